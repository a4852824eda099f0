"""What becomes of the first rank when another one that it started ends.

Lightning's launcher kills the first rank as soon as another one has ended with anything but 0: also one that was told to
stop, as this one was, while it still closes its loggers.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from typing import Any, cast

from lightning_fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
from pytorch_lightning.strategies.launchers import subprocess_script

from protperf.checkpoint.stopping import TRY_AGAIN

GRACE_SECONDS = 60
"""How long the first rank may take to end by itself, with a line that says why, when another one has failed."""

_TOLD_TO_STOP = (TRY_AGAIN, 128 + signal.SIGINT)


class PatientObserver(_ChildProcessObserver):
    """Leaves a rank that was told to stop alone, and gives it time when another one has failed."""

    def _terminate_all(self) -> None:
        codes = {process.returncode for process in self._child_processes}
        if codes <= {0, None, *_TOLD_TO_STOP}:
            return
        time.sleep(GRACE_SECONDS)  # the thread ends with the process
        super()._terminate_all()


def be_patient() -> None:
    """Let Lightning's launcher watch its ranks in this way."""

    def observe(processes: list[subprocess.Popen[bytes]]) -> None:
        PatientObserver(child_processes=processes, main_pid=os.getpid()).start()

    cast(Any, subprocess_script)._launch_process_observer = observe
