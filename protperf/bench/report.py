"""What a benchmark hands back, and how numbers become aligned text."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NO_NUMBER = "-"


@dataclass
class Report:
    """The outcome of a benchmark.

    Attributes:
        blocks: tables and what is said of them, for stdout.
        numbers: everything, as plain values.
        figures: file name without suffix -> figure.
    """

    blocks: list[str]
    numbers: dict[str, Any]
    figures: dict[str, Figure] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The blocks, with an empty line between them."""
        return "\n\n".join(self.blocks)


def format_table(title: str, columns: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    """Return a table with a title, its first column left-aligned and the others right-aligned.

    >>> print(format_table("ms", ["256", "512"], [("SDPA", ["1.2", "4.8"])]))
    ms     256  512
    SDPA   1.2  4.8
    """
    first = max(len(title), *(len(name) for name, _ in rows))
    widths = [
        max(len(column), *(len(cells[place]) for _, cells in rows)) for place, column in enumerate(columns)
    ]
    lines = []
    for name, cells in [(title, columns), *rows]:
        numbers = (f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
        lines.append("  ".join([f"{name:<{first}} ", *numbers]).rstrip())
    return "\n".join(lines)


def digits(value: float | None, *, unit: float = 1.0, suffix: str = "") -> str:
    """Return about three digits of a number, `-` for none.

    >>> digits(0.012345, unit=1e-3), digits(1234.5), digits(None), digits(0.5, suffix="x")
    ('12.3', '1,234', '-', '0.500x')
    """
    if value is None or math.isinf(value):
        return NO_NUMBER
    scaled = value / unit
    decimals = 0 if scaled >= 100 else 1 if scaled >= 10 else 2 if scaled >= 1 else 3
    return f"{scaled:,.{decimals}f}{suffix}"


def plain(value: Any) -> Any:
    """Return a tree in which numbers that JSON cannot hold are `None`."""
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def say(command: str, text: str) -> None:
    """Write one line of log."""
    print(f"protperf bench {command}: {text}", file=sys.stderr, flush=True)
