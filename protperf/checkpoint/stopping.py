"""A run that is told to stop: signals are noted, and answered where all ranks stand at the same place."""

from __future__ import annotations

import logging
import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import distributed

log = logging.getLogger("protperf")

TRY_AGAIN = 75
"""Exit status of a run that was told to stop and goes on when started again (EX_TEMPFAIL of sysexits.h)."""

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class StopRequest:
    """Notes SIGTERM, SIGUSR1 and Ctrl-C while it is entered; a second Ctrl-C ends the process at once.

    A handler only notes the signal: whatever the process does then, a collective operation of its own would disturb.
    Processes forked from this one ignore the signals.

    Attributes:
        is_forced: whether the process was told to end at once.
    """

    def __init__(self) -> None:
        self.is_forced = False
        self._signal: int | None = None
        self._handlers: dict[int, Any] = {}
        self._group: Any = None
        self._flag = torch.zeros(1)
        self._asked: Any = None

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            handle = self._handler(os.getpid())
            self._handlers = {number: signal.signal(number, handle) for number in STOP_SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}

    def agreed(self, *, at_once: bool = False) -> bool:
        """Tell whether any rank was told to stop; all ranks must ask at the same place.

        Ranks speak over gloo, on the CPU: a GPU never waits for the answer. Nor does anybody else: what is told is what was
        asked the time before, whose answer had a whole step to come.

        Args:
            at_once: wait for the answer of this time.
        """
        if not (distributed.is_available() and distributed.is_initialized()):
            return self._signal is not None
        if self._group is None:
            is_gloo = distributed.get_backend() == "gloo"
            self._group = distributed.group.WORLD if is_gloo else distributed.new_group(backend="gloo")
        before = self._answer()
        self._flag = torch.tensor([self._signal or 0])
        self._asked = distributed.all_reduce(
            self._flag, distributed.ReduceOp.MAX, group=self._group, async_op=True
        )
        return before or (at_once and self._answer())

    def settle(self) -> None:
        """Wait for what is asked: a process that leaves an operation of the group open is aborted at its end."""
        self._answer()

    def _answer(self) -> bool:
        """Wait for what was asked, if anything was."""
        if self._asked is None:
            return False
        self._asked.wait()
        self._asked = None
        return bool(self._flag)

    def end(self, *, step: int, is_first_rank: bool, is_saved: bool = True) -> None:
        """End the process.

        Args:
            step: that it stopped after.
            is_first_rank: which is the one to say so.
            is_saved: whether the step has a checkpoint.
        """
        self.settle()
        if is_first_rank:
            name = signal.Signals(self._signal).name if self._signal else "another rank"
            rest = "" if is_saved else " from the checkpoint before, for this step has none"
            log.info("stopped by %s after step %s; the same command goes on%s", name, f"{step:,}", rest)
        raise SystemExit(128 + signal.SIGINT if self._signal == signal.SIGINT else TRY_AGAIN)

    def _handler(self, pid: int) -> Any:
        def handle(number: int, frame: FrameType | None) -> None:
            if os.getpid() != pid:
                return
            if self._signal == number == signal.SIGINT:
                self.is_forced = True
                raise KeyboardInterrupt
            self._signal = number

        return handle
