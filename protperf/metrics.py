"""Perplexity and accuracy as sums over tokens and ranks, and the n-gram floors they are read against.

Axis letters: `L` length in tokens, `A` asked residues, `V` vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, distributed
from torchmetrics import Metric

from protperf.vocab import VOCABULARY

LENGTH_EDGES = (512, 1024, 2048, 4096, 8192)
"""Residues up to which proteins are told apart in evaluation."""


def length_bins(window: int) -> dict[str, float]:
    """Return the bins of protein length that a window of so many tokens can hold: name -> most residues.

    >>> length_bins(1024)
    {'up_to_512': 512, 'up_to_1024': 1024}
    """
    inner = [edge for edge in LENGTH_EDGES if edge < window]
    rest = [edge for edge in LENGTH_EDGES if edge >= window][:1]
    bins: dict[str, float] = {f"up_to_{edge}": edge for edge in inner + rest}
    return bins if rest else {**bins, f"over_{LENGTH_EDGES[-1]}": math.inf}


class TokenMetrics(Metric):
    """Loss, perplexity and accuracy over all asked tokens of all batches and ranks.

    Args:
        bins: names of the bins of which sums are added; each is reported besides the whole where there are several.
    """

    full_state_update = False
    nll: Tensor
    asked: Tensor
    correct: Tensor

    def __init__(self, bins: tuple[str, ...] = ("all",)) -> None:
        super().__init__()
        self.bins = bins
        self.add_state("nll", torch.zeros(len(bins), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("asked", torch.zeros(len(bins), dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("correct", torch.zeros(len(bins), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, nll: Tensor, asked: Tensor, correct: Tensor) -> None:
        """Add the sums of one batch (see `objectives.TokenSums`), each a scalar or one number a bin."""
        self.nll += nll.detach().double()
        self.asked += asked
        self.correct += correct

    def sums(self) -> dict[str, float]:
        """Return the arguments of `update` that would bring empty metrics here, summed over all ranks."""
        with self.sync_context():
            return {name: getattr(self, name).sum().item() for name in ("nll", "asked", "correct")}

    def compute(self) -> dict[str, float]:
        """Return loss in nats per asked token, its exponential, and the share of tokens got right.

        With several bins also `NAME_BIN` of each bin that was asked.
        """
        values = summarise(float(self.nll.sum()), int(self.asked.sum()), int(self.correct.sum()))
        if len(self.bins) == 1:
            return values
        for bin_name, *sums in zip(
            self.bins, self.nll.tolist(), self.asked.tolist(), self.correct.tolist(), strict=True
        ):
            if sums[1]:
                values |= {f"{name}_{bin_name}": value for name, value in summarise(*sums).items()}
        return values


def sum_over_ranks(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor over all ranks, which must all ask; on a GPU nothing waits for it."""
    if distributed.is_available() and distributed.is_initialized():
        tensor = tensor.clone()
        distributed.all_reduce(tensor)
    return tensor


def summarise(nll: float, asked: int, correct: int) -> dict[str, float]:
    """Turn sums over asked tokens into loss (nats per token), perplexity and accuracy; NaN if none was asked."""
    if asked == 0:
        return {"loss": math.nan, "perplexity": math.nan, "accuracy": math.nan}
    loss = nll / asked
    return {"loss": loss, "perplexity": math.exp(min(loss, 700.0)), "accuracy": correct / asked}


def rank_correlation(values: np.ndarray, others: np.ndarray) -> float:
    """Return Spearman's coefficient, equal values sharing the mean of their ranks; NaN where one side has one value.

    >>> round(rank_correlation(np.array([1, 2, 3, 4, 5]), np.array([5, 6, 7, 8, 7])), 6)
    0.820783

    Args:
        values: float `(N,)`, without NaN.
        others: float `(N,)`, without NaN.
    """
    one, other = (each - each.mean() for each in (_ranks(values), _ranks(others)))
    spread = math.sqrt((one @ one) * (other @ other))
    return float(one @ other) / spread if spread else math.nan


def _ranks(values: np.ndarray) -> np.ndarray:
    """Return the rank of each value from 1, float64 `(N,)`; equal values share the mean of theirs."""
    _, kinds, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[kinds]


class NgramFloor:
    """What counting gets: each residue predicted from the residues before it, in the training split alone.

    Witten-Bell interpolation (Witten & Bell 1991; Chen & Goodman 1999, Eq. 18) down to add-one unigrams over the
    residue tokens, which are the only ones that evaluation asks. Order 1 is the unigram floor.

    Args:
        counts: for each order n from 1, the counts of n-grams inside proteins, `<bos>` included, int64 `(V,) * n`.
    """

    def __init__(self, counts: Sequence[np.ndarray]) -> None:
        num_residues = VOCABULARY.num_residues
        unigrams = counts[0][:num_residues] + 1.0
        self._log_probabilities = [np.log(unigrams / unigrams.sum())]
        lower = unigrams / unigrams.sum()
        for table in counts[1:]:
            table = table[..., :num_residues].astype(np.float64)
            seen = table.sum(-1, keepdims=True)
            kinds = (table > 0).sum(-1, keepdims=True)
            with np.errstate(invalid="ignore"):
                mixed = (table + kinds * lower) / (seen + kinds)
            lower = np.where(seen > 0, mixed, np.broadcast_to(lower, table.shape))
            self._log_probabilities.append(np.log(lower))

    def losses(self, tokens: np.ndarray, asked: np.ndarray, *, order: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the loss of each asked residue in nats, float64 `(A,)`, and whether it was got right, bool `(A,)`.

        The context is what truly stands before a residue inside its protein and the window: fewer than
        `order - 1` tokens there mean a lower order.

        Args:
            tokens: one window, uint8 `(L,)`.
            asked: places of asked residues, int64 `(A,)`.
            order: 1 (unigram) to the number of tables.
        """
        begins = np.maximum.accumulate(np.where(tokens == VOCABULARY.bos, np.arange(len(tokens)), 0))
        context = np.minimum(asked - begins[asked], order - 1)
        nll, correct = np.zeros(len(asked)), np.zeros(len(asked), bool)
        for size in np.unique(context):
            chosen = context == size
            places = asked[chosen]
            before = tuple(tokens[places - back] for back in range(size, 0, -1))
            scores = self._log_probabilities[size][before]
            scores = np.broadcast_to(scores, (len(places), VOCABULARY.num_residues))
            nll[chosen] = -scores[np.arange(len(places)), tokens[places]]
            correct[chosen] = scores.argmax(-1) == tokens[places]
        return nll, correct
