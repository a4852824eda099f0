"""FASTA out: to a file that appears when it is whole, or to standard output as it comes."""

from __future__ import annotations

import sys
from pathlib import Path
from types import TracebackType
from typing import IO

from protperf.formats.commit import commit_file, temporary_path
from protperf.formats.records import escaped

STDOUT = "-"
LINE_RESIDUES = 60
"""Residues in a line, as in UniProt's files."""


class FastaWriter:
    """Write records one by one, each flushed as soon as it is there; a context manager.

    Left without an error, the file stands under its name; with one, nothing is left of it.

    Args:
        path: the file, or `-` for standard output.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = None if str(path) == STDOUT else Path(path)
        self._work = self.path and temporary_path(self.path)
        self._file: IO[str] = sys.stdout

    def __enter__(self) -> FastaWriter:
        """Start."""
        if self._work:
            self._file = open(self._work, "w", encoding="utf-8", newline="\n")
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
        if not (self.path and self._work):
            return
        try:
            self._file.close()
            if kind is None:
                commit_file(self._work, self.path)
        finally:
            self._work.unlink(missing_ok=True)
