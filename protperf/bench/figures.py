"""Figures of benchmarks: lines on logarithmic axes, and bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from protperf.figures import COLOURS, new_figure, new_panels, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

REFERENCES = ("SDPA", "X line", "uniform attention")
"""Drawn in black: what the others are compared with."""

_SIZE = (8.0, 4.5)  # inches
_REFERENCE_DASHES = ("solid", "dotted", "dashed")
_DASHES = ("solid", (0, (4, 2)), (0, (1, 1.5)))


def draw_lines(series: Mapping[str, Sequence[tuple[float, float]]], *, title: str, x: str, y: str) -> Figure:
    """Draw curves on logarithmic axes.

    A name is `GROUP` or `GROUP, VARIANT`: groups differ in colour, variants of one in dashes.

    Args:
        series: name -> points, positive.
        title: of the figure.
        x: label.
        y: label.
    """
    figure, axes = new_figure(title, size=_SIZE)
    _add_lines(axes, series)
    axes.set(xlabel=x, ylabel=y)
    if series:
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize=8)
    return figure


def draw_stacked(
    panels: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]], *, title: str, x: str, y: str
) -> Figure:
    """Draw panels of curves one above another, with the same axes and one legend; narrow, for telephones too.

    Args:
        panels: title -> series, as `draw_lines` takes them; the same names in each.
        title: of the figure.
        x: label.
        y: label.
    """
    figure, rows = new_panels(title, rows=len(panels), widths=(1,), height=2.2, width=5.5)
    column = [axes for (axes,) in rows]
    for axes, (name, series) in zip(column, panels.items(), strict=True):
        if axes is not column[0]:
            axes.sharex(column[0])
            axes.sharey(column[0])
        _add_lines(axes, series)
        axes.set_title(name, loc="left", fontsize=10)
        axes.set_ylabel(y)
    column[-1].set_xlabel(x)
    handles, labels = column[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
    return figure


def _add_lines(axes: Axes, series: Mapping[str, Sequence[tuple[float, float]]]) -> None:
    groups = dict.fromkeys(name.partition(", ")[0] for name in series)
    coloured = [group for group in groups if group not in REFERENCES]
    variants: dict[str, int] = {}
    for name, points in series.items():
        group = name.partition(", ")[0]
        number = variants[group] = variants.get(group, -1) + 1
        if group in REFERENCES:
            colour, dashes = "0.1", _REFERENCE_DASHES[REFERENCES.index(group)] if not number else "dashdot"
        else:
            colour = COLOURS[coloured.index(group) % len(COLOURS)]
            dashes = _DASHES[number % len(_DASHES)]  # type: ignore[assignment]
        xs, ys = zip(*points, strict=True)
        axes.plot(xs, ys, color=colour, linestyle=dashes, marker="o", markersize=3, linewidth=1.5, label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")


def draw_bars(values: Mapping[str, float], *, title: str, x: str) -> Figure:
    """Draw a horizontal bar for each value, the first at the top."""
    figure, axes = new_figure(title, size=_SIZE)
    colours = ["0.3" if name in REFERENCES else COLOURS[0] for name in values]
    bars = axes.barh(list(values), list(values.values()), color=colours)
    axes.bar_label(bars, fmt=" {:,.3g}", fontsize=9)
    axes.margins(x=0.12)
    axes.invert_yaxis()
    axes.set(xlabel=x)
    return figure


def save(figures: Mapping[str, Figure], folder: Path) -> list[Path]:
    """Write figures as PNG files, each of which appears only when it is whole; return their paths."""
    folder.mkdir(exist_ok=True)
    paths = [folder / f"{name}.png" for name in figures]
    for path, figure in zip(paths, figures.values(), strict=True):
        save_figure(figure, path)
    return paths
