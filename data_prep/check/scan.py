"""One pass over a shard's bytes: its hash, whether its tokens are whole proteins, and what they count to.

The order of tokens in a shard is a language of neighbours: which token may follow which says all but the first and the
last token. So the counts of neighbouring pairs are both the check and the numbers.

Axes: `T` tokens, `P` proteins.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from data_prep.keys import hash_sequences
from protperf.formats.manifest import LENGTH_BINS, ShardEntry
from protperf.vocab import VOCABULARY

_BLOCK_BYTES = 1 << 20
_SIZE = len(VOCABULARY)
_RESIDUES = slice(0, VOCABULARY.num_residues)
_BOS, _EOS, _PAD = VOCABULARY.bos, VOCABULARY.eos, VOCABULARY.pad


def _allow_pairs() -> np.ndarray:
    """Return which token (row) may be followed by which (column), `bool (36, 36)`."""
    allowed = np.zeros((_SIZE, _SIZE), bool)
    allowed[_BOS, _RESIDUES] = allowed[_RESIDUES, _RESIDUES] = allowed[_RESIDUES, _EOS] = True
    allowed[_EOS, [_BOS, _PAD]] = allowed[_PAD, _PAD] = True
    return allowed


_ALLOWED = _allow_pairs()


class ShardScan:
    """What the tokens of one shard are, fed block by block; memory is one block, one protein and 16 bytes a protein.

    Attributes:
        pairs: number of times a token (row) is followed by another (column), `int64 (36, 36)`; the first token counts as
            one that follows an `<eos>`.
        lengths: number of whole proteins by bin of `LENGTH_BINS`, `int64`.
        fault: the first place where the tokens are not whole proteins, in words; empty if there is none. What follows it
            is not counted.
    """

    def __init__(self, window: int, *, cut_tail: bool) -> None:
        """Start before the first token.

        Args:
            window: tokens per window.
            cut_tail: the last window of each shard was dropped unless full, so that a shard may end inside a protein and
                holds no `<pad>`; otherwise it is filled with `<pad>`.
        """
        self.pairs = np.zeros((_SIZE, _SIZE), np.int64)
        self.lengths = np.zeros(len(LENGTH_BINS), np.int64)
        self.fault = ""
        self._window = window
        self._cut_tail = cut_tail
        self._num_tokens = 0
        self._last = _EOS
        self._open = bytearray()
        self._is_open = False
        self._highs: list[np.ndarray] = []
        self._lows: list[np.ndarray] = []

    @property
    def highs(self) -> np.ndarray:
        """First halves of the hashes of the whole proteins, in order, `uint64 (P,)`: they give the order keys."""
        return np.concatenate([np.zeros(0, np.uint64), *self._highs])

    @property
    def lows(self) -> np.ndarray:
        """Second halves of these hashes, `uint64 (P,)`: proteins are compared by them."""
        return np.concatenate([np.zeros(0, np.uint64), *self._lows])

    @property
    def counts(self) -> np.ndarray:
        """Number of each token, `int64 (36,)`."""
        return self.pairs.sum(axis=0)

    def add(self, block: np.ndarray) -> None:
        """Take the next tokens, `uint8 (T,)`."""
        if self.fault or not len(block):
            return
        if not self._num_tokens and block[0] != _BOS:
            self.fault = f"begins with {_name(block[0])}, not <bos>"
            return
        self._count_pairs(block)
        if not self.fault:
            self._close_proteins(block)
            self._last = int(block[-1])
            self._num_tokens += len(block)

    def finish(self) -> None:
        """Say what is wrong with the end, once all tokens are in."""
        num_pads = int(self.counts[_PAD])
        if self.fault:
            return
        if self._cut_tail and num_pads:
            self.fault = "holds <pad>, though its last window was to be dropped"
        elif num_pads >= self._window:
            self.fault = f"ends in {num_pads} <pad>, a whole window ({self._window}) or more"
        elif self._is_open and not self._cut_tail:
            self.fault = "ends inside a protein"

    def _count_pairs(self, block: np.ndarray) -> None:
        """Count the pairs that end in `block`, `uint8 (T,)`, and find one that may not be."""
        before = np.concatenate(([np.uint8(self._last)], block[:-1]))
        codes = before.astype(np.uint16) * np.uint16(_SIZE) + block
        if block.max() < _SIZE:
            counts = np.bincount(codes, minlength=_SIZE * _SIZE).reshape(_SIZE, _SIZE)
            if not counts[~_ALLOWED].any():
                self.pairs += counts
                return
        wrong = block >= _SIZE
        wrong[~wrong] = ~_ALLOWED.ravel()[codes[~wrong] % (_SIZE * _SIZE)]
        first = int(np.argmax(wrong))
        window, place = divmod(self._num_tokens + first, self._window)
        self.fault = f"window {window}, token {place}: {_name(block[first])} after {_name(before[first])}"

    def _close_proteins(self, block: np.ndarray) -> None:
        """Take lengths and hashes of the proteins that end in `block`, `uint8 (T,)`, and keep the one left open."""
        text = block.tobytes()
        starts = np.flatnonzero(block == _BOS).tolist()
        ends = np.flatnonzero(block == _EOS).tolist()
        proteins: list[bytes] = []
        if self._is_open:
            self._open += text[: ends[0]] if ends else text
            if not ends:
                return
            proteins = [bytes(self._open)]
            self._open, self._is_open = bytearray(), False
            del ends[0]
        if len(starts) > len(ends):
            self._open, self._is_open = bytearray(text[starts.pop() :]), True
        proteins += [text[start:end] for start, end in zip(starts, ends, strict=True)]
        high, low = hash_sequences(proteins)
        self._highs.append(high)
        self._lows.append(low)
        lengths = np.fromiter(map(len, proteins), np.int64, len(proteins)) - 1
        bins = np.searchsorted(LENGTH_BINS, lengths, side="right") - 1
        self.lengths += np.bincount(bins, minlength=len(LENGTH_BINS))


def scan_shard(path: Path, shard: ShardEntry, window: int, *, cut_tail: bool) -> tuple[str, ShardScan]:
    """Read a shard once; return the hex SHA-256 of its bytes and what its tokens are.

    Args:
        path: the file.
        shard: its entry in the manifest, which says where the tokens lie.
        window: tokens per window.
        cut_tail: see `ShardScan`.
    """
    scan, digest = ShardScan(window, cut_tail=cut_tail), hashlib.sha256()
    end, place = shard.offset + shard.windows * window, 0
    buffer = np.empty(_BLOCK_BYTES, np.uint8)
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer.data):
            digest.update(buffer.data[:count])
            scan.add(buffer[max(0, shard.offset - place) : max(0, min(count, end - place))])
            place += count
    scan.finish()
    return digest.hexdigest(), scan


def split_histogram(lengths: np.ndarray) -> dict[str, int]:
    """Return counts by bin as the manifest holds them: empty bins left out."""
    return {str(bound): count for bound, count in zip(LENGTH_BINS, lengths.tolist(), strict=True) if count}


def find_repeated(hashes: np.ndarray) -> tuple[int, int] | None:
    """Return the numbers (from 0) of the first two proteins of a shard that are equal, None if all differ."""
    order = np.argsort(hashes, kind="stable")
    repeated = np.flatnonzero(hashes[order][1:] == hashes[order][:-1])
    if not repeated.size:
        return None
    place = repeated[np.argmin(order[repeated + 1])]
    return int(order[place]), int(order[place + 1])


def _name(token: int | np.integer) -> str:
    """Return a token's name, or its number where it has none."""
    return VOCABULARY.tokens[token] if token < _SIZE else f"{token} (no token)"
