"""Windows from shards to batches: which window of which dataset a rank reads when, and the question made of it.

Axis letters: `B` batch, `N` samples, `W` window length in tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback
from torch.utils.data import DataLoader, Dataset, Sampler

from protperf.batches import Batch, permuted
from protperf.config import DataConfig, ObjectiveConfig
from protperf.formats import FormatError
from protperf.formats.joined_shards import JoinedShards
from protperf.formats.open_files import OpenFiles
from protperf.formats.shards import ShardSet
from protperf.objectives import EVALUATION_EPOCH, ask, question_generator

WindowKey = tuple[int, int]
"""(epoch, window): all that a question depends on besides the seed. Windows of mixed datasets are numbered through."""

MIX_BLOCK = 1 << 16
"""Samples in which each dataset of a mix has exactly its share."""
_MIX_STREAM = 1 << 62
"""Keeps the draws of a mix apart from those of an epoch's order."""
_KEYS_AT_ONCE = 128
"""Keys that are drawn together: an array of few numbers costs as much as one of hundreds."""


class ReadingError(FormatError):
    """What was wrong with a dataset while it was read, in one line.

    Where a worker process raises it, torch builds it again from the text of the whole traceback: all but the
    message, which comes last, is dropped.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text.rpartition(f"{type(self).__name__}: ")[2].strip())


class QuestionDataset(Dataset[Batch]):
    """Turns the keys of a batch into its questions.

    Args:
        shards: the windows of one split.
        objective: what is asked.
        seed: of the run.
        evaluation: whether answers are compared with floors.
    """

    def __init__(
        self, shards: ShardSet | JoinedShards, objective: ObjectiveConfig, *, seed: int, evaluation: bool
    ) -> None:
        self.shards = shards
        self.objective = objective
        self.seed = seed
        self.evaluation = evaluation

    def __getitem__(self, keys: Sequence[WindowKey]) -> Batch:
        """Return the questions of some windows, each in its epoch: uint8 `(B, W)`, widened only on the device.

        Raises:
            ReadingError: a shard is damaged or cannot be read.
        """
        try:
            rows = self.shards.read_many([window for _, window in keys])
        except (ValueError, OSError) as error:
            raise ReadingError(str(error)) from error
        inputs, targets = np.empty_like(rows), np.empty_like(rows)
        for place, (epoch, window) in enumerate(keys):
            generator = question_generator(self.seed, epoch=epoch, window=window)
            inputs[place], targets[place] = ask(
                rows[place], self.objective, generator, evaluation=self.evaluation
            )
        return SentBatch(torch.from_numpy(inputs), torch.from_numpy(targets))


class SentBatch(Batch):
    """A batch that workers send as plain bytes.

    Torch would share memory instead, which for batches this small takes longer, and fails where `/dev/shm` is small,
    as in most containers.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return _receive, (self.inputs.numpy(), self.targets.numpy())


def _receive(inputs: np.ndarray, targets: np.ndarray) -> Batch:
    return Batch(torch.from_numpy(inputs), torch.from_numpy(targets))


def mix_quotas(weights: Sequence[float]) -> list[int]:
    """Return how many of each `MIX_BLOCK` samples each dataset gives: whole numbers by largest remainders.

    Raises:
        ValueError: a weight so small that its dataset would never be read.
    """
    parts = [weight / max(weights) for weight in weights]
    exact = [part / math.fsum(parts) * MIX_BLOCK for part in parts]
    quotas = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda place: quotas[place] - exact[place])
    for place in by_remainder[: MIX_BLOCK - sum(quotas)]:
        quotas[place] += 1
    if 0 in quotas:
        place = quotas.index(0)
        raise ValueError(
            f"data.weights: folder {place + 1} of data.path and data.more_paths has {weights[place]:g} of {sum(weights):g} (its windows "
            f"where no weights are given), less than one sample in {MIX_BLOCK:,}; give it more weight or leave it out"
        )
    return quotas


def mix(samples: np.ndarray, quotas: Sequence[int], *, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return which dataset each sample comes from, and its number among all samples of that dataset.

    A block holds its quota of each dataset in an order of its own, a function of (seed, block): no state.

    Args:
        samples: numbers from 0, int64 `(N,)`.
        quotas: samples of each dataset in a block, from `mix_quotas`.
        seed: of the run.

    Returns:
        int64 `(N,)` each.
    """
    if len(quotas) == 1:
        return np.zeros_like(samples), samples
    blocks, places = np.divmod(samples, MIX_BLOCK)
    slots = np.empty_like(places)
    for block in np.unique(blocks):
        here = blocks == block
        slots[here] = permuted(places[here], MIX_BLOCK, seed=seed, epoch=_MIX_STREAM + int(block))
    ends = np.cumsum(quotas)
    datasets = np.searchsorted(ends, slots, side="right")
    sizes = np.asarray(quotas)[datasets]
    return datasets, blocks * sizes + slots - (ends[datasets] - sizes)


class TrainingOrder(Sampler[list[WindowKey]]):
    """The endless order of training windows, cut into batches of this rank.

    Sample number t of the whole run is, with one dataset of n windows, window `permutation(epoch)[t mod n]` of epoch
    `t div n`; with several, `mix` says which dataset's sample it is. That holds for any number of ranks and workers;
    each rank takes its slice of each global batch. Position is one number, so going on after an interruption, with
    other workers or ranks too, needs nothing else.

    Args:
        sizes: number of windows of each dataset.
        quotas: samples of each dataset in a block, from `mix_quotas`.
        seed: of the run.
        batch_size: windows in a batch of one rank.
        rank: of this process, from 0.
        world_size: number of ranks.
        start: returns the number of samples that all ranks have trained on, asked when iteration begins.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        *,
        quotas: Sequence[int] = (MIX_BLOCK,),
        seed: int,
        batch_size: int,
        rank: int,
        world_size: int,
        start: Callable[[], int],
    ) -> None:
        assert len(sizes) == len(quotas)
        self.sizes = sizes
        self.quotas = quotas
        self.seed = seed
        self.batch_size = batch_size
        self.rank = rank
        self.world_size = world_size
        self.start = start

    def __iter__(self) -> Iterator[list[WindowKey]]:
        first, step = self.start(), self.batch_size * self.world_size
        ahead = -(-_KEYS_AT_ONCE // self.batch_size)
        while True:
            batches = first + self.rank * self.batch_size + step * np.arange(ahead)
            keys = self.keys((batches[:, None] + np.arange(self.batch_size)).ravel())
            for place in range(0, len(keys), self.batch_size):
                yield keys[place : place + self.batch_size]
            first += step * ahead

    def keys(self, samples: np.ndarray) -> list[WindowKey]:
        """Return the keys of sample numbers, int64 `(N,)`."""
        datasets, numbers = mix(samples, self.quotas, seed=self.seed)
        sizes = np.asarray(self.sizes)[datasets]
        epochs, places = np.divmod(numbers, sizes)
        windows = np.empty_like(places)
        first = 0
        for dataset, size in enumerate(self.sizes):
            for epoch in np.unique(epochs[datasets == dataset]):
                here = (datasets == dataset) & (epochs == epoch)
                stream = dataset << 40 | int(epoch)  # datasets of one size have orders of their own
                windows[here] = first + permuted(places[here], size, seed=self.seed, epoch=stream)
            first += size
        return list(zip(epochs.tolist(), windows.tolist(), strict=True))


class Position(Callback):
    """Counts the windows that all ranks have trained on; with the seed that is the whole position in the data.

    Args:
        seed: of the run.
        context_length: tokens in a window.
        digests: of the datasets.
        quotas: samples of each in a block of the mix.
        num_windows: of their training splits together.
    """

    def __init__(
        self,
        *,
        seed: int,
        context_length: int,
        digests: Sequence[str],
        quotas: Sequence[int],
        num_windows: int,
    ) -> None:
        self.samples = 0
        self._fixed = {
            "seed": seed,
            "context_length": context_length,
            "digest": digests[0],
            "more_digests": list(digests[1:]),
            "weights": [quota / MIX_BLOCK for quota in quotas],
            "num_windows": num_windows,
        }

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
            # a checkpoint from before mixes lacks keys; one dataset cut otherwise has another number of windows
            found = state_dict.get(key, value)
            if found != value:
                raise ValueError(
                    f"cannot resume: the checkpoint was trained with {key} {found}, this run has {value}; "
                    "give the same data, weights, context_length and seed, or another name for a new run"
                )
        self.samples = state_dict["samples"]


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
        loaders = []
        for shards in self.valid_shards.values():
            dataset = QuestionDataset(shards, self.objective, seed=self.seed, evaluation=True)
            count = self._num_windows(shards)
            keys = evaluation_keys(count, rank=self._rank, world_size=self._world_size)
            size = max(1, self.config.batch_size // self._world_size)
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
            dataset,
            sampler=batches,
            batch_size=None,  # an item is a batch
            num_workers=workers,
            pin_memory=torch.cuda.is_available(),
            persistent_workers=workers > 0,
        )


def evaluation_keys(num_windows: int, *, rank: int = 0, world_size: int = 1) -> list[WindowKey]:
    """Return this rank's share of an evaluation: each window once, its masks the same each time."""
    return [(EVALUATION_EPOCH, window) for window in range(rank, num_windows, world_size)]
