"""`protperf maps attention`: attention maps of one protein, drawn or as numbers.

Axis letters: `N` layers, `H` heads, `R` rows, `L` length in tokens.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from protperf.arguments import check_outputs, id_of, policy_of
from protperf.figures import save_figure
from protperf.formats.commit import commit_bytes
from protperf.formats.fasta import Policy, Record, SequenceReader
from protperf.formats.streams import check_inputs, place_of
from protperf.maps.arguments import NUMBERS
from protperf.maps.drawing import BOS, EOS, NOT_SEEN, as_text, coarse, label_tokens, new_panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from protperf.checkpoint import TrainedModel

MOST_LAYERS, MOST_HEADS = 4, 8
"""What is shown if nothing is asked for."""

_MOST_NUMBERS = 1 << 28
"""Numbers in all maps together: 1 GiB."""
_FAINTEST, _LEAST_RANGE, _BRIGHTEST = 0.1, 10.0, 99.9
"""Colours go from a tenth of even attention to a percentile, ten times even attention at least."""
_PANEL = {1: 7.0, 2: 4.5, 4: 3.2}
"""Inches of a square panel by the columns of the figure; else the smallest."""
_SMALLEST = 2.0
_STRIP = 10.0


@dataclass(frozen=True)
class AttentionMaps:
    """Maps of one protein.

    Attributes:
        record_id: whose.
        letters: of all tokens, `<bos>` and `<eos>` as signs, L of them.
        rows: places of the tokens that look, `(R,)`; a residue's place is its number from 1.
        layers: from 0.
        heads: from 0.
        weights: float32 `(N, H, R, L)`.
        causal: whether a row sees only what stands before it, and itself.
    """

    record_id: str
    letters: list[str]
    rows: np.ndarray
    layers: list[int]
    heads: list[int]
    weights: np.ndarray
    causal: bool

    @property
    def whole(self) -> bool:
        """Whether every token is a row."""
        return len(self.rows) == len(self.letters)


def run(options: argparse.Namespace) -> int:
    """Make the maps of one record; return the exit status."""
    check_inputs([options.input])
    from protperf.checkpoint import load_model, model_files

    check_outputs([options.out], [options.input, *model_files(options.checkpoint)], force=options.force)
    from protperf.devices import choose_device

    device = choose_device(options.device, precision=options.precision)
    trained = load_model(options.checkpoint)
    trained.model.to(device)
    record = find_record(
        options.input, options.record, policy_of(options, mask_token=True), naming=options.id
    )
    config = trained.model.config
    layers = choose(
        options.layers, config.num_layers, "--layers", first=_spread(config.num_layers, MOST_LAYERS)
    )
    heads = choose(
        options.heads,
        config.num_heads,
        "--heads",
        first=list(range(min(MOST_HEADS, config.num_heads))),
    )
    maps = measure(
        trained,
        record,
        id_of(record, options.id),
        layers=layers,
        heads=heads,
        rows=choose_rows(options.rows, len(record.tokens)),
        precision=options.precision,
    )
    shown = f"layers {_listed(layers)} of {config.num_layers}, heads {_listed(heads)} of {config.num_heads}"
    print(f"protperf maps: {maps.record_id}, {shown}", file=sys.stderr)
    if options.out.suffix == NUMBERS:
        commit_bytes(options.out, as_npz(maps))
    else:
        model = f"{as_text(trained.path.name)}, step {trained.step:,}"
        title = f"{as_text(maps.record_id)}, {len(record.tokens):,} residues; {model}"
        save_figure(draw(maps, title=title), options.out)
    print(options.out)
    return 0


def find_record(path: str, wanted: str | None, policy: Policy, *, naming: str) -> Record:
    """Return the record of a sequence file that has an id, else the one that has it as its accession; or the first.

    Raises:
        ValueError: there is none, or it was left out.
    """
    reader = SequenceReader([path], policy)
    ids: list[str] = []
    by_accession: Record | None = None
    for record in reader:
        found = id_of(record, naming)
        if wanted is None or found == wanted:
            return record
        if by_accession is None and record.accession == wanted:
            by_accession = record
        if len(ids) < 3:
            ids.append(found)
    examples = [example.message for example in reader.skipped_examples if wanted in (None, example.id)]
    if examples:
        raise ValueError(examples[0])
    if by_accession:
        return by_accession
    raise ValueError(
        f"{place_of(path)}: no record {wanted!r} among {reader.accepted:,}; the first are {', '.join(ids)} (--id {naming})"
    )


def choose(wanted: Sequence[int | None] | None, count: int, option: str, *, first: list[int]) -> list[int]:
    """Return the layers or heads that were asked for, from 0, in order; negative ones count from the end.

    Args:
        wanted: what an option holds; `None` in it is all.
        count: how many there are.
        option: its name.
        first: what is taken without the option.

    Raises:
        ValueError: one is not there.
    """
    if wanted is None:
        return first
    if None in wanted:
        return list(range(count))
    numbers = [number for number in wanted if number is not None]
    for number in numbers:
        if not -count <= number < count:
            raise ValueError(f"{option} {number}: the model has 0 to {count - 1} (or -{count} to -1)")
    return sorted({number % count for number in numbers})


def choose_rows(spans: Sequence[range] | None, num_residues: int) -> np.ndarray | None:
    """Return the places of the residues that look, int64 `(R,)`, rising; `None` for all tokens.

    Raises:
        ValueError: the protein ends before one of them.
    """
    if spans is None:
        return None
    last = max(span[-1] for span in spans)
    if last > num_residues:
        raise ValueError(f"--rows {last}: the protein has {num_residues:,} residues, counted from 1")
    return np.unique(np.concatenate([np.array(span) for span in spans]))


def measure(
    trained: TrainedModel,
    record: Record,
    record_id: str,
    *,
    layers: list[int],
    heads: list[int],
    rows: np.ndarray | None,
    precision: str = "fp32",
) -> AttentionMaps:
    """Ask a model where it looks in one protein.

    Raises:
        ValueError: the maps would not fit into memory.
    """
    import torch

    from protperf.inference.attention_maps import attention_maps
    from protperf.inference.passes import autocast, frame
    from protperf.vocab import VOCABULARY

    tokens = frame(record.tokens)
    num_rows = len(tokens) if rows is None else len(rows)
    numbers = len(layers) * len(heads) * num_rows * len(tokens)
    if numbers > _MOST_NUMBERS:
        raise ValueError(
            f"{record_id}: {len(layers)} layers x {len(heads)} heads x {num_rows:,} rows x {len(tokens):,} tokens are "
            f"{numbers * 4 / 2**30:,.1f} GiB; allowed: {_MOST_NUMBERS * 4 / 2**30:.0f}; choose fewer by --rows, --layers or --heads"
        )
    model = trained.model
    device = model.device
    with autocast(device, precision):
        maps = attention_maps(
            model,
            torch.from_numpy(tokens).unsqueeze(0).to(device),
            layers=layers,
            heads=heads,
            rows=None if rows is None else torch.from_numpy(rows),
        )
    return AttentionMaps(
        record_id,
        [BOS, *(VOCABULARY.tokens[token] for token in record.tokens), EOS],
        np.arange(len(tokens)) if rows is None else rows,
        layers,
        heads,
        np.stack([maps[layer].cpu().numpy() for layer in layers]),
        model.causal,
    )


def as_npz(maps: AttentionMaps) -> bytes:
    """Return the maps as a file of numpy arrays."""
    file = io.BytesIO()
    arrays: dict[str, Any] = {
        "attention": maps.weights,
        "layers": np.array(maps.layers),
        "heads": np.array(maps.heads),
        "rows": maps.rows,
        "tokens": np.array(["<bos>", *maps.letters[1:-1], "<eos>"]),
        "id": np.array(maps.record_id),
    }
    np.savez(file, **arrays)
    return file.getvalue()


def relative(maps: AttentionMaps) -> np.ndarray:
    """Return weights times the number of tokens that the row sees, `(N, H, R, L)`: 1 is even attention, NaN not seen."""
    length = len(maps.letters)
    if not maps.causal:
        return maps.weights * length
    seen = np.arange(length) <= maps.rows[:, None]
    return np.where(seen, maps.weights * (maps.rows[:, None] + 1), np.nan)


def draw(maps: AttentionMaps, *, title: str) -> Figure:
    """Draw a panel a head: square ones in rows of layers for whole maps, strips below each other for chosen rows."""
    from matplotlib.colors import LogNorm

    values = relative(maps)
    count, columns = (len(maps.layers), len(maps.heads)) if maps.whole else (values[..., 0, 0].size, 1)
    if maps.whole:
        inches = _PANEL.get(columns, 3.2 if columns < 4 else _SMALLEST)
        panel = (inches, inches)
    else:
        panel = (_STRIP, float(np.clip(0.14 * len(maps.rows), 0.35, 5.0)))
    figure, panels = new_panels(
        count, columns, size=(panel[0] * columns + 1.4, (panel[1] + 0.25) * count + 1.0)
    )
    brightest = max(_LEAST_RANGE, float(np.nanpercentile(values, _BRIGHTEST)))
    norm = LogNorm(_FAINTEST, brightest)
    for axes, matrix, (layer, head) in zip(
        panels.flat,
        values.reshape(-1, *values.shape[2:]),
        ((layer, head) for layer in maps.layers for head in maps.heads),
        strict=True,
    ):
        image, blocks = _draw_panel(axes, matrix, norm)
        axes.set_title(f"layer {layer} head {head}", fontsize=8, pad=3)
    _label(panels, maps, panel)
    note = "" if blocks == (1, 1) else f"; a point is the largest of a block of {blocks[0]:,} x {blocks[1]:,}"
    figure.suptitle(
        f"Attention in {title}\nrows look at columns; {BOS} is <bos>, {EOS} is <eos>{note}", fontsize=9
    )
    bar = figure.colorbar(image, ax=panels, extend="both", shrink=min(1.0, 4.0 / (panel[1] * count)))
    bar.ax.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    bar.set_label("attention weight relative to even attention (1)", fontsize=8)
    return figure


def _draw_panel(axes: Axes, matrix: np.ndarray, norm: Any) -> tuple[Any, tuple[int, int]]:
    """Draw one map; return the image, and how many rows and columns each point stands for."""
    import matplotlib

    colours = matplotlib.colormaps["viridis"].with_extremes(bad=NOT_SEEN)
    drawn, blocks = coarse(matrix)
    drawn = np.maximum(drawn, norm.vmin / 10)  # signed attention has weights below zero
    rows, columns = matrix.shape
    image = axes.imshow(
        drawn,
        norm=norm,
        cmap=colours,
        aspect="auto",
        interpolation="nearest",
        extent=(-0.5, columns - 0.5, rows - 0.5, -0.5),
    )
    return image, blocks


def _label(panels: np.ndarray, maps: AttentionMaps, panel: tuple[float, float]) -> None:
    """Write the sequence along the outer axes."""
    numbers = list(range(len(maps.letters)))
    row_letters = [maps.letters[row] for row in maps.rows]
    for axes in panels.flat:
        axes.set_xticks([])
        axes.set_yticks([])
    for axes in panels[-1]:
        label_tokens(axes, "x", maps.letters, numbers, inches=panel[0])
    for axes in panels[:, 0]:
        label_tokens(axes, "y", row_letters, maps.rows.tolist(), inches=panel[1])


def _spread(count: int, most: int) -> list[int]:
    """Return up to `most` of `count` layers, evenly from first to last."""
    return np.linspace(0, count - 1, num=min(most, count)).astype(int).tolist()


def _listed(numbers: Sequence[int]) -> str:
    return " ".join(map(str, numbers))
