"""The loaders of a run over folders that `protperf prepare` wrote."""

from __future__ import annotations

from collections.abc import Iterable

import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader

from protperf.batches import Batch
from protperf.config import DataConfig, ObjectiveConfig
from protperf.data.order import Position, TrainingOrder, mix_quotas
from protperf.data.questions import NO_WINDOW, QuestionDataset, WindowKey
from protperf.data.workers import leave_signals_to_parent
from protperf.formats.joined_shards import JoinedShards
from protperf.formats.open_files import OpenFiles
from protperf.formats.shards import ShardSet
from protperf.objectives import EVALUATION_EPOCH


class WindowData(pl.LightningDataModule):
    """Training and validation loaders over folders that `protperf prepare` wrote.

    Args:
        config: where and how many.
        objective: what is asked.
        seed: of the run.

    Raises:
        FormatError: a folder is no whole dataset.
        ValueError: folders that cannot be mixed, or windows that cannot be cut to `context_length`.

    Attributes:
        position: a callback for the trainer; training begins where it stands.
        train_shards: the training windows of all folders.
        valid_shards: the validation sets of the first folder, by name.
        test_shards: the test sets of the first folder that are not empty, by name.
    """

    def __init__(self, config: DataConfig, objective: ObjectiveConfig, *, seed: int) -> None:
        super().__init__()
        self.config = config
        self.objective = objective
        self.seed = seed
        length, files = config.context_length, OpenFiles()
        paths = (config.path, *config.more_paths)
        train_sets = [ShardSet(path, "train", window=length, files=files) for path in paths]
        self.train_shards = JoinedShards(train_sets)
        self.valid_shards = {
            name: ShardSet(config.path, name, window=length, files=files) for name in config.valid_sets
        }
        self.test_shards = {
            name: ShardSet(config.path, name, window=length, files=files)
            for name in config.test_sets
            if name in train_sets[0].manifest.splits and train_sets[0].manifest.splits[name].windows
        }
        self.quotas = mix_quotas(config.weights or self.train_shards.sizes)
        self.position = Position(
            seed=seed,
            context_length=self.window,
            digests=[shards.manifest.digest for shards in train_sets],
            quotas=self.quotas,
            num_windows=len(self.train_shards),
        )

    @property
    def window(self) -> int:
        """Tokens in a window, W."""
        return self.train_shards.window

    @property
    def digest(self) -> str:
        """Hash over all shards of the first folder."""
        return self.train_shards.sets[0].manifest.digest

    def train_dataloader(self) -> DataLoader[Batch]:
        """Return the endless loader of this rank."""
        order = TrainingOrder(
            self.train_shards.sizes,
            quotas=self.quotas,
            seed=self.seed,
            batch_size=self.config.batch_size // self._world_size,
            rank=self._rank,
            world_size=self._world_size,
            start=self.position.start,
        )
        dataset = QuestionDataset(self.train_shards, self.objective, seed=self.seed, evaluation=False)
        return self._loader(dataset, order)

    def val_dataloader(self) -> list[DataLoader[Batch]]:
        """Return one loader a validation set, in the order of `valid_sets`; ranks share the windows out."""
        return [
            self._evaluation_loader(shards, self.config.valid_windows)
            for shards in self.valid_shards.values()
        ]

    def test_dataloader(self) -> list[DataLoader[Batch]]:
        """Return one loader a test set, over all of its windows; ranks share them out."""
        return [self._evaluation_loader(shards, 0) for shards in self.test_shards.values()]

    def _evaluation_loader(self, shards: ShardSet, most: int) -> DataLoader[Batch]:
        """Return this rank's share of a set, of its first `most` windows if that is not 0."""
        dataset = QuestionDataset(shards, self.objective, seed=self.seed, evaluation=True)
        count = min(len(shards), most or len(shards))
        keys = evaluation_keys(count, rank=self._rank, world_size=self._world_size)
        size = max(1, self.config.batch_size // self._world_size)
        return self._loader(dataset, [keys[first : first + size] for first in range(0, len(keys), size)])

    @property
    def _is_on_cuda(self) -> bool:
        return bool(self.trainer) and self.trainer.strategy.root_device.type == "cuda"  # type: ignore[union-attr]

    @property
    def _rank(self) -> int:
        return self.trainer.global_rank if self.trainer else 0

    @property
    def _world_size(self) -> int:
        return self.trainer.world_size if self.trainer else 1

    def _loader(self, dataset: QuestionDataset, batches: Iterable[list[WindowKey]]) -> DataLoader[Batch]:
        workers = self.config.num_workers
        return DataLoader(
            dataset,
            sampler=batches,
            batch_size=None,  # an item is a batch
            num_workers=workers,
            pin_memory=torch.cuda.is_available() and self._is_on_cuda,
            persistent_workers=workers > 0,
            worker_init_fn=leave_signals_to_parent if workers else None,
        )


def evaluation_keys(num_windows: int, *, rank: int = 0, world_size: int = 1) -> list[WindowKey]:
    """Return this rank's share of an evaluation: each window once, its masks the same each time.

    All ranks get as many keys, the last one of some being `NO_WINDOW`: they take part in the same number of sums.
    """
    share = -(-num_windows // world_size)
    windows = [*range(rank, num_windows, world_size), NO_WINDOW][:share]
    return [(EVALUATION_EPOCH, window) for window in windows]
