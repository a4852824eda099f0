"""`protperf bench training`: the whole training loop beside its bare step, and several ranks beside one, in one run.

Axis letters: `B` batch, `L` length in tokens.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from protperf.batches import Batch, documents_of
from protperf.bench import measure
from protperf.bench.figures import draw_bars
from protperf.bench.model import PRECISIONS, Trainee
from protperf.bench.presets import Question, read_preset
from protperf.bench.report import Report, digits, format_table, say
from protperf.config import DataConfig, ModelConfig, ObjectiveConfig, to_dict
from protperf.data import WindowData
from protperf.formats.metrics_file import METRICS_NAME, read_metrics

Turn = Callable[[], float]
"""Does a contestant's work of one round and returns its tokens a second."""

RATE = "train/tokens_per_second"

BARE = "bare step"
LOOP = "protperf train"
BARE_AGAIN = "bare step, again"
"""The bare step has a turn before the loop and one after it: the loop is compared with the mean of both."""

LOOP_BAR = 0.95
"""The share of the bare step's rate that the whole loop must reach."""
RANK_BAR = 0.8
"""What each rank must add to the rate of one: two ranks reach 1.6 times as much."""

COLUMNS = ("tokens/s", "s/step", "of the bare step, %", "times one rank", "bar")

LEGEND = """\
bare step: forward, loss, backward and AdamW on the batches that training begins with, in memory; no clipping.
protperf train: a process of its own; its metric train/tokens_per_second without the first interval: reading and masking windows, moving
  them, training, clipping, logging, checkpoints (the last one excepted); not validation.
Ratios are medians of those within a round. Ranks on a CPU have one thread each, and one batch together."""


@dataclass(frozen=True)
class Result:
    """What was measured of one contestant.

    Attributes:
        name: the row of the table.
        ranks: processes that train.
        threads: of each of them.
        tokens_per_second: the median over rounds.
        seconds: of an optimizer step at that rate.
        of_bare: its rate over the bare step's, the median over rounds; `None` for the ranks of one thread.
        times_one: its rate over that of the smallest number of ranks; `None` for the others.
        bar: what `of_bare` or `times_one` must reach; `None`: nothing.
        rounds: tokens a second in each round.
    """

    name: str
    ranks: int
    threads: int
    tokens_per_second: float
    seconds: float
    of_bare: float | None
    times_one: float | None
    bar: float | None
    rounds: tuple[float, ...]

    @property
    def reached(self) -> bool | None:
        """Whether it is at its bar or above; `None` without one."""
        found = self.times_one if self.of_bare is None else self.of_bare
        return None if self.bar is None or found is None else found >= self.bar


def run(options: argparse.Namespace) -> Report:
    """Measure the loop, the bare step and the ranks, and lay the numbers out."""
    config = read_preset(options.preset, options.overrides, num_layers=options.layers)
    device = measure.choose_bench_device(options.device)
    machine = measure.describe_machine(device)
    say("training", measure.headline(machine))
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="protperf-bench-")))
        folder = options.data
        if folder is None:
            folder = scratch / "sample"
            run_protperf(
                "prepare", "--sample", str(folder), f"--window={options.window}", "--valid=0.05", "--test=0"
            )
        data = WindowData(_data_config(folder, options), ObjectiveConfig(), seed=options.seed)
        samples = compare(config, data, scratch, options, device)
    return lay_out(samples, config, data, machine, options)


def compare(
    config: ModelConfig, data: WindowData, scratch: Path, options: argparse.Namespace, device: torch.device
) -> dict[str, list[float]]:
    """Let the bare step, the loop and the ranks take turns.

    Returns:
        name -> tokens a second in each round; of the matrix product its products a second, under `measure.MATMUL`.
    """
    trainee = Trainee(config, first_questions(data, 1, device)[0], precision=options.precision)
    bare = partial(bare_rate, trainee, first_questions(data, options.log_every, device))
    product = measure.matrix_product(PRECISIONS[options.precision], device)
    loop = partial(loop_rate, config, data, scratch, options, device)
    turns: dict[str, Turn] = {
        BARE: bare,
        LOOP: partial(loop, ranks=1, threads=torch.get_num_threads()),
        BARE_AGAIN: bare,
        measure.MATMUL: lambda: 1 / measure.seconds_of(product, device=device, repeats=10),
    }
    turns |= {ranks_name(ranks): partial(loop, ranks=ranks, threads=1) for ranks in options.devices}
    for name in (BARE, measure.MATMUL):  # a process warms up by itself, in the interval that does not count
        turns[name]()
    say("training", "warm")
    samples: dict[str, list[float]] = {name: [] for name in turns}
    for number in range(options.rounds):
        for name, turn in turns.items():
            samples[name].append(turn())
        rates = ", ".join(
            f"{name} {digits(samples[name][-1])}"
            for name in turns
            if name not in (BARE_AGAIN, measure.MATMUL)
        )
        say("training", f"round {number + 1} of {options.rounds}, tokens/s: {rates}")
    return samples


def ranks_name(ranks: int) -> str:
    """Return the name of a number of ranks.

    >>> ranks_name(1), ranks_name(2)
    ('1 rank', '2 ranks')
    """
    return f"{ranks} rank{'s' * (ranks > 1)}"


def first_questions(data: WindowData, count: int, device: torch.device) -> list[Question]:
    """Return the batches that training begins with."""
    batches = islice(data.train_dataloader(), count)
    moved = [Batch(batch.inputs.to(device), batch.targets.to(device)) for batch in batches]
    return [Question(batch, documents_of(batch.inputs)) for batch in moved]


def bare_rate(trainee: Trainee, questions: Sequence[Question]) -> float:
    """Return the tokens a second of one training step on each question."""

    def step_on_all() -> None:
        for trainee.question in questions:
            trainee.step()

    tokens = sum(question.batch.inputs.numel() for question in questions)
    return tokens / measure.seconds_of(step_on_all, device=trainee.device)


def loop_rate(
    config: ModelConfig,
    data: WindowData,
    scratch: Path,
    options: argparse.Namespace,
    device: torch.device,
    *,
    ranks: int,
    threads: int,
) -> float:
    """Run `protperf train` in a folder of its own, which is removed, and return what it says of its tokens a second."""
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        run_protperf(
            "train", *training_arguments(config, data, Path(folder), options, device, ranks), threads=threads
        )
        return rate_of(read_metrics(Path(folder) / METRICS_NAME)[RATE], log_every=options.log_every)


def rate_of(intervals: Mapping[int, float], *, log_every: int) -> float:
    """Return the tokens a second over all intervals but the first, in which processes and memory warm up.

    >>> rate_of({10: 5.0, 20: 100.0, 30: 300.0}, log_every=10)
    150.0

    Args:
        intervals: step -> rate in the interval that ends there.
        log_every: steps in an interval.
    """
    counted = [rate for step, rate in intervals.items() if step > log_every]
    return len(counted) / sum(1 / rate for rate in counted)


def training_arguments(
    config: ModelConfig,
    data: WindowData,
    run_dir: Path,
    options: argparse.Namespace,
    device: torch.device,
    ranks: int,
) -> list[str]:
    """Return the command line of `protperf train` for the model and the data of this benchmark."""
    settings = {f"model.{key}": value for key, value in to_dict(config).items()}
    settings |= {
        "data.path": data.config.path,
        "data.batch_size": options.batch,
        "data.num_workers": options.workers,
        "data.valid_sets": list(data.config.valid_sets),
        "data.valid_windows": ranks,
        "data.test_sets": [],
        "trainer.accelerator": "gpu" if device.type == "cuda" else "cpu",
        "trainer.devices": ranks,
        "trainer.precision": options.precision,
        "trainer.max_steps": options.steps,
        "trainer.log_every": options.log_every,
        "trainer.checkpoint_every": options.checkpoint_every,
        "trainer.validate_every": options.steps,
        "trainer.seed": options.seed,
        "run_dir": run_dir,
    }
    return [f"{key}={quoted(value)}" for key, value in settings.items()]


def quoted(value: object) -> str:
    """Return a value as Hydra's command line reads it; paths may hold anything."""
    if isinstance(value, str | Path):
        return "'" + str(value).replace("'", "\\'") + "'"
    if isinstance(value, list | tuple):
        return f"[{','.join(map(quoted, value))}]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def run_protperf(*arguments: str, threads: int | None = None) -> None:
    """Run a command of protperf in a process of its own.

    Raises:
        ValueError: it failed; with the last line that it said.
    """
    limit = {"OMP_NUM_THREADS": str(threads)} if threads else {}
    done = subprocess.run(
        [sys.executable, "-m", "protperf", *arguments],
        env={**os.environ, **limit},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise ValueError(f"protperf {arguments[0]} failed: {said[-1]}")


def _data_config(folder: Path, options: argparse.Namespace) -> DataConfig:
    """Return how training reads the dataset; one without a validation split is validated on windows of training."""
    from protperf.formats.manifest import read_manifest

    valid = "valid" if read_manifest(folder).shards_of("valid") else "train"
    return DataConfig(
        path=str(folder.resolve()), batch_size=options.batch, num_workers=0, valid_sets=(valid,)
    )


def lay_out(
    samples: Mapping[str, Sequence[float]],
    config: ModelConfig,
    data: WindowData,
    machine: Mapping[str, Any],
    options: argparse.Namespace,
) -> Report:
    """Turn rates into a table, plain numbers and a figure."""
    tokens = options.batch * data.window
    results = judge(samples, tokens=tokens, threads=machine["threads"], ranks=options.devices)
    title = (
        f"{options.preset}: {config.num_layers} layers of {config.model_dim}, batch {options.batch} of {data.window:,} tokens, "
        f"{options.precision}; runs of {options.steps} steps that log every {options.log_every} and save every "
        f"{options.checkpoint_every}, {options.rounds} rounds"
    )
    table = format_table("training", COLUMNS, [(result.name, _row(result)) for result in results])
    products = [1 / rate for rate in samples[measure.MATMUL]]
    unrest = measure.warn_of_unrest(products)
    numbers = {
        "machine": dict(machine),
        "setting": {
            "data": options.data and str(options.data),
            "preset": options.preset,
            "model": to_dict(config),
            "batch": options.batch,
            "length": data.window,
            "precision": options.precision,
            "workers": options.workers,
            "steps": options.steps,
            "log_every": options.log_every,
            "checkpoint_every": options.checkpoint_every,
        },
        "results": [asdict(result) | {"reached": result.reached} for result in results],
        "product_rounds": products,
    }
    blocks = [measure.headline(machine), title, table, LEGEND, *([unrest] if unrest else [])]
    rates = {result.name: result.tokens_per_second for result in results}
    bars = draw_bars(rates, title=f"training {options.preset}", x="tokens/s")
    return Report(blocks, numbers, {"training": bars})


def judge(
    samples: Mapping[str, Sequence[float]], *, tokens: int, threads: int, ranks: Sequence[int]
) -> list[Result]:
    """Compare within rounds: the loop with the bare step around it, ranks with the smallest number of them.

    Args:
        samples: of `compare`.
        tokens: of a batch of all ranks.
        threads: of the bare step and the loop.
        ranks: numbers of them, ascending.
    """
    around = [(one + two) / 2 for one, two in zip(samples[BARE], samples[BARE_AGAIN], strict=True)]
    plain = partial(Result, of_bare=None, times_one=None, bar=None)
    rows: dict[str, tuple[int, int, Sequence[float]]] = {
        BARE: (1, threads, around),
        LOOP: (1, threads, samples[LOOP]),
        **{ranks_name(count): (count, 1, samples[ranks_name(count)]) for count in ranks},
    }
    results = [
        plain(name, count, each, middle := measure.median(rates), tokens / middle, rounds=tuple(rates))
        for name, (count, each, rates) in rows.items()
    ]
    shares = {name: measure.ratio(rates, around) for name, (_, _, rates) in rows.items()}
    results[1] = replace(results[1], of_bare=shares[LOOP], bar=LOOP_BAR)
    for place, count in enumerate(ranks, start=2):
        first = results[2]
        times = measure.ratio(results[place].rounds, first.rounds)
        bar = RANK_BAR * count / first.ranks if place > 2 else None
        results[place] = replace(results[place], times_one=times, bar=bar)
    return results


def _row(result: Result) -> tuple[str, ...]:
    words = {None: "", True: "reached", False: "below"}
    bar = "" if result.bar is None else digits(result.bar, unit=0.01 if result.of_bare else 1.0)
    return (
        digits(result.tokens_per_second),
        digits(result.seconds),
        digits(result.of_bare, unit=0.01),
        digits(result.times_one, suffix="x"),
        f"{bar} {words[result.reached]}".strip() or "-",
    )
