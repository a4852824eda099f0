"""How large files are, how large their text will be, and what their bytes hash to."""

from __future__ import annotations

import hashlib
import os
import re
import resource
import sys
from pathlib import Path

from protperf.formats.streams import COMPRESSIONS

COMPRESSED_FACTOR = 2.2
"""UniProt's FASTA is about twice its gzip."""

_BLOCK_BYTES = 4 << 20
_HEAD_BYTES = 16


def hash_file(path: Path | str) -> tuple[str, int]:
    """Return the hex SHA-256 of a file and the number of bytes read."""
    digest, size = hashlib.sha256(), 0
    with open(path, "rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
            size += len(block)
    return digest.hexdigest(), size


def estimate_text_bytes(path: Path | str) -> float:
    """Return the size of a sequence file's text, about: of the file itself if it is not compressed."""
    with open(path, "rb") as file:
        head = file.read(_HEAD_BYTES)
    compressed = any(magic.match(head) for magic in COMPRESSIONS.values())
    return os.path.getsize(path) * (COMPRESSED_FACTOR if compressed else 1)


def in_units(num_bytes: float) -> str:
    """Return a size in the largest decimal unit that leaves at least 1.

    >>> in_units(2_310_000)
    '2.31 MB'
    """
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB"


def peak_memory_bytes() -> int:
    """Return the most memory that this process has held so far, in bytes."""
    try:  # not ru_maxrss where this is known: a new process starts with that of the one that forked it
        status = Path("/proc/self/status").read_text()
    except OSError:
        per_unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * per_unit
    return int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0]) * 1024
