"""Numbers on the command line of `protperf bench`; what is not allowed ends with status 2."""

from __future__ import annotations

import argparse


def positive(text: str) -> int:
    """Return a whole number of at least 1."""
    return at_least(1, int(text))


def natural(text: str) -> int:
    """Return a whole number of at least 0."""
    return at_least(0, int(text))


def several(text: str) -> int:
    """Return a whole number of at least 2."""
    return at_least(2, int(text))


def even(text: str) -> int:
    """Return an even number of at least 2."""
    if at_least(2, int(text)) % 2:
        raise argparse.ArgumentTypeError(f"{text} is odd: some kinds make two features of each row")
    return int(text)


def positive_float(text: str) -> float:
    """Return a finite number above 0."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: must be above 0")
    return value


def at_least(low: int, value: int) -> int:
    """Return a number that is not below another."""
    if value < low:
        raise argparse.ArgumentTypeError(f"{value}: must be at least {low}")
    return value
