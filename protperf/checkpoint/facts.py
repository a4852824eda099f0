"""What the folder of a run tells of a model besides its checkpoint: how it was trained, on what, and how good it is."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from protperf.checkpoint.files import BEST_NAME
from protperf.checkpoint.loading import MODEL_DIR, TrainedModel
from protperf.formats import FormatError
from protperf.formats.manifest import Manifest, read_manifest
from protperf.formats.metrics_file import METRICS_NAME, read_metrics
from protperf.formats.run_config import read_run_config

CONFIG_NAME = "config.yaml"
"""The configuration of a run, in its folder."""

_TOLD = {
    "data": ("batch_size", "context_length", "valid_windows"),
    "optim": None,
    "trainer": ("precision", "gradient_clip", "redraw_every", "seed"),
}
"""Sections of the configuration, and which of their keys made the model what it is; `None`: all of them."""


@dataclass(frozen=True)
class RunFacts:
    """What is known; empty where nothing is.

    Attributes:
        name: of the run.
        settings: keys of the configuration, as the command line names them, that decided the weights.
        manifest: of the dataset, if it is still where it was.
        results: name of a set -> `loss`, `perplexity`, `accuracy` of these very weights on it.
    """

    name: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    manifest: Manifest | None = None
    results: dict[str, dict[str, float]] = field(default_factory=dict)


def collect_facts(trained: TrainedModel) -> RunFacts:
    """Return what the run that a model came from has left beside it; what cannot be read is not told."""
    run_dir = _run_dir(trained.path)
    if run_dir is None:
        return RunFacts()
    settings = _read_settings(run_dir / CONFIG_NAME)
    told = {
        f"{section}.{key}": value
        for section, keys in _TOLD.items()
        for key, value in settings.get(section, {}).items()
        if keys is None or key in keys
    }
    more = settings.get("data", {}).get("more_paths") or ()
    if isinstance(more, list) and more:
        told["data.more_paths"] = f"windows of {len(more)} more dataset{'s' * (len(more) > 1)} mixed in"
    dataset_dir = settings.get("data", {}).get("path")
    manifest = _read_manifest(Path(str(dataset_dir)), trained.dataset_digest) if dataset_dir else None
    return RunFacts(run_dir.resolve().name, told, manifest, _read_results(trained, run_dir / METRICS_NAME))


def _run_dir(checkpoint: Path) -> Path | None:
    """Return the folder of the run that wrote a checkpoint, or the model's folder in it."""
    for folder in (checkpoint.parent, checkpoint.parent.parent):
        if (folder / METRICS_NAME).is_file() and (folder / CONFIG_NAME).is_file():
            return folder
    return None


def _read_settings(path: Path) -> dict[str, dict[str, Any]]:
    try:
        return read_run_config(path, remedy="the card says nothing of it")
    except (ValueError, OSError):
        return {}


def _read_manifest(dataset_dir: Path, digest: str) -> Manifest | None:
    """Return the manifest of the dataset, if that is the one which the model was trained on."""
    try:
        manifest = read_manifest(dataset_dir)
    except (ValueError, OSError):
        return None
    return manifest if manifest.digest == digest else None


def _read_results(trained: TrainedModel, path: Path) -> dict[str, dict[str, float]]:
    """Return what the run measured of these weights.

    Validation is told of the step that the weights are of; a test, whose step is the last one, of the best weights alone,
    and only if the run has not gone on since.
    """
    try:
        metrics = read_metrics(path)
    except (FormatError, OSError):
        return {}
    is_best = trained.path.name == BEST_NAME or trained.path.parent.name == MODEL_DIR
    end = max((step for values in metrics.values() for step in values), default=0)
    results: dict[str, dict[str, float]] = {}
    for metric, values in metrics.items():
        group, _, name = metric.partition("/")
        if name not in ("loss", "perplexity", "accuracy") or group == "train":
            continue
        is_test = group == "test" or group.startswith("test_")
        step = end if is_test and is_best else trained.step
        if (is_best or not is_test) and math.isfinite(values.get(step, math.nan)):
            results.setdefault(group, {})[name] = values[step]
    return {name: values for name, values in results.items() if "perplexity" in values}
