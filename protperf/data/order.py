"""Which window of which dataset a rank reads when: a function of one number, the position.

Axis letters: `N` samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytorch_lightning as pl
from pytorch_lightning.callbacks import Callback
from torch.utils.data import Sampler

from protperf.batches import Batch, permuted
from protperf.data.questions import WindowKey

MIX_BLOCK = 1 << 16
"""Samples in which each dataset of a mix has exactly its share."""
_MIX_STREAM = 1 << 62
"""Keeps the draws of a mix apart from those of an epoch's order."""
_KEYS_AT_ONCE = 128
"""Keys that are drawn together: an array of few numbers costs as much as one of hundreds."""


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
