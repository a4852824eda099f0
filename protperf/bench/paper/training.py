"""Training runs as jobs: `protperf train` in a process of its own, and what its `metrics.csv` says."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from protperf.bench.paper.jobs import Job, Result
from protperf.bench.paper.settings import model_shape
from protperf.bench.training import quoted
from protperf.formats.metrics_file import METRICS_NAME, read_metrics

METRICS = ("loss", "perplexity", "accuracy")
TESTED = {"valid": "test_valid", "ood": "test_ood"}
"""Split -> what metrics of the test of the best checkpoint are named after."""

_DIVERGED = "lower optim.learning_rate"
"""What `protperf train` advises whoever meets numbers that are not finite."""


def training_job(
    name: str, folder: Path, dataset: Path, options: Namespace, overrides: Mapping[str, object]
) -> Job:
    """Return a training run.

    Args:
        name: of the run.
        folder: of the experiment.
        dataset: by `protperf prepare`.
        options: of `add_training`.
        overrides: of the configuration; they win over the options.
    """
    settings = {
        **{f"model.{key}": value for key, value in model_shape(options).items()},
        "data.path": dataset.resolve(),
        "data.batch_size": options.batch,
        "data.num_workers": 0,
        "data.test_sets": list(TESTED),
        "optim.learning_rate": options.learning_rate,
        "optim.warmup_steps": options.warmup,
        "trainer.accelerator": "cpu",
        "trainer.max_steps": options.steps,
        "trainer.validate_every": options.validate_every,
        "trainer.checkpoint_every": options.validate_every,
        "trainer.log_every": options.validate_every,
        "trainer.keep_checkpoints": 1,
        "trainer.redraw_every": 0,
        "run_dir": (folder / name).resolve(),
        **overrides,
    }
    given = tuple(f"{key}={quoted(value)}" for key, value in settings.items())
    return Job(name, ("protperf", "train", *given), collect_training)


def collect_training(folder: Path, failure: str) -> Result:
    """Return what a run says of itself.

    Args:
        folder: of the run.
        failure: its last line, if it failed.

    Returns:
        `diverged` (what it said of that, else `None`), `curve` (step -> perplexity and accuracy on `valid`), `seconds` of its
        training alone, and what the best checkpoint got on each split of `TESTED`, `None` where it diverged.

    Raises:
        ValueError: it failed of something else.
    """
    if failure and _DIVERGED not in failure:
        raise ValueError(failure)
    path = folder / METRICS_NAME
    metrics = read_metrics(path) if path.exists() else {}
    result: dict[str, Any] = {
        "diverged": failure or None,
        "curve": _curve(metrics),
        "seconds": _seconds(metrics),
    }
    for split, prefix in TESTED.items():
        result[split] = None if failure else {key: _last(metrics[f"{prefix}/{key}"]) for key in METRICS}
    return result


def _curve(metrics: Mapping[str, Mapping[int, float]]) -> dict[int, dict[str, float]]:
    steps = metrics.get("valid/loss", {})
    return {step: {key: metrics[f"valid/{key}"][step] for key in METRICS[1:]} for step in steps}


def _seconds(metrics: Mapping[str, Mapping[int, float]]) -> float:
    """Return the seconds in which a run trained: reading, steps and checkpoints, without validation."""
    tokens = [0.0, *metrics.get("train/tokens", {}).values()]
    rates = metrics.get("train/tokens_per_second", {}).values()
    return sum(
        (after - before) / rate for before, after, rate in zip(tokens, tokens[1:], rates, strict=False)
    )


def _last(series: Mapping[int, float]) -> float:
    return series[max(series)]
