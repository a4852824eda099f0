"""(g) Which amino acids heads look at alike, against BLOSUM62, in the models that `curves` trained (Fig. 13)."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from protperf.bench import measure
from protperf.bench.error import choose
from protperf.bench.paper.contestants import ATTENTIONS, OBJECTIVES
from protperf.bench.paper.jobs import RESULT_NAME, Result, call_job, claim, run_all
from protperf.bench.paper.page import markdown_table
from protperf.bench.report import Report, format_table
from protperf.checkpoint import load_model
from protperf.figures import COLOURS, new_figure
from protperf.formats.manifest import MANIFEST_NAME
from protperf.formats.shards import ShardSet
from protperf.inference.similarity import (
    agreement,
    attention_to_residues,
    chance_of,
    read_blosum,
    residue_similarity,
)
from protperf.model import ProteinModel
from protperf.vocab import VOCABULARY

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RELABELLINGS = 1000
SPLITS = ("valid", "ood")

COLUMNS = ("models", "Pearson with BLOSUM62", "chance, worst", "before training", "chance, worst")

LEGEND = f"""\
Pearson's correlation over the 190 pairs of amino acids, between BLOSUM62 and the similarity of what heads pay to them; means over
seeds, and half the range. chance: the share of {RELABELLINGS:,} relabellings of the amino acids that agree as well (Mantel's test).
before training: the same model with new weights."""


def run(options: argparse.Namespace) -> Report:
    """Compare every trained model with BLOSUM62, or go on with it, and lay the numbers out."""
    objectives = choose("--objectives", options.objectives, OBJECTIVES)
    trained = options.work / "curves"
    plans = [
        (system, objective, path)
        for objective in objectives
        for system, attention in ATTENTIONS.items()
        for path in sorted(trained.glob(f"{objective}-{attention}-*"))
        if (path / RESULT_NAME).exists() and (path / "model").is_dir()
    ]
    if not plans:
        raise ValueError(
            f"{trained}: holds no trained model of {' or '.join(objectives)}; "
            "`protperf bench paper curves --work` of the same folder trains them"
        )
    dataset = options.work / f"data-{options.window}" / "dataset"
    if not (dataset / MANIFEST_NAME).exists():
        raise ValueError(
            f"{dataset}: no dataset; give the --window with which `protperf bench paper curves` made it"
        )
    folder = options.work / "similarity"
    claim(folder, {"proteins": options.proteins, "window": options.window})
    jobs = {
        path.name: call_job(
            path.name,
            folder,
            compare,
            weights=str(path / "model"),
            dataset=str(dataset),
            num_proteins=options.proteins,
        )
        for _, _, path in plans
    }
    results = run_all(list(jobs.values()), folder, at_once=options.jobs)
    models = [
        {"system": system, "objective": objective, "name": path.name, **results[path.name]}
        for system, objective, path in plans
    ]
    numbers = {
        "experiment": "similarity",
        "machine": measure.describe_machine(torch.device("cpu")),
        "setting": f"{models[0]['proteins']:,} held-out proteins, {models[0]['residues']:,} residues; {models[0]['heads']} heads",
        "models": models,
    }
    return lay_out(numbers)


def compare(*, weights: str, dataset: str, num_proteins: int) -> Result:
    """Return how well a model's heads, and those of the same model before training, agree with BLOSUM62.

    Args:
        weights: a trained model.
        dataset: by `protperf prepare`.
        num_proteins: of its held-out splits, at most.
    """
    model = load_model(weights).model
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        first = ProteinModel(model.config, causal=model.causal).eval()
    proteins = held_out_proteins(Path(dataset), num=num_proteins)
    blosum = read_blosum()
    found: Result = {"proteins": len(proteins), "residues": sum(map(len, proteins))}
    for name, each in (("trained", model), ("untrained", first)):
        similarity = residue_similarity(attention_to_residues(each, proteins))
        generator = np.random.default_rng(0)
        found[name] = {
            "pearson": agreement(similarity, blosum),
            "chance": chance_of(similarity, blosum, num=RELABELLINGS, generator=generator),
        }
    return found | {"heads": model.config.num_layers * model.config.num_heads}


def held_out_proteins(dataset: Path, *, num: int) -> list[np.ndarray]:
    """Return residues of the first proteins of `valid` and `ood`, uint8 `(L,)` each, as far as their windows hold them.

    None has more than fit into a window between `<bos>` and `<eos>`: a model need not know a later place.
    """
    proteins: list[np.ndarray] = []
    for split in SPLITS:
        shards = ShardSet(dataset, split)
        for window in shards.read_many(range(len(shards))):
            is_residue = window < VOCABULARY.num_residues
            edges = np.flatnonzero(np.diff(is_residue, prepend=False, append=False))
            most = len(window) - 2
            proteins += [window[begin:end][:most] for begin, end in zip(edges[::2], edges[1::2], strict=True)]
    return proteins[:num]


def lay_out(numbers: dict[str, Any]) -> Report:
    """Turn results into tables, plain numbers and a figure."""
    tables = [
        format_table(objective, COLUMNS, table_rows(numbers, objective)) for objective in _asked(numbers)
    ]
    blocks = [measure.headline(numbers["machine"]), numbers["setting"], *tables, LEGEND]
    return Report(blocks, numbers, {"similarity": draw(numbers)})


def rows(numbers: dict[str, Any]) -> str:
    """Return the tables of docs/paper.md."""
    return "\n\n".join(
        markdown_table(objective, COLUMNS, table_rows(numbers, objective)) for objective in _asked(numbers)
    )


def table_rows(numbers: Mapping[str, Any], objective: str) -> list[tuple[str, tuple[str, ...]]]:
    """Return a row for each system."""
    table = []
    models = [model for model in numbers["models"] if model["objective"] == objective]
    for system in dict.fromkeys(model["system"] for model in models):
        own = [model for model in models if model["system"] == system]
        cells = [
            cell for which in ("trained", "untrained") for cell in _agreement([model[which] for model in own])
        ]
        table.append((system, (f"{len(own)}", *cells)))
    return table


def _asked(numbers: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys(model["objective"] for model in numbers["models"]))


def _agreement(found: list[dict[str, float]]) -> tuple[str, str]:
    values = [each["pearson"] for each in found]
    half = f" +- {(max(values) - min(values)) / 2:.2f}" if len(values) > 1 else ""
    return f"{sum(values) / len(values):.2f}{half}", f"{100 * max(each['chance'] for each in found):.1f} %"


def draw(numbers: Mapping[str, Any]) -> Figure:
    """Draw the correlation of each model, and below it that of the same model before training."""
    figure, axes = new_figure("agreement of attention with BLOSUM62", size=(8.0, 4.5))
    names = list(dict.fromkeys(f"{model['system']}, {model['objective']}" for model in numbers["models"]))
    for which, colour, marker in (("trained", COLOURS[0], "o"), ("untrained", "0.6", "x")):
        places = [names.index(f"{model['system']}, {model['objective']}") for model in numbers["models"]]
        values = [model[which]["pearson"] for model in numbers["models"]]
        axes.scatter(values, places, color=colour, marker=marker, label=which)
    axes.axvline(0, color="0.1", linewidth=1.0)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set(xlabel="Pearson's correlation over 190 pairs")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize=8)
    return figure
