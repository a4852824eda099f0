"""(c) Time and memory of a training step against length, beside the X line (Fig. 3)."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from protperf.bench import measure
from protperf.bench.contestants import X_LINE
from protperf.bench.figures import draw_lines
from protperf.bench.model import EXACT, compare
from protperf.bench.paper.page import markdown_table
from protperf.bench.paper.settings import model_shape
from protperf.bench.presets import draw_question
from protperf.bench.report import Report, digits, format_table, say
from protperf.config import ModelConfig

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAMES = {EXACT: "Transformer", "relu": "Performer-ReLU", X_LINE: X_LINE}
"""Attention -> row."""

COLUMNS = ("s/step", "GiB", "faster than the Transformer", "time / X line")

LEGEND = """\
A step is forward, loss, backward and AdamW on one window of one document; masked objective. X line: attention that returns v, as
fast as any can be. GiB: peak of what a step allocates. Ratios are medians of those within a round."""

_GIBIBYTE = 2**30


def run(options: argparse.Namespace) -> Report:
    """Measure a Performer, a Transformer and the X line at each length, and lay the numbers out."""
    device = measure.choose_bench_device("cpu")
    machine = measure.describe_machine(device)
    config = ModelConfig(attention="relu", **model_shape(options))  # type: ignore[arg-type]
    results = []
    for length in sorted(set(options.lengths)):
        question = draw_question(batch=1, length=length, packed=0, seed=0, device=device)
        for result in compare(config, question, options, device):
            results.append({"length": length, **asdict(result)})
        say("paper", f"speed: {length:,} tokens: done")
    shape = (
        f"{options.layers} layers of {options.model_dim}, {options.heads} heads, {options.features} features"
    )
    numbers = {
        "experiment": "speed",
        "machine": machine,
        "setting": f"{shape}; one window, {options.rounds} rounds, threads: {machine['threads']}",
        "results": results,
    }
    return lay_out(numbers)


def lay_out(numbers: dict[str, Any]) -> Report:
    """Turn results into tables, plain numbers and figures."""
    tables = [
        format_table(f"{length:,} tokens", COLUMNS, table_rows(numbers, length))
        for length in lengths_of(numbers)
    ]
    left_out = [
        f"-: {NAMES[each['name']]} at {each['length']:,}: {each['reason']}"
        for each in numbers["results"]
        if each["reason"]
    ]
    unrest = measure.warn_of_unrest(
        [each for result in numbers["results"] for each in result["product_rounds"]]
    )
    blocks = [measure.headline(numbers["machine"]), numbers["setting"], *tables, *left_out, LEGEND, unrest]
    figures = {
        "speed": _draw(numbers, "seconds", 1.0, "seconds of a step"),
        "memory": _draw(numbers, "step_bytes", _GIBIBYTE, "peak of a step, GiB"),
    }
    return Report([block for block in blocks if block], numbers, figures)


def rows(numbers: dict[str, Any]) -> str:
    """Return the table of docs/paper.md: a row for each length and model."""
    columns = ("model", *COLUMNS)
    table = [
        (f"{length:,}", (name, *cells))
        for length in lengths_of(numbers)
        for name, cells in table_rows(numbers, length)
    ]
    return markdown_table("tokens", columns, table)


def lengths_of(numbers: Mapping[str, Any]) -> list[int]:
    """Return the lengths that were measured."""
    return list(dict.fromkeys(each["length"] for each in numbers["results"]))


def table_rows(numbers: Mapping[str, Any], length: int) -> list[tuple[str, tuple[str, ...]]]:
    """Return the rows of one length."""
    at = {each["name"]: each for each in numbers["results"] if each["length"] == length}
    rounds = {name: each["rounds"] for name, each in at.items()}
    return [
        (
            NAMES[name],
            (
                digits(each["seconds"]),
                digits(each["step_bytes"], unit=_GIBIBYTE),
                digits(measure.ratio(rounds.get(EXACT, ()), each["rounds"]), suffix="x"),
                digits(measure.ratio(each["rounds"], rounds.get(X_LINE, ())), suffix="x"),
            ),
        )
        for name, each in at.items()
    ]


def _draw(numbers: Mapping[str, Any], value: str, unit: float, label: str) -> Figure:
    series = {
        name: [
            (each["length"], each[value] / unit)
            for each in numbers["results"]
            if each["name"] == kind and each[value]
        ]
        for kind, name in NAMES.items()
    }
    lines = {name: points for name, points in series.items() if points}
    return draw_lines(lines, title="a training step against length", x="tokens", y=label)
