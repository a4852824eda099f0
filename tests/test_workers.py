"""Processes that read data outlive what tells the run to stop, and end when the run says so."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys

import pytest
from torch.utils.data import DataLoader

from protperf.data.workers import leave_signals_to_parent


@pytest.mark.skipif(sys.platform == "darwin", reason="no sigwaitinfo on a Mac")
def test_signals_of_others_leave_a_worker_reading_until_its_parent_ends_it():
    loader = DataLoader(range(1000), batch_size=None, num_workers=1, worker_init_fn=leave_signals_to_parent)
    items = iter(loader)
    assert next(items) == 0
    (worker,) = multiprocessing.active_children()
    for name in ("TERM", "USR1", "USR2", "INT"):
        subprocess.run(["kill", f"-{name}", str(worker.pid)], check=True)
    assert list(items) == list(range(1, 1000))

    items = iter(loader)
    assert next(items) == 0
    (worker,) = multiprocessing.active_children()
    worker.terminate()
    worker.join(10)
    assert worker.exitcode == 0
