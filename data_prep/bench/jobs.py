"""What `data_prep.bench` measures inside a process of its own: `python -m data_prep.bench.jobs JOB ARGUMENT...`.

Each job prints one JSON object: `wall` and `cpu` seconds of the work itself, without the start of Python, and what else it
found.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import numpy as np
from Bio.SeqIO.FastaIO import SimpleFastaParser

from data_prep.journal import BuildOrder, Journal
from data_prep.memory import MemoryPlan, reuse_memory
from data_prep.options import PrepareOptions
from data_prep.prepare import prepare
from data_prep.reading import PartReader
from data_prep.synthetic import write_fasta
from protperf.formats.blocks import BlockParser
from protperf.formats.counts import Counts
from protperf.formats.cutting import BLOCK_BYTES, cut_records
from protperf.formats.records import Policy
from protperf.formats.shards import ShardSet
from protperf.formats.sizes import estimate_text_bytes
from protperf.formats.streams import open_stream
from protperf.vocab import VOCABULARY

_PIECE_BYTES = 16 << 20
_MANY_PARTS = 512
_MANY_STEPS = 64
_BATCH = 64
_TURNS = 11
_WINDOWS_A_TURN = 12_800

Found = dict[str, float]
"""Numbers by name."""


@contextmanager
def _measured(found: Found) -> Iterator[None]:
    """Add the seconds that the block takes to `found`."""
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
    yield
    after = resource.getrusage(resource.RUSAGE_SELF)
    found["wall"] = time.perf_counter() - start
    found["cpu"] = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def igzip_alone(path: str) -> Found:
    """Decompress a file and drop what comes out."""
    from isal import igzip

    found: Found = {"bytes": 0}
    with _measured(found), igzip.open(path) as file:
        while piece := file.read(_PIECE_BYTES):
            found["bytes"] += len(piece)
    return found


def parse(path: str, ahead: bool = False) -> Found:
    """Decompress, parse and tokenise a file, with `ahead` on two cores; the memory is set up as a task's is."""
    reuse_memory()
    found, counts = Found(), Counts()
    with _measured(found), open_stream(path, lambda _: None, ahead=ahead) as stream:
        parser = BlockParser(path, Policy(), counts)
        for text in cut_records(stream.pieces(), BLOCK_BYTES):
            parser.parse(text)
    return {**found, "records": counts.records, "residues": counts.residues}


def parse_ahead(path: str) -> Found:
    """Decompress in one thread, parse and tokenise in another."""
    return parse(path, ahead=True)


def biopython(path: str) -> Found:
    """Read a file with Biopython's plain FASTA reader and tokenise record by record."""
    found: Found = {"records": 0, "residues": 0}
    with _measured(found), gzip.open(path, "rt") as file:
        for _, sequence in SimpleFastaParser(file):
            found["records"] += 1
            found["residues"] += len(VOCABULARY.encode(sequence))
    return found


def reader(path: str) -> Found:
    """Decompress, hash and cut a file into parts and write them, as the one reader of `prepare` does."""
    found: Found = {}
    part_bytes = MemoryPlan.fit(2 << 30, 2, text_bytes=estimate_text_bytes(path)).part_bytes
    with tempfile.TemporaryDirectory(dir=Path(path).parent) as folder:
        journal = Journal(Path(folder))
        journal.begin(BuildOrder.describe([path], [], PrepareOptions(), strict=False))
        with _measured(found):
            tasks = PartReader([path], Path(folder), journal, part_bytes=part_bytes, advance=lambda _: None)
            for task in tasks:
                task.text_path.unlink()
    return found


def segments(num_bytes: str) -> Found:
    """Measure what a segment costs: what one step of a reduce task reads of one part. In a large build there are many.

    The same text is prepared in few and in many parts, each with few and with many steps. What many of both cost beyond
    what many of either cost is the segments'.
    """
    options, found = PrepareOptions(), dict[tuple[int, int], float]()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "small.fasta")
        written = write_fasta(path, int(num_bytes))
        tokens = written.residues + 2 * written.records
        for parts, steps in product((1, _MANY_PARTS), (1, _MANY_STEPS)):
            plan = MemoryPlan(2 << 30, 1, written.text_bytes // parts + 1, tokens // steps + 1)
            seconds: Found = {}
            with _measured(seconds):
                prepare([str(path)], Path(folder, f"{parts}-{steps}"), options, plan=plan)
            found[parts > 1, steps > 1] = seconds["cpu"]
    beyond = found[True, True] - found[True, False] - found[False, True] + found[False, False]
    count = (_MANY_PARTS - 1) * (_MANY_STEPS - 1)
    return {"seconds": max(0.0, beyond) / count, "segments": count}


def count_steps(tokens: float, step_bytes: int, options: PrepareOptions) -> int:
    """Return the steps of all reduce tasks of a build together, as `Build` plans them."""
    tasks = 1 << max(0, round(math.log2(tokens / (options.window * options.shard_windows))))
    return tasks << max(0, math.ceil(math.log2(tokens / tasks / step_bytes)))


def windows(dataset: str) -> Found:
    """Read random windows of `train` through a `ShardSet` and by bare `os.pread`.

    In each turn both read the same rows twice, so that each of them is once the first to touch them.
    """
    shards, bare = ShardSet(dataset, "train"), _BareReader(dataset)
    generator, ratios, rates = np.random.default_rng(0), [], []
    for turn in range(_TURNS + 1):
        rows = generator.integers(0, len(shards), (_WINDOWS_A_TURN // _BATCH, _BATCH))
        places = [bare.place(row) for row in rows.ravel().tolist()]
        seconds = [0.0, 0.0]
        for ours in (False, True, True, False):
            start = time.perf_counter()
            if ours:
                for batch in rows:
                    shards.read_many(batch)
            else:
                for descriptor, offset in places:
                    os.pread(descriptor, shards.window, offset)
            seconds[ours] += time.perf_counter() - start
        if turn:  # the first turn fills the page cache and opens the files
            ratios.append(seconds[0] / seconds[1])
            rates.append(2 * rows.size / seconds[1])
    return {"ratio": statistics.median(ratios), "windows_a_second": statistics.median(rates)}


class _BareReader:
    """Knows where each row of `train` lies, and holds the open files."""

    def __init__(self, dataset: str) -> None:
        manifest = json.loads((Path(dataset) / "manifest.json").read_text())
        shards = [shard for shard in manifest["shards"] if shard["split"] == "train"]
        self._window = manifest["window"]
        self._ends = np.cumsum([shard["windows"] for shard in shards])
        self._offsets = [shard["offset"] for shard in shards]
        self._descriptors = [os.open(Path(dataset) / shard["file"], os.O_RDONLY) for shard in shards]

    def place(self, row: int) -> tuple[int, int]:
        """Return the open file and the offset of a row."""
        number = int(np.searchsorted(self._ends, row, side="right"))
        first = int(self._ends[number - 1]) if number else 0
        return self._descriptors[number], self._offsets[number] + (row - first) * self._window


def growth(dataset: str, num_windows: str) -> Found:
    """Read windows at random and compare the memory held after a tenth of them with that at the end."""
    shards, generator, total = ShardSet(dataset, "train"), np.random.default_rng(0), int(num_windows)
    early = done = 0
    while done < total:
        shards.read_many(generator.integers(0, len(shards), _BATCH))
        done += _BATCH
        if not early and done >= total // 10:
            early = _resident_bytes()
    late = _resident_bytes()
    return {"early": early, "late": late, "growth": late / early - 1}


def _resident_bytes() -> int:
    """Return the memory that this process holds, without pages of the page cache."""
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


JOBS: dict[str, Callable[..., Found]] = {
    job.__name__: job
    for job in (igzip_alone, parse, parse_ahead, biopython, reader, segments, windows, growth)
}

if __name__ == "__main__":
    print(json.dumps(JOBS[sys.argv[1]](*sys.argv[2:])))
