"""What happens around training steps: seeds, redraws, reports. One callback each."""

from __future__ import annotations

import hashlib
import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import Any, cast

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback
from torch import Tensor
from torch.optim import Optimizer

from protperf.batches import Batch, documents_of
from protperf.formats.sizes import peak_memory_bytes
from protperf.metrics import TokenMetrics
from protperf.model import ProteinModel, QueryKeySums

log = logging.getLogger("protperf")


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

    def __init__(self, model: ProteinModel, *, every: int) -> None:
        self._model = model
        self._every = every
        self._redraw = -1
        self._is_first = True

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Batch, batch_idx: int
    ) -> None:
        """Redraw if an interval is full: never inside an accumulation window, where the step stands still."""
        redraw = trainer.global_step // self._every if self._every else self._redraw
        is_new = redraw != self._redraw and redraw != self._model.redraws.item()  # type: ignore[operator]
        if is_new:
            self._model.redraw_projections(redraw)
        if self._model.config.attention == "oprf" and (
            is_new or (self._is_first and trainer.global_step == 0)
        ):
            self._model.set_pair_squares(measured(trainer, self._model, batch).pair_squares())
        self._redraw, self._is_first = redraw, False


class Report(Callback):
    """Sends metrics to all loggers, and a line to the log, at whole logging intervals and validations.

    Args:
        model: whose queries and keys are measured at the end of each interval.
        train_metrics: what training steps add to; reset after each interval.
        valid_results: what the latest validation gave, by name.
        every: optimizer steps in an interval.
    """

    def __init__(
        self,
        model: ProteinModel,
        train_metrics: TokenMetrics,
        valid_results: Mapping[str, float],
        *,
        every: int,
    ) -> None:
        self._model = model
        self._train_metrics = train_metrics
        self._valid_results = valid_results
        self._every = every
        self._resumed: dict[str, float] = {}
        self._gradient_norm = math.nan
        self._learning_rate = math.nan
        self._last_step = 0
        self._tokens = 0
        self._seconds = 0.0
        self._since = 0.0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock, in the interval that the checkpoint was written in."""
        if self._resumed and trainer.is_global_zero:
            nll = torch.tensor(self._resumed["nll"], dtype=torch.float64)
            asked, correct = (torch.tensor(self._resumed[name]) for name in ("asked", "correct"))
            self._train_metrics.update(nll, asked, correct)
        self._last_step = trainer.global_step
        self._since = time.perf_counter()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        """Report if an interval is full, and after the last step, which is validated too."""
        self._tokens += batch.inputs.numel() * trainer.world_size
        step = trainer.global_step
        if step == self._last_step or not self._is_due(trainer, step):
            return
        trainer.should_stop |= step == trainer.max_steps  # Lightning then validates before it stops
        self._last_step = step
        self._stop_clock()
        values = {f"train/{name}": value for name, value in self._train_metrics.compute().items()}
        diverged = bool(self._train_metrics.asked) and not math.isfinite(values["train/loss"])
        if step % self._every == 0:  # a run that goes on after its last step has the interval whole
            self._train_metrics.reset()
        if diverged:
            raise ValueError(
                f"the loss is {values['train/loss']} at step {step}: lower optim.learning_rate or raise "
                "optim.warmup_steps, and start again from the last checkpoint or under another name"
            )
        values |= products_by_layer(measured(trainer, self._model, batch))
        values |= {
            "train/gradient_norm": self._gradient_norm,
            "train/learning_rate": self._learning_rate,
            "train/tokens_per_second": self._tokens / self._seconds,
            "train/peak_memory_gib": peak_memory_gib(pl_module.device),
        }
        self._tokens, self._seconds = 0, 0.0
        log_values(trainer, values)

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Note what the step that ends an interval moves with: its rate, and the gradient's norm before clipping."""
        if self._is_due(trainer, trainer.global_step + 1):
            self._learning_rate = optimizer.param_groups[0]["lr"]
            gradients = [p.grad for p in pl_module.parameters() if p.grad is not None]
            self._gradient_norm = float(torch.nn.utils.get_total_norm(gradients))

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop the clock: validation is no training time."""
        self._stop_clock()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Report each validation set."""
        log_values(trainer, self._valid_results)
        self._since = time.perf_counter()

    def state_dict(self) -> dict[str, Any]:
        """Return the sums of the interval so far."""
        return self._train_metrics.sums()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the sums of the interval; training adds them on one rank when it starts."""
        self._resumed = state_dict

    def _is_due(self, trainer: pl.Trainer, step: int) -> bool:
        return step % self._every == 0 or step == trainer.max_steps

    def _stop_clock(self) -> None:
        now = time.perf_counter()
        self._seconds += now - self._since
        self._since = now


def measured(trainer: pl.Trainer, model: ProteinModel, batch: Batch) -> QueryKeySums:
    """Measure queries and keys on the batches of all ranks; proteins in one window do not see each other here."""
    with trainer.precision_plugin.forward_context():
        sums = model.query_key_sums(batch.inputs, documents_of(batch.inputs))
    return QueryKeySums(*(cast(Tensor, trainer.strategy.reduce(x, reduce_op="sum")) for x in sums))


def products_by_layer(sums: QueryKeySums) -> dict[str, float]:
    """Return |q||k| / sqrt(K) of each layer, the mean over heads, by the name that loggers get."""
    layers = sums.products().mean(1).tolist()
    return {f"attention/qk_norm_{number:02d}": value for number, value in enumerate(layers)}


def log_values(trainer: pl.Trainer, values: Mapping[str, float]) -> None:
    """Send values to every logger and, on the first rank, as one line to the log."""
    for logger in trainer.loggers:
        logger.log_metrics(dict(values), step=trainer.global_step)
    if trainer.is_global_zero:
        shown = "  ".join(
            f"{name} {value:,.4g}" for name, value in values.items() if not name.startswith("attention/")
        )  # one a layer: too many for a line
        log.info("step %s/%s  %s", f"{trainer.global_step:,}", f"{trainer.max_steps:,}", shown)


def peak_memory_gib(device: torch.device) -> float:
    """Return the most memory held so far, in GiB: of the GPU if there is one, else of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return peak_memory_bytes() / 2**30
