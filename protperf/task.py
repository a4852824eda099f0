"""The Lightning module: glue between model, objective and optimizer, and nothing else.

Axis letters: `B` batch, `L` length in tokens.
"""

from __future__ import annotations

from typing import Any, cast

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from protperf.batches import Batch
from protperf.config import ModelConfig, ObjectiveConfig, OptimConfig
from protperf.metrics import TokenMetrics
from protperf.model import ProteinModel
from protperf.objectives import TokenSums, answer
from protperf.optim import build_optimizer, learning_rate_factor


class LanguageModelTask(pl.LightningModule):
    """Trains a protein language model.

    Args:
        model_config: shape of the model.
        objective: what it is asked; it decides the direction of attention.
        optim: how weights move.
        attend_across_documents: whether proteins packed into one window see each other.
        valid_sets: names of the validation sets, in the order of their loaders.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        objective: ObjectiveConfig,
        optim: OptimConfig,
        *,
        attend_across_documents: bool,
        valid_sets: tuple[str, ...],
    ) -> None:
        super().__init__()
        self.objective = objective
        self.optim = optim
        self.attend_across_documents = attend_across_documents
        self.model = ProteinModel(model_config, causal=objective.kind == "causal")
        self.train_metrics = TokenMetrics()
        self.valid_sets = valid_sets
        self.valid_metrics = torch.nn.ModuleList(TokenMetrics() for _ in valid_sets)
        self.valid_results: dict[str, float] = {}

    def answer(self, batch: Batch) -> TokenSums:
        """Return the sums of loss and hits over the asked tokens of a batch."""
        return answer(self.model, batch, across=self.attend_across_documents)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the mean loss over the asked tokens of all ranks, as this rank's share of it.

        Ranks ask different numbers of tokens; averaging gradients over ranks turns the shares into the gradient of
        the mean over tokens, the same as one rank with the whole batch. Accumulated batches each count the same.
        """
        sums = self.answer(batch)
        self.train_metrics.update(*sums)
        asked = self.trainer.strategy.reduce(sums.asked.clone(), reduce_op="sum")
        assert isinstance(asked, Tensor)
        return sums.nll * self.trainer.world_size / asked.clamp_min(1)

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Add a batch to the metrics of its validation set."""
        self._metrics_of(dataloader_idx).update(*self.answer(batch))

    def on_validation_epoch_end(self) -> None:
        """Close the metrics of all validation sets over all ranks."""
        for index, name in enumerate(self.valid_sets):
            metrics = self._metrics_of(index)
            self.valid_results |= {f"{name}/{key}": value for key, value in metrics.compute().items()}
            metrics.reset()

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """Return AdamW and its schedule, which counts optimizer steps."""
        optimizer = build_optimizer(self.model, self.optim)
        schedule = LambdaLR(optimizer, lambda step: learning_rate_factor(step, self.optim))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Let the configuration decide how weights move on: a resumed run may have another learning rate or decay."""
        own = build_optimizer(self.model, self.optim).param_groups
        for saved, schedule in zip(checkpoint["optimizer_states"], checkpoint["lr_schedulers"], strict=True):
            rate = self.optim.learning_rate * learning_rate_factor(schedule["last_epoch"], self.optim)
            schedule["base_lrs"] = [group["lr"] for group in own]
            schedule["_last_lr"] = [rate for _ in own]
            for group, settings in zip(saved["param_groups"], own, strict=True):
                group.update(
                    {**settings, "params": group["params"], "initial_lr": settings["lr"], "lr": rate}
                )

    def _metrics_of(self, index: int) -> TokenMetrics:
        return cast(TokenMetrics, self.valid_metrics[index])
