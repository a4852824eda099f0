"""How much each process may hold, so that all of them together stay below what `--memory` says."""

from __future__ import annotations

import ctypes
import functools
import re
from dataclasses import dataclass

PROCESS_BYTES = 56 << 20
"""What a process of ours takes before it does anything: Python, numpy, h5py."""

_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT])?i?B?", re.IGNORECASE)

_READER_BYTES = 16 << 20
"""Text that the reading process has decompressed ahead."""

_READER_PARTS = 1.0
"""Parts of text that it holds."""

_MAP_PARTS = 1.3
"""What a map task holds, in parts: the tokens, hashes and keys of one, and a block of text."""

_REDUCE_STEPS = 3.5
"""What a reduce task holds, in steps: the tokens as read, in one piece, and as they are written, and the records."""

_NGRAM_BYTES = 20 << 20
"""The tables in which a reduce task counts n-grams."""

_LEAST_PART, _MOST_PART = 4 << 20, 16 << 20
_LEAST_STEP, _MOST_STEP = 2 << 20, 16 << 20  # larger ones are slower: fresh memory at each step

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_REUSED = 64 << 20
"""Largest block of memory that is kept for the next one instead of going back to the system."""


@functools.cache
def reuse_memory() -> None:
    """Have this process keep what it frees.

    By default glibc gives memory back after each block of text and takes it again page by page, which is a good part of a
    task's time in the kernel. Elsewhere than on glibc this does nothing.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(_M_MMAP_THRESHOLD, _REUSED)
    mallopt(_M_TRIM_THRESHOLD, _REUSED)


@dataclass(frozen=True)
class MemoryPlan:
    """What fits.

    Attributes:
        total: bytes of all processes.
        workers: processes beside the reading one; 1: the reading one does all.
        part_bytes: text of a part.
        step_bytes: tokens of a step of a reduce task.
    """

    total: int
    workers: int
    part_bytes: int
    step_bytes: int

    @classmethod
    def fit(cls, memory: int, workers: int) -> MemoryPlan:
        """Return the plan for `memory` bytes and at most `workers` workers; fewer if the memory is small.

        Raises:
            ValueError: not even one fits.
        """
        for number in range(workers, 0, -1):
            processes = 1 if number == 1 else number + 1
            room = memory - processes * PROCESS_BYTES - _READER_BYTES
            part = int(room / (_READER_PARTS + number * _MAP_PARTS))
            step = int((room / number - _NGRAM_BYTES) / _REDUCE_STEPS)
            if part >= _LEAST_PART and step >= _LEAST_STEP:
                return cls(memory, number, min(part, _MOST_PART), min(step, _MOST_STEP))
        least = PROCESS_BYTES + _READER_BYTES + _NGRAM_BYTES + _REDUCE_STEPS * _LEAST_STEP
        raise ValueError(f"--memory {memory >> 20}M: at least {int(least) // (1 << 20) + 1}M is needed")


def parse_size(text: str) -> int:
    """Return a size in bytes.

    >>> parse_size("256M"), parse_size("2GiB")
    (268435456, 2147483648)
    """
    found = _SIZE.fullmatch(text.strip())
    if not found:
        raise ValueError(f"--memory {text!r}: a size such as 256M or 2G")
    return int(float(found[1]) * _UNITS.get((found[2] or "").upper(), 1))
