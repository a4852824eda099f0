"""The list of left-out records of a command that also leaves records out after they were read."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType

from protperf.formats.commit import sync_folder
from protperf.formats.fasta import SkippedTable
from protperf.formats.records import Skipped, escaped


class SkippedList:
    """A TSV file with the reader's rows, then those added here; the columns are those of `SkippedTable`.

    A context manager: leaving it without an error publishes the file (or removes an old one, if nothing was left out),
    with an error nothing is left of it.

    Args:
        path: the file.

    Attributes:
        work: what to give to `SequenceReader` as `skipped_path`.
        added: the records added here.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.work = path.with_name(f".{path.name}.{os.getpid()}.tmp")
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
