"""A run that no longer gets better ends."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import Callback

log = logging.getLogger("protperf")


class EarlyStop(Callback):
    """Ends training after so many validations in a row without a better loss; started again, it stays ended.

    Results are sums over all ranks, so all of them decide the same.

    Args:
        results: what the latest validation gave, by name.
        monitor: the name of the result that is best when lowest.
        patience: validations without a better one; 0 never ends.
    """

    def __init__(self, results: Mapping[str, float], *, monitor: str, patience: int) -> None:
        self._results = results
        self._monitor = monitor
        self._patience = patience
        self._best = math.inf
        self._waited = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stay ended."""
        self._decide(trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Count a validation."""
        loss = self._results[self._monitor]
        self._waited = 0 if loss < self._best else self._waited + 1
        self._best = min(self._best, loss)
        self._decide(trainer)

    def state_dict(self) -> dict[str, Any]:
        """Return the best loss, and the validations since."""
        return {"best": self._best, "waited": self._waited}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on counting."""
        self._best, self._waited = state_dict["best"], state_dict["waited"]

    def _decide(self, trainer: pl.Trainer) -> None:
        if not self._patience or self._waited < self._patience:
            return
        trainer.should_stop = True
        if trainer.is_global_zero:
            log.info(
                "stopping at step %s: no better %s than %.4f in %d validations; trainer.early_stop_after=0 trains on",
                f"{trainer.global_step:,}",
                self._monitor,
                self._best,
                self._waited,
            )
