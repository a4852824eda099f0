"""`protperf bench error`: how far random features are from exact softmax attention, beside uniform attention.

Uniform attention (the mean of v) knows nothing of q and k: what does not beat it approximates nothing.

Axis letters: `B` batch, `H` heads, `L` length in tokens, `D` model width, `K` head width, `F` features.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from protperf.attention import attend, draw_projection, projection_generator
from protperf.attention.projection import COUPLINGS
from protperf.bench import measure
from protperf.bench.figures import draw_lines, draw_stacked
from protperf.bench.replaced import Substitute, attention_replaced, average_values
from protperf.bench.report import Report, format_table, say
from protperf.config import ModelConfig
from protperf.model import ProteinModel
from protperf.vocab import VOCABULARY
from protperf.work import rows_for

if TYPE_CHECKING:
    from matplotlib.figure import Figure

APPROXIMATIONS = ("favor", "favor_hyperbolic", "oprf", "trig")
"""The kinds whose features stand for softmax."""

UNIFORM = "uniform attention"

LEGEND = """\
Relative error: |output - that of exact softmax in float64| over |the latter|, over all tokens; medians over seeds.
uniform attention: each token gets the mean of v. * marks what is no better than that.
All have equally many features; favor_hyperbolic and trig make two of each row of the projection."""

Errors = dict[str, dict[int, float]]
"""Row of a table -> number of features, or of layers -> relative error."""


@dataclass
class Approximation:
    """Attention by random features, in both directions; call number k draws the projection of layer k.

    Attributes:
        kind: one of `APPROXIMATIONS`.
        coupling: of the projection's rows.
        num_features: F.
        seed: of the projections.
        calls: so far.
    """

    kind: str
    coupling: str
    num_features: int
    seed: int
    calls: int = 0

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return `(B, H, L, K)`."""
        projection = draw_projection(
            rows_for(self.kind, self.num_features, q.shape[-1]),
            q.shape[-1],
            coupling=self.coupling,
            norms="chi",
            generator=projection_generator(self.seed, layer=self.calls, redraw=0),
        )
        self.calls += 1
        return attend(
            q,
            k,
            v,
            kind=self.kind,
            causal=False,
            projection=projection.to(q.device),
            pair_square=mean_pair_square(q, k) if self.kind == "oprf" else None,
        )


def run(options: argparse.Namespace) -> Report:
    """Measure errors against features and against layers, and lay them out."""
    kinds = choose("--kinds", options.kinds, APPROXIMATIONS)
    couplings = choose("--couplings", options.couplings, COUPLINGS)
    device = measure.choose_bench_device(options.device)
    machine = measure.describe_machine(device)
    heading = f"{options.heads} heads of {options.head_dim}, {options.length:,} tokens, {options.seeds} seeds"
    report = Report([measure.headline(machine), heading], {"machine": machine, "setting": heading})
    names = [(kind, coupling) for kind in kinds for coupling in couplings]
    _add_features(report, options, names, device)
    if options.layers:
        _add_layers(report, options, names, device)
    report.blocks.append(LEGEND)
    report.figures = draw(report.numbers)
    return report


def draw(numbers: Mapping[str, Any]) -> dict[str, Figure]:
    """Draw a figure for each scale of q and k, one of all scales, and one of errors through a model."""
    figures = {}
    if numbers["by_features"]:
        figures["error_features"] = draw_stacked(
            {f"q, k ~ {sigma} N(0, 1)": _series(errors) for sigma, errors in numbers["by_features"].items()},
            title="error of attention",
            x="features",
            y="relative error",
        )
    for sigma, errors in numbers["by_features"].items():
        title = f"error of attention, q, k ~ {sigma} N(0, 1)"
        figures[f"error_{sigma}"] = _figure(errors, title, "features")
    if "by_layers" in numbers:
        title = f"error of hidden states, random weights, {numbers['layer_features']} features"
        figures["error_layers"] = _figure(numbers["by_layers"], title, "layers")
    return figures


def choose(option: str, asked: Sequence[str] | None, allowed: Sequence[str]) -> list[str]:
    """Return the names to compare: those asked for, else all.

    Raises:
        ValueError: one is not among the allowed.
    """
    wrong = [name for name in asked or () if name not in allowed]
    if wrong:
        raise ValueError(f"{option} {' '.join(wrong)}: not there; allowed: {', '.join(allowed)}")
    return list(dict.fromkeys(asked or allowed))


def _add_features(
    report: Report, options: argparse.Namespace, names: Sequence[tuple[str, str]], device: torch.device
) -> None:
    """Add a table for each scale of q and k."""
    report.numbers["by_features"] = {}
    for sigma in options.sigmas:
        errors = errors_by_features(options, names, sigma=sigma, device=device)
        title = f"q, k ~ {sigma:g} N(0, 1)"
        report.blocks.append(table_of(f"{title}; features:", errors, options.features))
        report.numbers["by_features"][f"{sigma:g}"] = errors
        say("error", f"{title}: done")


def _add_layers(
    report: Report, options: argparse.Namespace, names: Sequence[tuple[str, str]], device: torch.device
) -> None:
    """Add the table of errors through a model."""
    errors, pair_square = errors_by_layer(options, names, device=device)
    columns = sorted({2**power for power in range(8) if 2**power < options.layers} | {options.layers})
    title = f"random weights, {options.layer_features} features"
    report.blocks += [
        table_of(f"{title}; layers:", errors, columns),
        "Hidden states of a model whose attention is replaced; the mean of |q' + k'|^2 in its first layer is "
        f"{pair_square:.2f}, of which the variance of a feature is the exponential.",
    ]
    report.numbers |= {
        "by_layers": errors,
        "layer_features": options.layer_features,
        "pair_square": pair_square,
    }


def errors_by_features(
    options: argparse.Namespace, names: Sequence[tuple[str, str]], *, sigma: float, device: torch.device
) -> Errors:
    """Return the median relative error of attention's output for (kind, coupling) and numbers of features."""
    samples: dict[str, dict[int, list[float]]] = {}
    for seed in range(options.seed, options.seed + options.seeds):
        shape = (3, 1, options.heads, options.length, options.head_dim)
        q, k, v = measure.normal(*shape, seed=seed).to(device)
        q, k = q * sigma, k * sigma
        exact = exact_attention(q, k, v)
        rivals = {(name, f): Approximation(*name, f, seed) for name in names for f in options.features}
        for ((kind, coupling), features), attention in rivals.items():
            error = relative_error(attention(q, k, v), exact)
            samples.setdefault(f"{kind}, {coupling}", {}).setdefault(features, []).append(error)
        for features in options.features:
            error = relative_error(average_values(q, k, v), exact)
            samples.setdefault(UNIFORM, {}).setdefault(features, []).append(error)
    return medians(samples)


def errors_by_layer(
    options: argparse.Namespace, names: Sequence[tuple[str, str]], *, device: torch.device
) -> tuple[Errors, float]:
    """Return the median relative error of hidden states after each layer of a model with random weights.

    The models of a seed share their weights and differ in attention alone.

    Source: Choromanski et al. 2021, Fig. 14, arXiv:2009.14794.

    Returns:
        the errors, and the mean of |q' + k'|^2 in the first layer of the model that attends exactly.
    """
    samples: dict[str, dict[int, list[float]]] = {}
    pair_squares = []
    for seed in range(options.seed, options.seed + options.seeds):
        model, tokens = draw_model(options, seed=seed, device=device)
        pair_squares.append(float(model.query_key_sums(tokens).pair_squares()[0].mean()))
        expected = hidden_states(model, tokens, exact_attention)
        rivals: dict[str, Substitute] = {
            f"{kind}, {coupling}": Approximation(kind, coupling, options.layer_features, seed)
            for kind, coupling in names
        }
        for name, attention in (rivals | {UNIFORM: average_values}).items():
            states = hidden_states(model, tokens, attention)
            for layer, (found, right) in enumerate(zip(states, expected, strict=True), start=1):
                samples.setdefault(name, {}).setdefault(layer, []).append(relative_error(found, right))
        say("error", f"layers, seed {seed}: done")
    return medians(samples), measure.median(pair_squares)


def draw_model(
    options: argparse.Namespace, *, seed: int, device: torch.device
) -> tuple[ProteinModel, Tensor]:
    """Return a bidirectional model with random weights, and random residues `(1, L)`."""
    model_dim = options.heads * options.head_dim
    config = ModelConfig(
        attention="softmax",
        num_layers=options.layers,
        num_heads=options.heads,
        model_dim=model_dim,
        feedforward_dim=2 * model_dim,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = ProteinModel(config, causal=False)
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY.num_standard, (1, options.length), generator=generator)
    return model.eval().to(device), tokens.to(device)


def hidden_states(model: ProteinModel, tokens: Tensor, attention: Substitute) -> list[Tensor]:
    """Return what leaves each block, `(1, L, D)`, of a model that attends as it is told."""
    states: list[Tensor] = []
    hooks = [
        block.register_forward_hook(lambda module, inputs, output: states.append(output))
        for block in model.blocks
    ]
    with torch.inference_mode(), attention_replaced(attention):
        model(tokens)
    for hook in hooks:
        hook.remove()
    return states


def exact_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return softmax(q k^T / sqrt(K)) v as it is written, computed in float64 and given in float64."""
    q, k, v = q.double(), k.double(), v.double()
    return (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v


def mean_pair_square(q: Tensor, k: Tensor) -> Tensor:
    """Return the mean of |q' + k'|^2 over all pairs of a head, `(H,)`; x' = x / K^(1/4)."""
    squares = (q.square().sum(-1) + k.square().sum(-1)).mean(-1)  # (B, H)
    products = (q.mean(-2) * k.mean(-2)).sum(-1)
    return (squares + 2 * products).mean(0) * q.shape[-1] ** -0.5


def relative_error(found: Tensor, right: Tensor) -> float:
    """Return |found - right| / |right|, in float64."""
    return float((found.double() - right.double()).norm() / right.double().norm())


def medians(samples: Mapping[str, Mapping[int, Sequence[float]]]) -> Errors:
    """Return the medians over seeds, uniform attention last."""
    names = sorted(samples, key=lambda name: name == UNIFORM)
    return {
        name: {place: measure.median(errors) for place, errors in samples[name].items()} for name in names
    }


def table_of(title: str, errors: Errors, columns: Sequence[int]) -> str:
    """Return a table; what does not beat uniform attention has an asterisk."""

    def show(name: str, column: int) -> str:
        error = errors[name][column]
        beaten = name != UNIFORM and not error < errors[UNIFORM][column]
        return (f"{error:.4f}" if error < 10 else f"{error:.2g}") + ("*" if beaten else " ")

    rows = [(name, [show(name, column) for column in columns]) for name in errors]
    return format_table(title, [f"{column:,} " for column in columns], rows)


def _figure(errors: Mapping[str, Mapping[Any, float | None]], title: str, x: str) -> Figure:
    return draw_lines(_series(errors), title=title, x=x, y="relative error")


def _series(errors: Mapping[str, Mapping[Any, float | None]]) -> dict[str, list[tuple[int, float]]]:
    """Return points to draw; as JSON holds errors, places are text and what is not finite is `None`."""
    series = {
        name: [(int(place), error) for place, error in points.items() if error and error < float("inf")]
        for name, points in errors.items()
    }
    return {name: points for name, points in series.items() if points}
