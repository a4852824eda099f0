"""`protperf maps similarity`: amino acids that heads look at alike, beside BLOSUM62."""

from __future__ import annotations

import argparse
import json
import sys
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from protperf.arguments import check_outputs, policy_of
from protperf.figures import save_figure
from protperf.formats.commit import commit_bytes
from protperf.formats.fasta import Record, SequenceReader
from protperf.formats.skipped import SOME_LEFT_OUT, leave_out
from protperf.formats.streams import check_inputs
from protperf.maps.drawing import NOT_SEEN, as_text, new_panels
from protperf.vocab import STANDARD_RESIDUES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from protperf.model import ProteinModel

DRAWN_ORDER = "CSTPAGNDEQHRKMILVFYW"
"""Alike beside alike, as BLOSUM62 is often printed: squares along the diagonal are groups."""

RELABELLINGS = 1000


def is_taken(model: ProteinModel, record: Record, reader: SequenceReader) -> bool:
    """Return whether the model takes a record; one that is too long for it is left out of the reader's count."""
    if model.max_residues is None or len(record.tokens) <= model.max_residues:
        return True
    reader.reject(leave_out(record, "too_long_for_model"), len(record.tokens))
    return False


def run(options: argparse.Namespace) -> int:
    """Compare a model's similarity of amino acids with BLOSUM62; return the exit status."""
    check_inputs(options.inputs)
    outputs = [options.out, *([options.json] if options.json else [])]
    from tqdm import tqdm

    from protperf.checkpoint import load_model, model_files

    check_outputs(outputs, [*options.inputs, *model_files(options.checkpoint)], force=options.force)
    from protperf.devices import choose_device
    from protperf.inference.similarity import (
        agreement,
        attention_to_residues,
        chance_of,
        read_blosum,
        residue_similarity,
    )

    device = choose_device(options.device, precision=options.precision)
    trained = load_model(options.checkpoint)
    trained.model.to(device)
    reader = SequenceReader(options.inputs, policy_of(options, mask_token=True))
    fitting = (record.tokens for record in reader if is_taken(trained.model, record, reader))
    proteins = list(islice(fitting, options.max_proteins))
    left_out, residues = reader.skipped.total(), sum(map(len, proteins))
    reader.taken(len(proteins), residues)
    if not proteins:
        raise ValueError(
            f"no record accepted of {reader.records}; the first: {reader.skipped_examples[0].message}"
        )
    with tqdm(total=len(proteins), desc="looking", unit="protein", disable=None) as bar:
        attention = attention_to_residues(
            trained.model,
            proteins,
            token_budget=options.toks_per_batch,
            precision=options.precision,
            advance=bar.update,
        )
    similarity = residue_similarity(attention)
    blosum = read_blosum()
    pearson = agreement(similarity, blosum)
    chance = chance_of(similarity, blosum, num=RELABELLINGS, generator=np.random.default_rng(0))
    heads = attention.shape[0] * attention.shape[1]
    for line in reader.summary():
        print(f"protperf maps: {line}", file=sys.stderr)
    found = {
        "checkpoint": trained.path.name,
        "step": trained.step,
        "proteins": len(proteins),
        "residues": residues,
        "heads": heads,
        "pearson": pearson,
        "chance": chance,
        "residue_order": STANDARD_RESIDUES,
        "similarity": similarity.tolist(),
    }
    save_figure(draw(similarity, blosum, found), options.out)
    if options.json:
        commit_bytes(options.json, (json.dumps(found, indent=1) + "\n").encode())
    print(
        f"{options.out}: Pearson {pearson:.3f} with BLOSUM62 over 190 pairs ({len(proteins):,} proteins, {residues:,} residues, "
        f"{heads} heads); {chance:.1%} of {RELABELLINGS:,} random relabellings of the amino acids reach it"
    )
    return SOME_LEFT_OUT if left_out else 0


def draw(similarity: np.ndarray, blosum: np.ndarray, found: dict[str, Any]) -> Figure:
    """Draw the two matrices side by side."""
    figure, panels = new_panels(1, 2, size=(10.5, 5.2))
    left, right = panels[0]
    _draw_matrix(left, similarity, "correlation of the shares of attention")
    _draw_matrix(right, blosum, "BLOSUM62 score")
    left.set_title(
        f"{as_text(found['checkpoint'])}, step {found['step']:,}: attention of {found['heads']} heads",
        fontsize=9,
    )
    right.set_title("BLOSUM62", fontsize=9)
    figure.suptitle(
        f"Similarity of amino acids: Pearson {found['pearson']:.2f} between the two over 190 pairs "
        f"({found['proteins']:,} proteins)",
        fontsize=10,
    )
    return figure


def _draw_matrix(axes: Axes, matrix: np.ndarray, label: str) -> None:
    import matplotlib

    order = [STANDARD_RESIDUES.index(letter) for letter in DRAWN_ORDER]
    drawn = matrix[np.ix_(order, order)].astype(float)
    np.fill_diagonal(drawn, np.nan)  # one, or as high as the residue is rare: no comparison
    most = np.nanmax(np.abs(drawn))
    colours = matplotlib.colormaps["RdBu_r"].with_extremes(bad=NOT_SEEN)
    image = axes.imshow(drawn, cmap=colours, vmin=-most, vmax=most, interpolation="nearest")
    axes.set_xticks(range(len(order)), list(DRAWN_ORDER), fontsize=8)
    axes.set_yticks(range(len(order)), list(DRAWN_ORDER), fontsize=8)
    axes.tick_params(length=0)
    axes.figure.colorbar(image, ax=axes, label=label, shrink=0.8)
