"""How long queries and keys are: measured, and set by a temperature. The variance of random features grows with it.

Axis letters: `B` batch, `H` heads, `L` length in tokens, `K` head width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize


class QueryKeySums(NamedTuple):
    """How long queries and keys are: sums over tokens, which may be added over batches and ranks.

    Attributes:
        tokens: `()` number of tokens.
        lengths: `(layers, 2, H)` of |q| and |k|.
        squares: `(layers, 2, H)` of |q|^2 and |k|^2.
        vectors: `(layers, 2, H, K)` of q and k.
    """

    tokens: Tensor
    lengths: Tensor
    squares: Tensor
    vectors: Tensor

    def products(self) -> Tensor:
        """Return mean |q| times mean |k| over sqrt(K), `(layers, H)`: about the largest logit there is."""
        means = self.lengths / self.tokens
        return means.prod(1) * self.vectors.shape[-1] ** -0.5

    def pair_squares(self) -> Tensor:
        """Return the mean of |q' + k'|^2 over all pairs, x' = x / K^(1/4), `(layers, H)`.

        The relative variance of a random feature is the exponential of it.
        """
        means = self.vectors / self.tokens
        cross = 2 * (means[:, 0] * means[:, 1]).sum(-1)
        return (self.squares.sum(1) / self.tokens + cross) * self.vectors.shape[-1] ** -0.5


def sum_queries_keys(q: Tensor, k: Tensor, documents: Tensor | None) -> QueryKeySums:
    """Return the sums of one layer's queries and keys `(B, H, L, K)`, padding left out."""
    real = torch.ones_like(q[:, 0, :, 0], dtype=torch.bool) if documents is None else documents >= 0
    both = torch.stack([y.transpose(1, 2)[real] for y in (q, k)]).float()  # (2, tokens, H, K)
    sums = both.norm(dim=-1).sum(1), both.square().sum((1, -1)), both.sum(1)
    return QueryKeySums(real.sum().clamp_min(1).float(), *(each.unsqueeze(0) for each in sums))


def with_temperature(x: Tensor, log_temperature: Tensor) -> Tensor:
    """Give queries or keys `(B, H, L, K)` the length sqrt(t) K^(1/4), so that q.k / sqrt(K) = t cos(q, k).

    Source: Henry et al. 2020, "Query-key normalization for transformers", arXiv:2010.04245; here with one learned
    temperature a head, whose square root both sides get: |q'| = |k'| = sqrt(t) bounds the variance of random features.

    Args:
        x: queries or keys.
        log_temperature: log t, `(H,)`.
    """
    length = torch.exp(log_temperature.float() / 2)[:, None, None] * x.shape[-1] ** 0.25
    return (normalize(x.float(), dim=-1, eps=1e-6) * length).to(x.dtype)
