"""FASTA out: to a file that appears when it is whole, or to standard output as it comes."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from types import TracebackType
from typing import IO

from protperf.formats import escaped
from protperf.formats.commit import committed_text

STDOUT = "-"
LINE_RESIDUES = 60
"""Residues in a line, as in UniProt's files."""


class FastaWriter:
    """Write records one by one, each flushed as soon as it is there; a context manager.

    Left without an error, the file stands under its name; with one, nothing is left of it. A full disk names the file.

    Args:
        path: the file, or `-` for standard output.
    """

    def __init__(self, path: str | Path) -> None:
        self._text = contextlib.nullcontext(sys.stdout) if str(path) == STDOUT else committed_text(Path(path))

    def __enter__(self) -> FastaWriter:
        """Start."""
        self._file: IO[str] = self._text.__enter__()
        return self

    def add(self, header: str, residues: str) -> None:
        """Write one record; control characters in the header are escaped."""
        lines = [residues[start : start + LINE_RESIDUES] for start in range(0, len(residues), LINE_RESIDUES)]
        self._file.write("\n".join([f">{escaped(header)}", *lines, ""]))
        self._file.flush()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Rename the file when all went well, else remove it."""
        self._text.__exit__(kind, error, traceback)


def shortest(value: float) -> str:
    """Return a number for a header, as short as it can be read back.

    >>> shortest(1.0), shortest(0.8), shortest(0.12345678)
    ('1', '0.8', '0.12345678')
    """
    return repr(float(value)).removesuffix(".0")
