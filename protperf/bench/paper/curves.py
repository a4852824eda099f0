"""(a) Training curves of all systems at equal shape, steps and data, masked and causal, beside the floors (Fig. 6, Table 2)."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from protperf.bench import measure
from protperf.bench.error import choose
from protperf.bench.paper.contestants import (
    ATTENTIONS,
    BIDIRECTIONAL,
    OBJECTIVES,
    attention_of,
    parameters_of,
)
from protperf.bench.paper.dataset import prepare_dataset
from protperf.bench.paper.floors import floors_on
from protperf.bench.paper.jobs import claim, run_all
from protperf.bench.paper.page import markdown_table
from protperf.bench.paper.settings import settings_of, shape_line
from protperf.bench.paper.training import TESTED, training_job
from protperf.bench.report import Report, format_table
from protperf.figures import COLOURS, new_panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Run = dict[str, Any]
"""What is kept of a run: name of the system, objective, seed, and what `collect_training` returns."""

COLUMNS = (
    "parameters",
    "valid perplexity",
    "accuracy",
    "ood perplexity",
    "accuracy",
    "below unigram",
    "s a run",
)

LEGEND = """\
Means over seeds, and half the range between them; of the checkpoint that was best on valid. valid: proteins at random; ood: whole clusters.
below unigram: runs whose perplexity on valid, and on ood, is below that of the unigram floor, asked the same residues.
Floors are n-gram models of the training split. NaN: runs that ended because their numbers were not finite."""

_DASHES = {"unigram": (0, (1, 1.5)), "trigram": (0, (4, 2)), "4-gram": (0, (7, 2, 1, 2))}


def run(options: argparse.Namespace) -> Report:
    """Train all systems, or go on with it, and lay the numbers out."""
    names = choose("--systems", options.systems, list(ATTENTIONS))
    objectives = choose("--objectives", options.objectives, OBJECTIVES)
    dataset = prepare_dataset(options, window=options.window)
    folder = options.work / "curves"
    claim(folder, settings_of(options, dataset))
    plans = [
        (name, objective, seed)
        for seed in range(options.seeds)
        for objective in objectives
        for name in names
        if objective == "masked" or name not in BIDIRECTIONAL
    ]
    overrides = {
        plan: attention_of(plan[0], window=options.window, features=options.features)
        | {"objective": plan[1], "trainer.seed": plan[2]}
        for plan in plans
    }
    parameters = {
        plan: parameters_of(options, given, causal=plan[1] == "causal") for plan, given in overrides.items()
    }
    jobs = [
        training_job(run_name(*plan), folder, dataset, options, given) for plan, given in overrides.items()
    ]
    results = run_all(jobs, folder, at_once=options.jobs)
    runs = [
        {"system": plan[0], "objective": plan[1], "seed": plan[2], "parameters": parameters[plan]}
        | results[run_name(*plan)]
        for plan in plans
    ]
    floors = {
        objective: {
            str(seed): floors_on(dataset, objective=objective, seed=seed, splits=tuple(TESTED))
            for seed in range(options.seeds)
        }
        for objective in objectives
    }
    machine = measure.describe_machine(measure.choose_bench_device("cpu"))
    numbers = {
        "experiment": "curves",
        "machine": machine,
        "setting": shape_line(options, dataset),
        "runs": runs,
        "floors": floors,
    }
    return lay_out(numbers)


def run_name(system: str, objective: str, seed: int) -> str:
    """Return the name of a run's folder.

    >>> run_name("Performer-softmax", "masked", 0)
    'masked-favor-0'
    """
    return f"{objective}-{ATTENTIONS[system]}-{seed}"


def lay_out(numbers: dict[str, Any]) -> Report:
    """Turn runs and floors into tables, plain numbers and a figure."""
    tables = [
        format_table(objective, COLUMNS, table_rows(numbers, objective)) for objective in numbers["floors"]
    ]
    diverged = [
        f"NaN: {run_name(run['system'], run['objective'], run['seed'])}: {run['diverged']}"
        for run in numbers["runs"]
        if run["diverged"]
    ]
    blocks = [measure.headline(numbers["machine"]), numbers["setting"], *tables, *diverged, LEGEND]
    return Report(blocks, numbers, {"curves": draw(numbers)})


def rows(numbers: dict[str, Any]) -> str:
    """Return the tables of docs/paper.md."""
    return "\n\n".join(
        markdown_table(objective, COLUMNS, table_rows(numbers, objective)) for objective in numbers["floors"]
    )


def table_rows(numbers: Mapping[str, Any], objective: str) -> list[tuple[str, tuple[str, ...]]]:
    """Return the rows of one objective: floors, then systems."""
    floors = numbers["floors"][objective]
    rows = []
    for floor in next(iter(floors.values()))["valid"]:
        scores = [{split: of_seed[split][floor] for split in TESTED} for of_seed in floors.values()]
        rows.append((f"{floor} floor", ("-", *_held_out(scores), "-", "-")))
    systems = dict.fromkeys(run["system"] for run in numbers["runs"] if run["objective"] == objective)
    for system in systems:
        runs = [run for run in numbers["runs"] if (run["system"], run["objective"]) == (system, objective)]
        whole = [run for run in runs if not run["diverged"]]
        below = [f"{sum(is_below(run, floors, split) for run in whole)}/{len(runs)}" for split in TESTED]
        seconds = measure.median([run["seconds"] for run in runs])
        rows.append(
            (system, (f"{runs[0]['parameters']:,}", *_held_out(whole), ", ".join(below), f"{seconds:.0f}"))
        )
    return rows


def is_below(run: Run, floors: Mapping[str, Any], split: str) -> bool:
    """Tell whether a run is better than residue frequencies, on the residues that it was asked."""
    floor: float = floors[str(run["seed"])][split]["unigram"]["perplexity"]
    return bool(run[split]["perplexity"] < floor)


def _held_out(scores: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return perplexity and accuracy on each split, over seeds."""
    if not scores:
        return ("NaN",) * 2 * len(TESTED)
    return tuple(
        cell
        for split in TESTED
        for cell in (
            over_seeds([score[split]["perplexity"] for score in scores]),
            over_seeds([100 * score[split]["accuracy"] for score in scores]) + " %",
        )
    )


def over_seeds(values: Sequence[float]) -> str:
    """Return the mean and half the range.

    >>> over_seeds([17.0, 17.5, 17.2]), over_seeds([3.0])
    ('17.23 +- 0.25', '3.00')
    """
    mean = f"{sum(values) / len(values):.2f}"
    return f"{mean} +- {(max(values) - min(values)) / 2:.2f}" if len(values) > 1 else mean


def draw(numbers: Mapping[str, Any]) -> Figure:
    """Draw perplexity on valid against steps: a panel for each objective, a line for each system, floors dashed."""
    objectives = list(numbers["floors"])
    title = "validation perplexity: means over seeds, and their range"
    figure, (panels,) = new_panels(title, rows=1, widths=[1.0] * len(objectives), height=4.6)
    for axes, objective in zip(panels, objectives, strict=True):
        _draw_panel(axes, numbers, objective)
    handles = {
        label: handle
        for axes in panels
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=5, frameon=False, fontsize=9
    )
    return figure


def _draw_panel(axes: Axes, numbers: Mapping[str, Any], objective: str) -> None:
    for place, system in enumerate(ATTENTIONS):
        curves = [
            {int(step): point["perplexity"] for step, point in run["curve"].items()}
            for run in numbers["runs"]
            if (run["system"], run["objective"]) == (system, objective) and run["curve"]
        ]
        if not curves:
            continue
        steps = sorted(set(curves[0]).intersection(*curves))
        at = [[curve[step] for curve in curves] for step in steps]
        colour = COLOURS[place]
        axes.plot(
            steps,
            [sum(each) / len(each) for each in at],
            color=colour,
            label=system,
            marker="o",
            markersize=2.5,
            linewidth=1.6,
        )
        axes.fill_between(
            steps, list(map(min, at)), list(map(max, at)), color=colour, alpha=0.15, linewidth=0
        )
    for name, dashes in _DASHES.items():
        values = [of_seed["valid"][name]["perplexity"] for of_seed in numbers["floors"][objective].values()]
        mean = sum(values) / len(values)
        axes.axhline(mean, color="0.1", linewidth=1.2, linestyle=dashes, label=f"floor: {name}")
    axes.set(title=objective, xlabel="optimizer steps", ylabel="perplexity")
