"""What a process that reads data does about signals."""

from __future__ import annotations

import os
import signal
import threading


def leave_signals_to_parent(number: int) -> None:
    """Let a worker outlive the signals that tell a run to stop: SLURM sends them to every process of a job.

    The training process stops after the step in progress, for which it may still need batches; it ends its workers then.
    SIGUSR2 is the signal of submitit, whose handler a forked worker would run a second time.

    Args:
        number: of the worker.
    """
    for stop in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT):
        signal.signal(stop, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):  # not on a Mac
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        threading.Thread(target=_end_when_parent_says, daemon=True).start()


def _end_when_parent_says() -> None:
    """Wait for a SIGTERM from the parent process; those from others are for it alone."""
    while signal.sigwaitinfo([signal.SIGTERM]).si_pid != os.getppid():
        pass
    os._exit(0)
