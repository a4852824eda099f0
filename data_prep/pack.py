"""Second half of the sort: buckets in order become streams of proteins, cut into windows and written as shards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import numpy as np

from data_prep.options import PrepareOptions
from data_prep.spill import SpilledRecord
from protperf.formats.manifest import SPLITS, ShardEntry, SplitStats
from protperf.formats.ngrams import NgramCounts
from protperf.formats.shards import shard_name, write_shard
from protperf.vocab import VOCABULARY

_BOS, _EOS, _PAD = (bytes([token]) for token in (VOCABULARY.bos, VOCABULARY.eos, VOCABULARY.pad))
_KEY_BITS = 64


@dataclass
class Removed:
    """What the packing dropped or moved.

    Attributes:
        duplicates: records dropped because the same sequence was there already.
        split_conflicts: sequences met under two splits and kept in one.
    """

    duplicates: int = 0
    split_conflicts: int = 0


class Packer:
    """Packs proteins that arrive in key order into the shards of all splits.

    A shard is a range of keys: shard s of n holds the keys from s/n to (s+1)/n of the key space. So a shard can be made
    without the others, and its bytes do not depend on who makes it. A range without proteins makes no file.

    Attributes:
        ngrams: counts of the split `train`.
        removed: what was dropped or moved.
    """

    def __init__(self, folder: Path, options: PrepareOptions, *, num_tokens: list[int]) -> None:
        """Plan the shards.

        Args:
            folder: where the shards are written.
            options: the dataset's options.
            num_tokens: tokens by split before duplicates are dropped; they give the number of shards.
        """
        self.ngrams = NgramCounts()
        self.removed = Removed()
        self._copies = options.duplicates == "keep"
        self._streams = [
            _Stream(folder, split, options.window, count_shards(tokens, options), self.ngrams)
            for split, tokens in zip(SPLITS, num_tokens, strict=True)
        ]

    def add(self, records: Iterable[SpilledRecord]) -> None:
        """Pack records sorted by key and sequence; equal sequences must come in one call."""
        for (key, sequence), group in groupby(records, key=itemgetter(0, 1)):
            splits = [record[2] for record in group]
            self.removed.split_conflicts += len(set(splits)) > 1
            stream = self._streams[max(splits)]
            if not self._copies:
                self.removed.duplicates += len(splits) - 1
                splits = splits[:1]
            for _ in splits:
                stream.add(key, sequence)

    def finish(self) -> tuple[list[ShardEntry], dict[str, SplitStats]]:
        """Write the last shard of each split; return all shards and the contents of each split."""
        for stream in self._streams:
            stream.flush()
        shards = [shard for stream in self._streams for shard in stream.shards]
        return shards, {stream.split: stream.stats() for stream in self._streams}


def count_shards(num_tokens: int, options: PrepareOptions) -> int:
    """Return the number of key ranges of a split, so that a shard holds about `shard_windows` windows."""
    return max(1, round(num_tokens / (options.window * options.shard_windows)))


class _Stream:
    """The proteins of one split on their way into shards; holds one shard in memory."""

    def __init__(self, folder: Path, split: str, window: int, num_shards: int, ngrams: NgramCounts) -> None:
        self.split = split
        self.shards: list[ShardEntry] = []
        self._folder = folder
        self._window = window
        self._num_shards = num_shards
        self._ngrams = ngrams if split == "train" else None
        self._index = 0
        self._tokens = bytearray()
        self._residues = 0
        self._histogram: Counter[int] = Counter()

    def add(self, key: bytes, sequence: bytes) -> None:
        """Append one protein."""
        index = int.from_bytes(key[: _KEY_BITS // 8], "big") * self._num_shards >> _KEY_BITS
        if index != self._index:
            self.flush()
            self._index = index
        self._tokens += _BOS + sequence + _EOS
        self._residues += len(sequence)
        self._histogram[1 << (len(sequence).bit_length() - 1)] += 1

    def flush(self) -> None:
        """Write the tokens held as a shard, the last window padded."""
        num_tokens = len(self._tokens)
        if not num_tokens:
            return
        self._tokens += _PAD * (-num_tokens % self._window)
        stream = np.frombuffer(self._tokens, np.uint8)
        if self._ngrams is not None:
            self._ngrams.add(stream[:num_tokens])
        path = self._folder / shard_name(self.split, self._index, self._num_shards)
        windows = stream.reshape(-1, self._window)  # (N, W)
        self.shards.append(
            write_shard(path, windows, split=self.split, index=self._index, num_shards=self._num_shards)
        )
        self._tokens = bytearray()

    def stats(self) -> SplitStats:
        """Return what the split holds."""
        sequences = self._histogram.total()
        return SplitStats(
            sequences=sequences,
            residues=self._residues,
            tokens=self._residues + 2 * sequences,
            windows=sum(shard.windows for shard in self.shards),
            length_histogram={str(length): number for length, number in sorted(self._histogram.items())},
        )
