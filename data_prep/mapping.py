"""The map task: one part of the input's text becomes one file of records, sorted by key."""

from __future__ import annotations

import errno
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.filters import Filters
from data_prep.keys import hash_sequences, order_keys
from data_prep.memory import reuse_memory
from data_prep.options import PrepareOptions
from data_prep.sorted_parts import BY_SEQUENCE, PartRecords, write_part
from protperf.formats.blocks import Block, BlockParser
from protperf.formats.commit import commit_bytes
from protperf.formats.counts import Counts
from protperf.formats.cutting import LongRecord
from protperf.formats.fasta import stopped
from protperf.formats.manifest import SPLITS
from protperf.formats.records import Policy, Skipped


@dataclass(frozen=True)
class MapTask:
    """One part to map.

    Attributes:
        index: number of the part.
        work: the build's work folder.
        place: name of the input in messages.
        first_line: number of the part's first line in it, or of its first entry.
        unit: what is counted: `line`, or `entry` of a file that is no FASTA, whose text is that of `entry_text`.
        blocks: sizes of the blocks of text, one behind the other, each ending where a record does.
        long_records: blocks of which only the start is there, number -> lines and bytes, as in `LongRecord`.
    """

    index: int
    work: Path
    place: str
    first_line: int
    unit: str
    blocks: tuple[int, ...]
    long_records: dict[int, tuple[int, int]]

    @property
    def text_path(self) -> Path:
        """The part's text."""
        return self.work / f"part-{self.index:06d}.fasta"

    @property
    def sorted_path(self) -> Path:
        """The part's records."""
        return self.work / sorted_name(self.index)

    @property
    def skipped_path(self) -> Path:
        """The records of the part that were left out, if there are any: one JSON list a line."""
        return self.work / skipped_name(self.index)


@dataclass
class MapResult:
    """What a map task found.

    Attributes:
        records: records met.
        accepted: records accepted.
        residues: residues in them.
        skipped: left-out records by reason.
        skipped_examples: the first of each reason, as the fields of `Skipped`.
        repaired: what was repaired, by kind.
        repaired_examples: where first, by kind.
        like_nucleotides: whether all that was accepted looks like nucleotides.
        dropped: accepted records that the filters dropped, by the name of their count; and `outside_clusters`.
        kept: records in the sorted file.
        tokens: tokens of the kept records, with `<bos>` and `<eos>`, by split; under `sequence` of those whose split their
            sequence gives.
    """

    records: int = 0
    accepted: int = 0
    residues: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    skipped_examples: list[list[Any]] = field(default_factory=list)
    repaired: dict[str, int] = field(default_factory=dict)
    repaired_examples: dict[str, str] = field(default_factory=dict)
    like_nucleotides: bool = True
    dropped: dict[str, int] = field(default_factory=dict)
    kept: int = 0
    tokens: dict[str, int] = field(default_factory=dict)


def sorted_name(index: int) -> str:
    """Return the name of a part's file of records."""
    return f"part-{index:06d}.sorted"


def skipped_name(index: int) -> str:
    """Return the name of a part's list of left-out records."""
    return f"part-{index:06d}.skipped"


def map_part(task: MapTask, options: PrepareOptions, strict: bool) -> dict[str, Any]:
    """Carry out a map task; its text is left for the caller to remove.

    Returns:
        The fields of a `MapResult`.

    Raises:
        FormatError: with `strict` for the first record that would be left out; text without any header.
    """
    reuse_memory()
    counts, filters = Counts(), Filters.open(options, task.work / "tables")
    policy = Policy(gaps=options.gaps, unknown=options.unknown)
    result, dropped = MapResult(), Counter[str]()
    left_out: list[Skipped] = []
    collected = _Collected(options.seed)
    for block in _blocks(task, policy, counts):
        if strict and block.skipped:
            raise stopped(block.skipped[0])
        for skipped in block.skipped:
            counts.skip(skipped)
        left_out += block.skipped
        result.like_nucleotides = result.like_nucleotides and block.is_like_nucleotides()
        collected.add(block, *filters.keep(block, dropped))
    if left_out:
        lines = "".join(json.dumps(list(asdict(skipped).values())) + "\n" for skipped in left_out)
        commit_bytes(task.skipped_path, lines.encode())
    collected.write(task.sorted_path)
    result.records, result.accepted, result.residues = counts.records, counts.accepted, counts.residues
    result.skipped, result.repaired = dict(counts.skipped), dict(counts.repaired)
    result.skipped_examples = [list(asdict(skipped).values()) for skipped in counts.skipped_examples]
    result.repaired_examples = counts.repaired_examples
    result.dropped, result.kept, result.tokens = dict(dropped), collected.num_records, collected.tokens
    return asdict(result)


def _blocks(task: MapTask, policy: Policy, counts: Counts) -> Iterator[Block]:
    """Yield the part's records, block by block."""
    parser = BlockParser(task.place, policy, counts, first_line=task.first_line, unit=task.unit)
    with open(task.text_path, "rb") as file:
        for number, size in enumerate(task.blocks):
            text = file.read(size)
            if len(text) != size:
                raise OSError(errno.EIO, "shorter than it was written", str(task.text_path))
            long = task.long_records.get(number)
            yield parser.parse(LongRecord(text, *long) if long else text)


class _Collected:
    """The kept records of a part on their way into its file."""

    def __init__(self, seed: int) -> None:
        self.num_records = 0
        self.tokens: dict[str, int] = {}
        self._seed = seed
        self._sequences: list[bytes] = []
        self._keys: list[np.ndarray] = []
        self._lows: list[np.ndarray] = []
        self._splits: list[np.ndarray] = []
        self._lengths: list[np.ndarray] = []

    def add(self, block: Block, kept: np.ndarray, splits: np.ndarray) -> None:
        """Take the kept records of a block, bool `(N,)`, with their splits, uint8 `(N,)`."""
        starts, ends, splits = block.starts[kept], block.ends[kept], splits[kept]
        spans = list(zip(starts.tolist(), ends.tolist(), strict=True))
        tokens = block.tokens
        sequences = [tokens[start - 1 : end] for start, end in spans]
        high, low = hash_sequences(sequences)
        self._sequences += sequences
        self._keys.append(order_keys(high, self._seed))
        self._lows.append(low)
        self._splits.append(splits)
        self._lengths.append(ends - starts + 1)
        self.num_records += len(spans)
        lengths = ends - starts + 2
        for split in np.unique(splits).tolist():
            name = "sequence" if split == BY_SEQUENCE else SPLITS[split]
            self.tokens[name] = self.tokens.get(name, 0) + int(lengths[splits == split].sum())

    def write(self, path: Path) -> None:
        """Write the part's file."""
        empty = np.empty(0, np.uint64)
        part = PartRecords(
            keys=np.concatenate([empty, *self._keys]),
            lows=np.concatenate([empty, *self._lows]),
            splits=np.concatenate([np.empty(0, np.uint8), *self._splits]),
            lengths=np.concatenate([np.empty(0, np.int64), *self._lengths]),
            sequences=self._sequences,
        )
        write_part(path, part)
