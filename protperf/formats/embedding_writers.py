"""Writers of embedding files, one a format: a file grows protein by protein and goes on after a kill where it was.

Each writes its arrays as they come (see `partial_output`) and makes all that describes them at the end, from a log. So the
bytes of a file depend on its proteins alone: not on where it was committed, cut off and gone on with, nor on shards.
"""

from __future__ import annotations

import math
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, NamedTuple

import numpy as np

from protperf.formats.embeddings import FORMAT_VERSION, Embedding, EmbeddingInfo
from protperf.formats.partial_output import PartialOutput
from protperf.formats.records import quoted

Value = str | int
"""Of an attribute of a file."""

KEY_DIGITS = 10
"""Decimal digits of a protein's number where it is its name."""

_ENTRY = struct.Struct("<QQIIIII")
_SAME = 0xFFFFFFFF


class Entry(NamedTuple):
    """What the log keeps of a protein.

    Attributes:
        number: of its record in the input, from 0.
        address: where its array starts, in bytes of the file.
        num_residues: L.
        checksum: a CRC-32, where the format has one.
        id: as in `Embedding`.
        header: as in `Embedding`.
        key: as in `Embedding`.
    """

    number: int
    address: int
    num_residues: int
    checksum: int
    id: str
    header: str
    key: str


class EmbeddingWriter(ABC):
    """Write an embedding file protein by protein; it appears under its name only when it is whole.

    A context manager: leaving it without an error publishes the file; with one, what was committed stays beside it, and
    the next writer of the same path, `info` and `run` goes on there.

    Args:
        path: the file; one that is there is replaced at the end.
        info: what its numbers are.
        run: what else must be as it was for the file to be gone on with, such as the input; plain JSON values.
        anew: drop what an interruption left.

    Attributes:
        num_records: proteins in the file.

    Raises:
        ValueError: another process writes the file, or it was begun otherwise; the message says how.
        FormatError: what an interruption left is damaged.
        OSError: the disk is full or the folder cannot be written.
    """

    format: ClassVar[str]

    def __init__(
        self, path: Path, info: EmbeddingInfo, run: Mapping[str, Any] | None = None, *, anew: bool = False
    ) -> None:
        self.path = path
        self._anew = anew
        self.info = info
        self.num_records = 0
        self._run = dict(run or {})
        self._next_index = 0
        self._finished = False

    @property
    def committed(self) -> dict[str, Any] | None:
        """The state given with the last commit; `None` where the file is new."""
        state = self._partial.state
        return None if state is None else state["caller"]

    def __enter__(self) -> EmbeddingWriter:
        """Start the file, or go on with it."""
        agreed = {"format": self.format, "format_version": FORMAT_VERSION, **asdict(self.info), **self._run}
        self._partial = PartialOutput(self.path, agreed, anew=self._anew)
        if self._partial.state is not None:
            self.num_records = self._partial.state["num_records"]
            self._next_index = self._partial.state["next_index"]
        else:
            self._begin()
        return self

    def can_name(self, record_id: str, header: str) -> bool:
        """Return whether a file of this format can hold these texts; `add` takes no others."""
        try:
            encoded(record_id + header)
        except UnicodeEncodeError:
            return False
        return True

    def add(self, index: int, embedding: Embedding) -> int:
        """Append one protein; return its address, for `read`.

        Args:
            index: number of its record in the whole input, larger than that of the one before.
            embedding: its numbers.
        """
        assert index >= self._next_index, f"record {index} after {self._next_index - 1}"
        assert self.can_name(embedding.id, embedding.header), embedding.id
        assert embedding.array.shape == self.info.shape(embedding.num_residues), embedding.array.shape
        array = as_stored(embedding, self.info.dtype)
        address, checksum = self._append(index, array)
        same = embedding.header == embedding.id
        texts = [encoded(text) for text in (embedding.id, "" if same else embedding.header, embedding.key)]
        sizes = len(texts[0]), _SAME if same else len(texts[1]), len(texts[2])
        self._partial.log(
            _ENTRY.pack(index, address, embedding.num_residues, checksum, *sizes) + b"".join(texts)
        )
        self.num_records += 1
        self._next_index = index + 1
        return address

    def read(self, address: int, num_residues: int) -> np.ndarray:
        """Return the array of a protein that was added: the numbers as the file holds them."""
        shape, dtype = self.info.shape(num_residues), np.dtype(self.info.dtype).newbyteorder("<")
        data = self._partial.read(address, math.prod(shape) * dtype.itemsize)
        return np.frombuffer(data, dtype).reshape(shape)

    def commit(self, state: Mapping[str, Any] | None = None) -> None:
        """Make all that was added outlive a kill, and `state` (plain JSON values) with it."""
        kept = {"caller": dict(state or {}), "num_records": self.num_records, "next_index": self._next_index}
        self._partial.commit(kept)

    def finish(self, about: Mapping[str, Value] | None = None) -> None:
        """Write the file to its end and flush it to the disk: what is left is its name.

        Several files that belong together are all finished before the first gets its name.

        Args:
            about: further attributes of the file.
        """
        if not self._finished:
            further = dict(sorted((about or {}).items()))  # whatever order a reader has them in
            attributes = {**self.info.attributes(), **further, "num_records": self.num_records}
            self._end(attributes)
            self._finished = True

    def discard(self) -> None:
        """Give the file up; nothing is left of it."""
        self._partial.discard()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Publish the file if all went well, else keep what was committed."""
        if kind is not None:
            self._partial.close()
            return
        try:
            self.finish()
            self._partial.publish()
        except BaseException:
            self._partial.close()
            raise

    def entries(self) -> Iterator[Entry]:
        """Yield what the log says of each protein, in order."""
        rest = b""
        for chunk in self._partial.read_log():
            rest += chunk
            place = 0
            while len(rest) - place >= _ENTRY.size:
                number, address, length, checksum, *found = _ENTRY.unpack_from(rest, place)
                id_size, header_size, key_size = found
                same = header_size == _SAME
                sizes = (id_size, 0 if same else header_size, key_size)
                if len(rest) - place - _ENTRY.size < sum(sizes):
                    break
                place += _ENTRY.size
                texts = []
                for size in sizes:
                    texts.append(rest[place : place + size].decode("utf-8", "surrogateescape"))
                    place += size
                header = texts[0] if same else texts[1]
                yield Entry(number, address, length, checksum, texts[0], header, texts[2])
            rest = rest[place:]
        assert not rest

    @abstractmethod
    def _begin(self) -> None:
        """Append what stands before the first protein."""

    @abstractmethod
    def _append(self, index: int, array: np.ndarray) -> tuple[int, int]:
        """Append an array, contiguous and little-endian; return where it starts, and its checksum if there is one."""

    @abstractmethod
    def _end(self, attributes: Mapping[str, Value]) -> None:
        """Append what stands behind the last protein and flush it to the disk."""


def as_stored(embedding: Embedding, dtype: str) -> np.ndarray:
    """Return the numbers as a file holds them.

    Raises:
        ValueError: a number is too large for float16.
    """
    array = np.ascontiguousarray(embedding.array)
    with np.errstate(over="ignore"):
        stored = array.astype(np.dtype(dtype).newbyteorder("<"), copy=False)
    if dtype == "float16" and not np.isfinite(stored).all() and np.isfinite(array).all():
        largest = np.abs(array).max()
        raise ValueError(
            f"record {quoted(embedding.id)} has a number of {largest:.3g}, which float16 cannot hold; use float32"
        )
    return stored


def encoded(text: str) -> bytes:
    """Return a text as files hold it; a foreign file may give letters that none can hold."""
    return text.encode("utf-8", "surrogateescape")
