"""Which split a record belongs to: a point drawn from the hash of its sequence, or of its cluster's representative.

The split depends on nothing else: not on the order of the records, the files they come in or the number of shards. Where
numbers are asked instead of fractions it also depends on what else is there, since the smallest points are taken.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from data_prep.keys import name_point
from data_prep.options import PrepareOptions
from protperf.formats.manifest import SPLITS

TRAIN, VALID, TEST, OOD = range(len(SPLITS))
"""Numbers of the splits, in rising priority: a sequence met under two splits goes to the higher one."""

_RANGE = 1 << 64


@dataclass(frozen=True)
class Thresholds:
    """Where the splits end on the range of the points, 0 to 2^64.

    Attributes:
        test_end: points below are `test`.
        valid_end: the others below are `valid`.
    """

    test_end: int
    valid_end: int

    @classmethod
    def of_fractions(cls, options: PrepareOptions) -> Thresholds | None:
        """Return the thresholds of two fractions, None if a number is asked."""
        if options.valid >= 1 or options.test >= 1:
            return None
        test_end = int(options.test * _RANGE)
        return cls(test_end, test_end + int(options.valid * _RANGE))

    @classmethod
    def of_points(cls, options: PrepareOptions, points: np.ndarray) -> Thresholds | None:
        """Return thresholds that give the numbers asked, None if the points are too few for them.

        Args:
            options: fractions and numbers.
            points: the smallest points of all distinct sequences or clusters, sorted, uint64 `(N,)`.
        """
        test_end = _end(options.test, 0, points)
        valid_end = None if test_end is None else _end(options.valid, test_end, points)
        return None if test_end is None or valid_end is None else cls(test_end, valid_end)

    @classmethod
    def of_clusters(cls, options: PrepareOptions, representatives: Iterable[bytes]) -> Thresholds:
        """Return thresholds for clusters, whose representatives are asked only if they must be counted."""
        fractions = cls.of_fractions(options)
        if fractions is not None:
            return fractions
        points = np.unique(
            np.fromiter((name_point(name, options.split_seed) for name in representatives), np.uint64)
        )
        found = cls.of_points(options, points)
        if found is None:
            raise ValueError(
                f"--valid {options.valid:g} --test {options.test:g}: there are only {len(points):,} clusters in {options.clusters}"
            )
        return found

    def split_at(self, point: int) -> int:
        """Return the number of the split of one point."""
        return TEST if point < self.test_end else VALID if point < self.valid_end else TRAIN

    def splits_at(self, points: np.ndarray) -> np.ndarray:
        """Return the numbers of the splits of points, uint8 `(N,)`; `points` is uint64."""
        splits = np.full(len(points), TRAIN, np.uint8)
        for end, split in ((self.valid_end, VALID), (self.test_end, TEST)):
            splits[points < np.uint64(end)] = split
        return splits

    @property
    def shares(self) -> dict[int, float]:
        """The part of the range that each split takes, by number."""
        test, valid = self.test_end / _RANGE, (self.valid_end - self.test_end) / _RANGE
        return {TRAIN: max(0.0, 1 - test - valid), VALID: valid, TEST: test, OOD: 0.0}


def num_asked(options: PrepareOptions) -> int:
    """Return how many sequences or clusters are asked for by number."""
    return int(sum(share for share in (options.valid, options.test) if share >= 1))


def _end(share: float, start: int, points: np.ndarray) -> int | None:
    """Return where a split that begins at `start` ends, None if there are too few points."""
    if share < 1:
        return min(start + int(share * _RANGE), _RANGE - 1)
    place = int(np.searchsorted(points, np.uint64(start))) + int(share)
    return min(int(points[place - 1]) + 1, _RANGE - 1) if place <= len(points) else None
