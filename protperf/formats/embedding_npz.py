"""Embedding files as NumPy archives: one array a protein, and arrays of the ids, headers and lengths behind them."""

from __future__ import annotations

import json
import re
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import chain, islice
from pathlib import Path

import numpy as np

from protperf.formats import FormatError
from protperf.formats.embedding_writers import KEY_DIGITS, EmbeddingWriter, Entry, Value
from protperf.formats.embeddings import Embedding, checked_length, info_from
from protperf.formats.foreign import as_format_error
from protperf.formats.npz_reading import LONGEST_TEXT, open_archive, read_numbers, read_texts, shape_of
from protperf.formats.zip_bytes import DEFLATED, Member, append_directory, local_header

_KEY = re.compile(r"[0-9]{1,20}")
_TOGETHER_BYTES = 1 << 22
"""Of texts or numbers encoded at once; NumPy gives every text the room of the longest."""


class NpzWriter(EmbeddingWriter):
    """Write an embedding file that `numpy.load` opens; see `EmbeddingWriter`."""

    format = "npz"

    def can_name(self, record_id: str, header: str) -> bool:
        """Return whether a file can hold these texts: NumPy drops a NUL at the end of one, and gives all the room of the longest."""
        if any(text.endswith("\0") or len(text) > LONGEST_TEXT for text in (record_id, header)):
            return False
        return super().can_name(record_id, header)

    def read(self, address: int, num_residues: int) -> np.ndarray:
        """Return the array of a protein that was added; see `EmbeddingWriter.read`."""
        head = npy_header(self.info.shape(num_residues), np.dtype(self.info.dtype).newbyteorder("<").str)
        member = Member(_name("0" * KEY_DIGITS), 0, 0, 0, address)  # every name is as long
        return super().read(address + len(local_header(member)) + len(head), num_residues)

    def _begin(self) -> None:
        pass

    def _append(self, index: int, array: np.ndarray) -> tuple[int, int]:
        head = npy_header(array.shape, array.dtype.str)
        data = array.data.cast("B")
        checksum = zlib.crc32(data, zlib.crc32(head))
        size = len(head) + len(data)
        member = Member(_name(f"{index:0{KEY_DIGITS}d}"), checksum, size, size, self._partial.size)
        self._partial.append(local_header(member) + head)
        self._partial.append(data)
        return member.address, checksum

    def _end(self, attributes: Mapping[str, Value]) -> None:
        about = np.array(json.dumps(dict(attributes)))
        members = [
            self._append_texts("ids", lambda entry: entry.id),
            self._append_texts("headers", lambda entry: entry.header),
            self._append_values("num_residues", "<u4", lambda entry: entry.num_residues),
            self._append_packed("about", [npy_header((), about.dtype.str), about.tobytes()]),
        ]
        append_directory(self._partial, (*map(self._member, self.entries()), *members))
        self._partial.flush()

    def _member(self, entry: Entry) -> Member:
        """Return the archive's member of a protein."""
        dtype = np.dtype(self.info.dtype).newbyteorder("<")
        shape = self.info.shape(entry.num_residues)
        size = len(npy_header(shape, dtype.str)) + int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        return Member(_name(f"{entry.number:0{KEY_DIGITS}d}"), entry.checksum, size, size, entry.address)

    def _append_texts(self, key: str, take: Callable[[Entry], str]) -> Member:
        longest = max((len(take(entry)) for entry in self.entries()), default=0)
        return self._append_values(key, f"<U{max(1, longest)}", take)

    def _append_values(self, key: str, dtype: str, take: Callable[[Entry], str | int]) -> Member:
        values = map(take, self.entries())
        together = max(1, _TOGETHER_BYTES // np.dtype(dtype).itemsize)
        chunks = (
            np.array(some, dtype).tobytes() for some in iter(lambda: list(islice(values, together)), [])
        )
        return self._append_packed(key, chain([npy_header((self.num_records,), dtype)], chunks))

    def _append_packed(self, key: str, chunks: Iterable[bytes]) -> Member:
        """Append a member whose size shows at its end; its header is written then."""
        member = Member(_name(key), 0, 0, 0, self._partial.size, DEFLATED, wide=True)
        self._partial.append(local_header(member))
        start = self._partial.size
        packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
        checksum = size = 0
        for chunk in chunks:
            checksum, size = zlib.crc32(chunk, checksum), size + len(chunk)
            self._partial.append(packer.compress(chunk))
        self._partial.append(packer.flush())
        member = member._replace(checksum=checksum, packed=self._partial.size - start, size=size)
        self._partial.write_at(member.address, local_header(member))
        return member


@lru_cache(maxsize=256)
def npy_header(shape: tuple[int, ...], dtype: str) -> bytes:
    """Return what stands before the numbers of an array in a `.npy` file of version 1.0.

    It is filled up to a multiple of 16 bytes, as NumPy did before it chose 64: that is a tenth of a short vector.
    """
    described = f"{{'descr': {dtype!r}, 'fortran_order': False, 'shape': {shape!r}, }}".encode()
    filled = described.ljust(len(described) + -(len(described) + 11) % 16) + b"\n"
    return b"\x93NUMPY\1\0" + struct.pack("<H", len(filled)) + filled


class NpzFile:
    """An embedding file in NumPy's format for reading; as `EmbeddingFile`.

    Attributes:
        info: what the numbers are.
        attributes: all that the file says of itself.

    Raises:
        ValueError: no such file, or made with another vocabulary.
        FormatError: damaged, foreign or newer.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise ValueError(f"{path}: no such file; give what `protperf embed` wrote")
        self._raw = open(self.path, "rb")  # noqa: SIM115 - closed by `close`
        try:
            self._open()
        except BaseException:
            self._raw.close()
            raise

    def _open(self) -> None:
        """Read all but the arrays of the proteins."""
        unreadable = f"{self.path}: no readable embedding file"
        with as_format_error(unreadable):
            self._file = open_archive(self._raw, self.path.stat().st_size)
            self._keys = sorted(filter(_KEY.fullmatch, map(_key_of, self._file.namelist())))
            self.attributes = json.loads(read_texts(self._file, _name("about"), count=1)[0])
        self.info = info_from(self.attributes, self.path)
        count, promised = len(self._keys), self.attributes["num_records"]
        with as_format_error(unreadable):
            shape = shape_of(self._file, _name("num_residues"))
        if count != promised or shape != (count,):
            raise FormatError(
                f"{self.path}: holds {count} proteins where it promises {promised}; embed again"
            )
        with as_format_error(unreadable):
            self._lengths = read_numbers(self._file, _name("num_residues"), shape=shape, kinds="iu")
            self._ids, self._headers = (
                read_texts(self._file, _name(key), count=count) for key in ("ids", "headers")
            )

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, index: int) -> Embedding:
        key = self._keys[index]
        with as_format_error(f"{self.path}: entry {key!r} is damaged"):
            length = checked_length(int(self._lengths[index]))
            array = read_numbers(self._file, _name(key), shape=self.info.shape(length), kinds="f")
        return Embedding(self._ids[index], self._headers[index], length, array)

    def __iter__(self) -> Iterator[Embedding]:
        return (self[index] for index in range(len(self)))

    def __enter__(self) -> NpzFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def numbered(self) -> Iterator[tuple[int, Embedding]]:
        """Yield the number of each protein in the whole input (a shard has gaps), and the protein."""
        return ((int(key), self[index]) for index, key in enumerate(self._keys))

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        self._raw.close()


def _name(key: str) -> str:
    return f"{key}.npy"


def _key_of(name: str) -> str:
    return name.removesuffix(".npy")
