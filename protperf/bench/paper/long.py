"""(b) Concatenated windows of 8,192 tokens: a deep Performer against the exact Transformer that fits into its memory (Fig. 7).

The memory of a training step is measured, without activation checkpointing. Models train for equally many seconds of one
thread, by their measured seconds of a step; proteins of one window see each other, as in the paper.
"""

from __future__ import annotations

import argparse
import time
from argparse import Namespace
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from protperf.bench import measure
from protperf.bench.model import Trainee
from protperf.bench.paper.dataset import prepare_dataset
from protperf.bench.paper.floors import floors_on
from protperf.bench.paper.jobs import Job, Result, call_job, claim, run_all
from protperf.bench.paper.page import markdown_table
from protperf.bench.paper.settings import model_shape, settings_of, shape_line
from protperf.bench.paper.training import TESTED, training_job
from protperf.bench.presets import draw_question
from protperf.bench.replaced import attention_replaced
from protperf.bench.report import Report, digits, format_table
from protperf.config import ModelConfig
from protperf.figures import COLOURS, new_panels

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PERFORMER = "Performer-ReLU"
SMALL = "Transformer, half as wide"
"""The paper's baseline: up to three layers of half the width, whose feed-forward part is no wider."""
SMALL_LAYERS = 3
WRITTEN = "Transformer, weights kept"
"""Exact attention as it is written: one layer keeps L x L weights a head for the backward pass, as all did in 2020."""

COLUMNS = (
    "layers",
    "parameters",
    "step, GiB",
    "s a step",
    "steps",
    "valid perplexity",
    "accuracy",
    "ood perplexity",
    "accuracy",
)

LEGEND = """\
step, GiB: peak of what a training step on one window allocates, and weights and AdamW's moments. s a step: of one thread. Transformers
attend by torch's kernel, which keeps no L x L weights; "weights kept" is attention as it is written, measured alone. Of equally
wide Transformers the deepest that needs no more memory than the Performer is trained; -: measured alone."""

_GIBIBYTE = 2**30


def run(options: argparse.Namespace) -> Report:
    """Measure memory, choose the Transformers, train, and lay the numbers out."""
    dataset = prepare_dataset(options, window=options.window)
    folder = options.work / "long"
    claim(
        folder,
        settings_of(options, dataset, **{"--seconds": options.seconds, "--objective": options.objective}),
    )
    shapes = shapes_of(options)
    measures = {
        name: call_job(
            f"step-{place_of(name)}",
            folder,
            measure_step,
            model=shape,
            length=options.window,
            causal=options.objective == "causal",
            written=name == WRITTEN,
        )
        for name, shape in shapes.items()
    }
    found = run_all(list(measures.values()), folder, at_once=options.jobs)
    measured = {name: found[job.name] for name, job in measures.items()}
    jobs: dict[str, Job] = {}
    for name in chosen(measured):
        steps = max(2, round(options.seconds / measured[name]["seconds"]))
        own = Namespace(
            **{**vars(options), "steps": steps, "warmup": steps // 10, "validate_every": max(1, steps // 8)}
        )
        overrides = {f"model.{key}": value for key, value in shapes[name].items()}
        overrides |= {"objective": options.objective, "data.attend_across_documents": True}
        jobs[name] = training_job(f"{place_of(name)}-{steps}-steps", folder, dataset, own, overrides)
        measured[name]["steps"] = steps
    results = run_all(list(jobs.values()), folder, at_once=options.jobs)
    line = shape_line(Namespace(**{**vars(options), "steps": measured[PERFORMER]["steps"]}), dataset)
    numbers = {
        "experiment": "long",
        "machine": measure.describe_machine(torch.device("cpu")),
        "setting": f"Performer: {line}; {options.seconds:g} s of one thread for each",
        "measured": measured,
        "runs": {name: results[job.name] for name, job in jobs.items()},
        "objective": options.objective,
        "floors": floors_on(dataset, objective=options.objective, seed=0, splits=tuple(TESTED)),
    }
    return lay_out(numbers)


def shapes_of(options: Namespace) -> dict[str, dict[str, Any]]:
    """Return the models that are measured: the Performer, Transformers as wide, the paper's small one, and one layer as written."""
    own = model_shape(options)
    half = options.model_dim // 2
    small = {"num_layers": SMALL_LAYERS, "model_dim": half, "feedforward_dim": half}
    shapes: dict[str, dict[str, Any]] = {PERFORMER: {**own, "attention": "relu"}}
    for depth in sorted(set(options.depths)):
        shapes[f"Transformer, {depth}"] = {**own, "num_layers": depth, "attention": "softmax"}
    shapes[SMALL] = {**own, **small, "attention": "softmax"}
    shapes[WRITTEN] = {**own, "num_layers": 1, "attention": "softmax"}
    return shapes


def place_of(name: str) -> str:
    """Return a model's name as that of a folder.

    >>> place_of("Transformer, half as wide")
    'transformer-half-as-wide'
    """
    return name.lower().replace(",", "").replace(" ", "-")


def chosen(measured: Mapping[str, Result]) -> list[str]:
    """Return the models that are trained: the Performer, the deepest equally wide Transformer that fits, the small one."""
    room = measured[PERFORMER]["bytes"]
    as_wide = [name for name in measured if name not in (PERFORMER, SMALL, WRITTEN)]
    fitting = [name for name in as_wide if measured[name]["bytes"] <= room]
    return [PERFORMER, *fitting[-1:], SMALL]


def measure_step(*, model: dict[str, Any], length: int, causal: bool, written: bool) -> Result:
    """Return the memory and the time of a training step on one window of one document.

    Args:
        model: its configuration.
        length: tokens.
        causal: whether a token sees only what stands before it.
        written: whether exact attention is computed as it is written.

    Returns:
        `bytes`: the peak of a step, with weights and AdamW's moments; `seconds` of this thread, the least of three steps;
        `parameters`, `layers`.
    """
    question = draw_question(batch=1, length=length, packed=0, seed=0, device=torch.device("cpu"))
    trainee = Trainee(ModelConfig(**model), question, precision="32-true", causal=causal)

    def step() -> None:
        if not written:
            trainee.step()
            return
        with attention_replaced(partial(attend_as_written, causal=causal)):
            trainee.step()

    seconds = []
    for _ in range(1 if written else 3):
        since = time.process_time()
        step()
        seconds.append(time.process_time() - since)
    trainee.optimizer.zero_grad()
    peak = measure.peak_allocated(step, device=trainee.device)
    return {
        "bytes": peak + trainee.held_bytes(),
        "seconds": min(seconds),
        "parameters": sum(parameter.numel() for parameter in trainee.model.parameters()),
        "layers": model["num_layers"],
    }


def attend_as_written(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    """Return softmax(q k^T / sqrt(K)) v, `(B, H, L, K)`; autograd keeps the weights, `(B, H, L, L)`."""
    logits = q @ k.mT * q.shape[-1] ** -0.5
    if causal:
        length = q.shape[-2]
        logits = logits.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), -torch.inf)
    return logits.softmax(-1) @ v


def lay_out(numbers: dict[str, Any]) -> Report:
    """Turn results into a table, plain numbers and a figure."""
    diverged = [f"NaN: {name}: {run['diverged']}" for name, run in numbers["runs"].items() if run["diverged"]]
    table = format_table(numbers["objective"], COLUMNS, table_rows(numbers))
    blocks = [measure.headline(numbers["machine"]), numbers["setting"], table, *diverged, LEGEND]
    return Report(blocks, numbers, {"long": draw(numbers)})


def rows(numbers: dict[str, Any]) -> str:
    """Return the table of docs/paper.md."""
    return markdown_table(numbers["objective"], COLUMNS, table_rows(numbers))


def table_rows(numbers: Mapping[str, Any]) -> list[tuple[str, tuple[str, ...]]]:
    """Return a row for the floor and for each model that was measured."""
    floors = [score for split in TESTED for score in _show(numbers["floors"][split]["unigram"])]
    table = [("unigram floor", ("-",) * 5 + tuple(floors))]
    for name, step in numbers["measured"].items():
        run = numbers["runs"].get(name)
        scores = ["-"] * 2 * len(TESTED)
        if run:
            scores = [
                score for split in TESTED for score in (_show(run[split]) if run[split] else ("NaN", "NaN"))
            ]
        shown = "Transformer" if name not in (PERFORMER, SMALL, WRITTEN) else name
        sizes = (f"{step['layers']}", f"{step['parameters']:,}", digits(step["bytes"], unit=_GIBIBYTE))
        table.append((shown, (*sizes, digits(step["seconds"]), f"{step.get('steps', '-')}", *scores)))
    return table


def _show(score: Mapping[str, float]) -> tuple[str, str]:
    return f"{score['perplexity']:.2f}", f"{100 * score['accuracy']:.2f} %"


def draw(numbers: Mapping[str, Any]) -> Figure:
    """Draw accuracy on valid against seconds of training, and against steps."""
    title = "windows joined of proteins: accuracy on valid"
    figure, (panels,) = new_panels(title, rows=1, widths=(1.0, 1.0), height=4.4)
    for axes, label in zip(panels, ("seconds of one thread", "optimizer steps"), strict=True):
        for place, (name, run) in enumerate(numbers["runs"].items()):
            scale = numbers["measured"][name]["seconds"] if label.startswith("seconds") else 1.0
            steps = [int(step) * scale for step in run["curve"]]
            values = [score["accuracy"] for score in run["curve"].values()]
            axes.plot(steps, values, color=COLOURS[place], marker="o", markersize=3, label=name)
        floor = numbers["floors"]["valid"]["unigram"]["accuracy"]
        axes.axhline(floor, color="0.1", linestyle=(0, (1, 1.5)), label="floor: unigram")
        axes.set(xlabel=label, ylabel="accuracy")
        axes.yaxis.set_major_formatter(lambda share, _: f"{share:.2%}")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    return figure
