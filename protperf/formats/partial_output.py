"""An output in the making that survives a kill: it grows at its end alone, and a small record says how far it is whole.

Three files beside the output `NAME`: `.NAME.partial`, its first bytes; `.NAME.partial.log`, an entry a record, from which
the end of the output is made; and `.NAME.partial.json`, the last commit: the length of both, what was agreed at the start,
and the caller's state. Each commit flushes the two files to the disk before the third is replaced, so a kill or a power cut
at any moment leaves a whole commit; what lies behind it is cut off at the next start.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from protperf.formats import FormatError
from protperf.formats.commit import commit_bytes, sync_folder, write_all

_BUFFER = 1 << 20
"""Bytes kept before they are written."""


class PartialOutput:
    """Append to an output, commit, and go on from the last commit after a kill.

    Args:
        path: the output; it appears when `publish` is called.
        agreed: what must be equal for an interrupted output to be gone on with; plain JSON values.
        shown: what messages call it; its path by default.
        anew: drop what an interruption left, unless another process is at work on it.

    Attributes:
        state: the caller's state at the last commit; `None` before the first.
        size: bytes appended so far.
        made_path: where a file may be made that is then published instead of what was appended.

    Raises:
        ValueError: another process writes it, or an interrupted output was made otherwise.
        FormatError: what an interruption left is damaged.
        OSError: the disk is full or the folder cannot be written.
    """

    def __init__(
        self, path: Path, agreed: Mapping[str, Any], *, shown: Path | None = None, anew: bool = False
    ) -> None:
        self.path = path
        self.shown = shown or path
        self.data_path, self.log_path, self.record_path, self.made_path = partial_paths(path)
        self.agreed = dict(agreed)
        self.state: dict[str, Any] | None = None
        self._data = _AppendedFile(self.data_path, self.shown)
        try:
            _lock(self._data.descriptor, self.data_path, self.shown)
            self._log = _AppendedFile(self.log_path, self.shown)
        except BaseException:
            self._data.close()
            raise
        try:
            self.made_path.unlink(missing_ok=True)
            if anew:
                self.record_path.unlink(missing_ok=True)
            data_bytes, log_bytes = self._resume()
            self._data.truncate(data_bytes)
            self._log.truncate(log_bytes)
        except BaseException:
            self._close_files()
            raise

    @property
    def is_committed(self) -> bool:
        """Whether the next start finds something; a signal may have ended a commit just after it was done."""
        return self.record_path.exists()

    @property
    def size(self) -> int:
        """Bytes appended so far."""
        return self._data.size

    def append(self, data: bytes | memoryview) -> int:
        """Append bytes; return where they start."""
        return self._data.append(data)

    def write_at(self, offset: int, data: bytes) -> None:
        """Replace bytes that the next start need not find as they were: a place kept for a number known at the end."""
        self._data.write_at(offset, data)

    def log(self, entry: bytes) -> None:
        """Append an entry to the log."""
        self._log.append(entry)

    def read(self, offset: int, size: int) -> bytes:
        """Return bytes appended before."""
        return self._data.read(offset, size)

    def read_log(self, chunk: int = _BUFFER) -> Iterator[bytes]:
        """Yield the log as it is now in chunks; more may be appended meanwhile."""
        size = self._log.size
        return (self._log.read(start, min(chunk, size - start)) for start in range(0, size, chunk))

    def commit(self, state: Mapping[str, Any]) -> None:
        """Make all that was appended outlive a kill, and `state` (plain JSON values) with it."""
        self._data.sync()
        self._log.sync()
        lengths = (self._data.size, self._log.size)
        record = {
            "agreed": self.agreed,
            "state": dict(state),
            "data_bytes": lengths[0],
            "log_bytes": lengths[1],
        }
        try:
            commit_bytes(self.record_path, json.dumps(record).encode())
        except OSError as error:
            raise named(error, self.shown) from error
        self.state = dict(state)

    def flush(self) -> None:
        """Flush what was appended after the last commit to the disk: what is left is the output's name."""
        self._data.sync()

    def publish(self) -> None:
        """Give the output its name and remove the rest; it is the file at `made_path`, or else what was appended."""
        self.flush()
        os.replace(self.made_path if self.made_path.exists() else self.data_path, self.path)
        sync_folder(self.path.parent)
        self.discard()

    def close(self) -> None:
        """Stop; what was committed stays for the next start, and where nothing was, nothing is left."""
        if self.is_committed:
            self._close_files()
        else:
            self.discard()

    def discard(self) -> None:
        """Remove what is there of it, but not the output."""
        discard_partial(self.path)
        self._close_files()

    def _close_files(self) -> None:
        self._data.close()
        self._log.close()

    def _resume(self) -> tuple[int, int]:
        """Return the lengths of the last commit."""
        if not self.record_path.exists():
            return 0, 0
        if self._data.size == 0:  # published, then cut off before the rest was removed
            self.record_path.unlink()
            return 0, 0
        try:
            record = json.loads(self.record_path.read_bytes())
            lengths = int(record["data_bytes"]), int(record["log_bytes"])
            agreed, state = record["agreed"], dict(record["state"])
        except (ValueError, KeyError, TypeError):
            raise FormatError(f"{self.record_path}: damaged; --force starts {self.shown.name} anew") from None
        if self._data.size < lengths[0] or self._log.size < lengths[1]:
            raise FormatError(
                f"{self.data_path}: shorter than what was committed; --force starts {self.shown.name} anew"
            )
        check_agreed(self.shown, agreed, json.loads(json.dumps(self.agreed)))
        self.state = state
        return lengths


def partial_paths(path: Path) -> tuple[Path, Path, Path, Path]:
    """Return the files of an output in the making: data, log, last commit, and what may be made of them at the end."""
    stem = f".{path.name}.partial"
    data, log, record, made = (path.with_name(stem + suffix) for suffix in ("", ".log", ".json", ".made"))
    return data, log, record, made


def is_begun(path: Path) -> bool:
    """Return whether an interrupted run left something of an output that can be gone on with."""
    return partial_paths(path)[2].exists()


def discard_partial(path: Path) -> None:
    """Remove what an interrupted run left of an output, as `--force` does."""
    for each in reversed(partial_paths(path)):
        each.unlink(missing_ok=True)


def check_agreed(path: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise unless an interrupted output was begun as it would be gone on with.

    Raises:
        ValueError: naming the first difference.
    """
    for name in [*now, *before]:
        old, new = before.get(name), now.get(name)
        if old != new:
            raise ValueError(
                f"{path}: was begun and cut off with {name} {old!r}, now it is {new!r}; "
                "run it as before to go on, or --force to start anew"
            )


class _AppendedFile:
    """A file that grows at its end through a buffer of our own, so that a failed write fails once, where it happens."""

    def __init__(self, path: Path, shown: Path) -> None:
        self.shown = shown
        try:
            self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise named(error, shown) from error
        self._written = os.fstat(self.descriptor).st_size
        self._waiting: list[bytes] = []
        self._waiting_bytes = 0

    @property
    def size(self) -> int:
        return self._written + self._waiting_bytes

    def append(self, data: bytes | memoryview) -> int:
        start = self.size
        if len(data) >= _BUFFER:
            self._write(data)
        else:
            self._waiting.append(bytes(data))
            self._waiting_bytes += len(data)
            if self._waiting_bytes >= _BUFFER:
                self._write(b"")
        return start

    def _write(self, data: bytes | memoryview) -> None:
        parts, self._waiting, self._waiting_bytes = [b"".join(self._waiting), data], [], 0
        try:
            os.lseek(self.descriptor, self._written, os.SEEK_SET)
            for part in parts:
                write_all(self.descriptor, part)
                self._written += len(part)
        except OSError as error:
            raise named(error, self.shown) from error

    def write_at(self, offset: int, data: bytes) -> None:
        self._write(b"")
        try:
            os.lseek(self.descriptor, offset, os.SEEK_SET)
            write_all(self.descriptor, data)
        except OSError as error:
            raise named(error, self.shown) from error

    def read(self, offset: int, size: int) -> bytes:
        if self._waiting:
            self._write(b"")
        parts = []
        while size > 0 and (part := os.pread(self.descriptor, size, offset)):  # one call reads 2 GiB at most
            parts.append(part)
            offset, size = offset + len(part), size - len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def sync(self) -> None:
        self._write(b"")
        try:
            os.fsync(self.descriptor)
        except OSError as error:
            raise named(error, self.shown) from error

    def truncate(self, size: int) -> None:
        self._waiting, self._waiting_bytes = [], 0
        os.ftruncate(self.descriptor, size)
        self._written = size

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def named(error: OSError, path: Path) -> OSError:
    """Return an error in the name of the output that the user asked for."""
    number = error.errno or 0
    return OSError(number, os.strerror(number) if number else str(error), str(path))


def _lock(descriptor: int, partial: Path, path: Path) -> None:
    """Keep other processes off an output in the making; file systems without locks are taken as they are."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        raise ValueError(
            f"{path}: another process is writing it; wait for its end, or give another name"
        ) from None
    except OSError:
        pass
    if not partial.exists() or os.stat(partial).st_ino != os.fstat(descriptor).st_ino:
        raise ValueError(
            f"{path}: another process has just written it; give another name, or --force to replace it"
        )
