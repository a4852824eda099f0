"""HDF5 files from anywhere: h5py tells what is where, and what it tells is checked before memory is taken for it.

HDF5 can say much that none of our files says: a link into another file, an array that lies elsewhere or is computed, a filter
that unpacks a byte to a thousand, a shape of 2^60. All of it is refused here. The numbers themselves are read by `pread` at
the place that h5py names, which lies in the file or is an error; HDF5's library reads what describes them, no more.
"""

from __future__ import annotations

import itertools
import math
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from protperf.formats import FormatError

SIGNATURE = b"\x89HDF\r\n\x1a\n"
_LARGEST_VALUE = 1 << 16
"""Bytes of an attribute in one piece; what is longer has a variable length, and lies elsewhere in the file."""
_DEFLATE = 1


class Hdf5File:
    """An HDF5 file for reading; a context manager.

    Args:
        path: the file.
        unreadable: what to say of one that is damaged or foreign, for messages.
        remedy: and what to do about it.

    Raises:
        FormatError: it is none.
        OSError: it cannot be read.
    """

    def __init__(self, path: Path, *, unreadable: str, remedy: str) -> None:
        self.path = path
        self._unreadable, self._remedy = unreadable, remedy
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            self._size = os.fstat(self._descriptor).st_size
            if not path.is_file() or os.pread(self._descriptor, len(SIGNATURE), 0) != SIGNATURE:
                raise FormatError(f"{path}: {unreadable} (it does not begin as an HDF5 file); {remedy}")
            with self.reading():
                self._file = h5py.File(path, "r", locking=False)
        except BaseException:
            os.close(self._descriptor)
            raise

    @contextmanager
    def reading(self, what: str = "") -> Iterator[None]:
        """Make one line of whatever h5py says of foreign bytes; a lack of memory stays one."""
        try:
            yield
        except MemoryError:
            raise
        except Exception as error:
            said = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise FormatError(f"{self.path}: {what or self._unreadable} ({said}); {self._remedy}") from None

    def names(self) -> list[str]:
        """Return the names of what lies at the root, in HDF5's order."""
        with self.reading():
            return list(self._file)

    def attributes(self, dataset: h5py.Dataset | None = None) -> dict[str, Any]:
        """Return what the file, or a dataset, says of itself: texts, numbers and lists of numbers."""
        owner = self._file if dataset is None else dataset
        with self.reading():
            return {name: _value_of(owner, name) for name in owner.attrs}

    def dataset(self, name: str) -> h5py.Dataset:
        """Return a dataset at the root.

        Raises:
            FormatError: it is not there, something else, or a link to elsewhere.
        """
        with self.reading(f"entry {name!r} is damaged"):
            if "/" in name or name in ("", "."):
                raise ValueError("a path, not a name")
            if not isinstance(self._file.get(name, getlink=True), h5py.HardLink):
                raise ValueError("a link to elsewhere")
            found = self._file[name]
            if not isinstance(found, h5py.Dataset):
                raise ValueError("no dataset")
            plan = found.id.get_create_plist()
            if found.shape is None or plan.get_external_count() or plan.get_layout() == h5py.h5d.VIRTUAL:
                raise ValueError("its numbers lie in another file")
            return found

    def read_whole(self, dataset: h5py.Dataset) -> np.ndarray:
        """Return an array of floating-point numbers that lies in one piece.

        Raises:
            FormatError: it does not, or not all of it is in the file.
        """
        with self.reading(f"entry {dataset.name!r} is damaged"):
            kind, shape = dataset.id.get_type(), dataset.shape
            dtype = next(
                (name for name in ("<f4", "<f2") if kind.equal(h5py.h5t.py_create(np.dtype(name)))), None
            )
            plan = dataset.id.get_create_plist()
            if dtype is None or plan.get_layout() != h5py.h5d.CONTIGUOUS or plan.get_nfilters():
                raise ValueError(f"{dataset.dtype} stored otherwise than `protperf embed` does")
            size = math.prod(shape) * np.dtype(dtype).itemsize
            data = self._read(dataset.id.get_offset(), size) if size else b""
            return np.frombuffer(bytearray(data), dtype).reshape(shape)

    def fill(self, dataset: h5py.Dataset, into: np.ndarray) -> None:
        """Fill an array with the numbers of a dataset, which lie in one piece or in chunks, plain or packed by deflate.

        Raises:
            FormatError: shape or type differ, or a chunk is damaged or unpacks to more than its numbers.
        """
        with self.reading(f"entry {dataset.name!r} is damaged"):
            shape, plan = dataset.shape, dataset.id.get_create_plist()
            filters = [plan.get_filter(number)[0] for number in range(plan.get_nfilters())]
            if shape != into.shape or dataset.dtype != into.dtype or filters not in ([], [_DEFLATE]):
                raise ValueError(f"{dataset.dtype} {shape}; it must be {into.dtype} {into.shape}")
            if plan.get_layout() == h5py.h5d.CONTIGUOUS:
                data = self._read(dataset.id.get_offset(), into.nbytes)
                into[...] = np.frombuffer(data, into.dtype).reshape(shape)
                return
            for place, data in self._chunks(dataset, into.itemsize, packed=bool(filters)):
                numbers = np.frombuffer(data, into.dtype).reshape(dataset.chunks)
                into[place] = numbers[tuple(map(slice, into[place].shape))]

    def _chunks(
        self, dataset: h5py.Dataset, item_bytes: int, *, packed: bool
    ) -> Iterator[tuple[tuple[slice, ...], bytes]]:
        """Yield the place and the bytes of each chunk."""
        shape, chunks = dataset.shape, dataset.chunks
        if not chunks or not all(0 < chunk <= size for chunk, size in zip(chunks, shape, strict=True)):
            raise ValueError(f"chunks of {chunks}")
        size = math.prod(chunks) * item_bytes
        for start in itertools.product(*map(range, itertools.repeat(0), shape, chunks)):
            found = dataset.id.get_chunk_info_by_coord(start)
            if found.filter_mask or found.byte_offset is None:
                raise ValueError(f"no chunk at {start}")
            data = self._read(found.byte_offset, found.size)
            data = zlib.decompressobj().decompress(data, size + 1) if packed else data
            if len(data) != size:
                raise ValueError("a chunk of another size")
            yield tuple(slice(first, first + chunk) for first, chunk in zip(start, chunks, strict=True)), data

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Hdf5File:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _read(self, offset: int | None, size: int) -> bytes:
        """Return bytes of the file, all that are asked for."""
        if offset is None or offset < 0 or offset + size > self._size:
            raise ValueError(f"{size:,} bytes at {offset} are not in a file of {self._size:,}")
        parts, end = [], offset + size
        while offset < end and (part := os.pread(self._descriptor, end - offset, offset)):  # 2 GiB at most
            parts.append(part)
            offset += len(part)
        if offset < end:
            raise ValueError("the file is cut short")
        return b"".join(parts)


def _value_of(owner: h5py.File | h5py.Dataset, name: str) -> Any:
    """Return a scalar attribute: a text, bytes, a Python number, or numbers `(N,)` of variable length."""
    attribute = owner.attrs.get_id(name)
    kind, space = attribute.get_type(), attribute.get_space()
    family = kind.get_class()
    if family == h5py.h5t.VLEN:
        family = kind.get_super().get_class()
    allowed = (h5py.h5t.INTEGER, h5py.h5t.STRING, h5py.h5t.OPAQUE)
    if (
        space.get_simple_extent_type() != h5py.h5s.SCALAR
        or family not in allowed
        or kind.get_size() > _LARGEST_VALUE
    ):
        raise ValueError(f"attribute {name!r} is no text and no number")
    value = owner.attrs[name]
    return value.item() if isinstance(value, np.integer) else value
