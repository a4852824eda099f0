"""HDF5 files from anywhere: what they say is checked before memory is taken for it, and read without HDF5's own library.

HDF5 can say much that none of our files says: a link into another file, an array that lies elsewhere or is computed, a filter
that unpacks a byte to a thousand, a shape of 2^60. All of it is refused here, as is whatever of the format `hdf5_objects` and `hdf5_index` do not
know. Numbers are read where they lie in the file.
"""

from __future__ import annotations

import math
import os
import struct
import weakref
import zlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from protperf.formats import FormatError
from protperf.formats.foreign import first_line
from protperf.formats.hdf5_format import (
    ATTRIBUTE,
    ATTRIBUTE_INFO,
    CHUNKED,
    COMPACT,
    CONTIGUOUS,
    DATASPACE,
    DATATYPE,
    FILTERS,
    LAYOUT,
    SIGNATURE,
    UNDEFINED,
)
from protperf.formats.hdf5_index import heap_objects, old_tree, read_links
from protperf.formats.hdf5_objects import (
    Attribute,
    Message,
    Source,
    UnknownError,
    read_attribute,
    read_header,
    read_kind,
    read_shape,
    root_of,
    value_of,
)

_DEFLATE, _SHUFFLE = 1, 2
_LARGEST_PACKED = 256 << 20
"""Bytes that a packed array, or a chunk of any, may unpack to."""
_FAULTS = (ValueError, LookupError, OverflowError, RecursionError, struct.error, zlib.error)
"""What this code meets on foreign bytes. Whatever else is raised is a mistake of ours, or the system could not read."""


class _StoredOtherwiseError(ValueError):
    """Numbers that are no damage, but stored as another program chose to; the message ends with what undoes it."""


_REPACK = "`h5repack -f NONE -l CONTI OLD NEW` writes a file that is read"
_COPY = "h5py writes a file that is read: copy all attributes, and all arrays without compression"
_LIBRARY_FILTERS = 256
"""HDF5's own filters have lower numbers; `h5repack` seldom has the others."""


class Dataset(NamedTuple):
    """An array and where it lies.

    Attributes:
        name: of it.
        shape: of it.
        dtype: NumPy's name of its numbers.
        address: of its first number, or of the tree of its chunks; `None` where it lies nowhere.
        chunks: their shape; empty where the array lies in one piece.
        filters: HDF5's numbers of what its chunks went through.
        messages: all that its header says.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    address: int | None
    chunks: tuple[int, ...]
    filters: tuple[int, ...]
    messages: list[Message]


class Hdf5File:
    """An HDF5 file for reading; a context manager.

    Args:
        path: the file.
        unreadable: what to say of one that is damaged or foreign, for messages.
        remedy: and what to do about it.

    Raises:
        FormatError: it is none.
        OSError: it cannot be read; also of all that reads later.
    """

    def __init__(self, path: Path, *, unreadable: str, remedy: str) -> None:
        self.path = path
        self._unreadable, self._remedy = unreadable, remedy
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        self._closing = weakref.finalize(self, os.close, descriptor)  # also of a file that nobody closes
        try:
            if not path.is_file() or os.pread(descriptor, len(SIGNATURE), 0) != SIGNATURE:
                raise FormatError(f"{path}: {unreadable} (it does not begin as an HDF5 file); {remedy}")
            self._source = Source(descriptor)
            self._links: dict[str, int | None] | None = None
            with self.reading():
                self._root = read_header(self._source, root_of(self._source))
        except BaseException:
            self.close()
            raise

    @contextmanager
    def reading(self, what: str = "") -> Iterator[None]:
        """Make one line of what foreign bytes lead to; a line of ours passes, as does what is no fault of theirs.

        Args:
            what: is wrong, for the message; else what was said of the whole file.
        """
        if not self._closing.alive:
            raise ValueError(f"{self.path}: is closed")
        try:
            yield
        except FormatError:
            raise
        except _StoredOtherwiseError as error:
            raise FormatError(f"{self.path}: {error}") from None
        except _FAULTS as error:
            text = f"{self.path}: {what or self._unreadable} ({first_line(error)}); {self._remedy}"
            raise FormatError(text) from None

    def names(self) -> list[str]:
        """Return the names of what lies at the root: in the order of creation where the file keeps it, else sorted."""
        return list(self._members())

    def attributes(
        self, dataset: Dataset | None = None, names: Collection[str] | None = None
    ) -> dict[str, Any]:
        """Return what the file, or a dataset, says of itself: texts, bytes, numbers and lists of numbers.

        Args:
            dataset: one of them, instead of the file.
            names: of the attributes that are asked for; else all, but for those with values of other kinds.
        """
        messages = self._root if dataset is None else dataset.messages
        found: dict[str, Any] = {}
        total = 0
        with self.reading(f"entry {dataset.name!r} is damaged" if dataset else ""):
            for attribute in self._attributes(messages):
                if names is not None and attribute.name not in names:
                    continue
                if attribute.name in found:
                    raise ValueError(f"attribute {attribute.name!r} is there twice")
                try:
                    value = found[attribute.name] = value_of(self._source, attribute)
                except UnknownError as error:
                    if names is not None:
                        raise ValueError(f"attribute {attribute.name!r} has {error}") from None
                    continue
                except _FAULTS as error:
                    raise ValueError(f"attribute {attribute.name!r} is damaged: {error}") from None
                total += len(attribute.name)
                total += len(value) if isinstance(value, str | bytes) else np.asarray(value).nbytes
                if total > self._source.size:  # they may share one text
                    raise ValueError("its attributes have more bytes than the file")
        return found

    def dataset(self, name: str) -> Dataset:
        """Return a dataset at the root.

        Raises:
            FormatError: it is not there, something else, or a link to elsewhere.
        """
        members = self._members()
        with self.reading(f"entry {name!r} is damaged"):
            if name not in members:
                raise ValueError("it is not there")
            address = members[name]
            if address is None:
                raise ValueError("a link to elsewhere")
            return _dataset_of(name, read_header(self._source, address))

    def read_whole(self, dataset: Dataset) -> np.ndarray:
        """Return an array of floating-point numbers.

        Raises:
            FormatError: as `fill`, or it claims more numbers than the file may hold.
        """
        with self.reading(f"entry {dataset.name!r} is damaged"):
            if dataset.dtype not in ("<f4", "<f2"):
                raise ValueError(f"numbers of type {dataset.dtype}; allowed: <f4, <f2")
            size = math.prod(dataset.shape) * np.dtype(dataset.dtype).itemsize
            if size > (_LARGEST_PACKED if dataset.filters else self._source.size):
                raise ValueError(
                    f"it claims {size:,} bytes, packed" if dataset.filters else f"it claims {size:,} bytes"
                )
            array = np.empty(dataset.shape, dataset.dtype)
        self.fill(dataset, array)
        return array

    def fill(self, dataset: Dataset, into: np.ndarray) -> None:
        """Fill an array with the numbers of a dataset, which lie in one piece or in chunks, plain, shuffled or packed by deflate.

        Raises:
            FormatError: shape or type differ, or a chunk is damaged or unpacks to more than its numbers.
        """
        with self.reading(f"entry {dataset.name!r} is damaged"):
            if dataset.shape != into.shape or dataset.dtype != into.dtype.str:
                raise ValueError(f"{dataset.dtype} {dataset.shape}; it must be {into.dtype.str} {into.shape}")
            if not {*dataset.filters} <= {_DEFLATE, _SHUFFLE}:
                raise _StoredOtherwiseError(
                    f"entry {dataset.name!r} is packed by filters {dataset.filters}; "
                    f"allowed: {_DEFLATE} (gzip), {_SHUFFLE} (shuffle); "
                    f"{_REPACK if max(dataset.filters) < _LIBRARY_FILTERS else _COPY}"
                )
            if not dataset.chunks:
                into[...] = np.frombuffer(self._piece(dataset), into.dtype).reshape(into.shape)
                return
            number = math.prod(
                -(-size // chunk) for size, chunk in zip(into.shape, dataset.chunks, strict=True)
            )
            seen: set[tuple[int, ...]] = set()
            for start, data in self._chunks(dataset, into.itemsize):
                part = tuple(
                    slice(first, first + chunk) for first, chunk in zip(start, dataset.chunks, strict=True)
                )
                numbers = np.frombuffer(data, into.dtype).reshape(dataset.chunks)
                into[part] = numbers[tuple(map(slice, into[part].shape))]
                seen.add(start)
            if len(seen) != number:
                raise ValueError(f"{len(seen)} of {number} chunks are there")

    def close(self) -> None:
        """Close the file."""
        self._closing()

    def __enter__(self) -> Hdf5File:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _members(self) -> dict[str, int | None]:
        """Return the address of each member of the root group, `None` of a link to elsewhere."""
        if self._links is None:
            with self.reading():
                links = read_links(self._source, self._root)
                self._links = {name.decode("utf-8", "surrogateescape"): place for name, place, _ in links}
        return self._links

    def _attributes(self, messages: list[Message]) -> Iterator[Attribute]:
        for kind, data in messages:
            if kind == ATTRIBUTE:
                yield read_attribute(data)
            elif kind == ATTRIBUTE_INFO:
                heap, tree = struct.unpack_from("<QQ", data, 4 if data[1] & 1 else 2)
                if heap != UNDEFINED:
                    yield from map(read_attribute, heap_objects(self._source, heap, tree))

    def _piece(self, dataset: Dataset) -> bytes:
        """Return the bytes of an array in one piece."""
        size = math.prod(dataset.shape) * np.dtype(dataset.dtype).itemsize
        if size and dataset.address is None:
            raise ValueError("its numbers are not in the file")
        return self._source.at(dataset.address or 0, size)

    def _chunks(self, dataset: Dataset, item_bytes: int) -> Iterator[tuple[tuple[int, ...], bytes]]:
        """Yield the place and the bytes of each chunk that is there."""
        size, rank = math.prod(dataset.chunks) * item_bytes, len(dataset.shape)
        if dataset.address is None:
            return
        for key, address in old_tree(self._source, dataset.address, kind=1, key_bytes=16 + 8 * rank):
            packed, mask, *start = struct.unpack(f"<II{rank}Q8x", key)
            places = zip(start, dataset.shape, dataset.chunks, strict=True)
            if any(first >= most or first % chunk for first, most, chunk in places):
                raise ValueError(
                    f"a chunk lies at {start} of an array {dataset.shape} in chunks of {dataset.chunks}"
                )
            data = self._source.at(address, packed)
            for number, name in reversed([*enumerate(dataset.filters)]):
                if mask >> number & 1:  # it was left out for this chunk
                    continue
                if name == _DEFLATE:
                    unpacker = zlib.decompressobj()
                    data = unpacker.decompress(data, size + 1)
                    if len(data) <= size and not unpacker.eof:
                        raise ValueError(f"the chunk at {start} is cut short")
                else:
                    data = np.frombuffer(data, np.uint8).reshape(item_bytes, -1).T.tobytes()
            if len(data) != size:
                raise ValueError(f"the chunk at {start} unpacks to another size than {size:,} bytes")
            yield tuple(start), data


def _dataset_of(name: str, messages: list[Message]) -> Dataset:
    """Return what the messages of a header say of an array."""
    said = {kind: data for kind, data in messages if kind in (DATASPACE, DATATYPE, LAYOUT, FILTERS)}
    if not {DATASPACE, DATATYPE, LAYOUT} <= said.keys():
        raise ValueError("no dataset")
    shape, kind, layout = read_shape(said[DATASPACE]), read_kind(said[DATATYPE]), said[LAYOUT]
    chunks: tuple[int, ...] = ()
    if layout[0] in (3, 4) and layout[1] == CONTIGUOUS:
        (address,) = struct.unpack_from("<Q", layout, 2)
    elif layout[0] == 3 and layout[1] == CHUNKED:
        (address,) = struct.unpack_from("<Q", layout, 3)
        *chunks_found, _ = struct.unpack_from(f"<{layout[2]}I", layout, 11)
        chunks = tuple(chunks_found)
        if len(chunks) != len(shape) or not 0 < math.prod(chunks) * kind.size <= _LARGEST_PACKED:
            raise ValueError(f"an array {shape} in chunks of {chunks}")
    elif layout[1] == CHUNKED:
        raise _StoredOtherwiseError(
            f"entry {name!r} has chunks with an index of HDF5 1.10; {_REPACK}, as does h5py with libver='earliest'"
        )
    elif layout[1] == COMPACT:
        raise _StoredOtherwiseError(f"entry {name!r} lies in its header; {_REPACK}")
    else:
        raise ValueError("its numbers lie in another file, or stored otherwise than protperf does")
    if kind.variable or not kind.dtype:
        raise ValueError("no numbers")
    filters = tuple(_filters_of(said[FILTERS])) if FILTERS in said else ()
    return Dataset(
        name, shape, kind.dtype, None if address == UNDEFINED else address, chunks, filters, messages
    )


def _filters_of(data: bytes) -> Iterator[int]:
    """Yield the numbers of a pipeline of filters."""
    version, count = data[:2]
    if version not in (1, 2):
        raise ValueError("filters of an unknown kind")
    place = 8 if version == 1 else 2
    for _ in range(count):
        (number,) = struct.unpack_from("<H", data, place)
        named = version == 1 or number >= 256
        length = struct.unpack_from("<H", data, place + 2)[0] if named else 0
        place += 4 if named else 2
        (values,) = struct.unpack_from("<H", data, place + 2)
        place += 4 + length + (-length % 8 if version == 1 else 0) + 4 * values
        place += 4 * (values % 2) if version == 1 else 0
        yield number
