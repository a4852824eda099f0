"""What one hash of a sequence determines: its place in the shuffle, its split, and whether it was there before.

The hash is the 16-byte BLAKE2b of `<bos>` and the sequence's tokens, read as two big-endian numbers: `high` gives the order key, `low`
the point that the split is drawn by. Both go through the finalizer of SplitMix64 (Steele, Lea and Flood 2014,
doi:10.1145/2714064.2660195), a bijection, after a number made of the seed was XORed in. So the two do not depend on each
other, another seed reorders without moving a protein to another split, and equal (key, low) mean equal hashes.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np

KEY_BITS = 64

_DIGEST_BYTES = 16


def hash_sequences(sequences: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """Return the two halves of the hash of each sequence, given with its `<bos>`; uint64 `(N,)` each: high, low."""
    digests = b"".join([blake2b(sequence, digest_size=_DIGEST_BYTES).digest() for sequence in sequences])
    halves = np.frombuffer(digests, ">u8").reshape(-1, 2)
    return halves[:, 0].astype(np.uint64), halves[:, 1].astype(np.uint64)


def order_keys(high: np.ndarray, seed: int) -> np.ndarray:
    """Return the keys that the proteins are sorted by, uint64 `(N,)`."""
    return _mixed(high ^ _seed_word("order", seed))


def sort_records(keys: np.ndarray, lows: np.ndarray) -> np.ndarray:
    """Return the places of records sorted by key and then by the second half of the hash, intp `(N,)`; both are uint64."""
    order = np.argsort(keys)
    keys, sorted_lows = keys[order], lows[order]
    if np.any(
        (keys[1:] == keys[:-1]) & (sorted_lows[1:] < sorted_lows[:-1])
    ):  # two hashes with one key: very rare
        return np.lexsort((lows, keys[np.argsort(order)]))
    return order


def split_points(low: np.ndarray, split_seed: int) -> np.ndarray:
    """Return the points that the splits are drawn by, uint64 `(N,)`, even over all of its range."""
    return _mixed(low ^ _seed_word("split", split_seed))


def hash_name(name: bytes) -> int:
    """Return a 64-bit hash of a record's name."""
    return int.from_bytes(blake2b(name, digest_size=8).digest(), "big")


def name_point(name: bytes, split_seed: int) -> int:
    """Return the point that the split of a cluster is drawn by, from the name of its representative; 0 to 2^64 - 1."""
    key = f"protperf split {split_seed}".encode()
    return int.from_bytes(blake2b(name, digest_size=8, key=key).digest(), "big")


def _seed_word(purpose: str, seed: int) -> np.uint64:
    """Return a number made of a seed, one for each purpose."""
    digest = blake2b(f"protperf {purpose} {seed}".encode(), digest_size=8).digest()
    return np.uint64(int.from_bytes(digest, "big"))


def _mixed(words: np.ndarray) -> np.ndarray:
    """Return SplitMix64's finalizer of `words`, uint64 `(N,)`."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
