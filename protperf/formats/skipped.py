"""The list of left-out records, a TSV file."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO

from protperf.formats import escaped
from protperf.formats.commit import commit_file
from protperf.formats.records import Record, Skipped

SOME_LEFT_OUT = 3
"""Exit status of a command that did its work and left records out."""


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
        self._file.write(_row(skipped))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Rename the file when all went well, else remove it."""
        if self._file is not None and self._path and self._partial:
            if kind is None:
                self._file.close()
                commit_file(self._partial, self._path)
                return
            with suppress(OSError):  # what a full disk did not take
                self._file.close()
            self._partial.unlink()
        elif kind is None and self._path:
            self._path.unlink(missing_ok=True)


class SkippedList:
    """The list of a command that also leaves records out after they were read: the reader's rows, then its own.

    A context manager: leaving it without an error publishes the file (or removes an old one, if nothing was left out),
    with an error nothing is left of it but rows that were committed. What a kill leaves is taken over by the next run.

    Args:
        path: the file, see `skipped_path`; only one process at a time may write it.

    Attributes:
        work: what to give to `SequenceReader` as `skipped_path`.
        counts: rows added here by reason.
        examples: the first of each reason.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.work = path.with_name(f".{path.name}.tmp")
        self.counts: Counter[str] = Counter()
        self.examples: dict[str, Skipped] = {}
        self._own_path = path.with_name(f".{path.name}.own")
        self._own: IO[str] | None = None
        self._committed = 0

    @property
    def num_added(self) -> int:
        """Number of rows added here."""
        return self.counts.total()

    def __enter__(self) -> SkippedList:
        return self

    def resume(self, committed: int) -> Iterator[Skipped]:
        """Take over the rows that an earlier run committed, and return them in order; the others are dropped.

        They are counted as they are taken, which must be before the first is added.

        Args:
            committed: what its last `commit` returned.
        """
        self._committed = committed
        if not committed:
            self._own_path.unlink(missing_ok=True)
            return iter(())
        os.truncate(self._own_path, committed)
        return self._earlier()

    def add(self, skipped: Skipped) -> None:
        """Add a record that was read well and left out later."""
        self._count(skipped)
        if self._own is None:
            self._own = open(self._own_path, "a" if self._committed else "w", encoding="utf-8", newline="\n")  # noqa: SIM115
        self._own.write(_row(skipped))

    def commit(self) -> int:
        """Flush the rows added so far to the disk; return how many bytes they are, for `resume`."""
        if self._own is not None:
            self._own.flush()
            os.fsync(self._own.fileno())
            self._committed = self._own.tell()
        return self._committed

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Publish or remove."""
        if self._own is not None:
            self._own.close()
        if kind is not None:
            self.work.unlink(missing_ok=True)
            if not self._committed:
                self._own_path.unlink(missing_ok=True)
            return
        if self.num_added:
            self._append()
        if self.work.exists():
            commit_file(self.work, self.path)
        else:
            self.path.unlink(missing_ok=True)
        if not self._committed:
            self._own_path.unlink(missing_ok=True)

    def discard(self) -> None:
        """Give up what was committed, so that an error leaves nothing."""
        self._committed = 0

    def forget(self) -> None:
        """Remove the committed rows, once nothing can be gone on with any more."""
        self._own_path.unlink(missing_ok=True)

    def _earlier(self) -> Iterator[Skipped]:
        with open(self._own_path, encoding="utf-8", newline="\n") as file:
            for line in file:
                path, number, name, _, reason, found = line.rstrip("\n").split("\t")
                skipped = Skipped(path, int(number), name, None, reason, found)
                self._count(skipped)
                yield skipped

    def _count(self, skipped: Skipped) -> None:
        self.counts[skipped.reason] += 1
        self.examples.setdefault(skipped.reason, skipped)

    def _append(self) -> None:
        is_new = not self.work.exists()
        with (
            open(self._own_path, encoding="utf-8", newline="\n") as own,
            open(self.work, "a", encoding="utf-8", newline="\n") as file,
        ):
            if is_new:
                file.write("\t".join(SkippedTable.COLUMNS) + "\n")
            shutil.copyfileobj(own, file)


def skipped_path(out: Path | str) -> Path:
    """Return the file beside an output that lists what was left out.

    >>> str(skipped_path("a.h5"))
    'a.h5.skipped.tsv'
    """
    path = Path(out)
    return path.with_name(f"{path.name}.skipped.tsv")


def leave_out(record: Record, reason: str) -> Skipped:
    """Return the row of a record that was read well and is left out for its length or for what comes of it."""
    found = f"{len(record.tokens)} residues"
    return Skipped(record.path, record.line, record.id, None, reason, found, record.unit)


def _row(skipped: Skipped) -> str:
    column = "" if skipped.column is None else skipped.column
    cells = (skipped.path, skipped.line, skipped.id, column, skipped.reason, skipped.found)
    return "\t".join(escaped(str(cell)) for cell in cells) + "\n"
