"""`metrics.csv`: one line a value, append-only, so that a run that goes on after an interruption loses nothing.

Columns `step,metric,value`. A step that was trained again after an interruption appears again; the later line counts.
A last line without its end (a full disk, a kill) does not count, and the next writer removes it: a run that goes on
trains that step again.
"""

from __future__ import annotations

import csv
import io
import os
from pathlib import Path

from protperf.formats import FormatError

METRICS_NAME = "metrics.csv"
HEADER = ("step", "metric", "value")


def append_metrics(path: Path, step: int, values: dict[str, float]) -> None:
    """Append values at an optimizer step, creating the file with its header if need be."""
    size = _remove_unfinished_line(path)
    with path.open("a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if not size:
            writer.writerow(HEADER)
        writer.writerows((step, name, repr(float(value))) for name, value in values.items())


def read_metrics(path: Path) -> dict[str, dict[int, float]]:
    """Return metric name -> step -> value, steps in ascending order.

    Raises:
        ValueError: the file is missing.
        FormatError: it is not one of ours, or damaged.
    """
    if not path.is_file():
        raise ValueError(f"{path}: no such file; give the folder of a run of `protperf train`")
    content = path.read_bytes().decode(errors="replace")
    finished = content[: content.rfind("\n") + 1]
    rows = csv.reader(io.StringIO(finished))
    if tuple(next(rows, ())) != HEADER:
        raise FormatError(f"{path}:1: not a metrics file; its first line must be {','.join(HEADER)}")
    series: dict[str, dict[int, float]] = {}
    for number, row in enumerate(rows, start=2):
        try:
            step, name, value = int(row[0]), row[1], float(row[2])
        except (IndexError, ValueError):
            raise FormatError(f"{path}:{number}: {','.join(row)!r} is not a line of a metrics file") from None
        series.setdefault(name, {})[step] = value
    return {name: dict(sorted(values.items())) for name, values in series.items()}


def _remove_unfinished_line(path: Path) -> int:
    """Cut off what stands after the last line's end; return the size that is left."""
    if not path.exists():
        return 0
    content = path.read_bytes()
    size = content.rfind(b"\n") + 1
    if size < len(content):
        os.truncate(path, size)
    return size
