"""Commands in processes of their own, without the seconds in which each would import torch and Lightning.

A process that has imported what others wrote, and nothing of protperf, forks for each command. What it starts has the
folder, variables, arguments and open files that it was asked for, a pid, signals and an exit status of its own, and is
a child of the process that runs the tests. As a program, `warm.py DESCRIPTOR` takes requests at an open socket.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib
import json
import os
import runpy
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

IMPORTED = ("h5py", "hydra", "matplotlib", "pytorch_lightning", "torch", "torchmetrics", "tqdm", "wandb")
"""What it takes commands seconds to import."""

LARGEST_REQUEST = 1 << 17
PR_SET_CHILD_SUBREAPER = 36
"""Linux: from now on, processes below this one whose parent has ended become its children."""


class WarmProcess(subprocess.Popen[Any]):
    """`Popen` of `[sys.executable, "-m", module, ...]`, forked from a process that is warm; on Linux alone.

    Of `Popen`'s options it knows `cwd`, `env` and those of streams. The variables may not be others than those of `server`
    where they are read by Python as it starts or by packages as they are imported.
    """

    def _execute_child(self, args: list[str], executable: None, *rest: Any) -> None:
        cwd, environment, pipes = rest[3], rest[4], rest[8:14]
        files = [own if given == -1 else given for own, given in enumerate((pipes[0], pipes[3], pipes[5]))]
        request = {"command": args, "cwd": os.fspath(cwd or os.getcwd()), "environment": environment}
        requests = server()
        with adopting():
            socket.send_fds(requests, [json.dumps(request).encode()], files)
            self.pid = int(requests.recv(LARGEST_REQUEST))
        self._child_created = True
        self._close_pipe_fds(*pipes)


@contextmanager
def adopting() -> Iterator[None]:
    """Make this process the parent of what a process below it starts and leaves."""
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, 0)


@cache
def server() -> socket.socket:
    """Start the process that forks; return the socket at which it takes requests."""
    from training import clean_environment, scratch_dir

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())],
            env=clean_environment(scratch_dir()),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )

    @atexit.register
    def end() -> None:
        ours.close()
        process.kill()
        process.wait()

    return ours


def main() -> None:
    """Import; then fork for each request. What was forked does not go on here: it runs what it was asked for."""
    requests = socket.socket(fileno=int(sys.argv[1]))
    for name in IMPORTED:
        importlib.import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1, "whoever forks must have a single thread"
    assert open_files() == {0, 1, 2, requests.fileno()}, (
        "what was imported must hold no file open that a fork would inherit"
    )
    while True:
        message, files, _, _ = socket.recv_fds(requests, LARGEST_REQUEST, 3)
        if not message:
            return
        if between := os.fork():
            os.waitpid(between, 0)
            for file in files:
                os.close(file)
            continue
        between = os.getpid()
        if os.fork():
            os._exit(0)  # so that the process that runs the tests becomes the other one's parent
        while os.getppid() == between:
            time.sleep(0.001)
        requests.send(str(os.getpid()).encode())
        requests.close()  # not by its number: an object that believes it open would close another's file in the end
        become(files, **json.loads(message))
        return


def open_files() -> set[int]:
    """Return the numbers of the files that this process has open."""
    return {
        int(number) for number in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{number}")
    }


def become(files: list[int], *, command: list[str], cwd: str, environment: dict[str, str]) -> None:
    """Take over folder, variables and files, and run the module as Python would."""
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    sys.stdout.reconfigure(line_buffering=os.isatty(1))
    sys.orig_argv = command
    _, _, module, *arguments = command
    sys.argv = [module, *arguments]
    sys.path[0] = cwd
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
