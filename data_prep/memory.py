"""How much each process may hold, so that all of them together stay below what `--memory` says."""

from __future__ import annotations

import ctypes
import functools
import re
from dataclasses import dataclass

_MAIN_BYTES = 56 << 20
"""What the first process takes before it does anything: Python, numpy, h5py."""

_SERVER_BYTES = 24 << 20
"""What the process takes from which workers are forked."""

_WORKER_BYTES = 28 << 20
"""What a worker takes of its own before it does anything."""

_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,9})?)\s*([KMGT])?i?B?", re.IGNORECASE)

_READER_BYTES = 16 << 20
"""Text that the reading process has decompressed ahead."""

_READER_PARTS = 1.0
"""Parts of text that it holds."""

_MAP_PARTS = 1.3
"""What a map task holds, in parts: the tokens, hashes and keys of one, and a block of text."""

_REDUCE_STEPS = 1.4
"""What a reduce task holds, in steps: the tokens, the records and the order of one."""

_REDUCE_BYTES = 36 << 20
"""What it holds besides: the tables in which it counts n-grams, and the tokens on their way out."""

_LEAST_PART, _USUAL_PART = 4 << 20, 16 << 20
_MOST_PARTS = 1000
_LEAST_STEP, _USUAL_STEP = 4 << 20, 16 << 20
_LEAST_READ = 64 << 10

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
        step_bytes: tokens of a step of a reduce task, at most.
    """

    total: int
    workers: int
    part_bytes: int
    step_bytes: int

    def step_of(self, num_parts: int) -> int:
        """Return the tokens of a step: small ones stay near the core, but each reads a little of every part."""
        return min(self.step_bytes, max(_USUAL_STEP, num_parts * _LEAST_READ))

    @classmethod
    def fit(cls, memory: int, workers: int, *, text_bytes: float = 0, part_bytes: int = 0) -> MemoryPlan:
        """Return the plan for `memory` bytes and at most `workers` workers; fewer if the memory is small.

        Args:
            memory: bytes of all processes together.
            workers: processes at most.
            text_bytes: text of all inputs, about; parts of large inputs are larger, so that there are not too many.
            part_bytes: text of the parts of a build that goes on; 0: they are still to be cut.

        Raises:
            ValueError: not even one fits.
        """
        for number in range(workers, 0, -1):
            room = memory - _MAIN_BYTES - _READER_BYTES
            room -= _SERVER_BYTES + number * _WORKER_BYTES if number > 1 else 0
            part = int(room / (_READER_PARTS + number * _MAP_PARTS))
            step = int((room / number - _REDUCE_BYTES) / _REDUCE_STEPS)
            if part >= max(_LEAST_PART, part_bytes) and step >= _LEAST_STEP:
                return cls(memory, number, min(part, max(_USUAL_PART, int(text_bytes / _MOST_PARTS))), step)
        work = max(_REDUCE_BYTES + _REDUCE_STEPS * _LEAST_STEP, (_READER_PARTS + _MAP_PARTS) * part_bytes)
        least = int(_MAIN_BYTES + _READER_BYTES + work) // (1 << 20) + 1
        why = " to go on with this build" if part_bytes else ""
        raise ValueError(f"--memory {memory >> 20}M: at least {least}M is needed{why}")


def parse_size(text: str, option: str = "--memory") -> int:
    """Return the size in bytes that an option gives.

    >>> parse_size("256M"), parse_size("2GiB")
    (268435456, 2147483648)
    """
    found = _SIZE.fullmatch(text.strip())
    if not found:
        raise ValueError(f"{option} {text!r}: a size such as 256M or 2G")
    return int(float(found[1]) * _UNITS.get((found[2] or "").upper(), 1))
