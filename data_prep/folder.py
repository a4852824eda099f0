"""The output folder: built in a work folder inside it, published by renames, the manifest last.

Only files that a manifest of ours names, or that lie in our own work folder, are ever replaced or removed. The work folder
of a build that was killed, or that met a full disk, stays: the same command goes on with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from pathlib import Path
from types import TracebackType
from typing import IO

from data_prep.journal import JOURNAL_NAMES
from protperf.formats.commit import commit_bytes, lock_folder, sync_folder
from protperf.formats.manifest import MANIFEST_NAME, SPLITS, list_files
from protperf.formats.ngrams import NGRAMS_NAME

WORK_NAME = ".work-prepare"
SKIPPED_NAME = "skipped.tsv"
REPORT_NAME = "report.html"

_PLAN_NAME = "publish.json"
_LOCK_NAME = "lock"
_EXTRAS = (SKIPPED_NAME, REPORT_NAME)

_OUR_NAMES = re.compile(
    rf"({'|'.join(SPLITS)})-\d{{5}}-of-\d{{5}}\.h5|{'|'.join(map(re.escape, (NGRAMS_NAME, *_EXTRAS)))}"
)


class OutputFolder:
    """Context manager around one build.

    Attributes:
        path: the dataset's folder.
        work: folder for everything unfinished.
        force: replace a dataset that is already there.
        keep: leave the work folder there on the way out; the builder sets it when there is something to go on with.
    """

    def __init__(self, path: Path, *, force: bool) -> None:
        """Remember where to build.

        Args:
            path: the dataset's folder; made if it is not there.
            force: replace a dataset that is already there; it stays whole until the new one is.
        """
        self.path = path
        self.work = path.absolute() / WORK_NAME  # workers on a cluster stand in other folders
        self.keep = False
        self.force = force
        self._created = False
        self._lock: IO[bytes] | None = None

    def __enter__(self) -> OutputFolder:
        """Make and lock the work folder, take back what a killed build had half published, check what is there.

        Raises:
            ValueError: a dataset is there and `force` is not given; files are there that no manifest claims; another
                build is at work.
        """
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"{self.path}: is a file; OUT is the folder to write the dataset to")
        self._created = not self.path.exists()
        self.work.mkdir(parents=True, exist_ok=True)
        try:
            self._take_lock()
            self._take_back()
            self._check()
        except BaseException:
            self._leave(remove=self._lock is not None and not self._has_results())
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the work folder, unless it is to be kept, and a folder this build made and left empty."""
        if not self.keep:
            with contextlib.suppress(OSError):
                self._take_back()
        self._leave(remove=not self.keep)

    def clear(self) -> None:
        """Empty the work folder, the journal first: what a kill leaves of it says of nothing that it is done."""
        for name in JOURNAL_NAMES:
            (self.work / name).unlink(missing_ok=True)
        sync_folder(self.work)
        for entry in self.work.iterdir():
            if entry.name == _LOCK_NAME:
                continue
            if entry.is_dir():
                shutil.rmtree(entry)
            else:
                entry.unlink()

    def publish(self, names: list[str]) -> None:
        """Move finished files from the work folder into place: the old dataset goes, `names` come, the manifest last."""
        old = self._owned()
        commit_bytes(self.work / _PLAN_NAME, json.dumps({"old": old, "new": names}).encode())
        for name in reversed(old):
            (self.path / name).unlink(missing_ok=True)
        for name in names:
            os.replace(self.work / name, self.path / name)
        sync_folder(self.path)
        os.replace(self.work / MANIFEST_NAME, self.path / MANIFEST_NAME)
        sync_folder(self.path)

    def _owned(self) -> list[str]:
        """Return the names of the files of the dataset that is there; the manifest comes last."""
        if not (self.path / MANIFEST_NAME).exists():
            return []
        return list_files(self.path)

    def _take_lock(self) -> None:
        """Refuse to build beside another build; see `lock_folder`."""
        busy = f"{self.path}: another `protperf prepare` is writing there; wait for it"
        self._lock = lock_folder(self.work / _LOCK_NAME, busy=busy)

    def _take_back(self) -> None:
        """Undo a publication that was cut off: its files go back into the work folder, the old dataset's rest goes."""
        plan = self.work / _PLAN_NAME
        if not plan.exists():
            return
        if (self.path / MANIFEST_NAME).exists():
            whole = json.loads(plan.read_text())["new"]
            if not any((self.work / name).exists() for name in whole):
                self.clear()  # the new manifest is there: all was published
            plan.unlink(missing_ok=True)
            return
        names = json.loads(plan.read_text())
        for name in names["new"]:
            if not (self.work / name).exists():
                os.replace(self.path / name, self.work / name)
        for name in names["old"]:
            (self.path / name).unlink(missing_ok=True)
        plan.unlink()

    def _has_results(self) -> bool:
        """Return whether there is a build to go on with; without a journal the work folder is a rest of a removed one."""
        return all((self.work / name).exists() for name in JOURNAL_NAMES)

    def _check(self) -> None:
        """Refuse to replace a dataset without `force`, and files of unknown origin always."""
        owned = self._owned()
        if owned and not self.force:
            beside = " by the unfinished build beside it" if self._has_results() else ""
            raise ValueError(
                f"{self.path}: holds a dataset already; --force replaces it{beside}, or choose another folder"
            )
        foreign = [
            entry.name
            for entry in self.path.iterdir()
            if _OUR_NAMES.fullmatch(entry.name) and entry.name not in owned
        ]
        if foreign:
            raise ValueError(
                f"{self.path}: holds {min(foreign)}, which no {MANIFEST_NAME} there names; move it away or choose another folder"
            )

    def _leave(self, *, remove: bool) -> None:
        """Let go of the lock; with `remove`, of the work folder too."""
        if remove:
            with contextlib.suppress(OSError):
                self.clear()
            shutil.rmtree(self.work, ignore_errors=True)
        if self._lock is not None:
            self._lock.close()
            with contextlib.suppress(OSError):
                self.work.rmdir()  # NFS keeps a removed file's name until it is closed
        if self._created:
            with contextlib.suppress(OSError):
                self.path.rmdir()
