"""What both halves of `protperf score` write alike: numbers, lines of log and of result, a progress bar."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

STDOUT = "-"
SEPARATORS = {".csv": ",", ".tsv": "\t"}
"""Suffix of an output -> what stands between its cells."""


class Outcome(NamedTuple):
    """What a run did.

    Attributes:
        scored: records or rows with a score.
        left_out: those without.
    """

    scored: int
    left_out: int


def format_number(value: float) -> str:
    """Return a number to five decimals, about what float32 holds; an empty cell for NaN.

    >>> format_number(-0.000001), format_number(math.nan)
    ('0.00000', '')
    """
    return "" if math.isnan(value) else f"{round(value, 5) + 0.0:.5f}"


def suffix_of(out: str) -> str:
    """Return the suffix of an output that decides its separator; stdout is CSV."""
    return ".csv" if out == STDOUT else Path(out).suffix.lower()


def progress_bar(total: int | None) -> tqdm:
    """Return a bar that counts the tokens shown to the model; silent where stderr is no terminal."""
    return tqdm(total=total, unit="token", unit_scale=True, desc="scoring", disable=None)


def say(text: str) -> None:
    """Write one line of log."""
    tqdm.write(f"protperf score: {text}", file=sys.stderr)


def tell(text: str, out: str) -> None:
    """Print one line of result: on stderr where stdout is the output itself."""
    print(text, file=sys.stderr if out == STDOUT else sys.stdout)
