"""The files a dataset is made from: their hashes, and how much disk the work on them will take."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from protperf.formats.manifest import InputEntry
from protperf.formats.sizes import estimate_text_bytes, hash_file, in_units
from protperf.formats.streams import STDIN

_WORK_FACTOR = 1.2
"""Disk that a build takes at its peak, for each byte of text: a bucket file goes when its shard comes."""


def check_tables(paths: Iterable[str]) -> None:
    """Refuse tables that are not files; they are read twice, so no pipe will do.

    Raises:
        ValueError: a path is missing or is no regular file.
    """
    for path in paths:
        if not os.path.isfile(path):
            raise ValueError(f"{path}: no such table; give the path of a regular file")


def describe_space(paths: list[str], out: Path) -> str:
    """Return one line on the disk space the build needs at its peak and what is free; standard input is not counted."""
    need = _WORK_FACTOR * sum(estimate_text_bytes(path) for path in paths if os.path.isfile(path))
    free = shutil.disk_usage(
        next(folder for folder in (out, *out.absolute().parents) if folder.is_dir())
    ).free
    verdict = "" if free > need else "; this may not be enough"
    return f"needs about {in_units(need)} of disk in {out}, {in_units(free)} are free{verdict}"


def describe_input(path: str, role: str) -> InputEntry:
    """Return name, size and hash of an input; a pipe has neither size nor hash, since it can be read only once."""
    if not os.path.isfile(path):
        return InputEntry(path if path == STDIN else _as_text(Path(path).name), role, None, None)
    digest, size = hash_file(path)
    return InputEntry(_as_text(Path(path).name), role, size, digest)


def _as_text(name: str) -> str:
    """Return a file name that JSON can hold: bytes that are no UTF-8 are escaped."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")
