"""The callback that writes checkpoints."""

from __future__ import annotations

import copy
import errno
import io
import logging
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import pytorch_lightning as pl
import torch
from lightning_fabric.plugins import TorchCheckpointIO
from pytorch_lightning.callbacks import Callback

from protperf.checkpoint.files import BEST_NAME, ENTRY, read_checkpoint, step_checkpoints, step_name, step_of
from protperf.checkpoint.stopping import StopRequest
from protperf.formats import FormatError
from protperf.formats.commit import FULL_DISK, commit_bytes
from protperf.optim import total_norm

log = logging.getLogger("protperf")

MAY_PASS = (*FULL_DISK, errno.EIO, errno.ESTALE)
"""Numbers of the errors with which a checkpoint is left out, and the next one tried."""


class Checkpoints(Callback):
    """Writes `step=N.ckpt` every so many optimizer steps and `best.ckpt` after each better validation.

    A file gets its name when it is complete. Where a step is validated too, it is saved after that, so that going on
    from it owes no validation. Stands last among the callbacks, so that it saves their new states.

    A run that is told to stop ends after the optimizer step in progress, or within the validation, with a checkpoint. The
    validation of the last step is finished whatever is asked: nothing else is left to do.

    Args:
        folder: where checkpoints go.
        every: optimizer steps between two.
        validate_every: optimizer steps between validations.
        keep: how many of the latest stay.
        description: from `describe`.
        results: what the latest validation gave, by name.
        monitor: the name of the result that is best when lowest.
        stop: whether the run is told to stop.
        diverged: makes the error to end with, of what is no longer finite and the step.
        saved: told of each file that was written, on the first rank, and whether it is the best one.
    """

    def __init__(
        self,
        folder: Path,
        *,
        every: int,
        validate_every: int,
        keep: int,
        description: dict[str, Any],
        results: Mapping[str, float],
        monitor: str,
        stop: StopRequest,
        diverged: Callable[..., ValueError],
        saved: Callable[[Path, bool], None],
    ) -> None:
        self._folder = folder
        self._every = every
        self._validate_every = validate_every
        self._keep = keep
        self._description = description
        self._results = results
        self._monitor = monitor
        self._stop = stop
        self._diverged = diverged
        self._saved = saved
        self._best = math.inf
        self._validated = 0
        self._loops: dict[str, Any] | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Validate the step begun from, if a stop came before its validation."""
        step = trainer.global_step
        first = trainer.strategy.broadcast(step)
        if not trainer.strategy.reduce_boolean_decision(step == first):
            raise ValueError(
                f"{self._folder}: ranks go on from different checkpoints (here step {step:,}, the first rank step "
                f"{first:,}); the folder must be the same one for all hosts, start again when it is"
            )
        if step and self._is_validated_at(trainer, step) and self._validated < step:
            if trainer.is_global_zero:
                log.info("validating step %s, which the start before did not come to", f"{step:,}")
            loop = trainer.fit_loop.epoch_loop.val_loop
            trainer.validating, loop.restarting = True, False
            loop.run()
            trainer.training = True

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save after a full interval and after the last step."""
        step = trainer.global_step
        stop = self._stop.agreed() and step != trainer.max_steps
        if self._is_validated_at(trainer, step):
            self._loops = copy.deepcopy(trainer.fit_loop.state_dict())
        elif not stop and self._is_due(trainer, step):
            self._save_step(trainer, pl_module)
        if stop:
            self._end(trainer, pl_module)

    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Do not let a long validation use up the time that a stop leaves."""
        if trainer.global_step != trainer.max_steps and self._stop.agreed():
            self._end(trainer, pl_module)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save if validation went better than ever, and if the step is due."""
        self._loops = None
        self._validated = step = trainer.global_step
        loss = self._results[self._monitor]
        if loss < self._best:
            before, self._best = self._best, loss
            if not self._save(trainer, self._folder / BEST_NAME):
                self._best = before  # the best that there is on the disk
        if self._is_due(trainer, step) or trainer.should_stop:
            self._save_step(trainer, pl_module)

    def on_test_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Stop in the test too, which the next start makes from its beginning."""
        if self._stop.agreed():
            self._stop.end(step=trainer.global_step, is_first_rank=trainer.is_global_zero)

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Say in the checkpoint what model it holds; one from within a validation goes on from before it."""
        checkpoint[ENTRY] = self._description
        if self._loops is not None:
            checkpoint["loops"]["fit_loop"] = self._loops

    def state_dict(self) -> dict[str, Any]:
        """Return the best loss so far, and the step of the latest validation."""
        return {"best": self._best, "validated": self._validated}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the best loss so far: `best.ckpt` may be younger than the checkpoint gone on from."""
        self._best = state_dict["best"]
        self._validated = state_dict["validated"]
        if not (self._folder / BEST_NAME).is_file():
            self._best = math.inf
            return
        try:
            callbacks = read_checkpoint(self._folder / BEST_NAME)["callbacks"]
            self._best = min(self._best, callbacks[self.state_key]["best"])
        except FormatError as error:
            log.warning("%s; the next validation writes a new one", error)
            self._best = math.inf

    def _is_due(self, trainer: pl.Trainer, step: int) -> bool:
        return step % self._every == 0 or step == trainer.max_steps

    def _is_validated_at(self, trainer: pl.Trainer, step: int) -> bool:
        return step % self._validate_every == 0 or step == trainer.max_steps

    def _end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save and end the process."""
        is_saved = self._save_step(trainer, pl_module)
        self._stop.end(step=trainer.global_step, is_first_rank=trainer.is_global_zero, is_saved=is_saved)

    def _save_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> bool:
        step = trainer.global_step
        if not math.isfinite(
            total_norm(pl_module.parameters())
        ):  # so that there is a sound one to go on from
            raise self._diverged(what="the weights have diverged", step=step)
        is_saved = self._save(trainer, self._folder / step_name(step))
        if trainer.is_global_zero and is_saved:
            known = [path for path in step_checkpoints(self._folder) if step_of(path) <= step]
            for old in known[: -self._keep]:  # a later one is damaged: this run went on from before it
                try:
                    old.unlink(missing_ok=True)
                except OSError as error:
                    log.warning("%s: %s; it stays", old, error.strerror or error)
        return is_saved

    def _save(self, trainer: pl.Trainer, path: Path) -> bool:
        """Write a checkpoint; where the disk is full, say so and train on: the ones before it are still there.

        Returns:
            whether it was written, the same on all ranks.
        """
        trainer.save_checkpoint(path)
        written = cast(CommittedFiles, trainer.strategy.checkpoint_io)
        error = trainer.strategy.broadcast(written.error)
        if error is None:
            if trainer.is_global_zero:
                self._saved(path, path.name == BEST_NAME)
            return True
        if error.errno not in MAY_PASS or trainer.global_step == trainer.max_steps:
            raise error
        if trainer.is_global_zero:
            log.warning("%s; this checkpoint is left out, the ones before it are kept", error)
        return False


class CommittedFiles(TorchCheckpointIO):
    """Writes checkpoints under their names when they are complete.

    Attributes:
        error: why the latest one could not be written, for all ranks to be told; `None` if it was.
    """

    error: OSError | None = None

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Write one, on the first rank."""
        buffer = io.BytesIO()
        torch.save(checkpoint, buffer)
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            commit_bytes(Path(path), buffer.getbuffer())
        except OSError as error:
            self.error = error
        else:
            self.error = None
