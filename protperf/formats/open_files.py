"""Reading at offsets from many files: few of them open at a time, and a read that fails is tried again."""

from __future__ import annotations

import errno
import os
import resource
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

MAX_OPEN_FILES = 256
_PASSING = (errno.EIO, errno.ESTALE)
"""What a network file system says while its server restarts, or of a file that was replaced under its name."""
_TABLE_FULL = (errno.EMFILE, errno.ENFILE)
_PAUSES = (0.1, 0.5, 2.0, 8.0)
"""Seconds to wait before each further try."""


class OpenFiles:
    """Files that are opened when first read and kept open, a bounded number of them.

    The file opened first is closed first: places are read in random order, so the latest use foretells nothing.
    An instance may be pickled, without its open files, or forked, with them: a read has no position to share.
    One instance serves one thread.

    Args:
        limit: most files open at a time; never more than a quarter of what the process may open, since batches
            travel between processes as open files too.
    """

    def __init__(self, limit: int = MAX_OPEN_FILES) -> None:
        self.limit = limit
        self._descriptors: dict[str, int] = {}

    def read(self, paths: Sequence[str], offsets: Sequence[int], rows: np.ndarray) -> int:
        """Fill each row with the bytes of its file from its offset on.

        Args:
            paths: the file of each row.
            offsets: where in it, in bytes.
            rows: uint8 `(N, W)`.

        Returns:
            number of rows that are full before the first whose file ends too early: N if all is well.

        Raises:
            OSError: a file cannot be opened, or reading failed each time.
        """
        preadv, opened, width = os.preadv, self._descriptors, rows.shape[1]
        for place, (path, offset, row) in enumerate(zip(paths, offsets, rows, strict=True)):
            try:
                count = preadv(opened[path], (row,), offset)
            except (KeyError, OSError):  # not open yet, or worth another try
                count = 0
            if count != width and self._read_patiently(path, offset, row.data) != width:
                return place
        return len(rows)

    def close(self) -> None:
        """Close all files; a later read opens them again."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def _read_patiently(self, path: str, offset: int, row: memoryview) -> int:
        """Read one row with pauses and further tries; return the number of bytes that are there."""
        for pause in _PAUSES:
            try:
                return self._read_once(path, offset, row)
            except OSError as error:
                if error.errno not in _PASSING:
                    raise
            self._forget(path)  # a stale descriptor stays stale: the next try opens the file anew
            time.sleep(pause)
        try:
            return self._read_once(path, offset, row)
        except OSError as error:
            raise OSError(
                f"{path}: {error.strerror}, {len(_PAUSES) + 1} times in {sum(_PAUSES):.0f} s; check the disk or the "
                "file server, then start again"
            ) from error

    def _read_once(self, path: str, offset: int, row: memoryview) -> int:
        descriptor = self._descriptors.get(path)
        if descriptor is None:
            descriptor = self._open(path)
        count = 0
        # fewer bytes than asked need not be the end: a signal may cut a read from a network file system short
        while count < len(row) and (more := os.preadv(descriptor, (row[count:],), offset + count)):
            count += more
        return count

    def _open(self, path: str) -> int:
        while len(self._descriptors) >= _allowed(self.limit):
            self._forget(next(iter(self._descriptors)))
        while True:
            try:
                descriptor = os.open(path, os.O_RDONLY)
                break
            except OSError as error:
                if error.errno not in _TABLE_FULL or not self._descriptors:
                    raise
            self._forget(next(iter(self._descriptors)))  # something else in the process took the rest
        self._descriptors[path] = descriptor
        return descriptor

    def _forget(self, path: str) -> None:
        """Close a file if it is open."""
        descriptor = self._descriptors.pop(path, None)
        if descriptor is not None:
            os.close(descriptor)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_descriptors": {}}

    def __del__(self) -> None:
        self.close()


def _allowed(limit: int) -> int:
    """Return how many files may be open: `limit`, or a quarter of the process's own limit, at least 1."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return limit if soft == resource.RLIM_INFINITY else max(1, min(limit, soft // 4))
