"""Drawings of a report: SVG as text, written by hand, so that a page needs no script, no font and no network."""

from __future__ import annotations

import html
import math

_WIDTH, _HEIGHT = 440, 150
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 10, 10, 34


def escape(text: object) -> str:
    """Return text that HTML shows as it is."""
    return html.escape(str(text))


def bar_cell(share: float, *, mark: float | None = None, tone: str = "bar") -> str:
    """Return a bar for a table's cell.

    Args:
        share: length of the bar, 0 to 1.
        mark: place of a vertical line to compare the bar with, 0 to 1; None for no line.
        tone: CSS class of the bar.
    """
    bar = f'<rect class="{escape(tone)}" y="2" width="{100 * share:.2f}" height="10"/>'
    line = "" if mark is None else f'<rect class="mark" x="{100 * mark:.2f}" width="1.2" height="14"/>'
    return f'<svg class="cell" viewBox="0 0 102 14" preserveAspectRatio="none" aria-hidden="true">{bar}{line}</svg>'


def length_chart(histogram: dict[int, tuple[int, int]], *, end: int, label: str) -> str:
    """Return a histogram of lengths over a logarithmic axis from 1.

    Args:
        histogram: lower bound of a bin -> (upper bound, which is outside; count), in residues.
        end: where the axis ends, in residues.
        label: what it shows, for who cannot see it.
    """
    total = sum(count for _, count in histogram.values())
    highest = max(count for _, count in histogram.values())
    bars = []
    for low, (high, count) in sorted(histogram.items()):
        x, height = _place(low, end), count / highest * (_HEIGHT - _TOP - _BOTTOM)
        width = max(_place(high, end) - x - 0.6, 0.6)
        title = f"{low:,} to {high - 1:,} residues: {count:,} ({count / total:.2%})"
        bars.append(
            f'<rect class="bar" x="{x:.1f}" y="{_HEIGHT - _BOTTOM - height:.1f}" width="{width:.1f}" height="{height:.1f}">'
            f"<title>{title}</title></rect>"
        )
    return (
        f'<svg class="chart" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(label)}">'
        f"{_axes(highest / total, end)}{''.join(bars)}</svg>"
    )


def _axes(highest: float, end: int) -> str:
    """Return base line, ticks at 1, 4, 16, ... residues, and the share of the highest bar."""
    base = _HEIGHT - _BOTTOM
    parts = [f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{base}" y2="{base}"/>']
    for exponent in range(0, math.floor(math.log2(end)) + 1, 2):
        x = _place(2**exponent, end)
        parts.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{base}" y2="{base + 4}"/>')
        parts.append(f'<text x="{x:.1f}" y="{base + 16}" text-anchor="middle">{_short(2**exponent)}</text>')
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{_HEIGHT - 5}" text-anchor="middle">residues</text>')
    parts.append(f'<text x="{_LEFT - 5}" y="{_TOP + 8}" text-anchor="end">{highest:.0%}</text>')
    parts.append(f'<text x="{_LEFT - 5}" y="{base}" text-anchor="end">0</text>')
    return "".join(parts)


def _place(length: int, end: int) -> float:
    """Return where a length stands on the axis."""
    return _LEFT + (_WIDTH - _LEFT - _RIGHT) * math.log2(length) / max(math.log2(end), 1)


def _short(number: int) -> str:
    """Return a power of two as it is said: 256, 1k, 64k, 1M.

    >>> [_short(number) for number in (256, 1024, 65536, 1 << 20)]
    ['256', '1k', '64k', '1M']
    """
    for unit, name in ((1 << 20, "M"), (1 << 10, "k")):
        if number >= unit:
            return f"{number // unit}{name}"
    return str(number)
