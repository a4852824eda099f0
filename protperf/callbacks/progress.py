"""A bar for people at a terminal; a log has its lines."""

from __future__ import annotations

import logging
import sys
from contextlib import ExitStack
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import Callback
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm


class Progress(Callback):
    """Shows steps, speed and the time that is left, below the log, where stderr is a terminal."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._shown = ExitStack()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin where the run goes on."""
        if not trainer.is_global_zero or not sys.stderr.isatty():
            return
        bar = tqdm(
            total=trainer.max_steps,
            initial=trainer.global_step,
            unit="step",
            desc="training",
            dynamic_ncols=True,
        )
        self._bar = self._shown.enter_context(bar)
        loggers = [logging.root, logging.getLogger("protperf")]
        self._shown.enter_context(logging_redirect_tqdm([each for each in loggers if each.handlers]))

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Move on."""
        if self._bar is not None:
            self._bar.update(trainer.global_step - self._bar.n)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Leave the terminal tidy, whatever happened."""
        self._shown.close()
        self._bar = None
