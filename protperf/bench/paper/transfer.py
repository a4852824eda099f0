"""(e) Backward compatibility: a Transformer's weights in a Performer, before and after some steps, beside training from scratch (Fig. 5).

Positive and trigonometric features get the same weights: those of a Transformer with `qk_norm`, which keeps |q||k|/sqrt(K) small.
Elsewhere trigonometric rows may sum to zero, so protperf refuses them. Positive features also get the weights of a Transformer
without it.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from protperf.bench import measure
from protperf.bench.paper.dataset import prepare_dataset
from protperf.bench.paper.floors import floors_on
from protperf.bench.paper.jobs import Job, call_job, claim, run_all
from protperf.bench.paper.page import markdown_table
from protperf.bench.paper.settings import model_shape, settings_of, shape_line
from protperf.bench.paper.training import training_job
from protperf.bench.paper.tuning import tune
from protperf.bench.report import Report, digits, format_table
from protperf.figures import COLOURS, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PLAIN, BOUNDED = "transformer", "transformer-qk"
"""Names of the Transformers whose weights are moved; the second has `qk_norm`."""

ROWS = {
    "Transformer with qk_norm, going on": ("softmax", True, True),
    "positive, from it": ("favor", True, True),
    "trigonometric, from it": ("trig", True, True),
    "positive, from scratch": ("favor", True, False),
    "trigonometric, from scratch": ("trig", True, False),
    "Transformer without qk_norm, going on": ("softmax", False, True),
    "positive, from that": ("favor", False, True),
    "positive without qk_norm, from scratch": ("favor", False, False),
}
"""Row -> attention, whether it has `qk_norm`, and whether it begins with the weights of such a Transformer."""

SHARES = (0.0, 0.1, 0.3, 1.0)
"""Of the steps, after which a model is judged."""

LEGEND = """\
Accuracy and perplexity on valid, masked, after so many steps. |q||k|/sqrt(K): of the model before the first step, the mean over heads;
the variance of random features grows as the exponential of it."""


def run(options: argparse.Namespace) -> Report:
    """Train Transformers, move their weights, tune, and lay the numbers out."""
    dataset = prepare_dataset(options, window=options.window)
    folder = options.work / "transfer"
    tuning = {"--tune-steps": options.tune_steps, "--tune-learning-rate": options.tune_learning_rate}
    claim(folder, settings_of(options, dataset, **tuning))
    teachers = [
        training_job(
            name, folder, dataset, options, {"model.attention": "softmax", "model.qk_norm": name == BOUNDED}
        )
        for name in (PLAIN, BOUNDED)
    ]
    for name, result in run_all(teachers, folder, at_once=options.jobs).items():
        if result["diverged"]:
            raise ValueError(f"{folder / name}: {result['diverged']}")
    jobs: dict[str, Job] = {}
    for row, (attention, qk_norm, moved) in ROWS.items():
        name = f"{attention}{'-qk' * qk_norm}-{'moved' if moved else 'scratch'}"
        jobs[row] = call_job(
            name,
            folder,
            tune,
            model={**model_shape(options), "attention": attention, "qk_norm": qk_norm},
            weights=str(folder / (BOUNDED if qk_norm else PLAIN) / "model") if moved else None,
            dataset=str(dataset),
            batch=options.batch,
            learning_rate=options.tune_learning_rate,
            warmup=max(1, options.tune_steps // 10),
            judged=sorted({round(part * options.tune_steps) for part in SHARES}),
        )
    results = run_all(list(jobs.values()), folder, at_once=options.jobs)
    numbers = {
        "experiment": "transfer",
        "machine": measure.describe_machine(torch.device("cpu")),
        "setting": f"{shape_line(options, dataset)}; then {options.tune_steps} steps at {options.tune_learning_rate:g}",
        "rows": {row: results[job.name] for row, job in jobs.items()},
        "floors": floors_on(dataset, objective="masked", seed=0, splits=("valid",))["valid"],
    }
    return lay_out(numbers)


def lay_out(numbers: dict[str, Any]) -> Report:
    """Turn results into a table, plain numbers and a figure."""
    table = format_table("masked", *table_of(numbers))
    blocks = [measure.headline(numbers["machine"]), numbers["setting"], table, LEGEND]
    return Report(blocks, numbers, {"transfer": draw(numbers)})


def rows(numbers: dict[str, Any]) -> str:
    """Return the table of docs/paper.md."""
    return markdown_table("masked", *table_of(numbers))


def table_of(numbers: Mapping[str, Any]) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """Return columns and rows."""
    steps = list(next(iter(numbers["rows"].values()))["curve"])
    columns = ["|q||k|/sqrt(K)", *(f"after {step}: %, perplexity" for step in steps)]
    unigram = numbers["floors"]["unigram"]
    table = [("unigram floor", ["-", *[_show(unigram)] * len(steps)])]
    for name, result in numbers["rows"].items():
        cells = [_show(score) for score in result["curve"].values()]
        table.append((name, [digits(result["product"]), *cells]))
    return columns, table


def _show(score: Mapping[str, float]) -> str:
    return f"{100 * score['accuracy']:.2f}, {score['perplexity']:.2f}"


def draw(numbers: Mapping[str, Any]) -> Figure:
    """Draw perplexity on valid against steps of tuning; what begins from scratch enters the figure from above."""
    figure, axes = new_figure("a Transformer's weights moved: perplexity on valid", size=(8.0, 4.5))
    for place, (name, result) in enumerate(numbers["rows"].items()):
        points = {int(step): score["perplexity"] for step, score in result["curve"].items()}
        dashes = "dashed" if "scratch" in name else "solid"
        axes.plot(
            list(points),
            list(points.values()),
            color=COLOURS[place],
            linestyle=dashes,
            marker="o",
            markersize=3,
            label=name,
        )
    floor = numbers["floors"]["unigram"]["perplexity"]
    moved = [
        score["perplexity"]
        for name, result in numbers["rows"].items()
        if "scratch" not in name
        for score in result["curve"].values()
    ]
    lowest, highest = min(moved), max(floor, *moved)
    axes.axhline(floor, color="0.1", linestyle=(0, (1, 1.5)), label="floor: unigram")
    axes.set(xlabel="steps after the move", ylabel="perplexity")
    axes.set_ylim(lowest - 0.1 * (highest - lowest), highest + 0.5 * (highest - lowest))
    axes.set_xscale("symlog", linthresh=10)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize=8)
    return figure
