"""What a build found, added up from what its tasks found."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from data_prep.mapping import MapResult
from protperf.formats.counts import NUM_EXAMPLES, Counts
from protperf.formats.manifest import DROPPED, InputEntry, ShardEntry, SplitStats
from protperf.formats.ngrams import NgramCounts
from protperf.formats.records import Skipped
from protperf.vocab import VOCABULARY


@dataclass
class Built:
    """What a build made; its files lie in the work folder.

    Attributes:
        inputs: the files read.
        counts: what reading met.
        dropped: accepted records dropped after reading, by the name of their count.
        splits: contents by split.
        shards: by split and index.
        ngrams: of the split `train`.
        residue_counts: of the split `train`, by letter.
    """

    inputs: list[InputEntry]
    counts: Counts
    dropped: Counter[str]
    splits: dict[str, SplitStats]
    shards: list[ShardEntry]
    ngrams: NgramCounts
    residue_counts: dict[str, int]


def merge_counts(counts: Counts, result: MapResult) -> None:
    """Add what one part held to what the parts before it held."""
    counts.accept_many(result.accepted, result.residues)
    counts.records += result.records - result.accepted
    for skipped in (Skipped(*fields) for fields in result.skipped_examples):
        if sum(each.reason == skipped.reason for each in counts.skipped_examples) < NUM_EXAMPLES:
            counts.skipped_examples.append(skipped)
    counts.skipped.update(result.skipped)
    for name, number in result.repaired.items():
        counts.repair(name, result.repaired_examples[name], number)


def explain_nothing(counts: Counts, dropped: Counter[str]) -> str:
    """Return why no record is left."""
    if counts.accepted:
        reasons = ", ".join(
            f"{dropped[name]:,} {reason}" for name, reason in DROPPED.items() if dropped[name]
        )
        return f"no record is left of {counts.accepted:,} accepted: {reasons}; ask for less"
    example = f"; the first: {counts.skipped_examples[0].message}" if counts.skipped_examples else ""
    return f"no record accepted of {counts.records}{example}"


def add_up(results: list[dict[str, Any]], shards: list[ShardEntry], tail: Counter[int]) -> SplitStats:
    """Return what a split holds, less what was dropped at the ends of its shards."""
    lengths = Counter[str]()
    for result in results:
        lengths.update(result["lengths"])
    sequences = sum(result["sequences"] for result in results)
    residues = sum(result["residues"] for result in results)
    return SplitStats(
        sequences=sequences - tail[VOCABULARY.bos],
        residues=residues - sum(tail[token] for token in range(VOCABULARY.num_residues)),
        tokens=residues + 2 * sequences - tail.total(),
        windows=sum(shard.windows for shard in shards),
        length_histogram={length: lengths[length] for length in sorted(lengths, key=int)},
    )


def check_sums(counts: Counts, dropped: Counter[str], splits: dict[str, SplitStats]) -> None:
    """Make sure that every record is in a split or has a reason not to be."""
    packed = sum(stats.sequences for stats in splits.values())
    lost = sum(dropped[name] for name in DROPPED)
    assert counts.records == counts.accepted + counts.skipped.total(), "records do not add up"
    assert counts.accepted == packed + lost, f"{counts.accepted} accepted, {packed} packed, {lost} dropped"
