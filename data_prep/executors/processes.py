"""Tasks in this process or in processes beside it."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from types import TracebackType
from typing import Any

from data_prep.executors.runner import ExecutorOptions, TaskRunner, attempt, fail


class InProcess(TaskRunner):
    """Runs each task when its result is asked for, in this process: no memory for a second interpreter."""

    workers = 1

    def _submit(self, name: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Future[Any]:
        """Run the task now."""
        future: Future[Any] = Future()
        future.set_result(function(*arguments))
        return future

    def __enter__(self) -> InProcess:
        """Need nothing."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave nothing."""


class Processes(TaskRunner):
    """A thread for each worker process: it hands over tasks, and puts a new process in the place of a dead one.

    `ProcessPoolExecutor` breaks as a whole when a worker dies and cannot tell which task did it; here the others work
    on, and the task is known. Workers are forked from a server process that has imported the tasks' module: they start
    at once, share its memory, and hold no thread, lock or file of this process.
    """

    def __init__(self, options: ExecutorOptions) -> None:
        self._options = options
        self._context = multiprocessing.get_context("forkserver")
        self._threads = ThreadPoolExecutor(options.workers, "tasks")
        self._here = threading.local()
        self._lock = threading.Lock()
        self._all: list[_Worker] = []
        self._closed = False

    @property
    def workers(self) -> int:
        """Return the number of processes, also of those that have not been needed yet."""
        return self._options.workers

    def _submit(self, name: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Future[Any]:
        """Queue the task for the next free thread."""
        return self._threads.submit(self._carry_out, name, function, pickle.dumps((function, arguments)))

    def _carry_out(self, name: str, function: Callable[..., Any], task: bytes) -> Any:
        """Have this thread's worker run a task, and new workers if it dies."""
        for _ in range(self._options.retries + 1):
            worker = self._worker(function.__module__)
            try:
                return worker.ask(task)
            except (EOFError, OSError):
                status = self._bury(worker)
        raise ChildProcessError(_explain_deaths(name, self._options.retries + 1, status))

    def _worker(self, module: str) -> _Worker:
        """Return this thread's worker; make it if there is none that lives."""
        worker: _Worker | None = getattr(self._here, "worker", None)
        if worker is not None and worker.process.is_alive():
            return worker
        if worker in self._all:  # died with nothing to do
            self._bury(worker)
        with self._lock:
            if self._closed:
                raise CancelledError
            if module != "__main__":
                self._context.set_forkserver_preload([module])
            self._here.worker = _Worker(self._context)
            self._all.append(self._here.worker)
        return self._here.worker

    def _bury(self, worker: _Worker) -> int | None:
        """Forget a dead worker of this thread; return its exit status."""
        status = worker.bury()
        with self._lock:
            self._all.remove(worker)
        return status

    def __enter__(self) -> Processes:
        """Start nothing: workers come with the first tasks."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Kill the workers; whatever they were writing has a temporary name."""
        with self._lock:
            self._closed = True
            for worker in self._all:
                if worker.process.is_alive():
                    worker.process.kill()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for worker in self._all:
            worker.bury()


class _Worker:
    """A process that runs one task after the other, and the pipe to it."""

    def __init__(self, context: ForkServerContext) -> None:
        self._pipe, far_end = context.Pipe()
        self.process = context.Process(target=_serve, args=(far_end,), daemon=True)
        self.process.start()
        far_end.close()  # the worker's copy is the only one: its death ends the pipe

    def ask(self, task: bytes) -> Any:
        """Return the outcome of a pickled task.

        Raises:
            EOFError, OSError: the process is dead.
        """
        self._pipe.send_bytes(task)
        return pickle.loads(self._pipe.recv_bytes())

    def bury(self) -> int | None:
        """Return the exit status of a process that is dead or about to die."""
        self.process.join()
        self._pipe.close()
        return self.process.exitcode


def _serve(pipe: Connection) -> None:
    """Run the tasks that arrive until the pipe ends: the life of a worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with suppress(EOFError, ConnectionError):
        while True:
            pipe.send_bytes(_attempt_pickled(pipe.recv_bytes()))


def _attempt_pickled(task: bytes) -> bytes:
    """Return a task's outcome, pickled; what does not pickle is a `Failure` of the task."""
    try:
        return pickle.dumps(attempt(*pickle.loads(task)))
    except Exception as error:
        return pickle.dumps(fail(error))


def _end_with_parent() -> None:
    """End this worker, also in the middle of a task, as soon as the process that started it is dead."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _explain_deaths(name: str, times: int, status: int | None) -> str:
    """Return the line for a task whose workers die."""
    how = f"killed by {signal.Signals(-status).name}" if status and status < 0 else f"ended, status {status}"
    cause = "there was too little memory, most likely: lower --memory or --workers"
    if status != -signal.SIGKILL:
        cause = "what it printed may say why"
    return f"{name}: its worker process was {how}, {times} times; {cause}; then run the same command again"
