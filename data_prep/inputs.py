"""The files a dataset is made from: their hashes, and how much disk the work on them will take."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from protperf.formats.manifest import InputEntry
from protperf.formats.streams import COMPRESSIONS, STDIN

_BLOCK_BYTES = 4 << 20
_HEAD_BYTES = 16
_PLAIN_FACTOR = 1.2
_COMPRESSED_FACTOR = 2.6
"""UniProt's FASTA is about twice its gzip; a bucket file goes when its shard comes, so both together take little more."""


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
    need = sum(_estimate_bytes(path) for path in paths if os.path.isfile(path))
    free = shutil.disk_usage(
        next(folder for folder in (out, *out.absolute().parents) if folder.is_dir())
    ).free
    verdict = "" if free > need else "; this may not be enough"
    return f"needs about {_in_units(need)} of disk in {out}, {_in_units(free)} are free{verdict}"


def describe_input(path: str, role: str) -> InputEntry:
    """Return name, size and hash of an input; a pipe has neither size nor hash, since it can be read only once."""
    if not os.path.isfile(path):
        return InputEntry(path if path == STDIN else _as_text(Path(path).name), role, None, None)
    digest, size = hashlib.sha256(), 0
    with open(path, "rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
            size += len(block)
    return InputEntry(_as_text(Path(path).name), role, size, digest.hexdigest())


def _as_text(name: str) -> str:
    """Return a file name that JSON can hold: bytes that are no UTF-8 are escaped."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def _estimate_bytes(path: str) -> int:
    """Return the disk space that the build of one input takes at its peak, in bytes."""
    with open(path, "rb") as file:
        head = file.read(_HEAD_BYTES)
    compressed = any(magic.match(head) for magic in COMPRESSIONS.values())
    return int(os.path.getsize(path) * (_COMPRESSED_FACTOR if compressed else _PLAIN_FACTOR))


def _in_units(num_bytes: float) -> str:
    """Return a size in the largest decimal unit that leaves at least 1.

    >>> _in_units(2_310_000)
    '2.31 MB'
    """
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB"
