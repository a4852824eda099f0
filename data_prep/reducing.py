"""The reduce task: one range of keys, from all sorted parts, becomes a shard of each split, or a piece of one.

The range is taken in steps that fit into memory, few of them, since each reads a little of every part. In a step records are
sorted over all parts, equal sequences meet, and what is kept is written behind what is there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from data_prep.keys import KEY_BITS, sort_records, split_points
from data_prep.memory import reuse_memory
from data_prep.options import PrepareOptions
from data_prep.sorted_parts import BY_SEQUENCE, EOS, RECORD, SortedPart, check_equal
from data_prep.splits import TRAIN, Thresholds
from protperf.formats.commit import commit_file, temporary_path
from protperf.formats.manifest import LENGTH_BINS, SPLITS
from protperf.formats.ngrams import NgramCounter
from protperf.formats.shard_writer import ShardWriter, shard_name
from protperf.vocab import VOCABULARY

_READ_BYTES = 1 << 20
_WRITTEN_BYTES = 4 << 20


@dataclass(frozen=True)
class ReducePlan:
    """What all reduce tasks of a build share.

    Attributes:
        work: the build's work folder, where the shards are written.
        parts: names of the sorted parts.
        num_shards: number of shards of each split, powers of two; 0 if the split is empty.
        thresholds: where the splits end.
        steps: number of steps of a task.
    """

    work: Path
    parts: list[str]
    num_shards: list[int]
    thresholds: Thresholds
    steps: int

    @property
    def num_ranges(self) -> int:
        """The number of reduce tasks."""
        return max(self.num_shards)

    def pieces_of(self, split: int, index: int) -> list[tuple[int, Path]]:
        """Return the pieces of a shard that is made from several ranges, with the ranges' numbers."""
        num_pieces = self.num_ranges // self.num_shards[split]
        numbers = range(index * num_pieces, (index + 1) * num_pieces)
        return [(number, self.work / piece_name(number, split)) for number in numbers]


@dataclass
class SplitResult:
    """What a task found of one split.

    Attributes:
        sequences: proteins, with what the shard's tail cuts off or drops.
        residues: residues in them.
        lengths: number of proteins by length bin.
    """

    sequences: int = 0
    residues: int = 0
    lengths: dict[str, int] = field(default_factory=dict)


def reduce_range(number: int, plan: ReducePlan, options: PrepareOptions) -> dict[str, Any]:
    """Carry out one reduce task.

    Args:
        number: of the range, 0 to `plan.num_ranges - 1`.
        plan: what the tasks share.
        options: of the dataset.

    Returns:
        `duplicates`, `split_conflicts`; `splits`: a `SplitResult` by name; `shards`: what `write_stream` returns.
    """
    reuse_memory()
    merge = _Merge(plan, options)
    first, count = number * plan.steps, plan.num_ranges * plan.steps
    edges = [(step << KEY_BITS) // count for step in range(first, first + plan.steps + 1)]
    ngrams = NgramCounter()
    sinks = {
        split: _open_sink(number, split, plan, options)
        for split, count in enumerate(plan.num_shards)
        if count
    }
    shards = {}
    try:
        for records, tokens in _steps(plan, edges):
            for split, stream in merge.streams(records, tokens):
                sinks[split].append(stream)
                if split == TRAIN:
                    ngrams.add(np.frombuffer(stream, np.uint8))
        for split, sink in sinks.items():
            shards[SPLITS[split]] = sink.close(options.tail)
    finally:
        for sink in sinks.values():
            sink.abandon()
    ngrams.save(plan.work / ngram_name(number))
    return {
        "duplicates": merge.duplicates,
        "split_conflicts": merge.split_conflicts,
        "splits": {name: asdict(result) for name, result in zip(SPLITS, merge.results, strict=True)},
        "shards": shards,
    }


def ngram_name(number: int) -> str:
    """Return the name of a task's n-gram counts."""
    return f"ngrams-{number:05d}.npz"


def piece_name(number: int, split: int) -> str:
    """Return the name of a task's piece of a split that has fewer shards than there are tasks."""
    return f"piece-{number:05d}.{SPLITS[split]}"


def join_pieces(split: int, index: int, plan: ReducePlan, options: PrepareOptions) -> dict[str, Any]:
    """Write a shard from the pieces of its tasks; they are left for the caller to remove. Returns as `_Shard.close`."""
    shard = _Shard(index, split, plan, options)
    try:
        for _, path in plan.pieces_of(split, index):
            with open(path, "rb") as piece:
                while block := piece.read(_READ_BYTES):
                    shard.append(block)
        return shard.close(options.tail)
    finally:
        shard.abandon()


def _steps(plan: ReducePlan, edges: list[int]) -> Iterator[tuple[np.ndarray, memoryview]]:
    """Yield for each step the records of all parts and their tokens; `end` counts from the first of these tokens."""
    paths = [plan.work / name for name in plan.parts]
    bounds = []
    for path in paths:
        with SortedPart(path) as part:
            bounds.append(part.bounds(edges))
    for step in range(len(edges) - 1):
        found: list[tuple[Path, np.ndarray, int, int]] = []
        size = 0
        for path, bound in zip(paths, bounds, strict=True):
            start, stop = bound[step], bound[step + 1]
            if start == stop:
                continue
            with SortedPart(path) as part:
                records = part.records(max(start - 1, 0), stop)
            first = int(records["end"][0]) if start else 0
            records = records[min(start, 1) :].copy()
            last = int(records["end"][-1])
            records["end"] = records["end"].astype(np.int64) + (size - first)
            found.append((path, records, first, last))
            size += last - first
        tokens, place = memoryview(bytearray(size)), 0
        for path, _, first, last in found:
            with SortedPart(path) as part:
                part.read_tokens(first, tokens[place : place + last - first])
            place += last - first
        yield np.concatenate([np.empty(0, RECORD), *(records for _, records, _, _ in found)]), tokens


class _Merge:
    """Sorts the records of a step, drops duplicates and gives each split its stream of tokens."""

    def __init__(self, plan: ReducePlan, options: PrepareOptions) -> None:
        self.duplicates = 0
        self.split_conflicts = 0
        self.results = [SplitResult() for _ in SPLITS]
        self._thresholds = plan.thresholds
        self._options = options

    def streams(self, records: np.ndarray, tokens: memoryview) -> Iterator[tuple[int, bytes]]:
        """Yield the splits' proteins in order, `<bos> residues <eos>` one after the other: number of the split, tokens.

        Args:
            records: `RECORD` `(N,)`, part after part.
            tokens: `<bos> residues` of each.
        """
        if not len(records):
            return
        ends = records["end"].astype(np.int64)
        starts = np.concatenate(([0], ends[:-1]))
        order = sort_records(records["key"], records["low"])
        keys, lows = records["key"][order], records["low"][order]
        first = np.ones(len(order), bool)
        first[1:] = (keys[1:] != keys[:-1]) | (lows[1:] != lows[:-1])
        starts, ends = starts[order], ends[order]
        for place in np.flatnonzero(~first).tolist():
            check_equal(tokens[starts[place - 1] : ends[place - 1]], tokens[starts[place] : ends[place]])
        splits = self._splits(records["split"][order], lows, first)
        copies = records["copies"][order].astype(np.int64)
        if self._options.duplicates == "drop":
            self.duplicates += int(copies.sum() - first.sum())
            starts, ends, splits = starts[first], ends[first], splits[first]
        else:
            starts, ends, splits = (np.repeat(each, copies) for each in (starts, ends, splits))
        written = np.cumsum(ends - starts)
        edges = np.searchsorted(written, np.arange(0, written[-1], _WRITTEN_BYTES))
        for begin, end in pairwise([*edges.tolist(), len(written)]):
            chosen = slice(begin, end)
            for split in np.unique(splits[chosen]).tolist():
                mine = splits[chosen] == split
                yield split, self._stream(split, tokens, starts[chosen][mine], ends[chosen][mine])

    def _splits(self, named: np.ndarray, lows: np.ndarray, first: np.ndarray) -> np.ndarray:
        """Return the split of each record: the highest among those of equal sequences; uint8 `(N,)`."""
        drawn = self._thresholds.splits_at(split_points(lows, self._options.split_seed))
        splits = np.where(named == BY_SEQUENCE, drawn, named)
        groups = np.flatnonzero(first)
        highest = np.maximum.reduceat(splits, groups)
        self.split_conflicts += int((highest != np.minimum.reduceat(splits, groups)).sum())
        return np.repeat(highest, np.diff(np.append(groups, len(first))))

    def _stream(self, split: int, tokens: memoryview, starts: np.ndarray, ends: np.ndarray) -> bytes:
        """Count proteins and return them."""
        result, lengths = self.results[split], ends - starts - 1
        result.sequences += len(starts)
        result.residues += int(lengths.sum())
        bins = Counter(result.lengths)
        for place, number in enumerate(np.bincount(np.searchsorted(LENGTH_BINS, lengths, side="right") - 1)):
            if number:
                bins[str(LENGTH_BINS[place])] += int(number)
        result.lengths = dict(bins)
        proteins = [tokens[start:end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]
        return EOS.join([*proteins, b""])


class _Sink(Protocol):
    """Takes the tokens of a split."""

    def append(self, tokens: bytes) -> None:
        """Write tokens behind those that are there."""

    def close(self, tail: str) -> dict[str, Any]:
        """Finish the file; return what the manifest needs of it."""

    def abandon(self) -> None:
        """Remove what is unfinished."""


def _open_sink(number: int, split: int, plan: ReducePlan, options: PrepareOptions) -> _Sink:
    if plan.num_shards[split] == plan.num_ranges:
        return _Shard(number, split, plan, options)
    return _Piece(plan.work / piece_name(number, split))


class _Shard:
    """A shard that a task writes whole."""

    def __init__(self, index: int, split: int, plan: ReducePlan, options: PrepareOptions) -> None:
        num_shards = plan.num_shards[split]
        path = plan.work / shard_name(SPLITS[split], index, num_shards)
        self._writer = ShardWriter(
            path, options.window, split=SPLITS[split], index=index, num_shards=num_shards
        )
        self._open = False

    def append(self, tokens: bytes) -> None:
        """Write tokens; the first ones make the file."""
        if not self._open:
            self._writer.__enter__()
            self._open = True
        self._writer.append(tokens)

    def close(self, tail: str) -> dict[str, Any]:
        """Finish the shard.

        Returns:
            `shard`: the fields of its `ShardEntry`, None if it has no window; `tail`: how many of each token were dropped, by
            number of the token, as far as any was.
        """
        if not self._open:
            return {"shard": None, "tail": {}}
        entry = self._writer.finish(tail=tail)
        numbers = np.bincount(np.frombuffer(self._writer.tail, np.uint8), minlength=len(VOCABULARY))
        dropped = {str(token): int(number) for token, number in enumerate(numbers) if number}
        return {"shard": None if entry is None else asdict(entry), "tail": dropped}

    def abandon(self) -> None:
        """Remove what is unfinished."""
        self._writer.__exit__()


class _Piece:
    """A piece of a shard."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._temporary = temporary_path(path)
        self._file = open(self._temporary, "wb")  # noqa: SIM115 - closed by close or abandon

    def append(self, tokens: bytes) -> None:
        """Write tokens."""
        self._file.write(tokens)

    def close(self, tail: str) -> dict[str, Any]:
        """Let the piece appear."""
        self._file.close()
        commit_file(self._temporary, self._path)
        return {}

    def abandon(self) -> None:
        """Remove what is unfinished."""
        self._file.close()
        self._temporary.unlink(missing_ok=True)
