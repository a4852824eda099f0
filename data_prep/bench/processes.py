"""Run a command and watch all processes that it starts: their CPU seconds and, if asked, their memory (Linux)."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

PAUSE = 0.02
"""Seconds between two looks."""

_TICKS = os.sysconf("SC_CLK_TCK")
_SESSION, _USER, _SYSTEM = 3, 11, 12  # places in /proc/PID/stat, counted from the state behind the name
_SHARE = re.compile(rb"^Pss:\s+(\d+) kB", re.MULTILINE)
_PEAK = re.compile(rb"^VmHWM:\s+(\d+) kB", re.MULTILINE)


def run_sampled(command: Sequence[str], *, sizes: bool, environment: dict[str, str]) -> dict[str, float]:
    """Run a command to its end in a session of its own.

    Args:
        command: program and arguments; what it prints is dropped.
        sizes: watch the memory too, which takes some time of the watched processes.
        environment: of the command.

    Returns:
        `wall` seconds; `cpu` seconds of all processes, exact for one, otherwise as far as the last look at each; with `sizes`
        also `peak`, the most that all of them held at a time (proportional set size: shared pages count once), and
        `separate_peaks`, the sum of each one's own peak, in bytes.

    Raises:
        subprocess.CalledProcessError: the command failed; its last line on stderr is the error's `stderr`.
    """
    with tempfile.TemporaryFile() as errors:
        start = time.perf_counter()
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=errors, env=environment, start_new_session=True
        )
        watch = _Watch(process.pid, sizes)
        watch.thread.start()
        try:
            _, status, usage = os.wait4(process.pid, 0)
            wall = time.perf_counter() - start
        except BaseException:  # Ctrl-C does not reach another session
            process.kill()
            process.wait()
            raise
        finally:
            watch.stop()
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            errors.seek(0)
            last = errors.read().decode("utf-8", "replace").strip().rpartition("\n")[2]
            raise subprocess.CalledProcessError(process.returncode, list(command), stderr=last)
    # the leader's usage holds the processes that it waited for, and no others
    found = {"wall": wall, "cpu": max(usage.ru_utime + usage.ru_stime, watch.seconds())}
    return found | ({"peak": watch.peak, "separate_peaks": sum(watch.peaks.values())} if sizes else {})


class _Watch:
    """Looks at the processes of a session again and again, in a thread.

    Attributes:
        peak: most bytes held by all at one look.
        peaks: most bytes held by each.
    """

    def __init__(self, leader: int, sizes: bool) -> None:
        self.peak = 0
        self.peaks: dict[int, int] = defaultdict(int)
        self.thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._leader = leader
        self._sizes = sizes
        self._seconds: dict[int, float] = {}
        self._ended = threading.Event()

    def stop(self) -> None:
        """End the thread."""
        self._ended.set()
        self.thread.join()

    def seconds(self) -> float:
        """Return the CPU seconds of all processes seen."""
        return sum(self._seconds.values())

    def _run(self) -> None:
        while not self._ended.wait(PAUSE):
            shares = 0
            for process, seconds in self._members():
                self._seconds[process] = seconds
                if self._sizes:
                    with suppress(OSError):  # it ended between two looks
                        shares += _kilobytes(process, "smaps_rollup", _SHARE) << 10
                        peak = _kilobytes(process, "status", _PEAK) << 10
                        self.peaks[process] = max(self.peaks[process], peak)
            self.peak = max(self.peak, shares)

    def _members(self) -> Iterator[tuple[int, float]]:
        """Yield the processes of the session with their CPU seconds, also orphans."""
        for name in filter(str.isdigit, os.listdir("/proc")):
            with suppress(OSError):
                fields = Path("/proc", name, "stat").read_bytes().rpartition(b")")[2].split()
                if int(fields[_SESSION]) == self._leader:
                    yield int(name), (int(fields[_USER]) + int(fields[_SYSTEM])) / _TICKS


def _kilobytes(process: int, name: str, pattern: re.Pattern[bytes]) -> int:
    """Return a number from a file of a process, 0 if the process is about to end."""
    found = pattern.search(Path("/proc", str(process), name).read_bytes())
    return int(found[1]) if found else 0
