"""Records in, files out: reading, computing, writing and committing, from where an earlier run was killed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
from tqdm import tqdm

from protperf.arguments import id_of
from protperf.embed.blocks import Block, Met, Sequences, cut_blocks
from protperf.formats.fasta import Record, Skipped
from protperf.formats.records import quoted
from protperf.formats.skipped import SkippedList, leave_out

Arrays = list[np.ndarray]
Compute = Callable[[Iterable[tuple[Any, list[np.ndarray]]]], Iterator[tuple[Any, "list[Arrays | None]"]]]
"""Labels with proteins in, the same labels with their arrays out, in order."""


class Sink(Protocol):
    """What is needed of an output in the making: a file that takes one part of each protein, or a folder that takes all.

    Attributes:
        committed: what was last committed by an earlier run, or `None`.
    """

    committed: dict[str, Any] | None

    def can_name(self, named: Named) -> bool:
        """Return whether it can hold a protein's id and header."""

    def add(self, index: int, named: Named, arrays: Arrays) -> Any:
        """Append a protein, given its number and the arrays of all parts; return where it is."""

    def find(self, index: int) -> Any:
        """Return where a protein is that an earlier run wrote, `None` if it is not; asked in ascending order."""

    def read(self, place: Any, num_residues: int) -> Arrays:
        """Return the arrays that were kept of a protein."""

    def commit(self, state: dict[str, Any]) -> None:
        """Make all that was added outlive a kill."""

    def discard(self) -> None:
        """Give the output up; nothing is left of it."""


class Named(NamedTuple):
    """A protein in the output, without its numbers.

    Attributes:
        id: as the user chose.
        header: the whole header without `>`.
        tokens: of its residues, uint8 `(L,)`.
    """

    id: str
    header: str
    tokens: np.ndarray


@dataclass(frozen=True)
class Task:
    """A block to compute.

    Attributes:
        block: the records.
        met: what is known of their sequences, by the bytes of their tokens.
        longest: residues of the longest protein that is not refused; 0: any.
        most: residues of the longest protein that the model takes; 0: any.
    """

    block: Block
    met: dict[bytes, Met]
    longest: int
    most: int = 0

    def refuse(self, tokens: np.ndarray) -> str:
        """Return why a protein is not to be computed, if it is not."""
        if self.most and len(tokens) > self.most:
            return "too_long_for_model"
        return "too_long" if self.longest and len(tokens) > self.longest else ""

    @cached_property
    def asked(self) -> list[bytes]:
        """The sequences to compute: those first met here, in the order met."""
        return [
            sequence
            for sequence, tokens in self.block.distinct.items()
            if self.met[sequence].first >= self.block.first and not self.refuse(tokens)
        ]

    @property
    def proteins(self) -> list[np.ndarray]:
        """Tokens of `asked`, uint8 `(L,)` each."""
        return [self.block.distinct[sequence] for sequence in self.asked]


@dataclass
class Progress:
    """How far a run has come; what is committed with each block.

    Attributes:
        records: accepted records that are done with, whoever computes them.
        digest: of all of them (see `Block.digest`).
        written: proteins in the output.
        residues: residues in the output.
        left_out: bytes of the list of what was read well and left out (see `SkippedList.commit`).
    """

    records: int = 0
    digest: str = ""
    written: int = 0
    residues: int = 0
    left_out: int = 0


@dataclass(frozen=True)
class Choices:
    """What the user chose of the run itself.

    Attributes:
        id_kind: what names a protein (see `protperf.arguments.id_of`).
        strict: stop at the first record that is left out.
        longest: residues of the longest protein that is not left out; 0: any.
        most: residues of the longest protein that the model takes whole; 0: any.
        shard: number (from 0) of this run, and of how many.
    """

    id_kind: str = "word"
    strict: bool = False
    longest: int = 0
    most: int = 0
    shard: tuple[int, int] = (0, 1)


class Engine:
    """Carry records through computing into outputs.

    Args:
        sinks: what takes the arrays that `compute` gives, in the order of the parts.
        skipped: takes what is left out.
        choices: of the run.

    Attributes:
        progress: of this run, or this shard.
        whole: number and digest of all accepted records that were read, of any shard.
    """

    def __init__(self, sinks: Sequence[Sink], skipped: SkippedList, choices: Choices) -> None:
        self.sinks = sinks
        self.skipped = skipped
        self.choices = choices
        had = [Progress(**(sink.committed or {})) for sink in sinks]
        self._had = [progress.records for progress in had]
        self.progress = min(had, key=lambda progress: progress.records)
        self.whole = (0, "")
        self._resumed = replace(self.progress)

    def run(self, records: Iterable[Record], compute: Compute) -> Progress:
        """Do all that is left to do and commit it, block by block.

        Raises:
            ValueError: the records that an earlier run did are not the same ones.
            OSError: the disk is full.
        """
        for task, arrays in compute((task, task.proteins) for task in self._tasks(records)):
            found = dict(zip(task.asked, arrays, strict=True))
            for index, record in enumerate(task.block.records, start=task.block.first):
                self._write(index, record, task, found.get(record.tokens.tobytes()))
            self.progress.records, self.progress.digest = task.block.end, task.block.digest
            self.progress.left_out = self.skipped.commit()
            for sink, had in zip(self.sinks, self._had, strict=True):
                if had < task.block.end:
                    sink.commit(vars(self.progress))
        return self.progress

    def _tasks(self, records: Iterable[Record]) -> Iterator[Task]:
        """Yield what is left to do, block by block; what an earlier run did is remembered."""
        sequences = Sequences()
        left_out = self.skipped.resume(self._resumed.left_out)
        for block in self._own(records):
            met = sequences.of(block, self._fits)
            if block.end > self._resumed.records:
                yield Task(block, met, self.choices.longest, self.choices.most)
                continue
            for index, record in enumerate(block.records, start=block.first):
                places = [sink.find(index) for sink in self.sinks]
                reason = next(left_out).reason if None in places else ""
                each = met[record.tokens.tobytes()]
                if each.first == index:
                    each.places, each.reason = () if reason else tuple(places), reason

    def _own(self, records: Iterable[Record]) -> Iterator[Block]:
        """Yield the blocks of this shard; check that those already done are what they were."""
        number, count = self.choices.shard
        done, is_checked = self._resumed.records, not self._resumed.records
        for block in cut_blocks(records):
            self.whole = (block.end, block.digest)
            if block.end == done:
                is_checked = block.digest == self._resumed.digest
            if not is_checked and block.end >= done:
                break
            if block.number % count == number:
                yield block
        if not is_checked:
            raise ValueError(
                f"the first {done:,} records are not those that an earlier run embedded; give the same input, or --force to "
                "begin anew"
            )

    def _write(self, index: int, record: Record, task: Task, arrays: Arrays | None) -> None:
        met = task.met[record.tokens.tobytes()]
        is_copy = met.first < index
        if is_copy and met.places:
            length = len(record.tokens)
            kept = zip(self.sinks, met.places, strict=True)
            arrays = [array for sink, place in kept for array in sink.read(place, length)]
        elif not is_copy:
            met.reason = task.refuse(record.tokens) or _judge(arrays)
        if met.reason or arrays is None or not self._fits(record):
            self._leave_out(record, met.reason or "unfit_name")
            return
        self.progress.written += 1
        self.progress.residues += len(record.tokens)
        met.places = self._add(index, record, arrays, task.block.end)

    def _named(self, record: Record) -> Named:
        return Named(id_of(record, self.choices.id_kind), record.header, record.tokens)

    def _fits(self, record: Record) -> bool:
        return all(sink.can_name(self._named(record)) for sink in self.sinks)

    def _add(self, index: int, record: Record, arrays: Arrays, end: int) -> tuple[Any, ...]:
        """Append a protein to each sink that an earlier run did not bring further; return where it is."""
        named = self._named(record)
        return tuple(
            sink.find(index) if had >= end else sink.add(index, named, arrays)
            for sink, had in zip(self.sinks, self._had, strict=True)
        )

    def _leave_out(self, record: Record, reason: str) -> None:
        skipped = leave_out(record, reason)
        self.skipped.add(skipped)
        if self.choices.strict:
            raise ValueError(f"{explain(skipped)} (stopped by --strict)")


def _judge(arrays: Arrays | None) -> str:
    """Return what is wrong with the numbers of a protein."""
    if arrays is None:
        return "out_of_memory"
    return "" if all(np.isfinite(array).all() for array in arrays) else "not_finite"


REMEDIES = {
    "out_of_memory": "does not fit into memory even alone; embed it where there is more, or with --device cpu",
    "too_long": "is longer than --window with --long error; --long whole or window takes it",
    "too_long_for_model": "is longer than this model takes; --long window with a --window of no more than that takes it",
    "unfit_name": "has a NUL at the end of its header, or in one of more than 60,000 bytes: this format cannot hold it",
    "not_finite": "gets numbers that are infinite or none; --precision fp32 or --dtype float32 may cure it",
}
"""Why a record that was read well is left out, and what to do about it."""


def explain(skipped: Skipped) -> str:
    """Return one line on a record that was read well and left out."""
    return f"{skipped.place}: record {quoted(skipped.id)} ({skipped.found}) {REMEDIES[skipped.reason]}"


def summarise(skipped: SkippedList) -> list[str]:
    """Return a line for each reason to leave out what was read well."""
    return [
        f"left out, {reason}: {count:,} (first: {explain(skipped.examples[reason])})"
        for reason, count in skipped.counts.items()
    ]


def say(text: str) -> None:
    """Write one line of log."""
    tqdm.write(f"protperf embed: {text}", file=sys.stderr)
