"""`protperf bench reading`: tokens a second that training's loader hands out, beside what a GPU takes and the bare reads.

Axis letters: `B` batch, `N` windows, `W` window length in tokens.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from protperf import __version__
from protperf.batches import Batch
from protperf.bench import measure
from protperf.bench.figures import draw_bars
from protperf.bench.report import Report, digits, format_table, say
from protperf.config import DataConfig, ObjectiveConfig
from protperf.data import WindowData
from protperf.formats.manifest import (
    Manifest,
    RecordCounts,
    SplitStats,
    dataset_digest,
    read_manifest,
    write_manifest,
)
from protperf.formats.ngrams import NgramCounter, write_ngrams
from protperf.formats.shard_writer import shard_name, write_shard
from protperf.vocab import VOCABULARY

Turn = Callable[[], float]
"""Does a contestant's work of one round and returns the seconds it took."""

GOAL = 433_800
"""Tokens a second that a loader is measured against: `performer_36l` on one H200, at an MFU of 24 %."""
BAR = 20
"""A loader must hand out this many times the goal, so that reading never holds training up."""
AIM = 100
"""What is aimed at, in the same measure."""

OBJECTIVES = ("masked", "causal")
PREAD = "os.pread"
PREAD_SECONDS = 0.05
"""Bare reads of a turn's windows are repeated until they last about so long."""

COLUMNS = ("million tokens/s", "x performer_36l", "of os.pread, %", "reached")

NUM_SHARDS = 16
SHARD_WINDOWS = 256
WINDOW = 8192
PROTEIN_TOKENS = (52, 652)
"""Lengths of generated proteins are uniform between these, in tokens: about those of TrEMBL on average."""

_QUIET_SECONDS = 0.05
"""Workers read ahead behind the end of their turn; the next one begins after that."""


@dataclass(frozen=True)
class Result:
    """What was measured of one contestant.

    Attributes:
        name: the row of the table.
        objective: `masked` or `causal`; empty for the bare reads.
        workers: processes that read; `None` for the bare reads.
        tokens_per_second: by the median over rounds.
        over_goal: that over `GOAL`.
        share_of_pread: its rate over that of the bare reads, the median over rounds.
        rounds: seconds of each turn.
    """

    name: str
    objective: str
    workers: int | None
    tokens_per_second: float
    over_goal: float
    share_of_pread: float | None
    rounds: tuple[float, ...]

    @property
    def reached(self) -> str:
        """Say whether the rate is beyond the aim, the bar or neither."""
        if self.workers is None:
            return "limit"
        return "aim" if self.over_goal >= AIM else "bar" if self.over_goal >= BAR else "below the bar"


def run(options: argparse.Namespace) -> Report:
    """Measure the loaders and lay the numbers out."""
    machine = measure.describe_machine(torch.device("cpu"))
    say("reading", measure.headline(machine))
    with ExitStack() as stack:
        folder = options.data
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="protperf-bench-")))
            generate(folder, seed=options.seed)
        samples = compare(folder, options)
        manifest = read_manifest(folder)
    return lay_out(samples, manifest, machine, options)


def compare(folder: Path, options: argparse.Namespace) -> dict[str, list[float]]:
    """Let all loaders, the bare reads and a matrix product take turns on the same windows.

    Returns:
        name -> seconds of each turn; those of the matrix product under `measure.MATMUL`.

    Raises:
        ValueError: no dataset, or one without a training split.
    """
    loaders = {
        row_name(kind, workers): training_loader(folder, kind, workers, options)
        for kind in OBJECTIVES
        for workers in options.workers
    }
    ahead = max(loader.num_workers * (loader.prefetch_factor or 0) for loader in loaders.values())
    order = next(iter(loaders.values())).sampler
    keys = [key for batch in islice(order, ahead, ahead + options.batches) for key in batch]
    cpu = torch.device("cpu")
    with opened(folder, [window for _, window in keys]) as read:
        calls = {PREAD: read, measure.MATMUL: measure.matrix_product(torch.float32, cpu)}
        turns: dict[str, Turn] = {
            name: partial(hand_out, loader, ahead=ahead, batches=options.batches)
            for name, loader in loaders.items()
        }
        for name, call in calls.items():
            repeats = max(1, round(PREAD_SECONDS / measure.warm_up(call, device=cpu)))
            turns[name] = partial(measure.seconds_of, call, device=cpu, repeats=repeats)
        for turn in turns.values():  # starts workers, opens files
            turn()
        say("reading", "warm")
        samples: dict[str, list[float]] = {name: [] for name in turns}
        for _ in range(options.rounds):
            for name, turn in turns.items():
                time.sleep(_QUIET_SECONDS)
                samples[name].append(turn())
    return samples


def row_name(kind: str, workers: int) -> str:
    """Return the name of a loader.

    >>> row_name("masked", 1), row_name("causal", 2)
    ('masked, 1 worker', 'causal, 2 workers')
    """
    return f"{kind}, {workers} worker{'s' * (workers != 1)}"


def training_loader(folder: Path, kind: str, workers: int, options: argparse.Namespace) -> DataLoader[Batch]:
    """Return the loader that training makes, with its window order and its questions."""
    # validation is not read, and a dataset need not have a split for it
    config = DataConfig(
        path=str(folder), batch_size=options.batch_size, num_workers=workers, valid_sets=("train",)
    )
    return WindowData(config, ObjectiveConfig(kind=kind), seed=options.seed).train_dataloader()


def hand_out(loader: DataLoader[Batch], *, ahead: int, batches: int) -> float:
    """Return the seconds that a loader takes for some batches, begun anew in the order.

    Args:
        loader: endless.
        ahead: batches taken before the clock starts, so that what workers read ahead of it is not a gift.
        batches: taken against the clock.
    """
    loading = iter(loader)
    for _ in islice(loading, ahead):
        pass
    start = time.perf_counter()
    for _ in islice(loading, batches):
        pass
    return time.perf_counter() - start


@contextmanager
def opened(folder: Path, windows: Sequence[int]) -> Iterator[Callable[[], None]]:
    """Open the shards of some training windows; gives a call that does nothing but read those windows in their order."""
    manifest = read_manifest(folder)
    shards = manifest.shards_of("train")
    ends = list(accumulate(shard.windows for shard in shards))
    numbers = [bisect_right(ends, window) for window in windows]
    length = manifest.window
    with ExitStack() as stack:
        files = {
            number: stack.enter_context(open(folder / shards[number].file, "rb", buffering=0)).fileno()
            for number in sorted(set(numbers))
        }
        places = [
            (files[number], shards[number].offset + (window - ends[number] + shards[number].windows) * length)
            for window, number in zip(windows, numbers, strict=True)
        ]

        def read() -> None:
            for descriptor, offset in places:
                os.pread(descriptor, length, offset)

        yield read


def generate(folder: Path, *, seed: int) -> None:
    """Write a dataset of random proteins; its manifest tells the truth about windows only, its n-grams are not counted.

    Args:
        folder: exists and is empty.
        seed: of residues and lengths.
    """
    generator = np.random.default_rng(seed)
    entries = [
        write_shard(
            folder / shard_name("train", index, NUM_SHARDS),
            random_windows(generator),
            split="train",
            index=index,
            num_shards=NUM_SHARDS,
        )
        for index in range(NUM_SHARDS)
    ]
    num_windows = NUM_SHARDS * SHARD_WINDOWS
    written = Manifest(
        protperf_version=__version__,
        window=WINDOW,
        seed=seed,
        release="generated by protperf bench reading",
        options={},
        inputs=[],
        counts=RecordCounts(0, 0, 0, {}, {}, 0, 0, 0, 0, 0),
        splits={"train": SplitStats(0, 0, num_windows * WINDOW, num_windows, {})},
        residue_counts={},
        shards=entries,
        ngrams=write_ngrams(folder / "ngrams.h5", NgramCounter().counts()),
        digest=dataset_digest(entries),
    )
    write_manifest(folder, written)


def random_windows(generator: np.random.Generator) -> np.ndarray:
    """Return the windows of one shard, full of whole proteins of uniform residues, uint8 `(N, W)`."""
    tokens = generator.integers(VOCABULARY.num_standard, size=SHARD_WINDOWS * WINDOW, dtype=np.uint8)
    low, high = PROTEIN_TOKENS
    ends = np.cumsum(generator.integers(low, high, size=tokens.size // low + 1))
    ends = np.append(ends[ends < tokens.size - low], tokens.size)
    tokens[ends - 1] = VOCABULARY.eos
    tokens[np.append(0, ends[:-1])] = VOCABULARY.bos
    return tokens.reshape(SHARD_WINDOWS, WINDOW)


def lay_out(
    samples: Mapping[str, Sequence[float]],
    manifest: Manifest,
    machine: Mapping[str, Any],
    options: argparse.Namespace,
) -> Report:
    """Turn seconds into a table, plain numbers and a figure."""
    tokens = options.batches * options.batch_size * manifest.window
    loaders = [(kind, workers) for kind in OBJECTIVES for workers in options.workers]
    results = [_result(row_name(*loader), *loader, tokens, samples) for loader in loaders]
    results.append(_result(PREAD, "", None, tokens, samples))
    title = (
        f"{options.data or 'generated dataset'}: windows of {manifest.window:,} tokens, batches of {options.batch_size}, "
        f"{options.batches} batches a turn, {options.rounds} rounds"
    )
    legend = (
        f"x performer_36l: over the {GOAL:,} tokens/s it would train on, on one H200 at an MFU of 24 %; bar {BAR}x, aim {AIM}x.\n"
        f"{PREAD}: bare reads of the same windows by the process that takes the batches: the limit of one process.\n"
        "All turns read the same windows, so they come from memory: the loader is measured, not the disk."
    )
    table = format_table("loader", COLUMNS, [(result.name, _row(result)) for result in results])
    unrest = measure.warn_of_unrest(samples[measure.MATMUL])
    blocks = [measure.headline(machine), title, table, legend, *([unrest] if unrest else [])]
    numbers = {
        "machine": dict(machine),
        "setting": {
            "data": options.data and str(options.data),
            "window": manifest.window,
            "batch_size": options.batch_size,
            "batches": options.batches,
        },
        "goal": GOAL,
        "bar": BAR,
        "aim": AIM,
        "results": [asdict(result) | {"reached": result.reached} for result in results],
        "product_rounds": list(samples[measure.MATMUL]),
    }
    rates = {result.name: result.over_goal for result in results}
    bars = draw_bars(rates, title="tokens handed out", x=f"times {GOAL:,} tokens/s")
    return Report(blocks, numbers, {"reading": bars})


def _result(
    name: str, kind: str, workers: int | None, tokens: int, samples: Mapping[str, Sequence[float]]
) -> Result:
    rate = tokens / measure.median(samples[name])
    share = measure.ratio(samples[PREAD], samples[name])
    return Result(name, kind, workers, rate, rate / GOAL, share, tuple(samples[name]))


def _row(result: Result) -> tuple[str, ...]:
    return (
        digits(result.tokens_per_second, unit=1e6),
        digits(result.over_goal, suffix="x"),
        digits(result.share_of_pread, unit=0.01),
        result.reached,
    )
