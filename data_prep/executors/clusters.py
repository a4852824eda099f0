"""Tasks on a running dask cluster, or on one of SLURM jobs that is made for them."""

from __future__ import annotations

import importlib
import math
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any
from weakref import WeakKeyDictionary

from data_prep.executors.runner import ExecutorOptions, TaskRunner, attempt
from protperf import __version__

_POLL_SECONDS = 10.0
"""How often a cluster is asked whether anybody is left who could finish a task."""


class DaskRunner(TaskRunner):
    """Runs tasks on the cluster of a dask scheduler."""

    _client: Any
    _executor: Executor

    def __init__(self, options: ExecutorOptions) -> None:
        _load_package("distributed", options)
        self._options = options
        self._stack = ExitStack()
        self._names: WeakKeyDictionary[Future[Any], str] = WeakKeyDictionary()
        self._worker_seen = time.monotonic()

    @property
    def workers(self) -> int:
        """Return the number of threads of all workers that are there now, or the number asked for if greater."""
        return max(self._options.workers, self._num_threads())

    def _num_threads(self) -> int:
        """Return how many threads the workers have that are there now."""
        try:
            return int(sum(self._client.nthreads().values()))
        except (OSError, RuntimeError) as error:
            raise self._scheduler_is_gone() from error

    def _submit(self, name: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Future[Any]:
        """Send the task to the scheduler."""
        future = self._executor.submit(_attempt_remotely, __version__, function, arguments)
        self._names[future] = name
        return future

    def _finished(self, pending: Iterable[Future[Any]], *, at_once: bool) -> set[Future[Any]]:
        """Return the finished futures; a cluster that cannot finish any is an error, not an endless wait."""
        while True:
            done = wait(pending, 0 if at_once else _POLL_SECONDS, FIRST_COMPLETED).done
            for future in done:
                self._check(future)
            if done or at_once:
                return done
            self._check_workers()

    def _check(self, future: Future[Any]) -> None:
        """Raise one clear line where dask itself could not run a task."""
        from distributed import KilledWorker

        if future.cancelled():
            raise self._scheduler_is_gone()
        error = future.exception()
        if isinstance(error, KilledWorker):
            raise ChildProcessError(
                f"{self._names[future]}, or a task beside it: workers died {error.allowed_failures + 1} times, the last at "
                f"{error.last_worker.address}; they had too little memory (lower --memory or give each more) or "
                f"lack protperf {__version__} as it is installed here; then run the same command again"
            ) from error
        if isinstance(error, RuntimeError) and isinstance(error.__cause__, ImportError):
            raise ConnectionError(
                f"{self._place}: its workers cannot load the tasks ({error.__cause__}); "
                f"they need protperf {__version__} as it is installed here"
            ) from error

    def _check_workers(self) -> None:
        """Raise if there has been nobody for a long time who could finish a task."""
        seconds = self._options.lost_seconds
        if self._num_threads() or self._some_will_come():
            self._worker_seen = time.monotonic()
        elif time.monotonic() - self._worker_seen > seconds:
            if self._replace_workers():
                self._worker_seen = time.monotonic()
                return
            raise ConnectionError(f"{self._place}: no worker for {seconds:g} s; {self._advice}")

    def _some_will_come(self) -> bool:
        """Say whether workers are on their way."""
        return False

    def _replace_workers(self) -> bool:
        """Ask for new workers in the place of those that are gone; say whether that could be done."""
        return False

    @property
    def _advice(self) -> str:
        """Return what to do when no worker is left."""
        return "start some with `dask worker` and run the same command again"

    @property
    def _place(self) -> str:
        """Return what the user calls this cluster."""
        return f"--scheduler {self._options.scheduler}"

    def _scheduler_is_gone(self) -> ConnectionError:
        """Return the error for a scheduler that answers no more."""
        return ConnectionError(
            f"{self._place}: the dask scheduler answers no more; run the same command again"
        )

    def __enter__(self) -> TaskRunner:
        """Connect."""
        with ExitStack() as stack:
            self._client = self._connect(stack)
            self._executor = self._client.get_executor(retries=self._options.retries, pure=False)
            self._worker_seen = time.monotonic()
            self._stack = stack.pop_all()
        return self

    def _connect(self, stack: ExitStack) -> Any:
        """Return a client of the scheduler once that has a worker; wait for both within bounds."""
        seconds = self._options.start_seconds
        try:
            client = stack.enter_context(_find_scheduler(self._options.scheduler, seconds))
            client.wait_for_workers(1, timeout=seconds)
        except (OSError, ValueError, RuntimeError, TimeoutError) as error:
            raise ConnectionError(
                f"{self._place}: no dask scheduler with a worker answered within {seconds:g} s; start `dask scheduler` "
                f"and `dask worker`, or raise the time ({' '.join(str(error).split())})"
            ) from error
        return client

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Disconnect."""
        self._stack.close()


class SlurmRunner(DaskRunner):
    """Runs tasks in SLURM jobs: dask workers of a scheduler that lives in this process."""

    _cluster: Any

    def __init__(self, options: ExecutorOptions, say: Callable[[str], None]) -> None:
        super().__init__(options)
        _load_package("dask_jobqueue", options)
        self._say = say
        self._submitted_again = 0

    @property
    def job_script(self) -> str:
        """Return the script that each job is submitted with."""
        return str(self._cluster.job_script())

    @property
    def _place(self) -> str:
        """Return what the user calls this cluster."""
        return "--executor slurm"

    def _connect(self, stack: ExitStack) -> Any:
        """Submit the jobs; return a client of their scheduler without waiting, since a queue may take hours."""
        from distributed import Client

        self._cluster = stack.enter_context(_make_slurm_cluster(self._options))
        _try_script(self.job_script)
        self._submit_jobs()
        return stack.enter_context(Client(self._cluster))

    def _some_will_come(self) -> bool:
        """Say whether one of the jobs waits in the queue, which may take hours, or has just started."""
        jobs = ",".join(str(job.job_id) for job in self._cluster.workers.values() if job.job_id)
        queue = subprocess.run(["squeue", "--noheader", "--jobs", jobs], capture_output=True, check=False)
        return bool(jobs and queue.returncode == 0 and queue.stdout.strip())

    def _submit_jobs(self) -> None:
        num_jobs = math.ceil(self._options.workers / self._options.workers_per_job)
        self._cluster.scale(jobs=num_jobs)
        self._say(
            f"{num_jobs} SLURM job{'s' * (num_jobs != 1)} submitted; tasks start with the first of them"
        )

    def _replace_workers(self) -> bool:
        """Submit the jobs again: those that were there have come to the end of their time, or were cancelled."""
        if self._submitted_again >= self._options.retries:
            return False
        self._submitted_again += 1
        self._cluster.scale(jobs=0)
        self._submit_jobs()
        return True

    @property
    def _advice(self) -> str:
        """Return what to do when no worker is left."""
        return (
            f"the SLURM jobs have ended with tasks left (each had {self._options.walltime}): give them more time, "
            "or more of them, and run the same command again"
        )


def _load_package(name: str, options: ExecutorOptions) -> None:
    """Import a package that not everybody has.

    Raises:
        ValueError: it is missing.
    """
    ours = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        importlib.import_module(name)
    except ImportError as error:
        raise ValueError(
            f"--executor {options.kind}: package {error.name} is missing; pip install 'protperf[cluster]'"
        ) from error
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in ours.items():  # dask_jobqueue makes Ctrl-C end with status 0
                signal.signal(number, handler)


def _attempt_remotely(version: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Run a task on a cluster; errors of files and networks go to dask, which tries again, others are outcomes."""
    if version != __version__:
        return attempt(_refuse_version, (version, socket.gethostname()))
    return attempt(function, arguments, leave=OSError)


def _refuse_version(version: str, host: str) -> None:
    """Raise, since another version may write other bytes."""
    raise ConnectionError(
        f"the dask worker on {host} has protperf {__version__}, this command is {version}; give the workers the same"
    )


def _find_scheduler(scheduler: str, seconds: float) -> Any:
    """Return a client of the scheduler at an address or in a file, which may still be about to appear."""
    from distributed import Client

    if ":" in scheduler and not Path(scheduler).exists():
        return Client(scheduler, timeout=seconds)
    end = time.monotonic() + seconds
    while not Path(scheduler).is_file():
        if time.monotonic() > end:
            raise FileNotFoundError("no such file, and no address such as tcp://HOST:8786")
        time.sleep(0.2)
    return Client(scheduler_file=scheduler, timeout=seconds)


def _make_slurm_cluster(options: ExecutorOptions) -> Any:
    """Return a scheduler in this process and the description of its jobs; nothing is submitted yet."""
    from dask import config
    from dask.utils import parse_bytes
    from dask_jobqueue import SLURMCluster

    job_memory = parse_bytes(options.worker_memory) * options.workers_per_job
    given: dict[str, Any] = {
        "queue": options.partition,
        "account": options.account,
        "interface": options.interface,
        "job_extra_directives": list(options.directives),
        "log_directory": options.log_dir,
    }
    with config.set({"distributed.scheduler.allowed-failures": options.retries}):
        return SLURMCluster(
            cores=options.workers_per_job,
            processes=options.workers_per_job,
            memory=f"{job_memory}B",
            walltime=options.walltime,
            job_name="protperf",
            scheduler_options={"dashboard_address": ":0"},
            **{name: value for name, value in given.items() if value},
        )


def _try_script(script: str) -> None:
    """Ask SLURM whether it would take a job, since dask-jobqueue hides its answer.

    Raises:
        ValueError: it would not, or there is no SLURM here.
    """
    with tempfile.NamedTemporaryFile("w", suffix=".sh") as file:
        file.write(script)
        file.flush()
        try:
            answer = subprocess.run(
                ["sbatch", "--test-only", file.name], capture_output=True, text=True, check=False
            )
        except FileNotFoundError:
            raise ValueError(
                "--executor slurm: no program `sbatch` here; run this where SLURM jobs are submitted"
            ) from None
    if answer.returncode:
        reason = " ".join(answer.stderr.split())
        raise ValueError(f"--executor slurm: SLURM would not take the jobs: {reason}")
