"""Parse FASTA many records at a time, by a few passes over a block of text instead of a loop over its lines.

A block ends where a record does. One `bytes.translate` turns its sequences into tokens and deletes white space; a record
in which anything else than letters is left, and one with an odd header, goes through `lines` and `records.judge` alone, so
that both ways read the same.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from protperf.formats.counts import LONGEST_KNOWN, Counts, settle
from protperf.formats.cutting import LongRecord
from protperf.formats.headers import WHITE_SPACE, first_word
from protperf.formats.lines import raw_records
from protperf.formats.records import Policy, RawRecord, Record, Skipped
from protperf.vocab import INVALID, VOCABULARY

_MARK, _LF = ord(">"), ord("\n")
_BOS = bytes([VOCABULARY.bos])
_INVALID_BYTE = bytes([INVALID])
_WHITE_SPACE = WHITE_SPACE.encode()
_IS_WHITE = np.isin(np.arange(256), np.frombuffer(_WHITE_SPACE, np.uint8))
_TABLE = bytes(VOCABULARY.bos if byte == _MARK else token for byte, token in enumerate(VOCABULARY.table))
_NUCLEOTIDES = VOCABULARY.encode("ACGTUN").tobytes()


def is_like_nucleotides(tokens: bytes) -> bool:
    """Return whether there is nothing but A, C, G, T, U and N."""
    return not tokens.translate(None, _NUCLEOTIDES)


@dataclass(frozen=True, eq=False)
class Block:
    """The records of a block of text, in its order.

    Attributes:
        tokens: ids, one byte each, with `<bos>` before each record.
        starts: place of the first residue of each accepted record in `tokens`, int64 `(N,)`.
        ends: place behind its last residue, int64 `(N,)`.
        skipped: the records left out.
    """

    tokens: bytes
    starts: np.ndarray
    ends: np.ndarray
    skipped: list[Skipped]
    _text: bytes
    _place: str
    _first_line: int
    _raw: np.ndarray  # (N,) number of the record in the text
    _heads: list[int]
    _head_ends: list[int]
    _odd: dict[int, Record] = field(default_factory=dict)  # by number among the accepted

    def __len__(self) -> int:
        """Return the number of accepted records, N."""
        return len(self.starts)

    def header(self, number: int) -> str:
        """Return the header of an accepted record, without its `>`."""
        if number in self._odd:
            return self._odd[number].header
        raw = self._raw[number]
        return self._text[self._heads[raw] + 1 : self._head_ends[raw]].decode("ascii").strip(WHITE_SPACE)

    def records(self) -> Iterator[Record]:
        """Yield the accepted records."""
        line_ends = np.flatnonzero(np.frombuffer(self._text, np.uint8) == _LF)
        lines = (np.searchsorted(line_ends, self._heads) + self._first_line).tolist()
        tokens = np.frombuffer(self.tokens, np.uint8)
        for number, (start, end) in enumerate(zip(self.starts.tolist(), self.ends.tolist(), strict=True)):
            if number in self._odd:
                yield self._odd[number]
                continue
            header = self.header(number)
            line = lines[self._raw[number]]
            yield Record(first_word(header), header, tokens[start:end].copy(), self._place, line)

    def is_like_nucleotides(self) -> bool:
        """Return whether all accepted records look like nucleotides."""
        first = self.tokens[self.starts[0] : self.ends[0]] if len(self) else b""
        return is_like_nucleotides(first) and all(
            is_like_nucleotides(self.tokens[start:end])
            for start, end in zip(self.starts.tolist(), self.ends.tolist(), strict=True)
        )


class BlockParser:
    """Parses the blocks of one file in turn.

    Args:
        place: the file's name in messages.
        policy: what to do with odd records.
        counts: told of accepted records and of what was repaired; left-out ones are the caller's to count.
        first_line: number of the first line.
        unit: `line`, or `entry` for text that `entry_text` made of the entries of another format; then `first_line` is the
            number of the first entry.
    """

    def __init__(
        self, place: str, policy: Policy, counts: Counts, *, first_line: int = 1, unit: str = "line"
    ) -> None:
        self.place = place
        self.policy = policy
        self.counts = counts
        self.line = first_line
        self.unit = unit

    def parse(self, text: bytes | LongRecord) -> Block:
        """Return the records of a block, see `cut_records`.

        Raises:
            FormatError: text but no header at all.
        """
        if isinstance(text, LongRecord):
            return self._leave_out(text)
        if b"\r" in text and text.count(b"\r") != text.count(b"\r\n"):
            text = text.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        if not text.endswith(b"\n"):
            text += b"\n"
        first_line, array = self.line, np.frombuffer(text, np.uint8)
        marks, line_ends = np.flatnonzero(array == _MARK), np.flatnonzero(array == _LF)
        heads = marks[(marks == 0) | (array[marks - 1] == _LF)]
        ends = line_ends[np.searchsorted(line_ends, heads)]
        starts, head_ends = heads.tolist(), ends.tolist()
        self.line += len(line_ends) if self.unit == "line" else len(starts)
        odd = _find_odd_headers(array, text, marks, heads, ends)
        tokens, bounds, odd = _tokenise(text, starts, head_ends, odd)
        block = Block(
            tokens,
            bounds[:-1][~odd] + 1,
            bounds[1:][~odd],
            [],
            text,
            self.place,
            first_line,
            np.flatnonzero(~odd),
            starts,
            head_ends,
        )
        self.counts.accept_many(len(block), int((block.ends - block.starts).sum()))
        if odd.any() or not starts:
            block = self._with_odd(block, np.flatnonzero(odd).tolist() if starts else [0])
        return block

    def _leave_out(self, long: LongRecord) -> Block:
        """Return a block without a record that is too long."""
        first_line, self.line = self.line, self.line + long.lines
        lines = io.StringIO(long.start.decode("latin-1"), newline=None)
        skipped = [
            each if isinstance(each, Skipped) else each.too_long(long.size)
            for each in raw_records(lines, self.place, self.counts.repair, first_line=first_line)
        ]
        none = np.empty(0, np.int64)
        return Block(b"", none, none, skipped, b"", self.place, first_line, none, [], [])

    def _with_odd(self, block: Block, odd: list[int]) -> Block:
        """Read odd records line by line and put the accepted ones into their places."""
        skipped: list[Skipped] = []
        records: list[tuple[int, Record]] = []
        for raw, items in self._raw_records(block, odd):
            for item in items:
                found = item if isinstance(item, Skipped) else settle(item, self.policy, self.counts)
                if isinstance(found, Record):
                    records.append((raw, found))
                else:
                    skipped.append(found)
        sizes = np.array([record.tokens.size for _, record in records], np.int64)
        ends = len(block.tokens) + np.cumsum(sizes + 1)
        raws = np.concatenate((block._raw, np.array([raw for raw, _ in records], np.int64)))
        order = np.argsort(raws, kind="stable")
        places = np.empty_like(order)
        places[order] = np.arange(len(order))
        return Block(
            block.tokens + b"".join(_BOS + record.tokens.tobytes() for _, record in records),
            np.concatenate((block.starts, ends - sizes))[order],
            np.concatenate((block.ends, ends))[order],
            skipped,
            block._text,
            block._place,
            block._first_line,
            raws[order],
            block._heads,
            block._head_ends,
            dict(zip(places[len(block) :].tolist(), (record for _, record in records), strict=True)),
        )

    def _raw_records(
        self, block: Block, odd: list[int]
    ) -> Iterator[tuple[int, Iterator[RawRecord | Skipped]]]:
        """Yield the number of each odd record with what it is line by line: one record, or several after a bad line end."""
        text, heads = block._text, block._heads
        edges = [0, *heads[1:], len(text)]
        line, counted = block._first_line, 0
        for raw in odd:
            if self.unit == "entry":
                number, end = block._first_line + raw, block._head_ends[raw]
                header, body = text[heads[raw] + 1 : end], text[end + 2 : edges[raw + 1] - 1]
                yield raw, iter([RawRecord(self.place, number, header, body, [number], "entry")])
                continue
            line, counted = line + text.count(b"\n", counted, edges[raw]), edges[raw]
            lines = io.StringIO(text[edges[raw] : edges[raw + 1]].decode("latin-1"), newline=None)
            yield raw, raw_records(lines, self.place, self.counts.repair, first_line=line)


def entry_text(entry: RawRecord) -> bytes:
    """Return an entry of another format as text that a `BlockParser` with the unit `entry` reads."""
    header, body = (part.replace(b"\n", b" ") for part in (entry.header, entry.body))
    return b">" + header + b"\n " + body + b"\n"


def _find_odd_headers(
    array: np.ndarray, text: bytes, marks: np.ndarray, heads: np.ndarray, head_ends: np.ndarray
) -> np.ndarray:
    """Return which records need a second look for what is not letters, bool `(N,)`.

    These have text before them, no name, a character that is not ASCII, or a `>` inside the sequence.

    Args:
        array: the text, uint8 `(T,)`.
        text: the same as bytes.
        marks: places of all `>`.
        heads: places of those that begin a record, `(N,)`.
        head_ends: the line end of each header, `(N,)`.
    """
    odd = _IS_WHITE[array[heads + 1]]
    if not len(heads):
        return odd
    odd[0] |= heads[0] > 0
    if not text.isascii():
        odd[np.searchsorted(heads, np.flatnonzero(array > 127), side="right") - 1] = True
    if len(marks) > len(heads):
        owners = np.searchsorted(heads, marks, side="right") - 1
        odd[owners[(owners >= 0) & (marks > head_ends[owners])]] = True
    return odd


def _tokenise(
    text: bytes, heads: list[int], head_ends: list[int], odd: np.ndarray
) -> tuple[bytes, np.ndarray, np.ndarray]:
    """Return the tokens of all sequences with `<bos>` before each, where these lie, and which records are odd.

    Returns:
        tokens; places of `<bos>` and the end of all, int64 `(N + 1,)`; bool `(N,)`: those given, and those with anything
        but letters, nothing at all or very many residues.
    """
    ends = [*heads, len(text)][1:]
    bodies = [text[start:end] for start, end in zip(head_ends, ends, strict=True)]
    for number in np.flatnonzero(odd).tolist():
        bodies[number] = b""
    tokens = b">".join((b"", *bodies)).translate(_TABLE, _WHITE_SPACE)
    array = np.frombuffer(tokens, np.uint8)
    bounds = np.append(np.flatnonzero(array == VOCABULARY.bos), len(tokens))
    lengths = np.diff(bounds) - 1
    odd = odd | (lengths == 0) | (lengths > LONGEST_KNOWN)
    if _INVALID_BYTE in tokens:
        odd[np.searchsorted(bounds, np.flatnonzero(array == INVALID), side="right") - 1] = True
    return tokens, bounds, odd
