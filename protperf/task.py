"""The Lightning module: glue between model, objective and optimizer, and nothing else.

Axis letters: `B` batch, `L` length in tokens.
"""

from __future__ import annotations

from typing import Any, cast

import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import ModelParallelStrategy
from pytorch_lightning.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from protperf.batches import Batch
from protperf.config import ModelConfig, ObjectiveConfig, OptimConfig
from protperf.metrics import TokenMetrics, length_bins, sum_over_ranks
from protperf.model import ProteinModel
from protperf.objectives import NOT_ASKED, TokenSums, answer, answer_by_length
from protperf.optim import build_optimizer, learning_rate_factor, number_by_model


class LanguageModelTask(pl.LightningModule):
    """Trains a protein language model.

    Args:
        model_config: shape of the model.
        objective: what it is asked; it decides the direction of attention.
        optim: how weights move.
        attend_across_documents: whether proteins packed into one window see each other.
        window: tokens in a window, which decides the bins of length.
        valid_sets: names of the validation sets, in the order of their loaders.
        test_sets: names of the test sets, in the order of their loaders.
        compile_blocks: whether torch.compile takes the blocks.
        windows_at_once: windows that a rank computes at once; 0: its whole share of a batch.

    Attributes:
        results: what the latest validation and test gave, by `SET/METRIC`.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        objective: ObjectiveConfig,
        optim: OptimConfig,
        *,
        attend_across_documents: bool,
        window: int,
        valid_sets: tuple[str, ...],
        test_sets: tuple[str, ...] = (),
        compile_blocks: bool = False,
        windows_at_once: int = 0,
    ) -> None:
        super().__init__()
        self.objective = objective
        self.optim = optim
        self.attend_across_documents = attend_across_documents
        self.compile_blocks = compile_blocks
        self.windows_at_once = windows_at_once
        self.model = ProteinModel(model_config, causal=objective.kind == "causal")
        self.train_metrics = TokenMetrics()
        self.valid_sets = valid_sets
        self.test_prefixes = tuple(test_prefixes(test_sets, valid_sets).values())
        self.length_bins = length_bins(window)
        self.valid_metrics = self._metrics_for(valid_sets)
        self.test_metrics = self._metrics_for(test_sets)
        self.results: dict[str, float] = {}
        self._is_configured = False

    def configure_model(self) -> None:
        """Compile and shard the blocks, once; Lightning calls this again at each stage."""
        if self._is_configured:
            return
        self._is_configured = True
        if self.compile_blocks:
            for block in self.model.blocks:
                block.compile()
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            assert self.device_mesh is not None
            mesh = self.device_mesh["data_parallel"]
            for block in self.model.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(self.model, mesh=mesh)

    def answer(self, batch: Batch, *, label_smoothing: float = 0.0) -> TokenSums:
        """Return the sums of loss and hits over the asked tokens of a batch."""
        return answer(self.model, batch, across=self.attend_across_documents, label_smoothing=label_smoothing)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the mean loss over the asked tokens of all ranks, as this rank's share of it.

        Ranks ask different numbers of tokens; averaging gradients over ranks turns the shares into the gradient of
        the mean over tokens, the same as one rank with the whole batch. Where a rank works through its windows in pieces,
        the gradients of all but the last are made here, and the last one's share is returned.
        """
        self.trainer.optimizers[0].zero_grad()
        asked = sum_over_ranks((batch.targets != NOT_ASKED).sum()).clamp_min(1)
        *pieces, last = self._pieces_of(batch)
        for piece in pieces:
            loss = self._share_of_loss(piece, asked)
            with torch.autocast(
                self.device.type, enabled=False
            ):  # a backward pass has the types of its forward pass
                self.trainer.strategy.backward(loss, None)
        return self._share_of_loss(last, asked)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        """Do nothing: Lightning calls this between the forward and the backward pass of the last piece."""

    def _pieces_of(self, batch: Batch) -> list[Batch]:
        """Return what is computed at once; all ranks have equally many."""
        size = self.windows_at_once or len(batch.inputs)
        return [Batch(*parts) for parts in zip(*(part.split(size) for part in batch), strict=True)]

    def _share_of_loss(self, piece: Batch, asked: Tensor) -> Tensor:
        sums = self.answer(piece, label_smoothing=self.objective.label_smoothing)
        self.train_metrics.update(*sums)
        return sums.nll * self.trainer.world_size / asked

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Add a batch to the metrics of its validation set."""
        self._add(self.valid_metrics, batch, dataloader_idx)

    def on_validation_epoch_end(self) -> None:
        """Close the metrics of all validation sets over all ranks."""
        self._close(self.valid_metrics, self.valid_sets)

    def test_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Add a batch to the metrics of its test set."""
        self._add(self.test_metrics, batch, dataloader_idx)

    def on_test_epoch_end(self) -> None:
        """Close the metrics of all test sets over all ranks."""
        self._close(self.test_metrics, self.test_prefixes)

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """Return the optimizer and its schedule, which counts optimizer steps."""
        optimizer = self._build_optimizer()
        schedule = LambdaLR(optimizer, lambda step: learning_rate_factor(step, self.optim))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_train_start(self) -> None:
        """Let the configuration decide how weights move on: a resumed run may have another learning rate or decay."""
        own = self._build_optimizer().param_groups
        (optimizer,), (config,) = self.trainer.optimizers, self.trainer.lr_scheduler_configs
        schedule = config.scheduler
        assert isinstance(schedule, LambdaLR)
        rate = self.optim.learning_rate * learning_rate_factor(schedule.last_epoch, self.optim)
        schedule.base_lrs = [group["lr"] for group in own]
        schedule._last_lr = [rate for _ in own]
        for group, settings in zip(optimizer.param_groups, own, strict=True):
            group.update({**settings, "params": group["params"], "initial_lr": settings["lr"], "lr": rate})

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Number the optimizer's states by the model's parameters, as sharded training does: any strategy goes on."""
        if not isinstance(self.trainer.strategy, ModelParallelStrategy):
            states = zip(checkpoint["optimizer_states"], self.trainer.optimizers, strict=True)
            checkpoint["optimizer_states"] = [
                number_by_model(state, optimizer, self) for state, optimizer in states
            ]

    def _build_optimizer(self) -> Optimizer:
        """Return the optimizer for the device of the run."""
        return build_optimizer(self.model, self.optim, fused=self.trainer.strategy.root_device.type == "cuda")

    def _metrics_for(self, names: tuple[str, ...]) -> torch.nn.ModuleList:
        return torch.nn.ModuleList(TokenMetrics(tuple(self.length_bins)) for _ in names)

    def _add(self, metrics: torch.nn.ModuleList, batch: Batch, index: int) -> None:
        for piece in self._pieces_of(batch):
            sums = answer_by_length(
                self.model, piece, across=self.attend_across_documents, edges=list(self.length_bins.values())
            )
            cast(TokenMetrics, metrics[index]).update(*sums)

    def _close(self, metrics: torch.nn.ModuleList, names: tuple[str, ...]) -> None:
        for each, name in zip(metrics, names, strict=True):
            assert isinstance(each, TokenMetrics)
            self.results |= {f"{name}/{key}": value for key, value in each.compute().items()}
            each.reset()


def test_prefixes(test_sets: tuple[str, ...], valid_sets: tuple[str, ...]) -> dict[str, str]:
    """Return what the metrics of each test set are named after: nothing that validation reports too.

    >>> test_prefixes(("test", "ood"), ("valid", "ood"))
    {'test': 'test', 'ood': 'test_ood'}
    """
    return {name: name if name == "test" and name not in valid_sets else f"test_{name}" for name in test_sets}
