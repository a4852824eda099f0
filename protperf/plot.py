"""`protperf plot`: the training curve of a run; a map of embedded proteins.

Axis letters: `N` proteins, `D` width of the embeddings.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from protperf.figures import COLOURS, FIGURE_SUFFIXES, new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_FEW_POINTS = 20
_VALID_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
_FLOOR_DASHES = ((0, (1, 1.5)), (0, (4, 2)), (0, (7, 2)), (0, (7, 2, 1, 2)))


@dataclass(frozen=True)
class ProteinMap:
    """Proteins in the plane of their first two principal components.

    Attributes:
        points: float64 `(N, 2)`.
        explained: share of the variance along each axis, `(2,)`.
    """

    points: np.ndarray
    explained: np.ndarray


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    options = parse(argv)
    check_output(options.out, force=options.force)
    draw = plot_curve if options.figure == "curve" else plot_map
    save_figure(draw(options), options.out)
    print(options.out)
    return 0


def plot_curve(options: argparse.Namespace) -> Figure:
    """Read what a run wrote and draw its curve."""
    from protperf.formats.metrics_file import METRICS_NAME, read_metrics

    path = options.run / METRICS_NAME if options.run.is_dir() else options.run
    metrics = read_metrics(path)
    floors = dict(options.floor)
    if options.scores:
        found = read_floors(options.scores, options.split)
        floors = {f"{name} on {options.split}": value for name, value in found.items()} | floors
    curves = {
        name.removesuffix("/perplexity"): values
        for name, values in metrics.items()
        if name.endswith("/perplexity")
    }
    if not curves:
        raise ValueError(f"{path}: holds no perplexity yet; let the run reach its first logged step")
    return draw_curve(curves, floors, title=options.title or "/".join(path.resolve().parent.parts[-2:]))


def draw_curve(curves: dict[str, dict[int, float]], floors: dict[str, float], *, title: str) -> Figure:
    """Draw perplexities against optimizer steps.

    Args:
        curves: `train` or the name of a validation set -> step -> perplexity.
        floors: name -> perplexity, drawn as horizontal lines.
        title: of the figure.
    """
    figure, axes = new_figure(title)
    held_out = [name for name in curves if name != "train"]
    if "train" in curves:
        steps = curves["train"]
        label = "train (not comparable with the floors)" if floors else "train"
        marker = "." if len(steps) < _FEW_POINTS else ""
        axes.plot(list(steps), list(steps.values()), color="0.6", linewidth=1.2, marker=marker, label=label)
    for number, name in enumerate(held_out):
        steps = curves[name]
        colour = _VALID_COLOURS[number % len(_VALID_COLOURS)]
        last = list(steps.values())[-1]
        label = f"{name} (last {last:.2f})"
        axes.plot(
            list(steps),
            list(steps.values()),
            color=colour,
            marker="o",
            markersize=4,
            linewidth=1.8,
            label=label,
        )
    for number, (name, value) in enumerate(floors.items()):
        dashes = _FLOOR_DASHES[number % len(_FLOOR_DASHES)]
        axes.axhline(value, color="0.25", linewidth=1, linestyle=dashes, label=f"floor: {name} ({value:.2f})")
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set(xlabel="optimizer steps", ylabel="perplexity (per asked residue)")
    # Below the axes: floors run from edge to edge, so that inside it would lie on one.
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    return figure


def read_floors(path: Path, split: str) -> dict[str, float]:
    """Return the floors' perplexities out of what `protperf evaluate --json` wrote.

    Raises:
        ValueError: no such file, no such split in it, or something else.
    """
    from protperf.formats.scores import floors_of, read_scores

    scores = read_scores(path)
    if split not in scores:
        raise ValueError(f"{path}: has no entry {split!r}; --split takes: {', '.join(scores)}")
    return {name: scores[split][name]["perplexity"] for name in floors_of(scores[split])}


def plot_map(options: argparse.Namespace) -> Figure:
    """Read an embedding file and draw its map."""
    from tqdm import tqdm

    from protperf.formats.embedding_merge import open_embeddings
    from protperf.formats.embeddings import VECTORS

    if options.embeddings.is_dir():
        raise ValueError(f"{options.embeddings}: is a folder; a map is of one .h5, .npz or .parquet file")
    vectors, headers, lengths = [], [], []
    with open_embeddings(options.embeddings) as file:
        if file.info.kind not in (*VECTORS, "per_tok"):
            raise ValueError(
                f"{options.embeddings}: holds {file.info.kind}; a map is of {', '.join(VECTORS)} or per_tok"
            )
        for each in tqdm(file, desc="reading", unit="protein", disable=None, leave=False, total=len(file)):
            vectors.append(each.array if file.info.kind in VECTORS else each.array.mean(0, dtype=np.float64))
            headers.append(each.header)
            lengths.append(each.num_residues)
    try:
        protein_map = project(np.stack(vectors)) if vectors else project(np.empty((0, 1)))
    except ValueError as error:
        raise ValueError(f"{options.embeddings}: {error}") from error
    groups = None if options.colour == "length" else [organism_of(header) for header in headers]
    if groups is not None and not any(groups):
        groups = None
    if groups is None and options.colour == "organism":
        raise ValueError(
            f"{options.embeddings}: no header names an organism (INS_HUMAN, OS=...); use --colour length"
        )
    pooled = file.info.kind if file.info.kind in VECTORS else "mean"
    title = (
        f"{options.embeddings.name}: {len(vectors):,} proteins, {pooled} embeddings of {file.info.checkpoint}"
    )
    return draw_map(protein_map, np.array(lengths), groups, title=options.title or title)


def project(vectors: np.ndarray) -> ProteinMap:
    """Return the first two principal components of centred vectors, through a singular value decomposition.

    The sign of each component is such that its largest entry is positive: equal input gives an equal map.

    Args:
        vectors: `(N, D)`, N at least 3.

    Raises:
        ValueError: too few, not finite, or all equal.
    """
    if len(vectors) < 3:
        raise ValueError(f"holds {len(vectors)} proteins; a map needs at least 3")
    centred = vectors.astype(np.float64) - vectors.mean(0, dtype=np.float64)
    if not np.isfinite(centred).all():
        raise ValueError("holds embeddings that are not finite; did training diverge?")
    _, scales, components = np.linalg.svd(centred, full_matrices=False)
    if not scales[0] > 0:
        raise ValueError("all embeddings are equal; there is nothing to map")
    largest = np.abs(components[:2]).argmax(1)
    signs = np.sign(components[np.arange(2), largest])
    return ProteinMap(centred @ (components[:2] * signs[:, None]).T, scales[:2] ** 2 / (scales**2).sum())


def organism_of(header: str) -> str:
    """Return UniProt's mnemonic of the organism (`HUMAN`), else its scientific name, else `""`.

    >>> organism_of("sp|P01308|INS_HUMAN Insulin OS=Homo sapiens OX=9606")
    'HUMAN'
    """
    from protperf.formats.headers import parse_header

    parsed = parse_header(header)
    return parsed.entry_name.rpartition("_")[2] or parsed.organism


def draw_map(protein_map: ProteinMap, lengths: np.ndarray, groups: list[str] | None, *, title: str) -> Figure:
    """Draw a map.

    Args:
        protein_map: N proteins.
        lengths: residues of each, `(N,)`; they give the colour where `groups` is `None`.
        groups: name of each protein's group.
        title: of the figure.
    """
    figure, axes = new_figure(title)
    if groups is None:
        _scatter_lengths(figure, axes, protein_map.points, lengths)
    else:
        _scatter_groups(axes, protein_map.points, np.array(groups))
    for name, axis, share in zip("12", (axes.xaxis, axes.yaxis), protein_map.explained, strict=True):
        axis.set_label_text(f"principal component {name} ({share:.0%} of the variance)")
    return figure


def _scatter_lengths(figure: Figure, axes: Axes, points: np.ndarray, lengths: np.ndarray) -> None:
    from matplotlib.colors import LogNorm

    low, high = np.percentile(lengths, [1, 99])
    norm = LogNorm(low, max(high, low + 1))
    x, y = points.T
    dots = axes.scatter(x, y, c=lengths, norm=norm, cmap="viridis", **_dots(len(points)))
    bar = figure.colorbar(
        dots, label="length (residues)", extend="both", format=lambda value, _: f"{value:,.0f}"
    )
    ticks = [tick for tick in (10, 30, 100, 300, 1000, 3000, 10_000, 30_000) if low <= tick <= high]
    bar.set_ticks(ticks or [low])
    bar.minorticks_off()


def _scatter_groups(axes: Axes, points: np.ndarray, groups: np.ndarray) -> None:
    frequent = Counter(filter(None, groups.tolist())).most_common(len(COLOURS))
    common = [name for name, _ in frequent]
    chosen = [~np.isin(groups, common), *(groups == name for name in common)]
    for name, colour, mask in zip(["others", *common], ["0.85", *COLOURS], chosen, strict=False):
        if mask.any():
            x, y = points[mask].T
            dots = _dots(len(points) if name == "others" else mask.sum())
            axes.scatter(x, y, color=colour, label=f"{name} ({mask.sum():,})", **dots)
    axes.legend(
        title="organism",
        loc="center left",
        bbox_to_anchor=(1, 0.5),
        frameon=False,
        fontsize=9,
        handletextpad=0.1,
    )


def _dots(count: int) -> dict[str, Any]:
    """Return size and look of points: smaller the more there are."""
    return {"s": float(np.clip(9000 / count, 6, 24)), "linewidths": 0}


def check_output(path: Path, *, force: bool) -> None:
    """Refuse, before any work, what must not be written.

    Raises:
        ValueError: no folder there, or the path is taken.
    """
    if not path.parent.is_dir():
        raise ValueError(f"{path.parent}: no such folder to write {path.name} to; make it first")
    if path.exists() and not force:
        raise ValueError(f"{path}: exists already; give another name, or --force to replace it")


def _floor(text: str) -> tuple[str, float]:
    name, _, value = text.rpartition("=")
    if not name:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=PERPLEXITY, such as unigram=17.95")
    return name, float(value)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line; wrong usage exits with status 2."""
    parser = make_parser()
    options = parser.parse_args(argv)
    if options.out.suffix not in FIGURE_SUFFIXES:
        parser.error(f"OUT is {str(options.out)!r}; its name must end in {', '.join(FIGURE_SUFFIXES)}")
    return options


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of `protperf plot`."""
    parser = argparse.ArgumentParser(
        "protperf plot", description="Figures: PNG, PDF or SVG, as the name says."
    )
    figures = parser.add_subparsers(dest="figure", required=True, metavar="curve|map")
    curve = figures.add_parser("curve", help="perplexity of a run against optimizer steps")
    curve.add_argument("run", type=Path, help="the folder of a run, or its metrics.csv")
    curve.add_argument("--scores", type=Path, metavar="JSON", help="floors from `protperf evaluate --json`")
    curve.add_argument("--split", default="valid", help="whose floors to take from --scores (%(default)s)")
    curve.add_argument(
        "--floor",
        type=_floor,
        action="append",
        default=[],
        metavar="NAME=PERPLEXITY",
        help="a horizontal line, such as unigram=17.95; may be given several times",
    )
    protein_map = figures.add_parser(
        "map", help="proteins by the first two principal components of their embeddings"
    )
    protein_map.add_argument(
        "embeddings", type=Path, help="what `protperf embed` wrote: .h5, .npz or .parquet, vectors or per_tok"
    )
    protein_map.add_argument(
        "--colour",
        "--color",
        choices=("auto", "length", "organism"),
        default="auto",
        help="what the colours show: the organism, by UniProt's mnemonic (HUMAN) or else its name, or the length; "
        "auto: the organism where headers name one (%(default)s)",
    )
    for each, own in (
        (curve, "the last two folders of the run's path"),
        (protein_map, "the names of the file and of the checkpoint"),
    ):
        each.add_argument("out", type=Path, help="the figure to write")
        each.add_argument("--title", help=f"of the figure, in place of {own}")
        each.add_argument("--force", action="store_true", help="replace a figure that is there")
    return parser


if __name__ == "__main__":
    sys.exit(main())
