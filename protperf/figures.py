"""What figures share: an empty one, its colours, and how it gets into a file."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#7f3c8d", "#8b5a2b")
"""Told apart by colour-blind people too."""

FIGURE_SUFFIXES = (".png", ".pdf", ".svg")
"""What the name of a figure ends in: its format."""

_DOTS_PER_INCH = 150


def new_figure(title: str, *, size: tuple[float, float] = (7.0, 4.5)) -> tuple[Figure, Axes]:
    """Return an empty figure of `size` inches, drawn by Agg: no display is needed."""
    figure = _empty_figure(size)
    axes = figure.add_subplot()
    _tidy(axes)
    axes.set_title(title, loc="left", fontsize=11)
    return figure, axes


def new_panels(
    title: str, *, rows: int, widths: Sequence[float], height: float, width: float = 13.0
) -> tuple[Figure, list[list[Axes]]]:
    """Return an empty figure of several panels, and their axes row by row.

    Args:
        title: of the whole figure.
        rows: number of rows.
        widths: of the panels of a row, in parts of each other.
        height: of a row, in inches.
        width: of the figure, in inches.
    """
    figure = _empty_figure((width, height * rows + 0.4))
    grid = figure.add_gridspec(rows, len(widths), width_ratios=widths)
    panels = [[figure.add_subplot(grid[row, column]) for column in range(len(widths))] for row in range(rows)]
    for axes in (axes for row in panels for axes in row):
        _tidy(axes)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    return figure, panels


def _empty_figure(size: tuple[float, float]) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, dpi=_DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _tidy(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    axes.grid(color="0.92")


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure in the format its name says; it appears only when it is whole."""
    from protperf.formats.commit import commit_bytes

    image = io.BytesIO()
    figure.savefig(image, format=path.suffix[1:])
    commit_bytes(path, image.getvalue())
