"""JSON files from anywhere: whatever is wrong with one is a `FormatError`, and memory stays within a bound."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from protperf.formats import FormatError
from protperf.formats.bounded import read_within

LARGEST_JSON = 16 << 20
"""Bytes. What the densest JSON becomes in memory is about 25 times its text; a manifest of 40,000 shards is smaller."""


def read_json(path: Path, *, remedy: str) -> Any:
    """Return the content of a JSON file.

    Args:
        path: the file.
        remedy: what to do about one that is none, for the message.

    Raises:
        FormatError: not JSON, nested without end, or larger than `LARGEST_JSON`.
        OSError: it cannot be read.
    """
    with open(path, "rb") as file:
        too_large = f"{path}: more than {LARGEST_JSON >> 20} MiB, too large for JSON read here; {remedy}"
        data = read_within(LARGEST_JSON, file, refusal=too_large)
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: not JSON ({error}); {remedy}") from None
