"""What a swap did, as tables for people and as JSON: accuracy after each stage, and how near each layer and head came.

Axis letters: `H` heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from protperf.config import ModelConfig
from protperf.inference.approximation import Approximation

EXACT, SWAPPED, TRANSFERRED, TUNED = "exact", "swapped", "transferred", "tuned"
"""The stages of a model on its way, in this order; a stage that was not asked for is left out."""

_WORDS = ((0.25, "close"), (0.75, "rough"), (1.0, "hardly better than averaging"))
"""Up to which share of the error of averaging a layer is called what."""


@dataclass
class SwapReport:
    """What was found.

    Attributes:
        config: of the swapped model.
        settings: what was asked for, and of how many proteins: plain values.
        accuracy: stage -> loss, perplexity, accuracy and the number of asked residues.
        approximations: stage -> how well exact attention is approximated; `SWAPPED` and `TRANSFERRED` alone.
    """

    config: ModelConfig
    settings: dict[str, Any]
    accuracy: dict[str, dict[str, float]] = field(default_factory=dict)
    approximations: dict[str, Approximation] = field(default_factory=dict)


def verdict(kind: str, *, error: float, null: float) -> str:
    """Say in a line how well a layer is approximated.

    >>> verdict("favor", error=0.2, null=0.8)
    'close (25 % of the error of averaging)'

    Args:
        kind: of its attention.
        error: relative error of what its heads gather.
        null: that of the mean of v.
    """
    if kind == "softmax":
        return "exact"
    share = error / null if null else float(error > 0)
    word = next((word for most, word in _WORDS if share <= most), "worse than averaging")
    return f"{word} ({100 * share:.0f} % of the error of averaging)"


def as_json(report: SwapReport) -> dict[str, Any]:
    """Return all numbers as plain values: `settings`, `accuracy` by stage, and `layers` with their heads."""
    layers = (
        [_layer(report, layer) for layer in range(report.config.num_layers)] if report.approximations else []
    )
    return {"settings": report.settings, "accuracy": report.accuracy, "layers": layers}


def as_text(report: SwapReport) -> str:
    """Return two tables: of stages, and of layers with their heads."""
    return "\n".join([*_accuracy_lines(report.accuracy), *_layer_lines(report)])


def _layer(report: SwapReport, layer: int) -> dict[str, Any]:
    kind = report.config.attention_of(layer)
    stages = report.approximations
    last = list(stages.values())[-1]
    null = float(last.layer_null[layer])
    return {
        "layer": layer,
        "attention": kind,
        "null": null,
        "error": {stage: float(found.layer_error[layer]) for stage, found in stages.items()},
        "drift": {stage: float(found.drift[layer]) for stage, found in stages.items()},
        "verdict": verdict(kind, error=float(last.layer_error[layer]), null=null),
        "heads": [_head(stages, layer, head) for head in range(report.config.num_heads)],
    }


def _head(stages: Mapping[str, Approximation], layer: int, head: int) -> dict[str, Any]:
    last = list(stages.values())[-1]
    return {
        "head": head,
        "logit": float(last.logit[layer, head]),
        "entropy": float(last.entropy[layer, head]),
        "uniform_entropy": float(last.most[layer, head]),
        "null": float(last.null[layer, head]),
        "error": {stage: float(found.error[layer, head]) for stage, found in stages.items()},
    }


def _accuracy_lines(accuracy: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    yield f"{'attention':<14}{'residues asked':>16}{'accuracy':>10}{'perplexity':>12}"
    for stage, scores in accuracy.items():
        yield (f"{stage:<14}{scores['asked']:>16,}{scores['accuracy']:>10.3f}{scores['perplexity']:>12.3f}")


def _layer_lines(report: SwapReport) -> Iterator[str]:
    """Yield a row for each layer, with its verdict, and under it one for each head; errors are relative."""
    if not report.approximations:
        return
    stages = list(report.approximations)
    yield ""
    names = "".join(f"{stage:>13}" for stage in ("averaging", *stages))
    yield f"{'layer':<7}{'head':<6}{'|q||k|/sqrt(K)':>14}{'entropy':>9}{'uniform':>9}{names}   error by attention"
    for layer in as_json(report)["layers"]:
        errors = "".join(f"{value:>13.3f}" for value in (layer["null"], *layer["error"].values()))
        yield f"{layer['layer']:<7}{'all':<6}{'':>32}{errors}   {layer['attention']}: {layer['verdict']}"
        if layer["attention"] == "softmax":
            continue
        for head in layer["heads"]:
            errors = "".join(f"{value:>13.3f}" for value in (head["null"], *head["error"].values()))
            yield (
                f"{'':<7}{head['head']:<6}{head['logit']:>14.2f}{head['entropy']:>9.2f}"
                f"{head['uniform_entropy']:>9.2f}{errors}"
            )
