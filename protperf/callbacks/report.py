"""What a run says of itself: metrics, at whole logging intervals and validations."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback
from torch.optim import Optimizer

from protperf.attention.norms import QueryKeySums
from protperf.batches import Batch, documents_of
from protperf.callbacks.steps import measured
from protperf.devices import peak_flops
from protperf.formats.sizes import peak_memory_bytes
from protperf.metrics import TokenMetrics, summarise
from protperf.model import ProteinModel
from protperf.objectives import NOT_ASKED
from protperf.optim import total_norm
from protperf.work import training_work

log = logging.getLogger("protperf")


class Report(Callback):
    """Sends metrics to all loggers, and a line to the log, at whole logging intervals, validations and the test.

    Args:
        model: whose queries and keys are measured at the end of each interval.
        train_metrics: what training steps add to; reset after each interval.
        results: what the latest validation and test gave, by name.
        every: optimizer steps in an interval.
        position: returns the number of windows that all ranks have trained on.
        precision: in which the model computes, for the share of the device's peak rate.
        diverged: makes the error to end with, of what is no longer finite and the step.
    """

    def __init__(
        self,
        model: ProteinModel,
        train_metrics: TokenMetrics,
        results: dict[str, float],
        *,
        every: int,
        position: Callable[[], int],
        precision: str,
        diverged: Callable[..., ValueError],
    ) -> None:
        self._model = model
        self._train_metrics = train_metrics
        self._results = results
        self._every = every
        self._position = position
        self._precision = precision
        self._peak_flops = math.nan
        self._diverged = diverged
        self._resumed: dict[str, float] = {}
        self._gradient_norm = math.nan
        self._learning_rate = math.nan
        self._steps = 0
        self._tokens = 0
        self._seconds = 0.0
        self._since = 0.0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock, in the interval that the checkpoint was written in."""
        if self._resumed and trainer.is_global_zero:
            nll = torch.tensor(self._resumed["nll"], dtype=torch.float64)
            asked, correct = (torch.tensor(self._resumed[name]) for name in ("asked", "correct"))
            self._train_metrics.update(nll, asked, correct)
        if trainer.is_global_zero:
            self._peak_flops = peak_flops(pl_module.device, self._precision)
        self._since = time.perf_counter()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        """Report if an interval is full, and after the last step, which is validated too."""
        self._tokens += batch.inputs.numel() * trainer.world_size
        step = trainer.global_step
        self._steps += 1
        if not self._is_due(trainer, step):
            return
        trainer.should_stop |= step == trainer.max_steps  # Lightning then validates before it stops
        sums = self._train_metrics.sums()
        results = summarise(sums["nll"], int(sums["asked"]), int(sums["correct"]))
        values = {f"train/{name}": value for name, value in results.items()}
        self._stop_clock()  # once the numbers are there, so that a GPU's work is in the time
        if sums["asked"] and not math.isfinite(values["train/loss"]):
            raise self._diverged(what=f"the loss is {values['train/loss']}", step=step)
        if step % self._every == 0:  # a run that goes on after its last step has the interval whole
            self._train_metrics.reset()
        values |= products_by_layer(measured(trainer, self._model, batch.inputs[:1]))
        speed = self._tokens / self._seconds
        mfu = speed / trainer.world_size * flops_per_token(self._model, batch) / self._peak_flops
        values |= {
            "train/grad_norm": self._gradient_norm,
            "train/weight_norm": total_norm(pl_module.parameters()),
            "train/learning_rate": self._learning_rate,
            "train/tokens": self._position() * batch.inputs.shape[1],
            "train/tokens_per_second": speed,
            "train/mfu": mfu,
            "train/peak_memory_gib": peak_memory_gib(pl_module.device),
        }
        send(trainer, values)
        if trainer.is_global_zero:
            left = (trainer.max_steps - step) * self._seconds / self._steps
            log.info("%s", training_line(values, step=step, max_steps=trainer.max_steps, seconds_left=left))
        self._tokens, self._steps, self._seconds = 0, 0, 0.0

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Note what the step that ends an interval moves with: its rate, and the gradient's norm before clipping."""
        if self._is_due(trainer, trainer.global_step + 1):
            self._learning_rate = optimizer.param_groups[0]["lr"]
            gradients = [p.grad for p in pl_module.parameters() if p.grad is not None]
            self._gradient_norm = total_norm(gradients)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop the clock: validation is no training time."""
        self._stop_clock()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Report each validation set."""
        self._report_results(trainer)
        self._since = time.perf_counter()

    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Forget what validation gave."""
        self._results.clear()

    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Report each test set."""
        self._report_results(trainer)

    def state_dict(self) -> dict[str, Any]:
        """Return the sums of the interval so far."""
        return self._train_metrics.sums()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the sums of the interval; training adds them on one rank when it starts."""
        self._resumed = state_dict

    def _report_results(self, trainer: pl.Trainer) -> None:
        send(trainer, self._results)
        if trainer.is_global_zero:
            for line in evaluation_lines(self._results):
                log.info("step %s  %s", f"{trainer.global_step:,}", line)

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


def send(trainer: pl.Trainer, values: Mapping[str, float]) -> None:
    """Send values to every logger."""
    for logger in trainer.loggers:
        logger.log_metrics(dict(values), step=trainer.global_step)


def training_line(values: Mapping[str, float], *, step: int, max_steps: int, seconds_left: float) -> str:
    """Return what an interval of training says to people.

    >>> values = {"loss": 2.5, "perplexity": 12.18, "tokens": 3276800, "tokens_per_second": 41234.5, "learning_rate": 1e-3}
    >>> training_line({f"train/{k}": v for k, v in values.items()}, step=50, max_steps=1000, seconds_left=3723)
    'step 50/1,000  loss 2.5000  perplexity 12.18  lr 0.001  3.3M tokens  41,234 tokens/s  1:02:03 left'
    """
    loss, perplexity, rate, tokens, speed = (
        values[f"train/{name}"]
        for name in ("loss", "perplexity", "learning_rate", "tokens", "tokens_per_second")
    )
    left = timedelta(seconds=round(seconds_left))
    return (
        f"step {step:,}/{max_steps:,}  loss {loss:.4f}  perplexity {perplexity:#.4g}  lr {rate:.3g}  "
        f"{short_count(tokens)} tokens  {speed:,.0f} tokens/s  {left} left"
    )


def evaluation_lines(results: Mapping[str, float]) -> list[str]:
    """Return a line for each evaluated set, with what all of its tokens gave."""
    sets = dict.fromkeys(name.partition("/")[0] for name in results)
    return [
        f"{name}  loss {results[f'{name}/loss']:.4f}  perplexity {results[f'{name}/perplexity']:#.4g}  "
        f"accuracy {results[f'{name}/accuracy']:.2%}"
        for name in sets
    ]


def flops_per_token(model: ProteinModel, batch: Batch) -> float:
    """Return the floating-point operations of a step for each token of a batch, forward and backward.

    What activation checkpointing computes again is not counted. Lengths of proteins change exact and hashed attention alone.
    """
    documents = [[batch.inputs.shape[1]]] * len(batch.inputs)
    if model.config.is_exact_somewhere or model.config.attention == "reformer":
        numbers = documents_of(batch.inputs).cpu()
        documents = [row.unique_consecutive(return_counts=True)[1].tolist() for row in numbers]
    num_asked = int((batch.targets != NOT_ASKED).sum())
    work = training_work(model.config, causal=model.causal, documents=documents, num_asked=num_asked)
    return (work.forward + work.backward) / batch.inputs.numel()


def short_count(number: float) -> str:
    """Return a count with three digits at most and a unit.

    >>> short_count(999), short_count(37_130_000_000)
    ('999', '37.1G')
    """
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.0f}"


def peak_memory_gib(device: torch.device) -> float:
    """Return the most memory held so far, in GiB: of the GPU if there is one, else of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return peak_memory_bytes() / 2**30
