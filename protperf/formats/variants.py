"""Tables of variants: read, and written again with more columns, every other byte as it was.

A table is text (UTF-8, or bytes of another encoding that are only carried along) with a header line, its cells
separated by a comma, a tab or a semicolon and quoted as RFC 4180 says. Rows end in LF, CRLF or CR. It may be compressed
by gzip. What is written is each row's own text, then the new cells, then the row's own end: a byte order mark, quotes,
blank lines and the order of rows and columns stay.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from protperf.formats import FormatError
from protperf.formats.mutations import (
    Mutant,
    check_mutant,
    fitting_offset,
    mutate,
    name_of,
    read_mutant,
    undo,
)
from protperf.formats.records import quoted
from protperf.formats.streams import STDIN, place_of, standard_input
from protperf.formats.unpacking import unpacked
from protperf.vocab import VOCABULARY

SEPARATORS = (",", "\t", ";")
MISSING = ("", "na", "nan", "n/a", "none", "null")
"""Cells without a number, in lower case."""

_LONGEST_CELL = 8 << 20
"""Letters; 80 times the longest protein known."""
_LONGEST_LINE = 32 << 20
_MOST_CELLS = 1 << 24
"""A row counts for four more: together they take a gigabyte of memory, besides the text, which is held twice; its letters take
four bytes each in a row that has one beyond U+FFFF."""
_MOST_NAMED = 20
_BYTE_ORDER_MARK = "\ufeff"


class Row(NamedTuple):
    """One row of a table.

    Attributes:
        line: number of its first line in the file, from 1.
        cells: as many as the header has; none in a blank line.
        text: as it stands in the file, without its end.
        end: LF, CRLF, CR, or nothing at the end of a file.
    """

    line: int
    cells: tuple[str, ...]
    text: str
    end: str


@dataclass(frozen=True)
class VariantTable:
    """A table of variants.

    Attributes:
        place: the file's name in messages.
        separator: of its cells.
        header: names of the columns.
        rows: in the order of the file, blank lines left in.
    """

    place: str
    separator: str
    header: Row
    rows: list[Row]

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns."""
        return self.header.cells

    @property
    def variants(self) -> list[Row]:
        """The rows that are no blank lines."""
        return [row for row in self.rows if row.cells]

    def cells(self, column: str) -> list[str]:
        """Return a column's cells, one for each of `variants`.

        Raises:
            ValueError: no such column, or several.
        """
        if self.columns.count(column) != 1:
            found = "no" if column not in self.columns else "more than one"
            raise ValueError(
                f"{self.place}: {found} column {quoted(column)}; there are: {_listed(self.columns)}"
            )
        place = self.columns.index(column)
        return [row.cells[place] for row in self.variants]

    def numbers(self, column: str) -> list[float]:
        """Return a column of numbers, NaN where a cell is one of `MISSING`.

        Raises:
            ValueError: no such column, or a cell is something else.
        """
        numbers = []
        for row, cell in zip(self.variants, self.cells(column), strict=True):
            text = cell.strip()
            try:
                numbers.append(math.nan if text.lower() in MISSING else float(text))
            except ValueError:
                raise ValueError(
                    f"{self.place}:{row.line}: {quoted(cell)} in column {quoted(column)} is no number; "
                    "allowed: a number with a decimal point, or an empty cell"
                ) from None
        return numbers

    def check_new(self, names: Iterable[str]) -> None:
        """Refuse names of columns that are there already with a `ValueError`."""
        for name in names:
            if name in self.columns:
                raise ValueError(
                    f"{self.place}: has a column {quoted(name)} already; give the table without it"
                )

    def with_columns(self, columns: Mapping[str, Sequence[str]]) -> bytes:
        """Return the table's bytes with columns added on the right: name -> a cell for each of `variants`.

        Raises:
            ValueError: a column of that name is there.
        """
        self.check_new(columns)
        cells = zip(*columns.values(), strict=True)
        written = [self._joined(self.header, tuple(columns))]
        written += [self._joined(row, next(cells)) if row.cells else row.text + row.end for row in self.rows]
        return "".join(written).encode("utf-8", "surrogateescape")

    def _joined(self, row: Row, cells: Sequence[str]) -> str:
        return self.separator.join((row.text, *cells)) + row.end


def read_variants(path: Path | str, *, column: str, lone: str = ",") -> VariantTable:
    """Read a table whose header names a column.

    Args:
        path: a file, or `-` for stdin.
        column: must be there; tells which of `SEPARATORS` the table uses.
        lone: separator of what is added to a table of one column, which shows none.

    Raises:
        FormatError: the file is damaged or no table.
        ValueError: it cannot be read, or has no such column.
    """
    place = place_of(path)
    data = _read_data(path, place)
    _check_size(data, place)
    csv.field_size_limit(_LONGEST_CELL)  # the default refuses a sequence of more than 131,072 residues
    headers = {separator: _header(data, place, separator) for separator in SEPARATORS}
    for separator, header in headers.items():
        if column in header:
            return _parse(data, place, separator if len(header) > 1 else lone)
    names = _listed(max(headers.values(), key=len))
    raise ValueError(f"{place}: no column {quoted(column)}; there are: {names}; --mutation-column names it")


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(quoted(name) for name in names[:_MOST_NAMED]) + more


def _read_data(path: Path | str, place: str) -> bytes:
    try:
        data = standard_input().read() if str(path) == STDIN else Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"{place}: cannot be read: {error.strerror}") from error
    data = unpacked(data, place)
    if b"\0" in data[:1024]:
        raise FormatError(f"{place}: is no text; allowed: CSV or TSV in UTF-8, plain or gzip")
    if not data.strip():
        raise FormatError(f"{place}: is empty; allowed: a header line and rows")
    return data


def _lines_of(data: bytes, place: str) -> Iterator[str]:
    """Yield the lines with their ends, one after the other: of all of them at once, each letter may take four bytes."""
    text = io.TextIOWrapper(io.BytesIO(data), "utf-8", "surrogateescape", newline="")
    while line := text.readline(_LONGEST_LINE + 1):
        if len(line) > _LONGEST_LINE:
            raise FormatError(f"{place}: a line has more than {_LONGEST_LINE >> 20} MiB; is it a table?")
        yield line


def _check_size(data: bytes, place: str) -> None:
    """Refuse a table that would take very much more memory than its text."""
    rows = data.count(b"\n") + data.count(b"\r") - data.count(b"\r\n")
    cells = max(data.count(separator.encode()) for separator in SEPARATORS)
    if 4 * rows + cells > _MOST_CELLS:
        raise FormatError(
            f"{place}: {rows:,} rows and {cells:,} separators are more than can be read at once; cut the table into several"
        )


def _header(data: bytes, place: str, separator: str) -> list[str]:
    """Return the names in the first line, or none where it cannot be taken apart."""
    try:
        return next(csv.reader(_unmarked(_lines_of(data, place)), delimiter=separator, strict=True), [])
    except csv.Error:
        return []


def _unmarked(lines: Iterator[str]) -> Iterator[str]:
    """Yield lines, the first without a byte order mark."""
    yield next(lines, "").removeprefix(_BYTE_ORDER_MARK)
    yield from lines


def _parse(data: bytes, place: str, separator: str) -> VariantTable:
    lines: list[str] = []  # of the row that is read

    def kept() -> Iterator[str]:
        for line in _lines_of(data, place):
            lines.append(line)
            yield line

    reader = csv.reader(_unmarked(kept()), delimiter=separator, strict=True)
    rows: list[Row] = []
    read = 0
    try:
        for cells in reader:
            raw = "".join(lines)
            lines.clear()
            content = raw.rstrip("\r\n")
            blank = bool(rows) and not content.strip(" ")
            rows.append(Row(read + 1, () if blank else tuple(cells), content, raw[len(content) :]))
            read = reader.line_num
            if not blank and len(cells) != len(rows[0].cells):
                raise FormatError(
                    f"{place}:{rows[-1].line}: {len(cells)} cells; the header has {len(rows[0].cells)}: "
                    "quote cells that hold the separator"
                )
    except csv.Error as error:
        raise FormatError(f"{place}:{read + 1}: {error}; allowed: cells quoted as in RFC 4180") from error
    return VariantTable(place, separator, rows[0], rows[1:])


def read_mutants(table: VariantTable, *, column: str, offset: int) -> tuple[list[Mutant | None], list[str]]:
    """Read the mutants of a table.

    Args:
        table: from `read_variants`.
        column: names the mutants.
        offset: as in `read_mutant`.

    Returns:
        a mutant for each of the table's variants, `None` where the cell is none; and a message for each `None`.
    """
    mutants: list[Mutant | None] = []
    messages = []
    for row, cell in zip(table.variants, table.cells(column), strict=True):
        try:
            mutants.append(read_mutant(cell, offset=offset))
        except ValueError as error:
            mutants.append(None)
            messages.append(f"{table.place}:{row.line}: {error}")
    return mutants, messages


def check_wild_type(
    table: VariantTable, mutants: Sequence[Mutant | None], wild_type: np.ndarray, *, offset: int
) -> None:
    """Refuse mutants that are not of this wild type.

    Args:
        table: where they stand, for messages.
        mutants: from `read_mutants`.
        wild_type: residue tokens, uint8 `(L,)`.
        offset: as in `read_mutant`.

    Raises:
        ValueError: names the row, the mutant, what is there, and the offset with which all rows would fit.
    """
    for row, mutant in zip(table.variants, mutants, strict=True):
        try:
            check_mutant(mutant or (), wild_type, offset=offset)
        except ValueError as error:
            fitting = fitting_offset(list(filter(None, mutants)), wild_type, offset=offset)
            remedy = "give the wild type of this table by --wild-type, or shift its numbers by --offset"
            if fitting is not None:
                remedy = f"all rows fit with --offset {fitting}"
            raise ValueError(f"{table.place}:{row.line}: {error}; {remedy}") from None


def rebuild_wild_type(
    table: VariantTable, mutants: Sequence[Mutant | None], *, column: str, offset: int
) -> np.ndarray:
    """Return the wild type, uint8 `(L,)`, from a column of mutated sequences: of the first row, checked on all others.

    Args:
        table: from `read_variants`.
        mutants: from `read_mutants`; rows with `None` are not looked at.
        column: holds the mutated sequences.
        offset: as in `read_mutant`.

    Raises:
        ValueError: a sequence is missing, or is not the mutant of the same wild type; the message names the row.
    """
    wild_type: np.ndarray | None = None
    origin = 0
    for row, mutant, cell in zip(table.variants, mutants, table.cells(column), strict=True):
        if mutant is None:
            continue
        try:
            if not cell.strip():
                raise ValueError(f"no sequence in column {quoted(column)}; give --wild-type")
            residues = VOCABULARY.encode(cell.strip())
            if wild_type is None:
                wild_type, origin = undo(residues, mutant, offset=offset), row.line
                continue
            check_mutant(mutant, wild_type, offset=offset)
            _check_same(residues, mutate(wild_type, mutant), mutant, offset)
        except ValueError as error:
            rebuilt = f" (the wild type was rebuilt from line {origin})" if origin else ""
            raise ValueError(f"{table.place}:{row.line}: {error}{rebuilt}") from None
    if wild_type is None:
        raise ValueError(
            f"{table.place}: no row with a mutant to rebuild the wild type from; give --wild-type"
        )
    return wild_type


def _check_same(found: np.ndarray, expected: np.ndarray, mutant: Mutant, offset: int) -> None:
    """Refuse a mutated sequence that is not the wild type with its substitutions."""
    if np.array_equal(found, expected):
        return
    name = name_of(mutant, offset=offset)
    if len(found) != len(expected):
        raise ValueError(
            f"mutant {quoted(name)} has a sequence of {len(found)} residues; the wild type has {len(expected)}"
        )
    place = int(np.flatnonzero(found != expected)[0])
    letters = VOCABULARY.tokens
    raise ValueError(
        f"mutant {quoted(name)} has {letters[found[place]]} at residue {place + 1 + offset} of its sequence; "
        f"its wild type and name give {letters[expected[place]]}"
    )
