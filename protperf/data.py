"""Windows from shards to batches: which window a rank reads when, and the question made of it.

Axis letters: `B` batch, `W` window length in tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback
from torch.utils.data import DataLoader, Dataset, Sampler

from protperf.batches import Batch, permuted
from protperf.config import DataConfig, ObjectiveConfig
from protperf.formats.shards import ShardSet
from protperf.objectives import EVALUATION_EPOCH, ask, question_generator

WindowKey = tuple[int, int]
"""(epoch, window): all that a question depends on besides the seed."""


class QuestionDataset(Dataset[tuple[np.ndarray, np.ndarray]]):
    """Turns a `WindowKey` into a question: shown inputs and targets, uint8 `(W,)` each.

    Args:
        shards: the windows of one split.
        objective: what is asked.
        seed: of the run.
        evaluation: whether answers are compared with floors.
    """

    def __init__(self, shards: ShardSet, objective: ObjectiveConfig, *, seed: int, evaluation: bool) -> None:
        self.shards = shards
        self.objective = objective
        self.seed = seed
        self.evaluation = evaluation

    def __getitem__(self, key: WindowKey) -> tuple[np.ndarray, np.ndarray]:
        """Return the question of one window in one epoch."""
        epoch, window = key
        generator = question_generator(self.seed, epoch=epoch, window=window)
        return ask(self.shards.read(window), self.objective, generator, evaluation=self.evaluation)


class TrainingOrder(Sampler[list[WindowKey]]):
    """The endless order of training windows, one permutation an epoch, cut into batches of this rank.

    Sample number t of the whole run is window `permutation(epoch)[t mod n]` of epoch `t div n`, whatever the number
    of ranks and workers; each rank takes its slice of each global batch. Position is one number, so going on
    after an interruption, with other workers or ranks too, needs nothing else.

    Args:
        num_windows: n.
        seed: of the run.
        batch_size: windows in a batch of one rank.
        rank: of this process, from 0.
        world_size: number of ranks.
        start: returns the number of samples that all ranks have trained on, asked when iteration begins.
    """

    def __init__(
        self,
        num_windows: int,
        *,
        seed: int,
        batch_size: int,
        rank: int,
        world_size: int,
        start: Callable[[], int],
    ) -> None:
        self.num_windows = num_windows
        self.seed = seed
        self.batch_size = batch_size
        self.rank = rank
        self.world_size = world_size
        self.start = start

    def __iter__(self) -> Iterator[list[WindowKey]]:
        first = self.start()
        while True:
            mine = first + self.rank * self.batch_size
            yield self.keys(np.arange(mine, mine + self.batch_size))
            first += self.batch_size * self.world_size

    def keys(self, samples: np.ndarray) -> list[WindowKey]:
        """Return the keys of sample numbers, int64 `(B,)`."""
        epochs, places = np.divmod(samples, self.num_windows)
        windows = np.empty_like(places)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            windows[here] = permuted(places[here], self.num_windows, seed=self.seed, epoch=int(epoch))
        return list(zip(epochs.tolist(), windows.tolist(), strict=True))


class Position(Callback):
    """Counts the windows that all ranks have trained on; with the seed that is the whole position in the data.

    Args:
        seed: of the run.
        num_windows: of the training split.
        digest: of the dataset.
    """

    def __init__(self, *, seed: int, num_windows: int, digest: str) -> None:
        self.samples = 0
        self._fixed = {"seed": seed, "num_windows": num_windows, "digest": digest}

    def start(self) -> int:
        """Return the number of samples trained on."""
        return self.samples

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        """Count a global batch."""
        self.samples += len(batch.inputs) * trainer.world_size

    def state_dict(self) -> dict[str, Any]:
        """Return the position and what it holds for."""
        return {"samples": self.samples, **self._fixed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint's position.

        Raises:
            ValueError: the checkpoint belongs to other data or another seed.
        """
        for key, value in self._fixed.items():
            if state_dict[key] != value:
                raise ValueError(
                    f"cannot resume: the checkpoint was trained with {key} {state_dict[key]}, this run has {value}; "
                    "give the same data and seed, or another name for a new run"
                )
        self.samples = state_dict["samples"]


class WindowData(pl.LightningDataModule):
    """Training and validation loaders over a folder that `protperf prepare` wrote.

    Args:
        config: where and how many.
        objective: what is asked.
        seed: of the run.

    Attributes:
        position: a callback for the trainer; training begins where it stands.
    """

    def __init__(self, config: DataConfig, objective: ObjectiveConfig, *, seed: int) -> None:
        super().__init__()
        self.config = config
        self.objective = objective
        self.seed = seed
        self.train_shards = ShardSet(config.path, "train")
        self.valid_shards = {name: ShardSet(config.path, name) for name in config.valid_sets}
        self.position = Position(seed=seed, num_windows=len(self.train_shards), digest=self.digest)

    @property
    def window(self) -> int:
        """Tokens in a window, W."""
        return self.train_shards.window

    @property
    def digest(self) -> str:
        """Hash over all shards of the folder."""
        return self.train_shards.manifest.digest

    def setup(self, stage: str) -> None:
        """Check that each rank has something to validate on: one without would not join in the sums.

        Raises:
            ValueError: a validation set has fewer windows than there are ranks.
        """
        for name, shards in self.valid_shards.items():
            if self._num_windows(shards) < self._world_size:
                raise ValueError(
                    f"{self.config.path}: {self._num_windows(shards)} windows of {name!r} to validate on, fewer than the "
                    f"{self._world_size} ranks; raise data.valid_windows or prepare with a larger fraction for it"
                )

    def train_dataloader(self) -> DataLoader[Batch]:
        """Return the endless loader of this rank."""
        order = TrainingOrder(
            len(self.train_shards),
            seed=self.seed,
            batch_size=self.config.batch_size,
            rank=self._rank,
            world_size=self._world_size,
            start=self.position.start,
        )
        dataset = QuestionDataset(self.train_shards, self.objective, seed=self.seed, evaluation=False)
        return self._loader(dataset, order)

    def val_dataloader(self) -> list[DataLoader[Batch]]:
        """Return one loader a validation set, in the order of `valid_sets`; ranks share the windows out."""
        loaders = []
        for shards in self.valid_shards.values():
            dataset = QuestionDataset(shards, self.objective, seed=self.seed, evaluation=True)
            count = self._num_windows(shards)
            keys = evaluation_keys(count, rank=self._rank, world_size=self._world_size)
            size = self.config.batch_size
            batches = [keys[first : first + size] for first in range(0, len(keys), size)]
            loaders.append(self._loader(dataset, batches))
        return loaders

    @property
    def _rank(self) -> int:
        return self.trainer.global_rank if self.trainer else 0

    @property
    def _world_size(self) -> int:
        return self.trainer.world_size if self.trainer else 1

    def _num_windows(self, shards: ShardSet) -> int:
        """Return how many windows of a validation set are read."""
        return min(len(shards), self.config.valid_windows or len(shards))

    def _loader(self, dataset: QuestionDataset, batches: Iterable[list[WindowKey]]) -> DataLoader[Batch]:
        workers = self.config.num_workers
        return DataLoader(
            dataset,  # type: ignore[arg-type]
            batch_sampler=batches,
            num_workers=workers,
            collate_fn=collate,
            pin_memory=torch.cuda.is_available(),
            persistent_workers=workers > 0,
        )


def evaluation_keys(num_windows: int, *, rank: int = 0, world_size: int = 1) -> list[WindowKey]:
    """Return this rank's share of an evaluation: each window once, its masks the same each time."""
    return [(EVALUATION_EPOCH, window) for window in range(rank, num_windows, world_size)]


def collate(questions: list[tuple[np.ndarray, np.ndarray]]) -> Batch:
    """Stack questions to a batch, uint8 `(B, W)` each: widened only on the device."""
    inputs, targets = zip(*questions, strict=True)
    return Batch(torch.from_numpy(np.stack(inputs)), torch.from_numpy(np.stack(targets)))
