"""What figures share: an empty one, its colours, and how it gets into a file."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#7f3c8d", "#8b5a2b")
"""Told apart by colour-blind people too."""

_DOTS_PER_INCH = 150


def new_figure(title: str, *, size: tuple[float, float] = (7.0, 4.5)) -> tuple[Figure, Axes]:
    """Return an empty figure of `size` inches, drawn by Agg: no display is needed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, dpi=_DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    axes.grid(color="0.92")
    axes.set_title(title, loc="left", fontsize=11)
    return figure, axes


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure in the format its name says; it appears only when it is whole."""
    from protperf.formats.commit import commit_bytes

    image = io.BytesIO()
    figure.savefig(image, format=path.suffix[1:])
    commit_bytes(path, image.getvalue())
