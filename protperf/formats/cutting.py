"""Cut FASTA into blocks of text that end where a record does; what is too long for a protein is passed over in constant memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from protperf.formats import FormatError

BLOCK_BYTES = 1 << 20
"""Text parsed at once: what fits into a core's cache."""

LONGEST_RECORD = 8 << 20
"""Bytes of text of one record, 80 times the longest protein known: a gzip file of a megabyte may hold one of a gigabyte."""

_LONGEST_HEADER = 1 << 12
"""Bytes that are kept of the header of a record that is too long."""
_LF = ord("\n")


@dataclass(frozen=True)
class LongRecord:
    """What is kept of a record that is too long.

    Attributes:
        start: its header, cut where that is very long; text before the first header of the file stands before it.
        lines: line ends in all of it, and in what stands before it.
        size: bytes of its text.
    """

    start: bytes
    lines: int
    size: int


def cut_records(
    pieces: Iterator[bytes], size: int, *, source: str = "<text>", longest: int = LONGEST_RECORD
) -> Iterator[bytes | LongRecord]:
    """Cut text into blocks that end where a record does; where the cuts lie depends on nothing but the text and the sizes.

    Args:
        pieces: the text, cut anywhere.
        size: bytes of a block at most, if no record is longer.
        source: the file's name in messages.
        longest: bytes of a record at most, no fewer than `size`.

    Yields:
        Blocks that start with a header, the first one maybe with other text before it, and a `LongRecord` in the place of
        each record that is too long; without such records the blocks together are the text.

    Raises:
        FormatError: `longest` bytes stand before the first header.
    """
    held: list[bytes] = []
    num_held = searched = 0
    long: _PassedOver | None = None
    for piece in pieces:
        if long:
            piece = long.pass_over(piece)
            if not long.is_over:
                continue
            yield long.found()
            long = None
        held.append(piece)
        num_held += len(piece)
        place = piece.rfind(b"\n>", 0, max(0, size - (num_held - len(piece)))) if num_held >= size else -1
        if place >= 0 and held[0].startswith(b">"):  # as below, without joining what is cut again
            yield b"".join((*held[:-1], piece[: place + 1]))
            held, num_held, searched = [piece[place + 1 :]], len(piece) - place - 1, 0
        while num_held >= size:
            text = held[0] if len(held) == 1 else b"".join(held)
            first = 0 if text.startswith(b">") else _next_start(text, 1)
            _check_lead(text, first, longest, source)
            end = 0
            if first or text.startswith(b">"):
                end = _last_start(text, first, size) or _next_start(text, max(searched, size, first + 1))
            is_long = (end or num_held) - first > longest
            if is_long and not end:
                long, held, num_held, searched = _PassedOver(text, first), [], 0, 0
                break
            if not end:
                held, searched = [text], len(text) - 1
                break
            yield _PassedOver(text[:end], first).found() if is_long else text[:end]
            held, num_held, searched = [text[end:]], num_held - end, 0
    rest = b"".join(held)
    if long:
        yield long.found()
    elif rest:
        yield rest


class _PassedOver:
    """A record that is too long, while what follows of it is passed over.

    Args:
        text: the beginning, maybe with other text before it.
        first: place of its header.

    Attributes:
        is_over: whether the next record has begun.
    """

    def __init__(self, text: bytes, first: int) -> None:
        ends = [
            end for mark in (b"\n", b"\r") if (end := text.find(mark, first, first + _LONGEST_HEADER)) >= 0
        ]
        self.is_over = False
        self._start = text[: min(ends, default=first + _LONGEST_HEADER)]
        self._lines = count_lines(text)
        self._size = len(text) - first
        self._last = text[-1:]

    def pass_over(self, piece: bytes) -> bytes:
        """Pass over what belongs to the record; return what follows it."""
        text = self._last + piece  # a line end or a mark may be cut in two
        end = _next_start(text, 1)
        mine = text[:end] if end else text
        self.is_over = end > 0
        self._lines += count_lines(mine) - count_lines(self._last)
        self._size += len(mine) - len(self._last)
        self._last = text[-1:]
        return text[end:] if end else b""

    def found(self) -> LongRecord:
        """Return what is kept of it."""
        return LongRecord(self._start, self._lines, self._size)


def _check_lead(text: bytes, first: int, longest: int, source: str) -> None:
    """Raise if very much text stands before the first header."""
    lead = 0 if text.startswith(b">") else first or len(text)
    if lead > longest:
        raise FormatError(
            f"{source}:1: more than {longest >> 20} MiB of text before the first '>' header; not FASTA, or its first line is damaged"
        )


def _last_start(text: bytes, first: int, stop: int) -> int:
    """Return the place of the last record after the one at `first` that begins before `stop`, 0 if there is none."""
    return (text.rfind(b"\n>", first, stop) + 1) or (text.rfind(b"\r>", first, stop) + 1)


def _next_start(text: bytes, start: int) -> int:
    """Return the place of the first record at or after `start`, which is at least 1; 0 if there is none."""
    places = [text.find(mark, start - 1) + 1 for mark in (b"\n>", b"\r>")]
    return min((place for place in places if place), default=0)


def count_lines(text: bytes) -> int:
    """Return the number of line ends (LF, CRLF or CR)."""
    lines = int(np.count_nonzero(np.frombuffer(text, np.uint8) == _LF))
    if b"\r" in text:
        lines += text.count(b"\r") - text.count(b"\r\n")
    return lines
