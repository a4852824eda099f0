"""(f) Features redrawn during training against features drawn once: the spread over projections (Fig. 5, 15)."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from protperf.bench import measure
from protperf.bench.paper.dataset import prepare_dataset
from protperf.bench.paper.floors import floors_on
from protperf.bench.paper.jobs import claim, run_all
from protperf.bench.paper.page import markdown_table
from protperf.bench.paper.settings import settings_of, shape_line
from protperf.bench.paper.training import TESTED, training_job
from protperf.bench.report import Report, format_table
from protperf.figures import COLOURS, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = ("runs", "valid perplexity", "lowest", "highest", "ood perplexity", "lowest", "highest")

LEGEND = """\
Performer-softmax, masked. All runs have the same first weights and batches and differ in their projections alone.
exact: the same model with exact attention."""

Run = dict[str, Any]


def run(options: argparse.Namespace) -> Report:
    """Train with several projections, redrawn and not, and lay the numbers out."""
    dataset = prepare_dataset(options, window=options.window)
    folder = options.work / "redraw"
    claim(folder, settings_of(options, dataset))
    overrides: dict[tuple[str, int], dict[str, object]] = {("exact", 0): {"model.attention": "softmax"}}
    for seed in range(options.projections):
        for name, every in (("never", 0), (f"every {options.redraw_every} steps", options.redraw_every)):
            overrides[name, seed] = {
                "model.attention": "favor",
                "model.projection_seed": seed,
                "trainer.redraw_every": every,
            }
    jobs = {
        plan: training_job(f"{plan[0].replace(' ', '-')}-{plan[1]}", folder, dataset, options, given)
        for plan, given in overrides.items()
    }
    results = run_all(list(jobs.values()), folder, at_once=options.jobs)
    runs = [{"redrawn": name, "projection": seed, **results[job.name]} for (name, seed), job in jobs.items()]
    numbers = {
        "experiment": "redraw",
        "machine": measure.describe_machine(torch.device("cpu")),
        "setting": shape_line(options, dataset),
        "runs": runs,
        "floors": floors_on(dataset, objective="masked", seed=0, splits=tuple(TESTED)),
    }
    return lay_out(numbers)


def lay_out(numbers: dict[str, Any]) -> Report:
    """Turn results into a table, plain numbers and a figure."""
    diverged = [
        f"NaN: redrawn {each['redrawn']}, projection {each['projection']}: {each['diverged']}"
        for each in numbers["runs"]
        if each["diverged"]
    ]
    table = format_table("redrawn", COLUMNS, table_rows(numbers))
    blocks = [measure.headline(numbers["machine"]), numbers["setting"], table, *diverged, LEGEND]
    return Report(blocks, numbers, {"redraw": draw(numbers)})


def rows(numbers: dict[str, Any]) -> str:
    """Return the table of docs/paper.md."""
    return markdown_table("redrawn", COLUMNS, table_rows(numbers))


def table_rows(numbers: Mapping[str, Any]) -> list[tuple[str, tuple[str, ...]]]:
    """Return a row for the floor and for each way."""
    floor = [f"{numbers['floors'][split]['unigram']['perplexity']:.3f}" for split in TESTED]
    table: list[tuple[str, tuple[str, ...]]] = [
        ("unigram floor", ("-", floor[0], "-", "-", floor[1], "-", "-"))
    ]
    for name in dict.fromkeys(each["redrawn"] for each in numbers["runs"]):
        runs = [each for each in numbers["runs"] if each["redrawn"] == name and not each["diverged"]]
        cells = [cell for split in TESTED for cell in _spread([each[split]["perplexity"] for each in runs])]
        table.append((name, (f"{len(runs)}", *cells)))
    return table


def _spread(values: list[float]) -> tuple[str, ...]:
    if not values:
        return ("NaN",) * 3
    return tuple(f"{value:.3f}" for value in (sum(values) / len(values), min(values), max(values)))


def draw(numbers: Mapping[str, Any]) -> Figure:
    """Draw perplexity on valid against steps: a line for each run."""
    figure, axes = new_figure("features redrawn or not: perplexity on valid", size=(8.0, 4.5))
    names = list(dict.fromkeys(each["redrawn"] for each in numbers["runs"]))
    for each in numbers["runs"]:
        points = {int(step): score["perplexity"] for step, score in each["curve"].items()}
        label = each["redrawn"] if not each["projection"] else None
        colour = COLOURS[names.index(each["redrawn"])]
        axes.plot(list(points), list(points.values()), color=colour, linewidth=1.2, label=label)
    floor = numbers["floors"]["valid"]["unigram"]["perplexity"]
    axes.axhline(floor, color="0.1", linestyle=(0, (1, 1.5)), label="floor: unigram")
    axes.set(xlabel="optimizer steps", ylabel="perplexity")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize=8)
    return figure
