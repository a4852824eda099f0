"""Run many tasks in this process, in processes beside it, on a dask cluster or in SLURM jobs: one interface for all.

A task is a function of an importable module with small arguments and a small result that pickle; files travel as
absolute paths. It is idempotent, because it runs again where its worker died.
"""

from __future__ import annotations

from collections.abc import Callable

from data_prep.executors.clusters import DaskRunner, SlurmRunner
from data_prep.executors.processes import InProcess, Processes
from data_prep.executors.runner import ExecutorOptions, TaskRunner

__all__ = ["ExecutorOptions", "TaskRunner", "make_runner"]


def make_runner(options: ExecutorOptions, *, say: Callable[[str], None] = lambda line: None) -> TaskRunner:
    """Return the runner that `options` ask for; `say` takes lines of log.

    Raises:
        ValueError: a package is missing.
    """
    if options.kind == "processes":
        return InProcess() if options.workers == 1 else Processes(options)
    return DaskRunner(options) if options.kind == "dask" else SlurmRunner(options, say)
