"""Write a file so that it is either absent or whole, also when the disk is full or the process is killed."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import platform
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO

FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
"""Numbers of the errors that say that a disk, or a quota, is full."""


def temporary_path(path: Path) -> Path:
    """Return a name beside `path` for a file in the making: of this host, process and thread alone, and hidden."""
    owner = f"{platform.node()}.{os.getpid()}.{threading.get_native_id()}"
    return path.with_name(f".{path.name}.{owner}.tmp")


def commit_bytes(path: Path, data: bytes | memoryview) -> None:
    """Write `data` to a temporary name beside `path`, flush it to the disk and rename it to `path`.

    Raises:
        OSError: the disk is full or the folder cannot be written; the message names `path`, the temporary file is gone.
    """
    temporary = temporary_path(path)
    try:
        with open(temporary, "wb", buffering=0) as file:
            write_all(file.fileno(), data)
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError) and error.errno is not None:
            raise OSError(error.errno, os.strerror(error.errno), str(path)) from error
        raise
    sync_folder(path.parent)


@contextlib.contextmanager
def committed_text(path: Path) -> Iterator[IO[str]]:
    """Open a UTF-8 text file that appears under its name when the context is left, or, after an error, not at all.

    Raises:
        OSError: the disk is full or the folder cannot be written; the message names `path`.
    """
    temporary = temporary_path(path)
    try:
        with open(temporary, "w", encoding="utf-8", newline="\n") as file:
            yield file
        commit_file(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError) and error.errno in FULL_DISK:
            raise OSError(error.errno, os.strerror(error.errno), str(path)) from error
        raise


def commit_file(temporary: Path, path: Path) -> None:
    """Flush a file that was written under a temporary name to the disk and rename it to `path`."""
    sync_file(temporary)
    os.replace(temporary, path)
    sync_folder(path.parent)


def sync_file(path: Path) -> None:
    """Flush a file that was written and closed to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def lock_folder(path: Path, *, busy: str) -> IO[bytes]:
    """Take a lock file for as long as the returned file stays open and this process lives.

    A record lock, which processes forked from this one do not inherit: they may outlive a kill for a moment. File
    systems without locks are taken as they are.

    Args:
        path: the lock file, made if need be.
        busy: what to say if another process holds it.

    Raises:
        ValueError: another process holds the lock.
    """
    lock = open(path, "ab")  # noqa: SIM115 - held by the caller
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        lock.close()
        raise ValueError(busy) from None
    except OSError:
        pass
    return lock


def sync_folder(folder: Path) -> None:
    """Flush a folder's list of names, so that a rename in it outlives a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """Write all of `data`; one `write` may take less, and never takes more than 2 GiB."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]
