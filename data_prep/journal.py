"""The journal of a build: what it was asked for, and the result of each task that is done.

It lies in the build's work folder. A build that is started again finds the tasks that are done and goes on with the others.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from data_prep.options import PrepareOptions
from protperf import __version__
from protperf.formats.commit import commit_bytes

_WORK_FORMAT = 1
"""Of the files in the work folder; another one is not gone on with."""

_ORDER_NAME = "order.json"
_JOURNAL_NAME = "journal.jsonl"
JOURNAL_NAMES = (_JOURNAL_NAME, _ORDER_NAME)


@dataclass(frozen=True)
class BuildOrder:
    """What determines the results of the tasks.

    Attributes:
        version: of protperf.
        options: the fields of `PrepareOptions` that determine the bytes.
        strict: whether a bad record ends the build.
        files: for each input and table its path, its size and its time of change; none for a pipe.
        part_bytes: text of a part; kept from the first start, whatever is asked later.
    """

    version: str
    options: dict[str, Any]
    strict: bool
    files: list[list[Any]]
    part_bytes: int

    @classmethod
    def describe(
        cls, inputs: list[str], tables: list[str], options: PrepareOptions, *, strict: bool
    ) -> BuildOrder:
        """Return what is asked now, without a size of the parts."""
        wanted = {name: value for name, value in asdict(options).items() if name != "release"}
        files = [_identity(path) for path in [*inputs, *tables]]
        return cls(f"{__version__}, format {_WORK_FORMAT}", wanted, strict, files, part_bytes=0)

    @property
    def can_resume(self) -> bool:
        """Whether all inputs can be read again."""
        return all(size is not None for _, size, _ in self.files)

    def difference(self, earlier: BuildOrder) -> str:
        """Return what an earlier order asked otherwise, in words; empty if the results are the same."""
        if earlier.version != self.version:
            return f"protperf was {earlier.version}, is {self.version}"
        for name, value in self.options.items():
            if earlier.options.get(name) != value:
                return f"--{name.replace('_', '-')} was {earlier.options.get(name)!r}, is {value!r}"
        if earlier.strict != self.strict:
            return f"--strict was {earlier.strict}, is {self.strict}"
        if [file[0] for file in earlier.files] != [file[0] for file in self.files]:
            return f"the inputs were {' '.join(file[0] for file in earlier.files)}"
        for before, now in zip(earlier.files, self.files, strict=True):
            if before != now:
                return f"{now[0]} was changed since ({before[1]} bytes then, {now[1]} now)"
        return ""


def _identity(path: str) -> list[Any]:
    """Return path, size and time of change of a file; a pipe has neither."""
    if not os.path.isfile(path):
        return [path, None, None]
    state = os.stat(path)
    return [os.path.abspath(path), state.st_size, state.st_mtime_ns]


class Journal:
    """Results of tasks, by kind and number, kept in a file that only grows.

    Args:
        work: the build's work folder.
    """

    def __init__(self, work: Path) -> None:
        self._path = work / _JOURNAL_NAME
        self._order_path = work / _ORDER_NAME
        self._results: dict[str, dict[int, Any]] = {}
        if self._path.exists():
            self._load()

    def read_order(self) -> BuildOrder | None:
        """Return what the build was asked for, None if it did not get as far as that."""
        try:
            return BuildOrder(**json.loads(self._order_path.read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def begin(self, order: BuildOrder) -> None:
        """Start a journal without results."""
        self._results = {}
        self._path.unlink(missing_ok=True)
        commit_bytes(self._order_path, json.dumps(asdict(order)).encode())

    def of(self, kind: str) -> dict[int, Any]:
        """Return the results of a kind of task, by number."""
        return self._results.setdefault(kind, {})

    def add(self, kind: str, number: int, result: Any) -> None:
        """Keep the result of a task that is done; its files are in place and flushed to the disk."""
        self.of(kind)[number] = result
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps([kind, number, result]) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def forget(self, kind: str, number: int) -> None:
        """Take a task for undone whose files are gone; it is done again, and its new result replaces the old one."""
        del self.of(kind)[number]

    def __len__(self) -> int:
        """Return the number of tasks done."""
        return sum(map(len, self._results.values()))

    def _load(self) -> None:
        """Read the results; a last line that a kill cut off is removed."""
        whole = self._path.read_bytes()
        end = whole.rfind(b"\n") + 1
        if end < len(whole):
            os.truncate(self._path, end)
        for line in whole[:end].splitlines():
            kind, number, result = json.loads(line)
            self.of(kind)[number] = result
