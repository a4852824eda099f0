"""Named pieces of work, each a process of its own and some at once; what one leaves is kept, so that nothing is done twice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protperf.bench.report import plain, say
from protperf.formats.commit import commit_bytes, lock_folder

RESULT_NAME = "result.json"
SETTINGS_NAME = "settings.json"

Result = dict[str, Any]

_LOCK_NAME = ".lock"
_PAUSE = 0.1  # seconds between looks at the processes


@dataclass(frozen=True)
class Job:
    """A piece of work.

    Attributes:
        name: of its folder, in that of the experiment.
        arguments: of `python -m`; `protperf` first, or a module.
        collect: returns the result of a process that has ended, from the job's folder and the last line it said if it
            failed, else ""; raises a `ValueError` for a failure that is no result.
    """

    name: str
    arguments: tuple[str, ...]
    collect: Callable[[Path, str], Result]


def claim(folder: Path, settings: Mapping[str, Any]) -> None:
    """Begin an experiment in a folder, or go on with one that was begun under the same settings.

    Args:
        folder: of the experiment; made if need be.
        settings: all that changes a job's result and is not in its name.

    Raises:
        ValueError: it was begun under other settings, or holds something else.
    """
    path = folder / SETTINGS_NAME
    asked = json.loads(json.dumps(plain(dict(settings))))
    if not path.exists():
        if folder.exists() and any(folder.iterdir()):
            raise ValueError(f"{folder}: holds something else, without {SETTINGS_NAME}; give another --work")
        folder.mkdir(parents=True, exist_ok=True)
        commit_bytes(path, (json.dumps(asked, indent=1) + "\n").encode())
        return
    begun = _read_json(path)
    changed = [
        f"{name} {begun.get(name)} (now {asked.get(name)})"
        for name in dict.fromkeys([*begun, *asked])
        if begun.get(name) != asked.get(name)
    ]
    if changed:
        raise ValueError(
            f"{folder}: was begun with {', '.join(changed)}; give the same options to go on, or another --work"
        )


def run_all(jobs: Sequence[Job], folder: Path, *, at_once: int) -> dict[str, Result]:
    """Do what is not done yet, each job in a process with one thread; return all results by name.

    Args:
        jobs: in the order of their starts.
        folder: of the experiment, one that `claim` took.
        at_once: number of processes.

    Raises:
        ValueError: a job failed, or another process works in the folder.
    """
    busy = f"{folder}: another process works there; wait for it, or give another --work"
    with lock_folder(folder / _LOCK_NAME, busy=busy):
        waiting = [job for job in jobs if not (folder / job.name / RESULT_NAME).exists()]
        running: list[tuple[Job, subprocess.Popen[bytes], float]] = []
        if len(waiting) < len(jobs):
            say("paper", f"{len(jobs) - len(waiting)} of {len(jobs)} jobs are done already")
        left = len(waiting)
        try:
            while waiting or running:
                while waiting and len(running) < at_once:
                    job = waiting.pop(0)
                    running.append((job, _start(job, folder), time.perf_counter()))
                ended = [each for each in running if each[1].poll() is not None]
                for each in ended:
                    job, process, since = each
                    _finish(job, folder, process.returncode)
                    running.remove(each)
                    left -= 1
                    say("paper", f"{job.name}: {time.perf_counter() - since:.0f} s, {left} left")
                time.sleep(0 if ended else _PAUSE)
        finally:
            for _, process, _ in running:
                process.terminate()
            for _, process, _ in running:
                process.wait()
    return {job.name: _read_json(folder / job.name / RESULT_NAME) for job in jobs}


def _start(job: Job, folder: Path) -> subprocess.Popen[bytes]:
    """Start a job; what it says goes into a file beside its folder."""
    own = folder / job.name
    own.mkdir(exist_ok=True)
    _wait_for(own)
    with _said(job, folder).open("wb") as said:
        return subprocess.Popen(
            [sys.executable, "-m", *job.arguments],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
        )


def _wait_for(own: Path) -> None:
    """Wait until no process of a command that was killed trains in a job's folder any more."""
    told = False
    while True:
        try:
            lock_folder(own / _LOCK_NAME, busy="").close()
        except ValueError:
            if not told:
                say("paper", f"{own.name}: its process outlived the command before; waiting for it")
            told = True
            time.sleep(_PAUSE)
        else:
            return


def _finish(job: Job, folder: Path, status: int) -> None:
    """Keep the result of a process that has ended."""
    own, said = folder / job.name, _said(job, folder)
    lines = said.read_text(errors="replace").strip().splitlines()
    line = "" if not status else lines[-1] if lines else f"exit status {status}"
    try:
        result = job.collect(own, line)
    except ValueError as error:
        raise ValueError(f"{own}: {error}; all it said is in {said}") from error
    commit_bytes(own / RESULT_NAME, (json.dumps(plain(result), indent=1, allow_nan=False) + "\n").encode())


def _said(job: Job, folder: Path) -> Path:
    return folder / f"{job.name}.log"


def _read_json(path: Path) -> Result:
    try:
        read: Result = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error}); remove it, it is made again") from None
    return read
