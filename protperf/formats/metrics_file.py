"""`metrics.csv`: one line a value, append-only, so that a run that goes on after an interruption loses nothing.

Columns `step,metric,value`. A step that was trained again after an interruption appears again; the later line counts.
A last line without its end (a full disk, a kill) does not count, and the next writer removes it: a run that goes on
trains that step again.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Iterator
from io import FileIO
from pathlib import Path
from typing import IO

from protperf.formats import FormatError
from protperf.formats.commit import write_all
from protperf.formats.records import quoted

METRICS_NAME = "metrics.csv"
HEADER = ("step", "metric", "value")
Report = tuple[int, dict[str, float]]
"""An optimizer step, and values by their metric's name."""

MOST_LINES, _MOST_NAMES, _LONGEST_LINE = 4_000_000, 10_000, 4096
"""Lines, names and bytes of a line that are read: a line takes some 200 bytes of memory, a name 400 more; a run that reports 20
values every 50 steps writes 400,000 lines in a million."""
_LAST_STEP = 1 << 63

_BLOCK = 4096
"""Bytes that are read at once in search of the last line's end."""


def append_metrics(path: Path, reports: Iterable[Report]) -> None:
    """Append all reports or none, creating the file with its header if need be.

    Raises:
        OSError: the disk is full or the file cannot be written; it is as it was.
    """
    with open(path, "ab+", buffering=0) as file:
        size = _end_of_last_line(file)
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        if not size:
            writer.writerow(HEADER)
        for step, values in reports:
            writer.writerows((step, name, repr(float(value))) for name, value in values.items())
        file.truncate(size)
        try:
            write_all(file.fileno(), text.getvalue().encode())
        except OSError:
            file.truncate(size)
            if not size:
                path.unlink()
            raise


def check_metrics_file(path: Path) -> None:
    """Raise a `FormatError` unless a file that is to be appended to is absent, empty or begins as a metrics file."""
    if not path.exists():
        return
    first = b"?"
    if path.is_file():
        with path.open("rb") as file:
            first = file.readline(200)
    header = ",".join(HEADER).encode()
    if first.strip() != header and not header.startswith(first):
        raise FormatError(f"{path}: not a metrics file, nothing is appended to it; move it away")


def read_metrics(path: Path) -> dict[str, dict[int, float]]:
    """Return metric name -> step -> value, steps in ascending order.

    Raises:
        ValueError: the file is missing.
        FormatError: it is not one of ours, damaged, or beyond all runs.
    """
    if not path.is_file():
        raise ValueError(f"{path}: no such file; give the folder of a run of `protperf train`")
    too_large = f"{path}: more than {MOST_LINES:,} lines or {_MOST_NAMES:,} metrics; give a shorter one (trainer.log_every=)"
    series: dict[str, dict[int, float]] = {}
    with path.open("rb") as file:
        rows = csv.reader(_finished_lines(file))
        try:
            if tuple(next(rows, ())) != HEADER:
                raise FormatError(f"{path}:1: not a metrics file; its first line must be {','.join(HEADER)}")
            for number, row in enumerate(rows, start=2):
                step, name, value = _read_row(row, place=f"{path}:{number}")
                series.setdefault(name, {})[step] = value
                if number > MOST_LINES or len(series) > _MOST_NAMES:
                    raise FormatError(too_large)
        except csv.Error as error:
            raise FormatError(f"{path}:{rows.line_num}: {error}: not a line of a metrics file") from None
    return {name: {step: values[step] for step in sorted(values)} for name, values in series.items()}


def _finished_lines(file: IO[bytes]) -> Iterator[str]:
    """Yield the lines that have an end; an overlong one in pieces, the first of which is no line of a metrics file."""
    for line in iter(lambda: file.readline(_LONGEST_LINE), b""):
        if line.endswith(b"\n") or len(line) == _LONGEST_LINE:
            yield line.decode(errors="replace")


def _read_row(row: list[str], *, place: str) -> tuple[int, str, float]:
    """Return the step, the metric's name and its value."""
    try:
        step, name, value = int(row[0]), row[1], float(row[2])
        if abs(step) > _LAST_STEP:
            raise ValueError
    except (IndexError, ValueError):
        raise FormatError(
            f"{place}: {quoted(','.join(row))} is not a line of a metrics file; allowed: a step, a metric, a number; take it out"
        ) from None
    return step, name, value


def _end_of_last_line(file: FileIO) -> int:
    """Return the size without what a killed writer left behind the last line's end."""
    end = file.seek(0, os.SEEK_END)
    while end:
        start = max(0, end - _BLOCK)
        file.seek(start)
        found = file.read(end - start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0
