"""Drawing tokens from what a model expects: temperature, top-k, top-p, and random numbers that belong to one sequence.

A draw is a function of the model, the sequence so far and the sequence's own stream of random numbers. What else stands
in the batch changes a probability by rounding alone; `choose` says where that could decide, so that the few such draws
are settled by computing the sequence alone, and a seed gives the same sequences whatever the batch.

Axis letters: `N` draws, `V` vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from protperf.vocab import VOCABULARY

if TYPE_CHECKING:
    from torch import Tensor

ROUNDING = 2e-4
"""How far rounding may move the logarithm of a probability in float32 from one batch to another, with room to spare."""

ROUNDING_OF_MEANS = 1e-5
"""How far rounding may move the mean of many of them; it is much less, since their errors have both signs."""

MAX_SEED = 2**63 - 1
_LEAST_UNIFORM = 2.0**-54


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn.

    Attributes:
        temperature: divides the logarithms of probabilities: 1 draws from the model as it is, less draws the likelier
            tokens more often, 0 always takes the likeliest.
        top_k: only so many of the likeliest residues; 0: all.
        top_p: only the fewest of the likeliest residues that have this share of all residues together, after
            `temperature` and `top_k`; 1: all. Neither moves the probability that a protein ends: `<eos>` is rare at every
            single residue, so a cut that counted it would leave it out everywhere.
        nonstandard: whether B, O, U, X, Z and J may be drawn, besides the 20 standard amino acids.
        seed: of the streams of random numbers.

    Raises:
        ValueError: a value out of its range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    nonstandard: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        """Check values."""
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature is {self.temperature}; allowed: 0 or more")
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}; allowed: 0 (all residues) or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; allowed: above 0 to 1")
        if not 0 <= self.seed <= MAX_SEED:
            raise ValueError(f"seed is {self.seed}; allowed: 0 to {MAX_SEED}")

    @property
    def residues(self) -> np.ndarray:
        """Which tokens may be drawn as residues, bool `(V,)`."""
        return np.arange(len(VOCABULARY)) < (
            VOCABULARY.num_residues if self.nonstandard else VOCABULARY.num_standard
        )

    def stream(self, protein: int, sample: int) -> np.random.Generator:
        """Return the random numbers of one sequence: the same whatever is drawn beside it.

        Args:
            protein: number of the prompt, or of the protein to fill.
            sample: number of the sample of it.
        """
        key = np.array([self.seed, protein], np.uint64)
        return np.random.Generator(np.random.Philox(key=key, counter=np.array([0, 0, 0, sample], np.uint64)))


class Choice(NamedTuple):
    """Drawn tokens.

    Attributes:
        tokens: int64 `(N,)`.
        sure: bool `(N,)`, false where errors of half of `ROUNDING` could have led to another token.
    """

    tokens: np.ndarray
    sure: np.ndarray


def gumbel(stream: np.random.Generator, draws: int) -> np.ndarray:
    """Return numbers of the standard Gumbel distribution for `choose`, float64 `(draws, V)`."""
    uniform = np.maximum(stream.random((draws, len(VOCABULARY))), _LEAST_UNIFORM)
    return -np.log(-np.log(uniform))


def choose(log_p: np.ndarray, allowed: np.ndarray, noise: np.ndarray, sampling: Sampling) -> Choice:
    """Draw a token a row: the one whose log p + temperature * noise is largest (the Gumbel-max trick).

    The residues that top-k and top-p leave out give their probability to the other residues; `<eos>` keeps its own, that of
    the allowed tokens at this temperature.

    Args:
        log_p: logarithms of the model's probabilities, float64 `(N, V)`.
        allowed: which tokens may be drawn, bool `(N, V)`: one residue or more a row, and `<eos>`.
        noise: from `gumbel`, `(N, V)`.
        sampling: how.
    """
    may_end, residues = allowed[:, VOCABULARY.eos], allowed.copy()
    residues[:, VOCABULARY.eos] = False
    order = np.argsort(np.where(residues, -log_p, np.inf), axis=1, kind="stable")
    ranked, candidates = (np.take_along_axis(x, order, 1) for x in (log_p, residues))
    cut = _cut(ranked, candidates, sampling)
    kept = np.empty_like(allowed)
    np.put_along_axis(kept, order, cut.kept, 1)
    kept[:, VOCABULARY.eos] = may_end
    scores = np.where(kept, log_p + sampling.temperature * noise, -np.inf)
    scores[:, VOCABULARY.eos] += sampling.temperature * np.log(cut.share)
    second, first = np.sort(scores, axis=1)[:, -2:].T
    # The share of what is kept moves with all residues, by at most twice as much as one of them times what is left out.
    margin = ROUNDING * np.where(may_end, 2 - cut.share, 1)
    return Choice(scores.argmax(1), cut.sure & (first - second >= margin))


class _Cut(NamedTuple):
    """What top-k and top-p leave of ranked residues.

    Attributes:
        kept: bool `(N, V)`.
        share: of the probability of all of them that is left, `(N,)`.
        sure: whether rounding has no say in it, bool `(N,)`.
    """

    kept: np.ndarray
    share: np.ndarray
    sure: np.ndarray


def _cut(ranked: np.ndarray, candidates: np.ndarray, sampling: Sampling) -> _Cut:
    """Return what is left of `candidates` `(N, V)`, with log p `ranked`, the likeliest first."""
    kept, sure = candidates.copy(), np.ones(len(ranked), bool)
    if not sampling.temperature or (not sampling.top_k and sampling.top_p == 1):
        return _Cut(kept, np.ones(len(ranked)), sure)
    likelihood = np.exp(np.where(candidates, ranked - ranked[:, :1], -np.inf) / sampling.temperature)
    if sampling.top_k:
        kept[:, sampling.top_k :] = False
    if sampling.top_p < 1:
        weights = np.where(kept, likelihood, 0.0)
        shares = weights / weights.sum(1, keepdims=True)
        before = shares.cumsum(1) - shares
        distance = np.abs(before - sampling.top_p)[:, 1:] * sampling.temperature
        sure &= ~(kept[:, 1:] & (distance < ROUNDING)).any(1)
        kept &= before < sampling.top_p
        kept[:, 0] = True
    border = kept[:, :-1] & candidates[:, 1:] & ~kept[:, 1:]
    sure &= ~(border & (ranked[:, :-1] - ranked[:, 1:] < ROUNDING)).any(1)
    return _Cut(kept, np.where(kept, likelihood, 0.0).sum(1) / likelihood.sum(1), sure)


def log_softmax(logits: Tensor) -> np.ndarray:
    """Return the logarithms of the probabilities of all tokens, float64 `(N, V)`, for scores `(N, V)` on any device."""
    scores = logits.float().cpu().double().numpy()
    scores = scores - scores.max(1, keepdims=True)
    return scores - np.log(np.exp(scores).sum(1, keepdims=True))


def perplexity_of(nll: float, tokens: int, settle: Callable[[], float] | None) -> float:
    """Return exp(nll / tokens), rounded to hundredths so that a batch's rounding does not show; NaN of no tokens.

    Args:
        nll: negative log-likelihood in nats.
        tokens: how many it is of.
        settle: gives `nll` anew from the sequence alone, called where rounding could show; `None`: it is that already.
    """
    if not tokens:
        return math.nan
    low, high = (
        round(math.exp(nll / tokens + error), 2) for error in (-ROUNDING_OF_MEANS, ROUNDING_OF_MEANS)
    )
    if low != high and settle is not None:
        nll = settle()
    return round(math.exp(nll / tokens), 2)
