"""How matrices over a sequence are drawn: panels, letters on the axes, colours.

Axis letters: `R` rows, `L` length in tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BOS, EOS = "⊢", "⊣"
"""How `<bos>` and `<eos>` are written on an axis."""

NOT_SEEN = "0.85"
"""Grey of what a row does not see."""

_DOTS_PER_INCH = 150
_MOST_INCHES = 400
"""Matplotlib draws up to 65,535 dots."""
_POINTS = 72  # an inch
_LETTER_POINTS = 4.5
"""A letter for each residue needs so much room; else every few residues have their letter and number."""
_LABEL_POINTS = 9.0
_LONGEST_NAME = 60
_MOST_CELLS = 1500
"""Rows or columns of a drawn matrix; more are taken together."""


def new_panels(rows: int, columns: int, *, size: tuple[float, float]) -> tuple[Figure, np.ndarray]:
    """Return an empty figure of `size` inches and its panels, an array `(rows, columns)` of axes; no display is needed.

    Raises:
        ValueError: it would be too large to be drawn.
    """
    if max(size) > _MOST_INCHES:
        raise ValueError(
            f"a figure of {size[0]:,.0f} x {size[1]:,.0f} inches is too large to be drawn; allowed: {_MOST_INCHES}; show less in it, "
            "or write numbers (.npz)"
        )
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, dpi=_DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, squeeze=False)


def as_text(name: str) -> str:
    """Return a name as a figure shows it: at most 60 characters, and no `$` begins a formula."""
    short = name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 3]}..."
    return short.replace("$", r"\$")


def label_tokens(
    axes: Axes, axis: str, letters: Sequence[str], numbers: Sequence[int], *, inches: float
) -> None:
    """Write a sequence along an axis: a letter for each token if there is room, else some of them with their numbers.

    Args:
        axes: the panel.
        axis: `x` or `y`.
        letters: one for each row or column.
        numbers: of the residues, from 1.
        inches: length of the axis.
    """
    room = inches * _POINTS / len(letters)
    along = axes.xaxis if axis == "x" else axes.yaxis
    if axis == "y" and room >= _LABEL_POINTS:
        labels = [_with_number(*pair) for pair in zip(letters, numbers, strict=True)]
        along.set_ticks(range(len(letters)), labels, fontsize=7)
        along.set_tick_params(length=0, pad=2)
        return
    if room >= _LETTER_POINTS:
        labels = [_with_tens(*pair, axis=axis) for pair in zip(letters, numbers, strict=True)]
        along.set_ticks(range(len(letters)), labels, fontsize=min(8.0, 0.95 * room))
        along.set_tick_params(length=0, pad=2)
        return
    shown = _thinned(numbers, least=int(np.ceil(_LABEL_POINTS / room)))
    labels = [_with_number(letters[place], numbers[place]) for place in shown]
    along.set_ticks(shown, labels, fontsize=6.5, rotation=90 if axis == "x" else 0)
    along.set_tick_params(length=2, pad=1)


def _with_number(letter: str, number: int) -> str:
    """Return a residue's letter and number; `<bos>` and `<eos>` have none."""
    return letter if letter in (BOS, EOS) else f"{letter}{number:,}"


def _with_tens(letter: str, number: int, *, axis: str) -> str:
    """Return a residue's letter, with its number if that is a multiple of ten."""
    if number % 10 or letter in (BOS, EOS):
        return letter
    return f"{letter}\n{number}" if axis == "x" else f"{number} {letter}"


def _thinned(numbers: Sequence[int], *, least: int) -> list[int]:
    """Return the first place and those of round numbers that are at least `least` places apart."""
    rising = np.diff(numbers)
    if len(numbers) > 1 and (rising == 1).all():
        step = next(each * 10**power for power in range(9) for each in (1, 2, 5) if each * 10**power >= least)
        places = [place for place, number in enumerate(numbers) if number % step == 0 and number]
        first = next(place for place, number in enumerate(numbers) if number)
        return [first, *(place for place in places if place - first >= least)]
    return list(range(0, len(numbers), least))


def coarse(matrix: np.ndarray) -> tuple[np.ndarray, tuple[int, int]]:
    """Return a matrix `(R, L)` of few enough cells to be drawn, each the largest of a block, and the blocks' shape.

    NaN counts as nothing: a block is NaN where all of it is.
    """
    blocks = tuple(-(-size // _MOST_CELLS) for size in matrix.shape)
    if blocks == (1, 1):
        return matrix, (1, 1)
    filled = np.where(np.isnan(matrix), -np.inf, matrix)
    for axis, block in enumerate(blocks):
        filled = np.maximum.reduceat(filled, np.arange(0, filled.shape[axis], block), axis=axis)
    return np.where(np.isneginf(filled), np.nan, filled), (blocks[0], blocks[1])
