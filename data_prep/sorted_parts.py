"""The file that a map task leaves: the records of one part of the input, sorted by key.

    header     the number of records and of fences, 8 bytes each
    fences     the key of every 256th record, uint64
    records    one `RECORD` each
    tokens     `<bos>` and the residues of each record, in the same order

So the records of a range of keys lie side by side and are found by two small reads.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO

import numpy as np

from data_prep.keys import sort_records
from protperf.formats.commit import commit_file, temporary_path
from protperf.vocab import VOCABULARY

RECORD = np.dtype([("key", "<u8"), ("low", "<u8"), ("end", "<u8"), ("copies", "<u4"), ("split", "u1")])
"""Order key, second half of the hash, end of the tokens, number of equal records, number of the split or `BY_SEQUENCE`."""

BY_SEQUENCE = 255
"""In place of a split: the sequence's own hash gives it."""

EOS = bytes([VOCABULARY.eos])
"""What a shard has behind each record and a part has not."""

_FENCE = 256
_JOINED = 4096
_HEADER_BYTES = 16


@dataclass(frozen=True, eq=False)
class PartRecords:
    """The records of a part in any order.

    Attributes:
        keys: order keys, uint64 `(N,)`.
        lows: second halves of the hashes, uint64 `(N,)`.
        splits: numbers of the splits, uint8 `(N,)`.
        lengths: tokens of each record, `<bos>` included, int64 `(N,)`.
        sequences: `<bos>` and the residues' tokens of each record.
    """

    keys: np.ndarray
    lows: np.ndarray
    splits: np.ndarray
    lengths: np.ndarray
    sequences: list[bytes]


def write_part(path: Path, part: PartRecords) -> None:
    """Write a part's file, which appears when it is whole."""
    temporary = temporary_path(path)
    try:
        with open(temporary, "wb") as file:
            write_records(file, part)
        commit_file(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_records(file: IO[bytes], part: PartRecords) -> None:
    """Sort the records of a part by key and write them, equal ones of one split once."""
    order = sort_records(part.keys, part.lows)
    keys, lows, splits = part.keys[order], part.lows[order], part.splits[order]
    first = np.ones(len(order), bool)
    first[1:] = (keys[1:] != keys[:-1]) | (lows[1:] != lows[:-1]) | (splits[1:] != splits[:-1])
    for place in np.flatnonzero(~first).tolist():
        check_equal(part.sequences[order[place - 1]], part.sequences[order[place]])
    records = np.empty(int(first.sum()), RECORD)
    records["key"], records["low"], records["split"] = keys[first], lows[first], splits[first]
    records["copies"] = np.diff(np.append(np.flatnonzero(first), len(order)))
    order = order[first]
    records["end"] = np.cumsum(part.lengths[order])
    fences = records["key"][::_FENCE]
    # not ndarray.tofile, which says nothing of a disk that is full at its end
    file.write(np.array([len(records), len(fences)], np.uint64).tobytes())
    file.write(np.ascontiguousarray(fences).tobytes())
    file.write(records.tobytes())
    places = order.tolist()
    for start in range(0, len(places), _JOINED):
        file.write(b"".join([part.sequences[place] for place in places[start : start + _JOINED]]))


def check_equal(one: bytes | memoryview, other: bytes | memoryview) -> None:
    """Make sure that equal hashes are equal sequences: no protein is lost to a collision in silence.

    Raises:
        ValueError: they are not.
    """
    if one != other:
        texts = [VOCABULARY.decode(np.frombuffer(bytes(each[1:31]), np.uint8)) for each in (one, other)]
        raise ValueError(
            f"two sequences with one 128-bit hash, {texts[0]}... and {texts[1]}...: leave one of them out"
        )


class SortedPart:
    """Reads a part; a context manager that holds one open file.

    Attributes:
        num_records: records in it.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDONLY)
        self.num_records, self._num_fences = np.frombuffer(self._read(0, _HEADER_BYTES), np.uint64).tolist()
        self._records_at = _HEADER_BYTES + 8 * self._num_fences
        self._tokens_at = self._records_at + RECORD.itemsize * self.num_records

    def __enter__(self) -> SortedPart:
        return self

    def bounds(self, keys: list[int]) -> list[int]:
        """Return for each key the number of records below it; a key may be 2^64, above all."""
        fences = np.frombuffer(self._read(_HEADER_BYTES, 8 * self._num_fences), np.uint64)
        return [self._bound(fences, key) for key in keys]

    def _bound(self, fences: np.ndarray, key: int) -> int:
        if key >> 64:
            return self.num_records
        block = max(int(np.searchsorted(fences, np.uint64(key))) - 1, 0)
        records = self.records(block * _FENCE, min((block + 1) * _FENCE, self.num_records))
        return block * _FENCE + int(np.searchsorted(np.ascontiguousarray(records["key"]), np.uint64(key)))

    def records(self, start: int, stop: int) -> np.ndarray:
        """Return records, `RECORD` `(N,)`."""
        size = RECORD.itemsize
        return np.frombuffer(self._read(self._records_at + size * start, size * (stop - start)), RECORD)

    def read_tokens(self, start: int, buffer: memoryview) -> None:
        """Fill a buffer with the tokens from a place on."""
        place = self._tokens_at + start
        while buffer:
            count = os.preadv(self._file, [buffer], place)
            assert count, "a part is shorter than its header says"
            buffer, place = buffer[count:], place + count

    def _read(self, place: int, size: int) -> bytes:
        pieces = []
        while size and (piece := os.pread(self._file, size, place)):
            pieces.append(piece)
            place, size = place + len(piece), size - len(piece)
        assert not size, "a part is shorter than its header says"
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file."""
        os.close(self._file)
