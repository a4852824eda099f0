"""What changes around training steps: seeds and projections."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback
from torch import Tensor

from protperf.attention.norms import QueryKeySums
from protperf.batches import Batch, documents_of
from protperf.metrics import sum_over_ranks
from protperf.model import ProteinModel


class StepSeeds(Callback):
    """Seeds torch before each batch from (seed, position, rank): dropout is a function of the step, not of history.

    Args:
        position: returns the number of windows that all ranks have trained on.
        seed: of the run.
    """

    def __init__(self, position: Callable[[], int], *, seed: int) -> None:
        self._position = position
        self._seed = seed

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Batch, batch_idx: int
    ) -> None:
        """Seed this rank's generators."""
        text = f"step {self._seed} {self._position()} {trainer.global_rank}"
        torch.manual_seed(
            int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
        )


class Redraw(Callback):
    """Draws the model's projections anew every `every` optimizer steps, between steps; the same on every rank.

    With `oprf` attention it also tells the model what norms to expect, measured on the batches of all ranks
    that follow: at the first step and at each redraw. In between they are constants, so no token's features depend on
    another token.
    """

    def __init__(self, model: ProteinModel, *, every: int, at_once: int = 0) -> None:
        self._model = model
        self._every = every
        self._at_once = at_once
        self._redraw = -1
        self._is_first = True

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Batch, batch_idx: int
    ) -> None:
        """Redraw if an interval is full."""
        redraw = trainer.global_step // self._every if self._every else self._redraw
        is_new = redraw != self._redraw and redraw != self._model.redraws.item()  # type: ignore[operator]
        if is_new:
            self._model.redraw_projections(redraw)
        if self._model.config.attention == "oprf" and (
            is_new or (self._is_first and trainer.global_step == 0)
        ):
            sums = measured(trainer, self._model, batch.inputs, at_once=self._at_once)
            self._model.set_pair_squares(sums.pair_squares())
        self._redraw, self._is_first = redraw, False


def measured(trainer: pl.Trainer, model: ProteinModel, tokens: Tensor, *, at_once: int = 0) -> QueryKeySums:
    """Measure queries and keys on windows of all ranks; proteins in one window do not see each other here.

    Args:
        trainer: in training.
        model: its model.
        tokens: this rank's windows, `(B, L)`.
        at_once: windows that are computed at once; 0: all.
    """
    with trainer.precision_plugin.forward_context():
        pieces = [
            model.query_key_sums(piece, documents_of(piece)) for piece in tokens.split(at_once or len(tokens))
        ]
    return QueryKeySums(*(sum_over_ranks(sum(parts[1:], parts[0])) for parts in zip(*pieces, strict=True)))
