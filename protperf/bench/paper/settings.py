"""What decides the numbers of an experiment, besides the names of its jobs."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

from protperf import __version__
from protperf.formats.manifest import read_manifest

SHAPE = ("layers", "heads", "model_dim", "feedforward_dim", "features")
TRAINING = ("steps", "batch", "learning_rate", "warmup", "validate_every")


def model_shape(options: Namespace) -> dict[str, int]:
    """Return the shape that the models share, by the keys of `ModelConfig`."""
    names = ("num_layers", "num_heads", "model_dim", "feedforward_dim", "num_features")
    return {name: getattr(options, option) for name, option in zip(names, SHAPE, strict=True)}


def settings_of(options: Namespace, dataset: Path, **more: object) -> dict[str, Any]:
    """Return the options that change numbers, by their names on the command line, and what the numbers were made with."""
    names = [name for name in (*SHAPE, *TRAINING) if hasattr(options, name)]
    given = {f"--{name.replace('_', '-')}": getattr(options, name) for name in names}
    manifest = read_manifest(dataset)
    return {"protperf": __version__, "dataset": manifest.digest, "window": manifest.window, **given, **more}


def shape_line(options: Namespace, dataset: Path) -> str:
    """Return the setting in one line."""
    manifest = read_manifest(dataset)
    tokens = options.steps * options.batch * manifest.window
    sizes = ", ".join(f"{manifest.splits[split].sequences:,} {split}" for split in ("train", "valid", "ood"))
    return (
        f"{options.layers} layers of {options.model_dim}, {options.heads} heads, feed-forward {options.feedforward_dim}, "
        f"{options.features} features; {options.steps} steps of {options.batch} windows of {manifest.window:,} tokens "
        f"({tokens / 1e6:.2f} million), AdamW at {options.learning_rate:g}; proteins: {sizes}"
    )
