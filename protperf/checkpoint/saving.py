"""The callback that writes checkpoints."""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback

from protperf.checkpoint.files import BEST_NAME, ENTRY, read_checkpoint, step_checkpoints, step_name
from protperf.formats.commit import commit_file

log = logging.getLogger("protperf")

TRY_AGAIN = 75
"""Exit status of a run that was told to stop and goes on when started again (EX_TEMPFAIL of sysexits.h)."""

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class Checkpoints(Callback):
    """Writes `step=N.ckpt` every so many optimizer steps and `best.ckpt` after each better validation.

    A file gets its name when it is complete. Stands last among the callbacks, so that it saves their new states.

    SIGTERM, SIGUSR1 or Ctrl-C on any rank ends the run after the optimizer step in progress, with a checkpoint and the
    exit status `TRY_AGAIN` (130 after Ctrl-C); a second Ctrl-C ends it at once.

    Args:
        folder: where checkpoints go.
        every: optimizer steps between two.
        keep: how many of the latest stay.
        description: from `describe`.
        results: what the latest validation gave, by name.
        monitor: the name of the result that is best when lowest.
    """

    def __init__(
        self,
        folder: Path,
        *,
        every: int,
        keep: int,
        description: dict[str, Any],
        results: Mapping[str, float],
        monitor: str,
    ) -> None:
        self._folder = folder
        self._every = every
        self._keep = keep
        self._description = description
        self._results = results
        self._monitor = monitor
        self._best = math.inf
        self._last_step = -1
        self._signal: int | None = None
        self._handlers: dict[int, Any] = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take the step begun from as saved: inside its accumulation window there is nothing whole to save."""
        self._last_step = trainer.global_step
        if threading.current_thread() is threading.main_thread():
            self._handlers = {
                number: signal.signal(number, self._note(os.getpid())) for number in _STOP_SIGNALS
            }

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Give the signals back."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save after a full interval and after the last step."""
        step = trainer.global_step
        if step == self._last_step:
            return
        stop = trainer.strategy.reduce_boolean_decision(self._signal is not None, all=False)
        self._last_step = step
        if not stop and step % self._every and step != trainer.max_steps:
            return
        _check_finite(pl_module, step)
        self._save(trainer, self._folder / step_name(step))
        if trainer.is_global_zero:
            for old in step_checkpoints(self._folder)[: -self._keep]:
                old.unlink()
        if stop:
            self._end(trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save if validation went better than ever."""
        loss = self._results[self._monitor]
        if loss < self._best:
            self._best = loss
            self._save(trainer, self._folder / BEST_NAME)

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Say in the checkpoint what model it holds."""
        checkpoint[ENTRY] = self._description

    def state_dict(self) -> dict[str, Any]:
        """Return the best loss so far."""
        return {"best": self._best}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the best loss so far: `best.ckpt` may be younger than the checkpoint gone on from."""
        self._best = state_dict["best"]
        if (self._folder / BEST_NAME).is_file():
            callbacks = read_checkpoint(self._folder / BEST_NAME)["callbacks"]
            self._best = min(self._best, callbacks[self.state_key]["best"])

    def _note(self, pid: int) -> Callable[[int, FrameType | None], None]:
        """Return a handler that only notes a signal; processes forked from this one ignore theirs."""

        def handle(number: int, frame: FrameType | None) -> None:
            if os.getpid() != pid:
                return
            if self._signal == number == signal.SIGINT:
                raise KeyboardInterrupt
            self._signal = number

        return handle

    def _end(self, trainer: pl.Trainer) -> None:
        """End the process; its state is saved."""
        if trainer.is_global_zero:
            name = signal.Signals(self._signal).name if self._signal else "another rank"
            log.info(
                "stopped by %s after step %s; the same command goes on", name, f"{trainer.global_step:,}"
            )
        raise SystemExit(128 + signal.SIGINT if self._signal == signal.SIGINT else TRY_AGAIN)

    def _save(self, trainer: pl.Trainer, path: Path) -> None:
        partial = path.with_name(path.name + ".partial")
        try:
            trainer.save_checkpoint(partial)
            if trainer.is_global_zero:
                commit_file(partial, path)
        except OSError as error:
            partial.unlink(missing_ok=True)
            number = error.errno or 0
            raise OSError(number, os.strerror(number), str(path)) from error


def _check_finite(pl_module: pl.LightningModule, step: int) -> None:
    """Keep diverged weights out of the checkpoints, so that there is a sound one to go on from."""
    if not torch.nn.utils.get_total_norm(pl_module.parameters()).isfinite():
        raise ValueError(
            f"the weights have diverged at step {step} and are not saved: lower optim.learning_rate or raise "
            "optim.warmup_steps, and start again from the last checkpoint or under another name"
        )
