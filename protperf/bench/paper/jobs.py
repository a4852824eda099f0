"""Named pieces of work, each a process of its own and some at once; what one leaves is kept, so that nothing is done twice."""

from __future__ import annotations

import json
import multiprocessing
import os
import runpy
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from protperf.bench.report import plain, say
from protperf.formats.commit import commit_bytes, lock_folder

RESULT_NAME = "result.json"
RETURNED_NAME = "returned.json"
SETTINGS_NAME = "settings.json"

Result = dict[str, Any]

_PRELOADED = ["protperf.train", "protperf.bench.paper.tuning"]
"""What takes a process most of its start: the server of processes imports it once, and each job is forked from there."""
_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(_PRELOADED)

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


def call_job(name: str, folder: Path, function: Callable[..., Result], **arguments: object) -> Job:
    """Return a call of a function of this package, with plain values, in a process of its own.

    Args:
        name: of the job.
        folder: of the experiment.
        function: public, in a module of this package; returns what JSON holds.
        arguments: of the function.
    """
    out = folder / name / RETURNED_NAME
    command = (function.__module__, function.__name__, json.dumps(arguments), str(out))
    return Job(name, ("protperf.bench.paper.call", *command), lambda own, failure: _returned(out, failure))


def _returned(out: Path, failure: str) -> Result:
    if failure:
        raise ValueError(failure)
    return _read_json(out)


def claim(folder: Path, settings: Mapping[str, Any]) -> None:
    """Begin an experiment in a folder, or go on with one of which something was done under the same settings.

    Args:
        folder: of the experiment; made if need be.
        settings: all that changes a job's result and is not in its name.

    Raises:
        ValueError: it was begun under other settings, or holds something else.
    """
    path = folder / SETTINGS_NAME
    asked = json.loads(json.dumps(plain(dict(settings))))
    there = {each.name for each in folder.iterdir()} if folder.exists() else set()
    if there <= {
        SETTINGS_NAME,
        _LOCK_NAME,
    }:  # options that were refused once must not bind those that mend them
        path.unlink(missing_ok=True)
    elif SETTINGS_NAME not in there:
        raise ValueError(f"{folder}: holds something else, without {SETTINGS_NAME}; give another --work")
    if not path.exists():
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
        running: list[tuple[Job, BaseProcess, float]] = []
        if len(waiting) < len(jobs):
            say("paper", f"{len(jobs) - len(waiting)} of {len(jobs)} jobs are done already")
        left = len(waiting)
        try:
            while waiting or running:
                while waiting and len(running) < at_once:
                    job = waiting.pop(0)
                    running.append((job, _start(job, folder), time.perf_counter()))
                ended = [each for each in running if each[1].exitcode is not None]
                for each in ended:
                    job, process, since = each
                    _finish(job, folder, process.exitcode or 0)
                    running.remove(each)
                    left -= 1
                    say("paper", f"{job.name}: {time.perf_counter() - since:.0f} s, {left} left")
                time.sleep(0 if ended else _PAUSE)
        finally:
            for _, process, _ in running:
                process.terminate()
            for _, process, _ in running:
                process.join()
    return {job.name: _read_json(folder / job.name / RESULT_NAME) for job in jobs}


def _start(job: Job, folder: Path) -> BaseProcess:
    """Start a job; what it says goes into a file beside its folder."""
    own = folder / job.name
    own.mkdir(exist_ok=True)
    _wait_for(own)
    process = _SERVER.Process(target=_become, args=(job.arguments, str(_said(job, folder))), name=job.name)
    process.start()
    return process


def _become(arguments: tuple[str, ...], said: str) -> None:
    """Run a module as `python -m` does, with one thread, in this new process."""
    import torch

    threading.Thread(target=_follow_parent, daemon=True).start()
    torch.set_num_threads(1)
    descriptor = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(descriptor, stream.fileno())
    module, *sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _follow_parent() -> None:
    """Tell this process to stop once the command has ended that started it: a kill reaches the command alone."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)


def _wait_for(own: Path) -> None:
    """Wait until no process of a command that was killed trains in a job's folder: it saves before it stops."""
    told = False
    while True:
        try:
            lock_folder(own / _LOCK_NAME, busy="").close()
        except ValueError:
            if not told:
                say("paper", f"{own.name}: another process trains there still; waiting for it")
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
