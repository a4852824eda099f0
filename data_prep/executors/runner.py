"""What all who carry out tasks have in common: the loop that hands tasks over and takes results back."""

from __future__ import annotations

import pickle
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from types import TracebackType
from typing import Any

KINDS = ("processes", "dask", "slurm")


@dataclass(frozen=True)
class ExecutorOptions:
    """Who carries out the tasks; nothing here changes what they write.

    Attributes:
        kind: `processes` of this machine, a running `dask` cluster or new `slurm` jobs.
        workers: number of processes, for `slurm` in all jobs together; 1 of `processes` is this process itself.
        retries: how often a task runs again whose worker died, and for `slurm` how often jobs that have all ended are
            submitted again; a dask cluster has its own limit, `allowed-failures`.
        scheduler: for `dask`: the scheduler's address or its scheduler file.
        start_seconds: for `dask`: how long to wait for the scheduler and for its first worker.
        lost_seconds: for `dask` and `slurm`: how long to wait when all workers, or all jobs, are gone.
        partition: for `slurm`: the partition; empty here and below: what the site's dask configuration or SLURM says.
        account: for `slurm`: the account.
        walltime: for `slurm`: a job's time limit, as sbatch reads it.
        worker_memory: for `slurm`: memory of one worker, such as `4GiB`.
        workers_per_job: for `slurm`: workers in one job, one core each.
        interface: for `slurm`: the network interface between the nodes, such as `ib0`.
        directives: for `slurm`: more options of sbatch, such as `--qos=long`.
        log_dir: for `slurm`: folder of the jobs' output.
    """

    kind: str = "processes"
    workers: int = 1
    retries: int = 2
    scheduler: str = ""
    start_seconds: float = 60.0
    lost_seconds: float = 300.0
    partition: str = ""
    account: str = ""
    walltime: str = "04:00:00"
    worker_memory: str = "4GiB"
    workers_per_job: int = 1
    interface: str = ""
    directives: tuple[str, ...] = ()
    log_dir: str = ""

    def __post_init__(self) -> None:
        """Refuse values that cannot work."""
        if self.kind not in KINDS:
            raise ValueError(f"--executor {self.kind}: allowed: {' '.join(KINDS)}")
        for name in ("workers", "workers_per_job"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} {getattr(self, name)}: at least 1 is needed")
        if self.retries < 0:
            raise ValueError(f"--retries {self.retries}: 0 or more")
        if (self.kind == "dask") != bool(self.scheduler):
            raise ValueError(
                "--executor dask and --scheduler ADDRESS|FILE go together; "
                f"found --executor {self.kind} --scheduler {self.scheduler!r}"
            )


class TaskRunner(ABC):
    """Runs tasks; use it in a `with` block, whose end stops what still runs.

    Tasks that run on a dask cluster cannot be stopped: they end by themselves.
    """

    @property
    @abstractmethod
    def workers(self) -> int:
        """Return how many tasks may run at once."""

    @abstractmethod
    def _submit(self, name: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Future[Any]:
        """Hand one task over; its outcome is a result or a `Failure`."""

    def run(
        self, function: Callable[..., Any], arguments: Iterable[tuple[Any, ...]]
    ) -> Iterator[tuple[int, Any]]:
        """Yield (index, result) of `function(*arguments[index])` as the tasks finish, in any order.

        `arguments` is drawn from as workers come free: never more than twice as many tasks as there are workers are
        drawn and not yet yielded, so that a reader that makes the tasks' input stays a little ahead of them.

        Raises:
            Exception: what a task raised, at once; tasks that have not started are dropped.
            ChildProcessError: the workers of one task died again and again; the message names the task.
            ConnectionError: the cluster is gone.
        """
        source = iter(enumerate(arguments))
        pending: dict[Future[Any], int] = {}
        try:
            while True:
                room = len(pending) < 2 * self.workers
                drawn = next(source, None) if room else None
                if drawn is not None:
                    index, task = drawn
                    pending[self._submit(f"{function.__name__} number {index}", function, task)] = index
                elif not pending:
                    return
                for future in self._finished(pending, at_once=drawn is not None):
                    yield pending.pop(future), open_outcome(future.result())
        finally:
            for future in pending:
                future.cancel()

    def _finished(self, pending: Iterable[Future[Any]], *, at_once: bool) -> set[Future[Any]]:
        """Return the finished futures, after waiting for the first one unless `at_once`."""
        return wait(pending, timeout=0 if at_once else None, return_when=FIRST_COMPLETED).done

    @abstractmethod
    def __enter__(self) -> TaskRunner:
        """Get ready."""

    @abstractmethod
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop all workers that are ours."""


@dataclass(frozen=True)
class Failure:
    """What a task raised, and its traceback as text, which does not pickle otherwise."""

    error: Exception
    trace: str


class _WorkerTraceback(Exception):
    """The traceback of a worker, shown as the cause of its exception."""


def attempt(
    function: Callable[..., Any], arguments: tuple[Any, ...], *, leave: type[Exception] | tuple[()] = ()
) -> Any:
    """Run a task in a worker; return its result or its `Failure`, except for exceptions to `leave` as they are."""
    try:
        return function(*arguments)
    except leave:
        raise
    except Exception as error:
        return fail(error)


def fail(error: Exception) -> Failure:
    """Return an exception in a form that surely pickles."""
    trace = traceback.format_exc()
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        error = RuntimeError(f"{type(error).__name__}: {error}")
    return Failure(error, trace)


def open_outcome(outcome: Any) -> Any:
    """Return the result in an outcome or raise its exception."""
    if isinstance(outcome, Failure):
        raise outcome.error from _WorkerTraceback(f"in a worker:\n{outcome.trace}")
    return outcome
