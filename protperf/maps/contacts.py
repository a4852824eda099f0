"""`protperf maps contacts`: a logistic regression over attention maps, judged on structures that it was not fitted to.

Axis letters: `L` length in residues, `P` pairs of residues, `N` layers, `H` heads.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from tqdm import tqdm

from protperf import __version__
from protperf.arguments import check_outputs
from protperf.figures import save_figure
from protperf.formats import FormatError
from protperf.formats.commit import commit_bytes
from protperf.formats.contact_head import (
    ContactHead,
    describe_other_model,
    read_contact_head,
    write_contact_head,
)
from protperf.formats.sizes import hash_file
from protperf.formats.skipped import SOME_LEFT_OUT
from protperf.formats.structures import (
    SUFFIXES,
    ChainStructure,
    find_structures,
    passed_over,
    read_structure,
)
from protperf.maps.drawing import as_text, label_tokens, new_panels
from protperf.vocab import VOCABULARY

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from protperf.checkpoint import TrainedModel
    from protperf.model import ProteinModel

LEAST_STRUCTURES = 2
"""One to fit to and one to predict."""

_ACROSS = 4
"""Panels of a row of the figure."""
_PANEL = 3.3
_DRAWN = 16
"""Structures in the figure."""
_LEAST_RANGE = 0.1
"""The darkest colour is the highest probability, this one at least."""

Precisions = dict[str, dict[str, float]]
"""Range -> `L`, `L/2`, `L/5` -> share of contacts."""


class Case(NamedTuple):
    """A structure and what the model says of it.

    Attributes:
        structure: the chain.
        features: of its pairs, float32 `(P, N * H)`.
        contacts: 1, 0 or NaN, float32 `(P,)`.
    """

    structure: ChainStructure
    features: np.ndarray
    contacts: np.ndarray


def run(options: argparse.Namespace) -> int:
    """Fit a head, or take one, and judge it; return the exit status."""
    if options.save_head and options.save_head.is_file() and not options.force:
        raise ValueError(
            f"{options.save_head}: exists already; name another file for the fitted head by --save-head, judge this one by "
            "--head, or give --force to replace it"
        )
    outputs = [path for path in (options.out, options.json, options.save_head) if path]
    from protperf.checkpoint import load_model, model_files

    read = [*options.structures, *filter(None, [options.head]), *model_files(options.checkpoint)]
    check_outputs(outputs, read, force=options.force)
    from protperf.devices import choose_device
    from protperf.inference.contacts import check_head

    head = read_contact_head(options.head) if options.head else None
    paths = find_structures(options.structures)
    for folder in filter(Path.is_dir, options.structures):
        say_passed_over(folder)
    structures, left_out = read_structures(paths)
    device = choose_device(options.device, precision=options.precision)
    trained = load_model(options.checkpoint)
    too_long = [each for each in structures if not takes(trained.model, each)]
    for each in too_long:
        _say(f"{each.name}: left out, its {len(each.residues):,} residues are more than this model takes")
    structures, left_out = (
        [each for each in structures if takes(trained.model, each)],
        left_out + len(too_long),
    )
    if not structures or (head is None and len(structures) < LEAST_STRUCTURES):
        raise ValueError(
            f"{len(structures)} structure{'s' * (len(structures) != 1)} to use; a head is judged on structures that it was not fitted to: give "
            f"{LEAST_STRUCTURES} or more, or --head"
        )
    trained.model.to(device)
    digest = hash_file(trained.path)[0]
    if head is not None:
        check_head(trained.model, head)
        if warning := describe_other_model(head, trained.path, digest):
            _say(f"{options.head} {warning}")
    bar = tqdm(structures, desc="looking", unit="structure", disable=None)
    cases = [measure(trained, structure, precision=options.precision) for structure in bar]
    heads = [head] * len(cases) if head else fit_without_each(cases, trained, options.regularisation)
    results = judge(cases, heads)
    mean = mean_of(list(results.values()))
    print(format_table(results | {"mean": mean}, fitted=head is None))
    if options.save_head:
        saved = fit(cases, trained, options.regularisation)
        about = describe(trained, digest, cases, mean["model"], options.regularisation)
        write_contact_head(options.save_head, replace(saved, provenance=about))
    save_figure(draw(cases, heads, results, title=f"{trained.path.name}, step {trained.step:,}"), options.out)
    if options.json:
        content = {
            "checkpoint": trained.path.name,
            "step": trained.step,
            "head": options.head.name if options.head else "fitted to the other structures",
            "structures": results,
            "mean": mean,
        }
        commit_bytes(options.json, (json.dumps(_plain(content), indent=1, allow_nan=False) + "\n").encode())
    for path in outputs:
        print(path)
    return SOME_LEFT_OUT if left_out else 0


def takes(model: ProteinModel, structure: ChainStructure) -> bool:
    """Return whether a chain is no longer than a model takes."""
    return model.max_residues is None or len(structure.residues) <= model.max_residues


def say_passed_over(folder: Path) -> None:
    """Say how many files of a folder are no structures by their names."""
    if names := passed_over(folder):
        listed = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        _say(
            f"{folder}: {len(names):,} passed over ({listed}): no name of a structure, {', '.join(SUFFIXES)}, also with .gz"
        )


def read_structures(paths: Sequence[Path]) -> tuple[list[ChainStructure], int]:
    """Return the chains of structure files, and how many files hold none; each of those is named.

    Raises:
        ValueError: no file holds one, or two have one name.
    """
    structures: list[ChainStructure] = []
    first, left_out = "", 0
    for path in paths:
        try:
            structure = read_structure(path)
        except FormatError as error:
            first, left_out = first or str(error), left_out + 1
            _say(f"left out: {error}")
            continue
        if structure.name in {each.name for each in structures}:
            raise ValueError(
                f"{path}: a second structure {structure.name!r}; give each only once, or rename one file"
            )
        structures.append(structure)
        _say(
            f"{structure.name}: {len(structure.residues):,} residues, {structure.num_missing:,} of them not seen, "
            f"{structure.num_modified:,} modified"
        )
    if not structures:
        raise ValueError(f"no structure of {left_out} can be used; the first: {first}")
    return structures, left_out


def measure(trained: TrainedModel, structure: ChainStructure, *, precision: str) -> Case:
    """Ask a model about the pairs of a structure."""
    from protperf.inference.contacts import contacts_of, pair_features

    residues = VOCABULARY.encode(structure.residues)
    features = pair_features(trained.model, residues, precision=precision)
    return Case(structure, features, contacts_of(structure.positions))


def fit_without_each(
    cases: Sequence[Case], trained: TrainedModel, regularisation: float
) -> list[ContactHead]:
    """Return a head for each case, fitted to all others."""
    places = tqdm(range(len(cases)), desc="fitting", unit="head", disable=None)
    return [fit([*cases[:place], *cases[place + 1 :]], trained, regularisation) for place in places]


def fit(cases: Sequence[Case], trained: TrainedModel, regularisation: float) -> ContactHead:
    """Fit a head to the pairs of some structures that are seen."""
    from protperf.inference.contacts import fit_contacts

    seen = [~np.isnan(case.contacts) for case in cases]
    features = np.concatenate([case.features[known] for case, known in zip(cases, seen, strict=True)])
    contacts = np.concatenate([case.contacts[known] for case, known in zip(cases, seen, strict=True)])
    config = trained.model.config
    shape = (config.num_layers, config.num_heads)
    return fit_contacts(features, contacts, shape=shape, regularisation=regularisation)


def judge(cases: Sequence[Case], heads: Sequence[ContactHead]) -> dict[str, dict[str, Precisions]]:
    """Return structure -> `model`, `nearest first`, `random` -> precisions.

    `nearest first` takes the pairs nearest along the chain, `random` any.
    """
    from protperf.inference.contacts import pairs_of, precisions, score_pairs

    results = {}
    for case, head in zip(cases, heads, strict=True):
        length = len(case.structure.residues)
        i, j = pairs_of(length)
        scores = {
            "model": score_pairs(case.features, head),
            "nearest first": (i - j).astype(float),
            "random": np.zeros(len(i)),
        }
        results[case.structure.name] = {
            name: precisions(values, case.contacts, length) for name, values in scores.items()
        }
    return results


def mean_of(results: Sequence[dict[str, Precisions]]) -> dict[str, Precisions]:
    """Return the mean of each number over structures that have such pairs; NaN where none has."""

    def mean(predictor: str, reach: str, label: str) -> float:
        values = np.array([each[predictor][reach][label] for each in results])
        return float(values[~np.isnan(values)].mean()) if not np.isnan(values).all() else float("nan")

    return {
        predictor: {
            reach: {label: mean(predictor, reach, label) for label in labels}
            for reach, labels in ranges.items()
        }
        for predictor, ranges in results[0].items()
    }


def format_table(results: dict[str, dict[str, Precisions]], *, fitted: bool) -> str:
    """Return the precisions as an aligned table: long range for each structure, all ranges for their mean."""
    how = "each structure by a regression fitted to the others" if fitted else "by the given head"
    lines = [
        f"precision of the first L, L/2 and L/5 pairs, {how}",
        f"{'structure':<16} {'apart':<7} {'predictor':<14} {'L':>7} {'L/2':>7} {'L/5':>7}",
    ]
    for name, predictors in results.items():
        for reach in ("long", "medium", "short") if name == "mean" else ("long",):
            for predictor, ranges in predictors.items():
                numbers = " ".join(f"{ranges[reach][label]:>7.1%}" for label in ("L", "L/2", "L/5"))
                lines.append(f"{name:<16} {reach:<7} {predictor:<14} {numbers}")
    return "\n".join(lines)


def describe(
    trained: TrainedModel,
    digest: str,
    cases: Sequence[Case],
    found: Precisions,
    regularisation: float,
) -> dict[str, Any]:
    """Return where a head comes from, in plain values; `found` is the mean precision on structures held out."""
    from protperf.inference.contacts import CONTACT_DISTANCE, MIN_SEPARATION

    return {
        "protperf_version": __version__,
        "checkpoint": trained.path.name,
        "checkpoint_sha256": digest,
        "contact": f"C-beta (C-alpha of glycine) under {CONTACT_DISTANCE:g} A, {MIN_SEPARATION} residues apart or more",
        "regression": f"logistic, L2 on weights of standardised maps, C = {regularisation:g}",
        "fitted_to": [
            {
                "structure": case.structure.name,
                "residues": len(case.structure.residues),
                "missing": case.structure.num_missing,
                "contacts": int(np.nansum(case.contacts)),
            }
            for case in cases
        ],
        "held_out_precision": _plain(found),
    }


def draw(
    cases: Sequence[Case],
    heads: Sequence[ContactHead],
    results: dict[str, dict[str, Precisions]],
    *,
    title: str,
) -> Figure:
    """Draw a panel a structure: predicted probabilities above the diagonal, true contacts below it."""
    from protperf.inference.contacts import pairs_of, score_pairs

    shown = list(zip(cases, heads, strict=True))[:_DRAWN]
    columns = min(_ACROSS, len(shown))
    rows = -(-len(shown) // columns)
    figure, panels = new_panels(rows, columns, size=(_PANEL * columns + 1.0, (_PANEL + 0.4) * rows + 0.8))
    for axes in panels.flat[len(shown) :]:
        axes.set_axis_off()
    odds = [np.clip(score_pairs(case.features, head), -50, 50) for case, head in shown]
    predicted = [1 / (1 + np.exp(-each)) for each in odds]
    highest = max(_LEAST_RANGE, *(each.max(initial=0.0) for each in predicted))
    for axes, (case, _), probabilities in zip(panels.flat, shown, predicted, strict=False):
        length = len(case.structure.residues)
        i, j = pairs_of(length)
        matrix = np.full((length, length), np.nan)
        matrix[i, j] = probabilities
        image = axes.imshow(matrix, vmin=0, vmax=highest, cmap="Blues", interpolation="nearest")
        true = case.contacts == 1
        axes.scatter(i[true], j[true], s=(130 / length) ** 2 + 0.5, color="#d55e00", marker="s", linewidths=0)
        axes.set_xlim(-0.5, length - 0.5)
        axes.set_ylim(length - 0.5, -0.5)
        for axis in "xy":
            label_tokens(axes, axis, list(case.structure.residues), range(1, length + 1), inches=_PANEL * 0.8)
        found = results[case.structure.name]["model"]["long"]["L"]
        axes.set_title(
            f"{as_text(case.structure.name)}, {length} residues: long range {found:.0%} at L", fontsize=8
        )
    bar = figure.colorbar(image, ax=panels, shrink=min(1.0, 0.8 / rows))
    bar.set_label("predicted probability of a contact", fontsize=8)
    left = len(cases) - len(shown)
    more = f"; {left} more structures are not drawn" if left else ""
    figure.suptitle(
        f"Contacts out of the attention of {as_text(title)}\nabove the diagonal: predicted; below, orange: in the structure{more}",
        fontsize=10,
    )
    return figure


def _plain(numbers: Any) -> Any:
    """Return nested dicts with `None` for NaN, which JSON does not know."""
    if isinstance(numbers, dict):
        return {key: _plain(value) for key, value in numbers.items()}
    return None if numbers != numbers else numbers


def _say(text: str) -> None:
    """Write one line of log."""
    print(f"protperf maps: {text}", file=sys.stderr)
