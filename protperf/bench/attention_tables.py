"""The tables and figures of `protperf bench attention`, and the length from which a contestant beats exact attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from protperf.bench import measure
from protperf.bench.contestants import EXACT, PACKED, X_LINE, Setting
from protperf.bench.figures import draw_lines
from protperf.bench.report import Report, digits, format_table

PASSES = ("forward", "forward + backward")

LEGEND = """\
ms: median of the rounds, in which all take turns. faster: SDPA's time (for packed rows: packed SDPA's) over this one.
Ratios are medians of those within a round.
share: useful arithmetic in a second over that of a 1024^3 matrix product in the same round, by closed forms: bidirectional
  8 L F K a head forward and 24 forward + backward, of which 4 are features computed again because they are not kept.
MiB: peak of tensors beyond q, k, v, out and their gradients (on a CPU: on one thread). X line: attention that returns v, the limit.
crossover: the length from which a row beats SDPA, interpolated on log axes."""

_MEBIBYTE = 2**20


@dataclass(frozen=True)
class Cell:
    """One measurement.

    Attributes:
        contestant: name.
        direction: `bidirectional` or `causal`.
        passes: one of `PASSES`.
        length: tokens.
        seconds: the median of the rounds; `None` where it was left out.
        rounds: seconds of one call in each round.
        product_rounds: seconds of the matrix product in the same rounds.
        extra_bytes: peak of tensors beyond q, k, v, out and their gradients.
        gflops: 10^9 operations of `work` in a second.
        share: that over the rate of a 1024^3 matrix product in the same rounds.
        reason: why it was left out.
    """

    contestant: str
    direction: str
    passes: str
    length: int
    seconds: float | None = None
    rounds: tuple[float, ...] = ()
    product_rounds: tuple[float, ...] = ()
    extra_bytes: int | None = None
    gflops: float | None = None
    share: float | None = None
    reason: str = ""


def lay_out(cells: Sequence[Cell], setting: Setting, machine: Mapping[str, Any]) -> Report:
    """Turn cells into tables, plain numbers and figures."""
    tables = list(dict.fromkeys((cell.direction, cell.passes) for cell in cells))
    blocks, figures = [measure.headline(machine), _describe(setting)], {}
    for direction, passes in tables:
        own = [cell for cell in cells if (cell.direction, cell.passes) == (direction, passes)]
        title = f"{direction}, {passes}"
        blocks += [f"== {title} ==", *_tables_of(own)]
        name = f"{direction}_{passes.replace(' + ', '_')}"
        for quantity, label, value in (("time", "seconds", _seconds), ("memory", "MiB", _mebibytes)):
            figures[f"{quantity}_{name}"] = draw_lines(
                _series(own, value), title=f"{quantity}: {title}", x="length (tokens)", y=label
            )
    crossovers = find_crossovers(cells)
    unrest = measure.warn_of_unrest([seconds for cell in cells for seconds in cell.product_rounds])
    blocks += [_crossover_table(crossovers, tables), LEGEND, *_left_out(cells), unrest]
    numbers = {
        "machine": dict(machine),
        "setting": asdict(setting) | {"dtype": str(setting.dtype), "device": str(setting.device)},
        "cells": [asdict(cell) for cell in cells],
        "crossovers": crossovers,
    }
    return Report([block for block in blocks if block], numbers, figures)


def crossover(ratios: Mapping[int, float]) -> float | None:
    """Return the length from which a contestant is the faster one, at every greater length that was measured.

    Between two lengths the logarithm of the ratio is a straight line in the logarithm of the length.

    Args:
        ratios: length -> its time over that of exact attention.

    Returns:
        0 if it is never slower, infinity if it is slower at the end, `None` without a length.
    """
    lengths = sorted(ratios)
    if not lengths:
        return None
    logs = [math.log(ratios[length]) for length in lengths]
    slower = [place for place, log in enumerate(logs) if log > 0]
    if not slower:
        return 0.0
    last = slower[-1]
    if last == len(lengths) - 1:
        return math.inf
    part = logs[last] / (logs[last] - logs[last + 1])
    return lengths[last] * (lengths[last + 1] / lengths[last]) ** part


def find_crossovers(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """Return the crossover with exact attention of each contestant in each table, and how it is written."""
    found: dict[tuple[str, str, str], dict[int, float]] = {}
    slower = ratios_of(cells)
    for cell in cells:
        if cell.contestant not in (rival_of(cell.contestant), X_LINE):
            ratios = found.setdefault((cell.contestant, cell.direction, cell.passes), {})
            if ratio := slower(cell, rival_of(cell.contestant)):
                ratios[cell.length] = ratio
    return [
        {
            "contestant": name,
            "direction": direction,
            "passes": passes,
            "length": crossover(ratios) or None,
            "text": _write_crossover(crossover(ratios), sorted(ratios)),
        }
        for (name, direction, passes), ratios in found.items()
    ]


def ratios_of(cells: Sequence[Cell]) -> Callable[[Cell, str], float | None]:
    """Return a function of a cell and a name: the cell's time over that of another contestant at the same place."""
    rounds = {(cell.contestant, cell.direction, cell.passes, cell.length): cell.rounds for cell in cells}

    def ratio(cell: Cell, other: str) -> float | None:
        return measure.ratio(cell.rounds, rounds.get((other, cell.direction, cell.passes, cell.length), ()))

    return ratio


def rival_of(name: str) -> str:
    """Return the exact attention that does the same task."""
    return EXACT + PACKED if name.endswith(PACKED) else EXACT


def _write_crossover(length: float | None, common: Sequence[int]) -> str:
    if length is None:
        return digits(None)
    if length == 0:
        return f"below {common[0]:,}"
    return f"above {common[-1]:,}" if math.isinf(length) else f"{length:,.0f}"


def _describe(setting: Setting) -> str:
    packed = f", {setting.packed} documents where packed" if setting.packed else ""
    return (
        f"batch {setting.batch}, {setting.heads} heads of {setting.head_dim}, {setting.num_features} features, "
        f"{str(setting.dtype).removeprefix('torch.')}{packed}, {setting.rounds} rounds"
    )


def _tables_of(cells: Sequence[Cell]) -> list[str]:
    """Return the tables of one direction and pass."""
    slower = ratios_of(cells)

    def faster(cell: Cell) -> str:
        ratio = None if cell.contestant == X_LINE else slower(cell, rival_of(cell.contestant))
        return digits(ratio and 1 / ratio, suffix="x")

    def costs(cell: Cell) -> str:
        return digits(slower(cell, cell.contestant.removesuffix(PACKED)), suffix="x")

    found = [
        _grid("ms", cells, lambda cell: digits(cell.seconds, unit=1e-3)),
        _grid("faster", cells, faster),
        _grid("share, %", cells, lambda cell: digits(cell.share, unit=0.01)),
        _grid("MiB", cells, lambda cell: digits(_mebibytes(cell))),
    ]
    packed = [cell for cell in cells if cell.contestant.endswith(PACKED)]
    return [*found, _grid("time over unpacked", packed, costs)] if packed else found


def _grid(title: str, cells: Sequence[Cell], show: Callable[[Cell], str]) -> str:
    """Return a table with a row for each contestant and a column for each length."""
    lengths = sorted({cell.length for cell in cells})
    rows: dict[str, list[str]] = {}
    for cell in sorted(cells, key=lambda cell: cell.length):
        rows.setdefault(cell.contestant, []).append(show(cell))
    return format_table(title, [f"{length:,}" for length in lengths], list(rows.items()))


def _crossover_table(crossovers: Sequence[Mapping[str, Any]], tables: Sequence[tuple[str, str]]) -> str:
    found = {(each["contestant"], each["direction"], each["passes"]): each["text"] for each in crossovers}
    names = dict.fromkeys(each["contestant"] for each in crossovers)
    rows = [(name, [found.get((name, *table), digits(None)) for table in tables]) for name in names]
    columns = [", ".join(table) for table in tables]
    return format_table("crossover, tokens", columns, rows) if rows else ""


def _left_out(cells: Sequence[Cell]) -> list[str]:
    """Return, for each contestant of each table that has a cell without a number, from where on and why."""
    first: dict[tuple[str, str, str], Cell] = {}
    for cell in cells:
        if cell.reason:
            first.setdefault((cell.contestant, cell.direction, cell.passes), cell)
    lines = [
        f"-: {cell.contestant}, {cell.direction}, {cell.passes}, {cell.length:,} tokens: {cell.reason}"
        for cell in first.values()
    ]
    return ["\n".join(lines)] if lines else []


def _seconds(cell: Cell) -> float | None:
    return cell.seconds


def _mebibytes(cell: Cell) -> float | None:
    return None if cell.extra_bytes is None else cell.extra_bytes / _MEBIBYTE


def _series(
    cells: Sequence[Cell], value: Callable[[Cell], float | None]
) -> dict[str, list[tuple[float, float]]]:
    """Return contestant -> points of a logarithmic figure."""
    found: dict[str, list[tuple[float, float]]] = {}
    for cell in cells:
        if number := value(cell):
            found.setdefault(cell.contestant, []).append((cell.length, number))
    return found
