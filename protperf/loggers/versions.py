"""Which code a run was made by."""

from __future__ import annotations

import subprocess
from pathlib import Path

import torch

from protperf import __version__

_SECONDS = 10


def versions() -> dict[str, str]:
    """Return the versions of protperf and torch; and of a clone the commit, with `-dirty` if tracked files differ."""
    found = {"protperf": __version__, "torch": str(torch.__version__)}
    commit = commit_of(Path(__file__).resolve().parents[2])
    return found | ({"commit": commit} if commit else {})


def commit_of(folder: Path) -> str | None:
    """Return the commit that a clone stands at, `-dirty` behind it if tracked files differ; else `None`."""
    if not (folder / ".git").exists():
        return None
    describe = ("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    try:
        result = subprocess.run(
            ["git", "-C", str(folder), *describe], capture_output=True, text=True, timeout=_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() or None
