"""What a run says of itself: metrics, at whole logging intervals and validations."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback
from torch.optim import Optimizer

from protperf.batches import Batch
from protperf.callbacks.steps import measured
from protperf.formats.sizes import peak_memory_bytes
from protperf.metrics import TokenMetrics
from protperf.model import ProteinModel, QueryKeySums

log = logging.getLogger("protperf")


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
            "train/grad_norm": self._gradient_norm,
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
