"""Some steps of masked training from given weights, judged on the way: a job of its own process."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import torch

from protperf.batches import documents_of
from protperf.bench.paper.floors import Score, windows_of
from protperf.bench.paper.jobs import Result
from protperf.checkpoint import load_model
from protperf.config import DataConfig, ModelConfig, ObjectiveConfig, OptimConfig
from protperf.data import WindowData
from protperf.formats.shards import ShardSet
from protperf.inference.evaluation import Answerer, tally_windows
from protperf.metrics import length_bins
from protperf.model import ProteinModel
from protperf.objectives import answer
from protperf.optim import build_optimizer, learning_rate_factor

CLIP = 0.5
"""As in training."""


def tune(
    *,
    model: dict[str, Any],
    weights: str | None,
    dataset: str,
    batch: int,
    learning_rate: float,
    warmup: int,
    judged: list[int],
) -> Result:
    """Train a model for some steps, at a constant rate after the warm-up.

    Args:
        model: its configuration.
        weights: a model of the same shape whose weights it begins with, whatever its attention; `None`: new ones.
        dataset: by `protperf prepare`.
        batch: windows of a step.
        learning_rate: after the warm-up.
        warmup: steps.
        judged: numbers of steps, ascending, after which it is asked on `valid`; the last ends it.

    Returns:
        `curve`: steps -> loss, perplexity, accuracy, asked; `product`: |q||k|/sqrt(K) before the first step.
    """
    torch.manual_seed(0)
    trained = ProteinModel(ModelConfig(**model), causal=False)
    if weights:
        source = load_model(weights)
        trained.load_weights(source.model.state_dict(), place=weights, projections="draw")
    objective = ObjectiveConfig()
    data = WindowData(DataConfig(path=dataset, batch_size=batch, num_workers=0), objective, seed=0)
    optim = OptimConfig(learning_rate=learning_rate, warmup_steps=warmup, schedule="constant")
    optimizer = build_optimizer(trained, optim)
    batches = iter(data.train_dataloader())
    curve: dict[int, Score] = {}
    product, done = 0.0, 0
    for steps in judged:
        for each in islice(batches, steps - done):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate * learning_rate_factor(done, optim)
            sums = answer(trained.train(), each, across=False)
            optimizer.zero_grad()
            (sums.nll / sums.asked).backward()
            torch.nn.utils.clip_grad_norm_(trained.parameters(), CLIP)
            optimizer.step()
            done += 1
        curve[steps] = judge(trained.eval(), Path(dataset))
        if not done:
            product = norm_product(trained, Path(dataset))
    return {"curve": curve, "product": product}


def judge(model: ProteinModel, dataset: Path) -> Score:
    """Return loss, perplexity and accuracy on the split `valid`, masked as training does with seed 0."""
    shards = ShardSet(dataset, "valid")
    tallies = tally_windows(
        {"model": Answerer(model)},
        {},
        windows_of(shards),
        objective=ObjectiveConfig(),
        seed=0,
        bins=length_bins(shards.window),
    )
    return tallies["model"].summary()


def norm_product(model: ProteinModel, dataset: Path) -> float:
    """Return |q||k|/sqrt(K) on the first windows of `valid`, the mean over layers and heads."""
    _, windows = next(windows_of(ShardSet(dataset, "valid")))
    tokens = torch.from_numpy(windows)
    return float(model.query_key_sums(tokens, documents_of(tokens)).products().mean())
