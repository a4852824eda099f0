"""`metrics.csv`: one line a value, append-only, so that a run that goes on after an interruption loses nothing.

Columns `step,metric,value`. A step that was trained again after an interruption appears again; the later line counts.
A line that a full disk or a kill cut short is passed over.
"""

from __future__ import annotations

import csv
import os
from pathlib import Path

HEADER = ("step", "metric", "value")


def append_metrics(path: Path, step: int, values: dict[str, float]) -> None:
    """Append values at an optimizer step, creating the file with its header if need be."""
    last = _last_byte(path)
    with path.open("a", newline="") as file:
        writer = csv.writer(file)
        if last not in (b"", b"\n"):
            file.write("\n")
        if not last:
            writer.writerow(HEADER)
        writer.writerows((step, name, repr(float(value))) for name, value in values.items())


def read_metrics(path: Path) -> dict[str, dict[int, float]]:
    """Return metric name -> step -> value, steps in ascending order.

    Raises:
        ValueError: the file is missing, or is not one of ours.
    """
    if not path.is_file():
        raise ValueError(f"{path}: no such file; give the folder of a run of `protperf train`")
    series: dict[str, dict[int, float]] = {}
    with path.open(newline="") as file:
        rows = csv.reader(file)
        if tuple(next(rows, ())) != HEADER:
            raise ValueError(f"{path}:1: not a metrics file; its first line must be {','.join(HEADER)}")
        for step, name, value in (row for row in rows if len(row) == len(HEADER)):
            series.setdefault(name, {})[int(step)] = float(value)
    return {name: dict(sorted(values.items())) for name, values in series.items()}


def _last_byte(path: Path) -> bytes:
    """Return the last byte of a file, nothing if it is empty or not there."""
    if not path.exists() or not path.stat().st_size:
        return b""
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read()
