"""From windows and proteins to batches: which window comes when, which token belongs to which protein.

Axis letters: `B` batch, `L` length in tokens, `N` number of windows or proteins.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from protperf.vocab import PADDING_DOCUMENT, VOCABULARY


class Batch(NamedTuple):
    """A question: what the model is shown and what it is asked.

    Attributes:
        inputs: shown tokens, uint8 `(B, L)`.
        targets: the right token where one is asked, else `objectives.NOT_ASKED`; uint8 `(B, L)`.
    """

    inputs: Tensor
    targets: Tensor


def documents_of(tokens: Tensor, *, across: bool = False) -> Tensor:
    """Number the proteins packed into each window, int32 `(B, L)`; `PADDING_DOCUMENT` where padding stands.

    The number is the running count of `<bos>`: 0 for the rest of a protein that began in the window before.

    Args:
        tokens: ids, any integer type, `(B, L)`.
        across: give all proteins of a window one number, so that they see each other.
    """
    numbers = torch.zeros_like(tokens, dtype=torch.int32)
    if not across:
        numbers = tokens.eq(VOCABULARY.bos).cumsum(1, dtype=torch.int32)
    return numbers.masked_fill(tokens.eq(VOCABULARY.pad), PADDING_DOCUMENT)


def documents_or_one(tokens: Tensor, *, across: bool) -> Tensor | None:
    """Return what a model is told of the proteins in each window: `None` where all of every row is one document.

    Exact attention then takes kernels without a mask, a few times as fast.

    Args:
        tokens: as in `documents_of`.
        across: as in `documents_of`.
    """
    if across and not tokens.eq(VOCABULARY.pad).any():
        return None
    return documents_of(tokens, across=across)


def residues_of_proteins(tokens: Tensor) -> Tensor:
    """Return of each token how many residues of its protein lie in the window, int64 `(B, L)`; 0 at padding.

    Args:
        tokens: ids, residues possibly shown as `<mask>`, any integer type, `(B, L)`.
    """
    numbers = documents_of(tokens).long() + 1  # padding is 0
    special = tokens.eq(VOCABULARY.bos) | tokens.eq(VOCABULARY.eos) | tokens.eq(VOCABULARY.pad)
    counts = numbers.new_zeros(len(tokens), tokens.shape[1] + 2)
    counts.scatter_add_(1, numbers, (~special).long())
    return counts.gather(1, numbers)


def pad_together(sequences: Sequence[np.ndarray]) -> tuple[Tensor, Tensor]:
    """Put single proteins side by side: tokens uint8 `(B, L)`, padded right, and documents int32 `(B, L)`."""
    tokens = np.full((len(sequences), max(map(len, sequences))), VOCABULARY.pad, np.uint8)
    for row, sequence in zip(tokens, sequences, strict=True):
        row[: len(sequence)] = sequence
    return torch.from_numpy(tokens), documents_of(torch.from_numpy(tokens), across=True)


def plan_batches(lengths: Sequence[int], *, token_budget: int) -> Iterator[list[int]]:
    """Group proteins of similar length so that a padded batch holds at most `token_budget` tokens.

    A protein longer than the budget is a batch of its own.

    Args:
        lengths: tokens of each protein.
        token_budget: rows times the longest row.

    Yields:
        places in `lengths`, shortest proteins first.
    """
    batch: list[int] = []
    for place in np.argsort(np.asarray(lengths), kind="stable").tolist():
        if batch and (len(batch) + 1) * lengths[place] > token_budget:
            yield batch
            batch = []
        batch.append(place)
    if batch:
        yield batch


_OUT_OF_MEMORY = ("out of memory", "allocate memory", "ALLOC_FAILED")
"""What allocators say where they raise a plain `RuntimeError`: CPU, MPS, cuBLAS."""


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an allocator had no memory left, in whatever way it says so."""
    known = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return known or any(text in str(error) for text in _OUT_OF_MEMORY)


_ROUNDS = 6
_ORDER_STREAM = 1 << 63
"""Keeps the draws of an epoch's order apart from those of its questions (`objectives.question_generator`)."""
_MIX = np.uint64(0x9E3779B97F4A7C15)


def permuted(places: np.ndarray, size: int, *, seed: int, epoch: int) -> np.ndarray:
    """Return where a random permutation of `0 .. size - 1` sends `places`, without storing the permutation.

    A Feistel network over the smallest even number of bits that holds `size`, walked until it lands inside: a
    bijection for every size, so any place of any epoch is found at once and resuming needs no state.

    Args:
        places: integers below `size`, `(N,)`.
        size: number of windows.
        seed: of the run.
        epoch: each has its own permutation.

    Returns:
        int64 `(N,)`.
    """
    half = np.uint64(max(1, (max(size - 1, 1).bit_length() + 1) // 2))
    key = np.array(
        [seed, _ORDER_STREAM | epoch], np.uint64
    )  # a plain list this large would pass through float64
    keys = np.random.Philox(key=key).random_raw(_ROUNDS)
    result = places.astype(np.uint64)
    outside = np.ones(len(result), bool)
    while outside.any():
        result[outside] = _feistel(result[outside], keys, half)
        outside = result >= size
    return result.astype(np.int64)


def _feistel(values: np.ndarray, keys: np.ndarray, half: np.uint64) -> np.ndarray:
    low_bits = (np.uint64(1) << half) - np.uint64(1)
    left, right = values >> half, values & low_bits
    for key in keys:
        mixed = (right + key) * _MIX
        mixed = (mixed ^ (mixed >> np.uint64(29))) * _MIX
        left, right = right, left ^ ((mixed >> np.uint64(32)) & low_bits)
    return (left << half) | right
