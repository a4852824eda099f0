"""(d) Error of random-feature attention against features, and through layers (Fig. 4, 14): `bench error` at the paper's sizes."""

from __future__ import annotations

import argparse
from typing import Any

from protperf.bench import error
from protperf.bench.paper.page import markdown_table
from protperf.bench.report import Report

KINDS = {"favor": "positive", "trig": "trigonometric"}


def run(options: argparse.Namespace) -> Report:
    """Measure errors, as `protperf bench error` does for positive and trigonometric features.

    Errors over features are those of one head; a model has its own shape, in which random weights give q and k a length.
    """
    shared = {
        **vars(options),
        "kinds": list(KINDS),
        "couplings": ["iid", "orthogonal"],
        "device": "cpu",
        "seed": 0,
    }
    report = error.run(argparse.Namespace(**{**shared, "layers": 0}))
    report.numbers |= {"experiment": "error"}
    if options.layers:
        shape = {name: getattr(options, f"layer_{name}") for name in ("heads", "head_dim", "length", "seeds")}
        through = error.run(argparse.Namespace(**{**shared, **shape, "sigmas": ()}))
        report.blocks[-1:] = through.blocks[1:]
        report.figures |= through.figures
        setting = f"{report.numbers['setting']}; layers: {through.numbers['setting']}"
        report.numbers |= {
            key: through.numbers[key] for key in ("by_layers", "layer_features", "pair_square")
        }
        report.numbers |= {"setting": setting}
    return report


def lay_out(numbers: dict[str, Any]) -> Report:
    """Turn numbers into the tables of docs/paper.md and figures."""
    return Report([rows(numbers)], numbers, error.draw(numbers))


def rows(numbers: dict[str, Any]) -> str:
    """Return the tables of docs/paper.md: one over features for all scales, one over layers."""
    by_features = numbers["by_features"]
    first = next(iter(next(iter(by_features.values())).values()))
    columns = ("q, k ~", *(f"{features} features" for features in first))
    table = [
        (_name(name), (f"{sigma} N(0, 1)", *(_show(value) for value in errors.values())))
        for sigma, rows_of_sigma in by_features.items()
        for name, errors in rows_of_sigma.items()
    ]
    tables = [markdown_table("relative error of the output", columns, table)]
    if "by_layers" in numbers:
        layers = list(next(iter(numbers["by_layers"].values())))
        shown = [layer for place, layer in enumerate(layers) if place in (0, 1, 3, 7, len(layers) - 1)]
        through = [
            (_name(name), tuple(_show(errors[layer]) for layer in shown))
            for name, errors in numbers["by_layers"].items()
        ]
        title = f"hidden states, {numbers['layer_features']} features"
        tables.append(markdown_table(title, [f"after layer {layer}" for layer in shown], through))
    return "\n\n".join(tables)


def _name(name: str) -> str:
    kind, comma, coupling = name.partition(", ")
    return f"{KINDS.get(kind, kind)}{comma}{coupling}"


def _show(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}" if value < 10 else f"{value:.2g}"
