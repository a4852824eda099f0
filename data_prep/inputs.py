"""The files a dataset is made from: their hashes, and how much disk the work on them will take."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from data_prep.options import PrepareOptions
from data_prep.reading import as_text
from protperf.formats.manifest import InputEntry, check_fits
from protperf.formats.sizes import estimate_text_bytes, hash_file, in_units
from protperf.formats.streams import place_of

_NGRAM_FACTOR, _NGRAM_BYTES = 4, 2e6
"""Disk for the n-gram counts of a range of keys: for each of its tokens, and at most."""

_WORK_FACTOR = 1.65
"""Disk that a build takes at its peak, for each byte of text: the sorted parts and the shards, each without headers."""


def check_tables(paths: Iterable[str]) -> None:
    """Refuse tables that are not files; they are read twice, so no pipe will do.

    Raises:
        ValueError: a path is missing or is no regular file.
    """
    for path in paths:
        if not os.path.isfile(path):
            raise ValueError(f"{path}: no such table; give the path of a regular file")


def check_number(paths: list[str]) -> None:
    """Refuse more inputs than a manifest can name with a `ValueError`."""
    check_fits([InputEntry(as_text(Path(path).name), "sequences", 10**12, "0" * 64) for path in paths], 0)


def estimate_text(paths: list[str]) -> float:
    """Return the size of the inputs' text in bytes, about; standard input is not counted."""
    total = 0.0
    for path in paths:
        try:
            total += estimate_text_bytes(path) if os.path.isfile(path) else 0
        except OSError as error:
            raise ValueError(f"{place_of(path)}: cannot be read: {error.strerror}") from error
    return total


def check_space(text_bytes: float, out: Path, options: PrepareOptions, *, there: int) -> str:
    """Return one line on the disk space the build needs at its peak and what is free.

    Args:
        text_bytes: text of the inputs, see `estimate_text`.
        out: the dataset's folder.
        options: of the dataset; many small shards need more.
        there: bytes that an earlier start of the same build has written already.

    Raises:
        ValueError: there is not enough.
    """
    shard_bytes = options.window * options.shard_windows
    need = _WORK_FACTOR * text_bytes + 2 * text_bytes / shard_bytes * min(
        shard_bytes * _NGRAM_FACTOR, _NGRAM_BYTES
    )
    free = shutil.disk_usage(out).free
    if free + there < need:
        raise ValueError(
            f"{out}: needs about {in_units(need)} of disk, {in_units(free)} are free there; make room or choose another folder "
            "(--no-space-check builds all the same)"
        )
    if not text_bytes:
        return f"what it needs of disk in {out} is not known, {in_units(free)} are free"
    return f"needs about {in_units(need)} of disk in {out}, {in_units(free)} are free"


def describe_table(path: str, role: str) -> InputEntry:
    """Return name, size and hash of a table."""
    digest, size = hash_file(path)
    return InputEntry(as_text(Path(path).name), role, size, digest)
