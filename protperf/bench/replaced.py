"""Models whose attention is replaced while they run: by the identity on v, by the mean of v, by an approximation.

Axis letters: `B` batch, `H` heads, `L` length in tokens, `K` head width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

import protperf.layers

Substitute = Callable[[Tensor, Tensor, Tensor], Tensor]
"""`(q, k, v) -> (B, H, L, K)`, each of them `(B, H, L, K)`."""


@contextmanager
def attention_replaced(by: Substitute) -> Iterator[None]:
    """Let every model attend by another function: forward, and where the backward pass computes a block again."""

    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        documents: Tensor | None = None,
        *,
        causal: bool,
        gate: Tensor | None,
        **choices: Any,
    ) -> Tensor:
        return by(q, k, v).to(v.dtype)

    original = protperf.layers.attend
    protperf.layers.attend = attend  # type: ignore[assignment]
    try:
        yield
    finally:
        protperf.layers.attend = original


def return_values(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return v: the X line, what a model costs without attention.

    Source: Choromanski et al. 2021, Fig. 3, arXiv:2009.14794, where it is called X (OPT).
    """
    return v


def average_values(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return the mean of v for every token: attention that knows nothing of q and k."""
    return v.mean(2, keepdim=True).expand_as(v)
