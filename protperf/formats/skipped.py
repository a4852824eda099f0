"""The list of left-out records, a TSV file."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import IO

from protperf.formats.commit import commit_file, sync_folder
from protperf.formats.records import Skipped, escaped


class SkippedTable:
    """A TSV file with one row for each left-out record; it appears only when the whole reading succeeded.

    Columns: file, line (or entry number), id, column (empty where the whole record is meant), reason, found. Text is
    UTF-8 with control characters escaped. With no row there is no file.
    """

    COLUMNS = ("file", "line", "id", "column", "reason", "found")

    def __init__(self, path: str | Path | None) -> None:
        self._path = Path(path) if path is not None else None
        self._partial = self._path and self._path.with_name(self._path.name + ".partial")
        self._file: IO[str] | None = None

    def __enter__(self) -> SkippedTable:
        """Start; the file is made with the first row."""
        return self

    def write(self, skipped: Skipped) -> None:
        """Add a row."""
        if self._partial is None:
            return
        if self._file is None:
            self._partial.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self._partial, "w", encoding="utf-8", newline="\n")  # noqa: SIM115
            self._file.write("\t".join(self.COLUMNS) + "\n")
        column = "" if skipped.column is None else skipped.column
        row = (skipped.path, skipped.line, skipped.id, column, skipped.reason, skipped.found)
        self._file.write("\t".join(escaped(str(cell)) for cell in row) + "\n")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Rename the file when all went well, else remove it."""
        if self._file is not None and self._path and self._partial:
            self._file.close()
            if kind is None:
                commit_file(self._partial, self._path)
            else:
                self._partial.unlink()
        elif kind is None and self._path:
            self._path.unlink(missing_ok=True)


class SkippedList:
    """The list of a command that also leaves records out after they were read: the reader's rows, then its own.

    A context manager: leaving it without an error publishes the file (or removes an old one, if nothing was left out),
    with an error nothing is left of it. What a kill leaves is taken over by the next run.

    Args:
        path: the file; only one process at a time may write it.

    Attributes:
        work: what to give to `SequenceReader` as `skipped_path`.
        added: the records added here.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.work = path.with_name(f".{path.name}.tmp")
        self.added: list[Skipped] = []

    def __enter__(self) -> SkippedList:
        return self

    def add(self, skipped: Skipped) -> None:
        """Add a record that was read well and left out later."""
        self.added.append(skipped)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Publish or remove."""
        if kind is not None:
            self.work.unlink(missing_ok=True)
            return
        if self.added:
            self._append()
        if self.work.exists():
            os.replace(self.work, self.path)
        else:
            self.path.unlink(missing_ok=True)
        sync_folder(self.path.parent)

    def _append(self) -> None:
        rows = [(s.path, s.line, s.id, s.column or "", s.reason, s.found) for s in self.added]
        header = [] if self.work.exists() else [SkippedTable.COLUMNS]
        with open(self.work, "a", encoding="utf-8", newline="\n") as file:
            for row in [*header, *rows]:
                file.write("\t".join(escaped(str(cell)) for cell in row) + "\n")
