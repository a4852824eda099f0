"""What counting n-grams gets where models are asked: the same residues, the same training split."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from protperf.config import ObjectiveConfig
from protperf.formats.ngrams import NGRAMS_NAME, read_ngrams
from protperf.formats.scores import FLOORS
from protperf.formats.shards import ShardSet
from protperf.inference.evaluation import tally_windows
from protperf.metrics import NgramFloor, length_bins

Score = dict[str, float]

_AT_ONCE = 8192  # tokens


def floors_on(
    dataset: Path, *, objective: str, seed: int, splits: tuple[str, ...]
) -> dict[str, dict[str, Score]]:
    """Return what the floors get: split -> name of the floor -> loss, perplexity, accuracy, asked.

    Args:
        dataset: by `protperf prepare`.
        objective: `masked` or `causal`.
        seed: of the run that they stand beside, which decides its masks.
        splits: names.
    """
    counted = NgramFloor(list(read_ngrams(dataset / NGRAMS_NAME).orders.values()))
    found = {}
    for split in splits:
        shards = ShardSet(dataset, split)
        tallies = tally_windows(
            {},
            {name: (counted, order) for name, order in FLOORS.items()},
            windows_of(shards),
            objective=ObjectiveConfig(kind=objective),
            seed=seed,
            bins=length_bins(shards.window),
        )
        found[split] = {name: tallies[name].summary() for name in FLOORS}
    return found


def windows_of(shards: ShardSet) -> Iterator[tuple[range, np.ndarray]]:
    """Yield the numbers of some windows and their tokens, uint8 `(B, W)`, until there are no more."""
    rows = max(1, _AT_ONCE // shards.window)
    for first in range(0, len(shards), rows):
        numbers = range(first, min(first + rows, len(shards)))
        yield numbers, shards.read_many(list(numbers))
