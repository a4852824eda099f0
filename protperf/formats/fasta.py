"""Read protein sequences one record at a time: FASTA first, UniProt and GenBank files too.

The way of a record: bytes -> `streams` (decompressed, known by the first bytes) -> `cutting` and `blocks` (many records at
once; odd ones line by line through `lines`) or `flatfiles` -> `records.judge` (the policy) -> `Record` with tokens, or `Skipped`
with a reason. Memory holds one block of 1 MB, or one record if it is longer: an odd one of very many lines takes twenty times its text.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from protperf.formats import FormatError
from protperf.formats.blocks import BlockParser, is_like_nucleotides
from protperf.formats.counts import Counts, settle
from protperf.formats.cutting import BLOCK_BYTES, cut_records
from protperf.formats.records import Policy, Record, Skipped
from protperf.formats.skipped import SkippedTable
from protperf.formats.streams import Advance, SequenceStream, check_inputs, open_stream, progress_bar

__all__ = ["Policy", "Record", "SequenceReader", "Skipped"]


def stopped(skipped: Skipped) -> FormatError:
    """Return the error that ends a strict reading."""
    return FormatError(f"{skipped.message} (stopped by --strict)")


def nothing_in(place: str) -> FormatError:
    """Return the error for a file without any record."""
    return FormatError(f"{place}: no sequence in this file: it is empty or holds only comments")


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
            for found in self._found(stream):
                if isinstance(found, Record):
                    like_nucleotides = like_nucleotides and is_like_nucleotides(found.tokens.tobytes())
                    yield found
                    continue
                if self.policy.strict:
                    raise stopped(found)
                self.skip(found)
                table.write(found)
            if self.records == records_before:
                raise nothing_in(stream.place)
        if like_nucleotides and self.accepted > accepted_before:
            self.repair("like_nucleotides", stream.place)

    def _found(self, stream: SequenceStream) -> Iterator[Record | Skipped]:
        """Yield what a file holds, accepted records already counted."""
        if stream.kind == "fasta":
            parser = BlockParser(stream.place, self.policy, self)
            for text in cut_records(stream.pieces(), BLOCK_BYTES, source=stream.place):
                block = parser.parse(text)
                if block.skipped:  # in the order of the file: whoever stops reading has met no later one
                    found: list[Iterable[Record | Skipped]] = [block.skipped, block.records()]
                    yield from heapq.merge(*found, key=lambda each: each.line)
                else:
                    yield from block.records()
            return
        from protperf.formats.flatfiles import entries

        for raw in entries(stream):
            yield settle(raw, self.policy, self)
