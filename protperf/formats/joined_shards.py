"""The same split of several datasets, read as one.

Axes: `N` windows, `W` tokens per window.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from protperf.formats.shards import ShardSet


class JoinedShards:
    """Windows of several sets, numbered through in their order.

    Args:
        sets: at least one; all with windows of one length.

    Raises:
        ValueError: windows of several lengths.
    """

    def __init__(self, sets: Sequence[ShardSet]) -> None:
        self.sets = list(sets)
        self.sizes = [len(shards) for shards in self.sets]
        self._ends = np.array(list(accumulate(self.sizes)))
        self.window = self.sets[0].window
        for shards in self.sets:
            if shards.window != self.window:
                common = math.gcd(*(each.window for each in self.sets))
                raise ValueError(
                    f"{shards.dataset_dir}: windows of {shards.window} tokens, those of {self.sets[0].dataset_dir} "
                    f"have {self.window}; prepare them with one window, or give data.context_length={common}"
                )

    def __len__(self) -> int:
        """Return the number of windows."""
        return sum(self.sizes)

    def read_many(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return windows in the order asked, `uint8 (N, W)`; errors as `ShardSet.read_many`."""
        if len(self.sets) == 1:
            return self.sets[0].read_many(indices)
        places = np.asarray(indices)
        windows = np.empty((len(places), self.window), np.uint8)
        owners = np.searchsorted(self._ends, places, side="right")
        for owner in np.unique(owners):
            here = owners == owner
            first = self._ends[owner] - self.sizes[owner]
            windows[here] = self.sets[owner].read_many(places[here] - first)
        return windows
