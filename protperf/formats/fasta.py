"""Read protein sequences one record at a time: FASTA first, UniProt and GenBank files too.

The way of a record: bytes -> `streams` (decompressed, known by the first bytes) -> raw record (here, or `flatfiles`)
-> `records.judge` (the policy) -> `Record` with tokens, or `Skipped` with a reason. Memory holds one record.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

import numpy as np

from protperf.formats import FormatError
from protperf.formats.headers import WHITE_SPACE, first_word
from protperf.formats.records import (
    REASONS,
    REPAIRS,
    Policy,
    RawRecord,
    Record,
    Skipped,
    decoded,
    escaped,
    judge,
    num_residues,
    quoted,
    shortened,
)
from protperf.formats.streams import Advance, SequenceStream, check_inputs, open_stream, progress_bar
from protperf.vocab import VOCABULARY

__all__ = ["Policy", "Record", "SequenceReader", "Skipped"]

LONGEST_KNOWN = 100_000
"""Residues; the longest proteins known have fewer (titin 35,000; the longest in UniProtKB about 46,000)."""

NUM_EXAMPLES = 3
"""Left-out records kept in memory for each reason; all of them go to `skipped_path`."""

_SPECIAL_STARTS = ">;#\xef"
_BYTE_ORDER_MARK = "\xef\xbb\xbf"
_IS_NUCLEOTIDE = np.isin(np.arange(len(VOCABULARY)), VOCABULARY.encode("ACGTUN"))

Repair = Callable[[str, str], None]
"""Called with the name of a repair (a key of `REPAIRS`) and the place."""


def raw_records(lines: Iterable[str], path: str, repair: Repair) -> Iterator[RawRecord | Skipped]:
    """Cut lines into records; comment lines (`;`, `#`) are dropped and counted.

    Args:
        lines: lines ended by LF, each character one byte (Latin-1).
        path: the file's name in messages.
        repair: told each comment line.

    Yields:
        Records; text before the first header comes as one `Skipped`.

    Raises:
        FormatError: there is text but no header.
    """
    header, start = "", 0
    body: list[str] = []
    numbers: list[int] = []
    for number, line in enumerate(lines, 1):
        if line[0] in _SPECIAL_STARTS:
            line = line.removeprefix(_BYTE_ORDER_MARK)
            if line.startswith(">"):
                yield from _finished(path, header, start, body, numbers)
                header, start, body, numbers = line, number, [], []
                continue
            if line.startswith((";", "#")):
                repair("comment_line", f"{path}:{number}")
                continue
        # of text before the first header only the first line is kept, so that memory stays flat
        if header or (not body and line.strip(WHITE_SPACE)):
            body.append(line)
            numbers.append(number)
    if body and not header:
        raise FormatError(
            f"{path}:{numbers[0]}: no '>' header; not FASTA (found {quoted(body[0].strip())}); "
            "allowed: '>' and a name before each sequence"
        )
    yield from _finished(path, header, start, body, numbers)


def _finished(
    path: str, header: str, line: int, body: list[str], numbers: list[int]
) -> Iterator[RawRecord | Skipped]:
    text = "".join(body).encode("latin-1")
    if header:
        yield RawRecord(path, line, header[1:].encode("latin-1"), text, numbers)
    elif body:
        yield Skipped(path, numbers[0], "", None, "text_before_header", shortened(decoded(text)[0].strip()))


class Counts:
    """What a reading has met so far.

    Attributes:
        records: records read: accepted and left out.
        accepted: records handed on.
        residues: residues (and mask tokens) in them.
        skipped: left-out records by reason (a key of `REASONS`).
        skipped_examples: the first few left-out records of each reason.
        repaired: what was changed in accepted input or is worth a look, by name (a key of `REPAIRS`).
        repaired_examples: where each of these was met first.
    """

    def __init__(self) -> None:
        self.records = 0
        self.accepted = 0
        self.residues = 0
        self.skipped: Counter[str] = Counter()
        self.skipped_examples: list[Skipped] = []
        self.repaired: Counter[str] = Counter()
        self.repaired_examples: dict[str, str] = {}

    def accept(self, record: Record, repaired: Counter[str], place: str) -> None:
        """Count a record that is handed on, and what was repaired in it."""
        self.records += 1
        self.accepted += 1
        self.residues += record.tokens.size
        for name, count in repaired.items():
            self.repair(name, place, count)

    def skip(self, skipped: Skipped) -> None:
        """Count a record that is left out."""
        self.records += 1
        self.skipped[skipped.reason] += 1
        if self.skipped[skipped.reason] <= NUM_EXAMPLES:
            self.skipped_examples.append(skipped)

    def repair(self, name: str, place: str, count: int = 1) -> None:
        """Count something that was changed or is worth a look."""
        self.repaired[name] += count
        self.repaired_examples.setdefault(name, place)

    def summary(self) -> list[str]:
        """Return the reading in lines: totals, a line for each reason, a line for each repair or note."""
        left_out = self.skipped.total()
        lines = [
            f"read {self.records:,} records: {self.accepted:,} accepted ({self.residues:,} residues), {left_out:,} left out"
        ]
        for reason in REASONS:
            if self.skipped[reason]:
                first = next(example for example in self.skipped_examples if example.reason == reason)
                lines.append(f"left out, {reason}: {self.skipped[reason]:,} (first: {first.message})")
        for name, words in REPAIRS.items():
            if self.repaired[name]:
                lines.append(f"{words}: {self.repaired[name]:,} (first: {self.repaired_examples[name]})")
        return lines


class SkippedTable:
    """A TSV file with one row for each left-out record; it appears only when the whole reading succeeded.

    Columns: file, line (or entry number), id, column (empty where the whole record is meant), reason, found. Text is
    UTF-8 with control characters escaped. With no row there is no file.
    """

    COLUMNS = ("file", "line", "id", "column", "reason", "found")

    def __init__(self, path: str | Path | None) -> None:
        self._path = Path(path) if path is not None else None
        self._partial = self._path and self._path.with_name(self._path.name + ".partial")
        self._file: IO[str] | None = None

    def __enter__(self) -> SkippedTable:
        """Start; the file is made with the first row."""
        return self

    def write(self, skipped: Skipped) -> None:
        """Add a row."""
        if self._partial is None:
            return
        if self._file is None:
            self._partial.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self._partial, "w", encoding="utf-8", newline="\n")  # noqa: SIM115
            self._file.write("\t".join(self.COLUMNS) + "\n")
        column = "" if skipped.column is None else skipped.column
        row = (skipped.path, skipped.line, skipped.id, column, skipped.reason, skipped.found)
        self._file.write("\t".join(escaped(str(cell)) for cell in row) + "\n")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Rename the file when all went well, else remove it."""
        if self._file is not None and self._path and self._partial:
            self._file.close()
            if kind is None:
                os.replace(self._partial, self._path)
            else:
                self._partial.unlink()
        elif kind is None and self._path:
            self._path.unlink(missing_ok=True)


class SequenceReader(Counts):
    """Iterate over the records of sequence files; afterwards ask it what it counted.

    A bad record is left out, counted and named; a bad file is a `FormatError`, which may come after some of its records:
    commit what was made from them only when the iteration has ended. Iterating again reads again and counts anew.

    Args:
        paths: files, or `-` for stdin; plain, gzip, bzip2 or xz.
        policy: what to do with odd records.
        skipped_path: TSV file for all left-out records (see `SkippedTable`).
        progress: show a progress bar where stderr is a terminal.

    Raises:
        ValueError: a path is missing or a folder.
    """

    def __init__(
        self,
        paths: Sequence[str | Path],
        policy: Policy | None = None,
        *,
        skipped_path: str | Path | None = None,
        progress: bool = False,
    ) -> None:
        super().__init__()
        check_inputs(paths)
        self.paths = list(paths)
        self.policy = policy or Policy()
        self.skipped_path = skipped_path
        self.progress = progress

    def __iter__(self) -> Iterator[Record]:
        """Yield the accepted records of all files in order.

        Raises:
            FormatError: a file is damaged, foreign or without any sequence; with `Policy.strict` also a bad record.
        """
        Counts.__init__(self)
        with (
            SkippedTable(self.skipped_path) as table,
            progress_bar(self.paths, shown=self.progress) as advance,
        ):
            for path in self.paths:
                yield from self._read_file(path, table, advance)

    def _read_file(self, path: str | Path, table: SkippedTable, advance: Advance) -> Iterator[Record]:
        records_before, accepted_before, like_nucleotides = self.records, self.accepted, True
        with open_stream(path, advance) as stream:
            for raw in self._raw(stream):
                found = raw if isinstance(raw, Skipped) else self._settle(raw)
                if isinstance(found, Record):
                    like_nucleotides = like_nucleotides and bool(_IS_NUCLEOTIDE[found.tokens].all())
                    yield found
                    continue
                if self.policy.strict:
                    raise FormatError(f"{found.message} (stopped by --strict)")
                self.skip(found)
                table.write(found)
            if self.records == records_before:
                raise FormatError(
                    f"{stream.place}: no sequence in this file: it is empty or holds only comments"
                )
        if like_nucleotides and self.accepted > accepted_before:
            self.repair("like_nucleotides", stream.place)

    def _raw(self, stream: SequenceStream) -> Iterator[RawRecord | Skipped]:
        if stream.kind == "fasta":
            return raw_records(stream.text(), stream.place, self.repair)
        from protperf.formats.flatfiles import entries

        return entries(stream)

    def _settle(self, raw: RawRecord) -> Record | Skipped:
        """Turn a raw record into an accepted one (and count it) or into one to be left out."""
        header, is_utf8 = decoded(raw.header)
        header = header.strip(WHITE_SPACE)
        record_id = first_word(header)
        if not record_id:
            return Skipped(raw.path, raw.line, "", None, "no_name", ">", raw.unit)
        verdict = judge(raw.body, self.policy)
        if len(raw.body) > LONGEST_KNOWN and num_residues(raw.body) > LONGEST_KNOWN:
            self.repair("very_long", raw.place)
        if verdict.tokens is None:
            return raw.skipped(record_id, verdict)
        repaired = verdict.repaired if is_utf8 else verdict.repaired + Counter(header_encoding=1)
        record = Record(record_id, header, verdict.tokens, raw.path, raw.line, raw.unit)
        self.accept(record, repaired, raw.place)
        return record
