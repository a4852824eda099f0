"""A run whose numbers are no longer finite ends, and says where it began."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from protperf.model import ProteinModel

REMEMBERED = 200
"""Optimizer steps of which the norms are kept."""


class Divergence(Callback):
    """Keeps the norm of each layer's gradient over the latest steps, to name the layer in which it grew.

    Norms stay on the device until somebody asks, so nothing waits for them. Of sharded weights they are those of this
    rank's shards, which explode like the whole.

    Args:
        model: the model.
        last_checkpoint: returns the latest checkpoint.
    """

    def __init__(self, model: ProteinModel, *, last_checkpoint: Callable[[], Path | None]) -> None:
        self._model = model
        self._last_checkpoint = last_checkpoint
        self._layers: dict[str, list[torch.nn.Parameter]] = {}
        self._norms: deque[tuple[int, Tensor]] = deque(maxlen=REMEMBERED)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Find the layers' parameters: sharding, which is over now, has replaced them."""
        blocks = {f"layer {number}": block for number, block in enumerate(self._model.blocks)}
        self._layers = {name: list(block.parameters()) for name, block in blocks.items()}
        inside = {parameter for parameters in self._layers.values() for parameter in parameters}
        outside = [parameter for parameter in self._model.parameters() if parameter not in inside]
        self._layers["the embedding and the final norm"] = outside

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Note the norms of a step, before clipping."""
        norms = [torch.nn.utils.get_total_norm(_gradients(each)) for each in self._layers.values()]
        self._norms.append((trainer.global_step + 1, torch.stack(norms)))

    def error(self, *, what: str, step: int) -> ValueError:
        """Return the error to end with.

        Args:
            what: is no longer finite.
            step: at which that was seen.
        """
        last = self._last_checkpoint()
        good = f"the last good checkpoint is {last}" if last else "no checkpoint was written yet"
        return ValueError(
            f"{what} at step {step:,}{self._where()}; {good}; lower optim.learning_rate or raise optim.warmup_steps, "
            "and give the same command to go on from there, or another name to start anew"
        )

    def _where(self) -> str:
        """Tell in which layer the gradient's norm grew most before it was no number; empty if nothing is known."""
        if not self._norms:
            return ""
        steps, rows = zip(*self._norms, strict=True)
        norms = torch.stack(rows).double().cpu()  # (steps, layers)
        names = list(self._layers)
        finite = norms.isfinite().all(1).tolist()
        # behind the last finite one: in 16-mixed single steps overflow and are left out
        first_bad = len(steps) - finite[::-1].index(True) if any(finite) else 0
        if first_bad == 0:
            worst = int(norms[0].isfinite().logical_not().float().argmax())
            return f": the gradient of {names[worst]} is {norms[0, worst]:g} at step {steps[0]:,} already"
        last = first_bad - 1
        usual = (
            norms[: last or 1]
            .nan_to_num(posinf=0.0)
            .median(0)
            .values.clamp_min(torch.finfo(torch.float32).tiny)
        )
        worst = int((norms[last] / usual).argmax())
        grew = f"the gradient's norm in {names[worst]} was {norms[last, worst]:.3g} at step {steps[last]:,}"
        usually = f" ({usual[worst]:.3g} in the steps before)" if last else ""
        then = f", and no number at step {steps[first_bad]:,}" if first_bad < len(steps) else ""
        return f": {grew}{usually}{then}"


def _gradients(parameters: list[torch.nn.Parameter]) -> list[Tensor]:
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
