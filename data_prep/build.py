"""The stages of a build: map the parts of the input, sort out the splits, reduce ranges of keys to shards, publish.

Tasks run through one `TaskRunner`, in any order and anywhere; each leaves a file by rename and a line in the journal. What
is written depends on neither.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from data_prep.clustering import run_mmseqs
from data_prep.executors.runner import TaskRunner
from data_prep.journal import Journal
from data_prep.keys import split_points
from data_prep.mapping import MapResult, MapTask, map_part, skipped_name, sorted_name
from data_prep.memory import MemoryPlan
from data_prep.options import MMSEQS, PrepareOptions
from data_prep.reading import PartReader
from data_prep.reducing import ReducePlan, join_pieces, ngram_name, reduce_range
from data_prep.results import Built, add_up, check_sums, explain_nothing, merge_counts
from data_prep.sorted_parts import BY_SEQUENCE, SortedPart
from data_prep.splits import Thresholds, num_asked
from data_prep.tables import write_tables
from protperf.formats.counts import Counts
from protperf.formats.fasta import nothing_in
from protperf.formats.manifest import SPLITS, ShardEntry, check_fits
from protperf.formats.ngrams import NgramCounter
from protperf.formats.records import Skipped
from protperf.formats.skipped import SkippedTable
from protperf.formats.streams import place_of, progress_bar
from protperf.vocab import VOCABULARY

_SCANNED = 1 << 18


class Build:
    """One build in a work folder.

    Args:
        inputs: paths.
        work: the folder; `journal` says what is done there already.
        options: of the dataset.
        journal: of the folder.
        strict: a bad record ends the build.
        memory: what fits.
        part_bytes: text of a part.
        say: takes lines of log.
    """

    def __init__(
        self,
        inputs: list[str],
        work: Path,
        options: PrepareOptions,
        journal: Journal,
        *,
        strict: bool,
        memory: MemoryPlan,
        part_bytes: int,
        say: Callable[[str], None],
    ) -> None:
        self.inputs = inputs
        self.work = work
        self.options = options
        self.journal = journal
        self._strict = strict
        self._memory = memory
        self._part_bytes = part_bytes
        self._say = say
        self.reader: PartReader

    def run(self, runner: TaskRunner) -> Built:
        """Carry out all stages.

        Raises:
            ValueError: a bad input or table, or no record is left.
            OSError: the disk is full, or a file cannot be read or written.
        """
        self._tidy()
        named = self._prepare_tables(runner.workers)
        self._map(runner)
        results = [MapResult(**result) for _, result in sorted(self.journal.of("part").items())]
        counts, dropped = self._count(results)
        thresholds = self._thresholds(named, sum(result.kept for result in results))
        plan = self._plan(results, thresholds)
        check_fits(self.reader.inputs(), sum(plan.num_shards))
        self._forget_lost_pieces(plan)
        self._reduce(runner, plan)
        self._join(runner, plan)
        return self._gather(plan, counts, dropped)

    def _tidy(self) -> None:
        """Remove what was unfinished when the build was cut off, and do again what is gone."""
        for left in self.work.glob(".*.tmp"):
            left.unlink(missing_ok=True)
        for kind, names in (
            ("clusters", lambda number, result: [result]),
            ("tables", lambda number, result: ["tables/names.npy", "tables/values.npy"]),
            ("part", lambda number, result: [sorted_name(number)]),
            ("range", lambda number, result: [ngram_name(number), *_shard_names(result["shards"].values())]),
            ("join", lambda number, result: _shard_names([result])),
        ):
            for number, result in list(self.journal.of(kind).items()):
                if not all((self.work / name).exists() for name in names(number, result)):
                    self.journal.forget(kind, number)

    def _forget_lost_pieces(self, plan: ReducePlan) -> None:
        """Make those ranges again of which a piece is gone that no shard holds yet."""
        for split, count in enumerate(plan.num_shards):
            for index in range(count if count < plan.num_ranges else 0):
                if _join_number(split, index) in self.journal.of("join"):
                    continue
                for number, path in plan.pieces_of(split, index):
                    if number in self.journal.of("range") and not path.exists():
                        self.journal.forget("range", number)

    def _prepare_tables(self, threads: int) -> Thresholds | None:
        """Write the tables of names, once; return the thresholds of the clusters' splits."""
        done, options = self.journal.of("tables"), self.options
        if (options.clusters or options.ood_families) and 0 not in done:
            if options.clusters == MMSEQS:
                options = options.with_table(str(self._cluster(threads)))
            folder = self.work / "tables"
            folder.mkdir(exist_ok=True)
            for left in folder.iterdir():
                left.unlink()
            thresholds = write_tables(folder, options)
            self.journal.add(
                "tables", 0, thresholds and [str(thresholds.test_end), str(thresholds.valid_end)]
            )
        ends = done.get(0)
        return Thresholds(*map(int, ends)) if ends else None

    def _cluster(self, threads: int) -> Path:
        """Have MMseqs2 make the cluster table, once; return it."""
        if 0 not in self.journal.of("clusters"):
            table = run_mmseqs(
                self.inputs,
                self.work / "mmseqs",
                self.options,
                threads=threads,
                memory=self._memory.total,
                say=self._say,
            )
            self.journal.add("clusters", 0, str(table.relative_to(self.work)))
        return self.work / str(self.journal.of("clusters")[0])

    def _map(self, runner: TaskRunner) -> None:
        with progress_bar(self.inputs, shown=True) as advance:
            self.reader = PartReader(
                self.inputs, self.work, self.journal, part_bytes=self._part_bytes, advance=advance
            )
            tasks: list[MapTask] = []

            def arguments() -> Iterator[tuple[MapTask, PrepareOptions, bool]]:
                for task in self.reader:
                    tasks.append(task)
                    yield task, self.options, self._strict

            for index, result in runner.run(map_part, arguments()):
                task = tasks[index]
                self.journal.add("part", task.index, result)
                task.text_path.unlink(missing_ok=True)

    def _count(self, results: list[MapResult]) -> tuple[Counts, Counter[str]]:
        """Add up what reading met, in the order of the input, and write `skipped.tsv`."""
        counts, dropped = Counts(), Counter[str]()
        for number, path in enumerate(self.inputs):
            mine = [results[part] for part in self.reader.parts_of(number)]
            if not sum(result.records for result in mine):
                raise nothing_in(place_of(path))
            for result in mine:
                merge_counts(counts, result)
                dropped.update(result.dropped)
            if all(result.like_nucleotides for result in mine) and any(result.accepted for result in mine):
                counts.repair("like_nucleotides", place_of(path))
        for line in counts.summary():
            self._say(line)
        kept = sum(result.kept for result in results)
        if not kept:
            raise ValueError(explain_nothing(counts, dropped))
        if self.options.clusters and dropped["outside_clusters"] == kept + dropped["not_representative"]:
            raise ValueError(
                f"{self.options.clusters}: names none of the records; its second column holds their first words or accessions"
            )
        self._write_skipped(len(results))
        return counts, dropped

    def _write_skipped(self, num_parts: int) -> None:
        with SkippedTable(self.work / "skipped.tsv") as table:
            for number in range(num_parts):
                path = self.work / skipped_name(number)
                if path.exists():
                    for line in path.read_text().splitlines():
                        table.write(Skipped(*json.loads(line)))

    def _thresholds(self, named: Thresholds | None, kept: int) -> Thresholds:
        """Return where the splits of what no table names end: by fractions, or so that the numbers asked come out."""
        known = Thresholds.of_fractions(self.options)
        if known is not None:
            return known
        if named is not None:  # as many clusters as asked, and no more
            return Thresholds(0, 0)
        fractions = sum(share for share in (self.options.valid, self.options.test) if share < 1)
        bound = fractions + 2 * num_asked(self.options) / kept + 0.01
        while True:
            points = self._smallest_points(min(bound, 1.0))
            found = Thresholds.of_points(self.options, points)
            if found is not None:
                return found
            if bound >= 1:
                raise ValueError(
                    f"--valid {self.options.valid:g} --test {self.options.test:g}: there are only {len(points):,} distinct sequences"
                )
            bound *= 4

    def _smallest_points(self, bound: float) -> np.ndarray:
        """Return the points below `bound` of all distinct sequences whose split is theirs to draw, sorted, uint64."""
        limit = np.uint64(min(int(bound * 2**64), 2**64 - 1))
        found, named = [np.empty(0, np.uint64)], [np.empty(0, np.uint64)]
        for path in _sorted_names(self.journal):
            with SortedPart(self.work / path) as part:
                for start in range(0, part.num_records, _SCANNED):
                    records = part.records(start, min(start + _SCANNED, part.num_records))
                    points = split_points(records["low"], self.options.split_seed)
                    by_sequence = records["split"] == BY_SEQUENCE
                    found.append(points[by_sequence & (points <= limit)])
                    named.append(points[~by_sequence & (points <= limit)])
        return np.setdiff1d(np.concatenate(found), np.concatenate(named))

    def _plan(self, results: list[MapResult], thresholds: Thresholds) -> ReducePlan:
        """Decide on the number of shards: it depends on the records alone, not on parts, memory or workers."""
        tokens = Counter[str]()
        for result in results:
            tokens.update(result.tokens)
        num_shards = [
            _count_shards(tokens[name] + thresholds.shares[split] * tokens["sequence"], self.options)
            for split, name in enumerate(SPLITS)
        ]
        per_range = tokens.total() / max(num_shards)
        parts = _sorted_names(self.journal)
        steps = 1 << max(0, math.ceil(math.log2(per_range / self._memory.step_of(len(parts)))))
        return ReducePlan(self.work, parts, num_shards, thresholds, steps)

    def _reduce(self, runner: TaskRunner, plan: ReducePlan) -> None:
        done = self.journal.of("range")
        numbers = [number for number in range(plan.num_ranges) if number not in done]
        with _counting("reduce", plan.num_ranges, len(done)) as advance:
            tasks = ((number, plan, self.options) for number in numbers)
            for index, result in runner.run(reduce_range, tasks):
                self.journal.add("range", numbers[index], result)
                advance()

    def _join(self, runner: TaskRunner, plan: ReducePlan) -> None:
        """Write the shards of the splits that have fewer than there are ranges."""
        done = self.journal.of("join")
        shards = [
            (split, index)
            for split, count in enumerate(plan.num_shards)
            for index in range(count)
            if count < plan.num_ranges and _join_number(split, index) not in done
        ]
        tasks = ((split, index, plan, self.options) for split, index in shards)
        for number, result in runner.run(join_pieces, tasks):
            split, index = shards[number]
            self.journal.add("join", _join_number(split, index), result)
            for _, path in plan.pieces_of(split, index):
                path.unlink(missing_ok=True)

    def _gather(self, plan: ReducePlan, counts: Counts, dropped: Counter[str]) -> Built:
        """Add up what the tasks found."""
        ranges = [result for _, result in sorted(self.journal.of("range").items())]
        for name in ("duplicates", "split_conflicts"):
            dropped[name] = sum(result[name] for result in ranges)
        counter = NgramCounter()
        for number in range(len(ranges)):
            counter.merge(self.work / ngram_name(number))
        ngrams = counter.counts()
        letters = VOCABULARY.tokens[: VOCABULARY.num_residues]
        residue_counts = dict(zip(letters, ngrams.orders[1][: len(letters)].tolist(), strict=True))
        shards, splits = [], {}
        for split, name in enumerate(SPLITS):
            joined = plan.num_shards[split] < plan.num_ranges
            found = [
                self.journal.of("join")[_join_number(split, index)]
                if joined
                else ranges[index]["shards"][name]
                for index in range(plan.num_shards[split])
            ]
            mine = [ShardEntry(**each["shard"]) for each in found if each["shard"]]
            tail = Counter[int]()
            for each in found:
                tail.update({int(token): number for token, number in each["tail"].items()})
            splits[name] = add_up([result["splits"][name] for result in ranges], mine, tail)
            dropped["tail_sequences"] += tail[VOCABULARY.bos]
            dropped["tail_residues"] += sum(tail[token] for token in range(len(letters)))
            if name == "train":
                for token, letter in enumerate(letters):
                    residue_counts[letter] -= tail[token]
            shards += mine
        check_sums(counts, dropped, splits)
        if not shards:
            raise ValueError(
                f"no shard fills a window of {self.options.window:,} tokens; ask for a smaller --window, or --tail pad"
            )
        return Built(self.reader.inputs(), counts, dropped, splits, shards, ngrams, residue_counts)


def _shard_names(shards: Iterable[dict[str, Any]]) -> list[str]:
    """Return the names of the shards that a task wrote."""
    return [shard["shard"]["file"] for shard in shards if shard.get("shard")]


def _sorted_names(journal: Journal) -> list[str]:
    return [sorted_name(number) for number in sorted(journal.of("part"))]


def _count_shards(num_tokens: float, options: PrepareOptions) -> int:
    """Return the number of key ranges of a split: a power of two, so that a shard holds about `shard_windows` windows."""
    if not num_tokens:
        return 0
    return 1 << max(0, round(math.log2(num_tokens / (options.window * options.shard_windows))))


def _join_number(split: int, index: int) -> int:
    """Return one number for a shard of a split, for the journal."""
    return index * len(SPLITS) + split


@contextmanager
def _counting(what: str, total: int, done: int) -> Iterator[Callable[[], Any]]:
    """Show how many tasks are done, where stderr is a terminal."""
    with tqdm(total=total, initial=done, desc=what, unit="task", disable=None, leave=False) as bar:
        yield bar.update
