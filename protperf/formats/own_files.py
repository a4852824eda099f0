"""Names of files that a table of contents gives: each of a file in the table's own folder."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from protperf.formats import FormatError

_LONGEST_NAME = 255
"""Bytes, of the file systems of Linux and macOS."""


def check_names(table: Path, names: Iterable[str], *, remedy: str) -> None:
    """Refuse names that lead out of a folder, or to no file in it.

    Args:
        table: the file that gives them.
        names: as they stand there.
        remedy: what to do about it, for the message.

    Raises:
        FormatError: there is one.
    """
    for name in names:
        if not _is_name(name):
            raise FormatError(f"{table}: names a file as no file can be named, {name!r}; {remedy}")
        if name != Path(name).name or name in ("", "..") or "\0" in name:
            raise FormatError(f"{table}: names a file outside its folder, {name!r}; {remedy}")


def _is_name(name: str) -> bool:
    try:
        return len(os.fsencode(name)) <= _LONGEST_NAME
    except UnicodeEncodeError:
        return False
