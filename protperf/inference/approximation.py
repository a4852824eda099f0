"""How well a model's attention approximates exact attention, by layer and head, on given proteins.

Both get the same queries, keys and values: those of the exact model, so that no layer answers for the errors of those
before it. How far these add up is told by the states that leave each layer.

Axis letters: `B` batch, `H` heads, `L` length in tokens, `D` model width, `K` head width.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from protperf.attention import allowed_pairs, attend
from protperf.layers import SelfAttention
from protperf.model import ProteinModel


class HeadSums(NamedTuple):
    """Sums over tokens, float64 `(H,)` each, of one layer or `(layers, H)` of all: they add up over batches.

    Attributes:
        tokens: how many.
        size: |y|^2, y what a head gathers with exact attention.
        error: |z - y|^2, z what it gathers with the approximation.
        null: |m - y|^2, m the mean of v over all that the token may see.
        queries: |q|.
        keys: |k|.
        entropy: of the token's row of exact attention, in nats.
        most: the largest that this can be: the logarithm of the number of tokens that it may see.
    """

    tokens: Tensor
    size: Tensor
    error: Tensor
    null: Tensor
    queries: Tensor
    keys: Tensor
    entropy: Tensor
    most: Tensor

    def plus(self, other: HeadSums) -> HeadSums:
        """Return the sums over both."""
        return HeadSums(*(one + two for one, two in zip(self, other, strict=True)))


class Approximation(NamedTuple):
    """What `HeadSums` come to, float64 `(layers, H)` each but the last.

    Attributes:
        error: the relative error of a head's output, sqrt(sum |z - y|^2 / sum |y|^2).
        null: the same of the mean of v in place of z: attention that knows nothing of q and k.
        logit: mean |q| times mean |k| over sqrt(K): about the largest logit there is.
        entropy: mean entropy of exact attention, in nats.
        most: its mean over uniform attention.
        layer_error: as `error`, of all heads of a layer together, `(layers,)`.
        layer_null: as `null`, likewise.
        drift: the relative error of the states that leave each layer of the whole approximate model, `(layers,)`.
    """

    error: Tensor
    null: Tensor
    logit: Tensor
    entropy: Tensor
    most: Tensor
    layer_error: Tensor
    layer_null: Tensor
    drift: Tensor


def measure_approximation(
    exact: ProteinModel, approximate: ProteinModel, batches: Iterable[tuple[Tensor, Tensor]]
) -> Approximation:
    """Compare the attention of two models that differ in nothing else.

    Args:
        exact: with exact attention in all layers.
        approximate: with another in some or all of them.
        batches: tokens as shown, `(B, L)`, and documents, int32 `(B, L)`, on the models' device; memory is quadratic in L.
    """
    sums: HeadSums | None = None
    drift, size = (torch.zeros(exact.config.num_layers, dtype=torch.float64) for _ in range(2))
    layers = range(1, exact.config.num_layers + 1)
    for tokens, documents in batches:
        found = _sums_of_layers(exact, approximate, tokens, documents)
        sums = found if sums is None else sums.plus(found)
        real = documents >= 0
        with torch.no_grad():
            pairs = zip(
                *(model.states(tokens, documents, layers=layers) for model in (exact, approximate)),
                strict=True,
            )
        for layer, (y, z) in enumerate(pairs):
            drift[layer] += (z - y)[real].double().square().sum().cpu()
            size[layer] += y[real].double().square().sum().cpu()
    assert sums is not None, "nothing to measure on"
    return _ratios(sums, torch.sqrt(drift / size), head_dim=exact.head_dim)


def sum_heads(attention: SelfAttention, q: Tensor, k: Tensor, v: Tensor, documents: Tensor) -> HeadSums:
    """Return the sums of one layer.

    Args:
        attention: the approximation.
        q: `(B, H, L, K)`, of exact attention: without the learned factor of the approximation, which is applied here.
        k: likewise.
        v: likewise.
        documents: int32 `(B, L)`.
    """
    real = documents >= 0

    def total(values: Tensor) -> Tensor:
        """Sum `(B, H, L)` over real tokens."""
        return values.double().masked_fill(~real.unsqueeze(1), 0.0).sum((0, 2)).cpu()

    gather_exactly = partial(attend, kind="softmax", causal=attention.causal)
    y = gather_exactly(q, k, v, documents)
    z = attention.gather(*attention.with_factor(q, k), v, documents)
    m = gather_exactly(torch.zeros_like(q), k, v, documents)
    entropy, most = _entropies(q, k, documents, causal=attention.causal)
    return HeadSums(
        tokens=total(torch.ones_like(entropy)),
        size=total(y.double().square().sum(-1)),
        error=total((z - y).double().square().sum(-1)),
        null=total((m - y).double().square().sum(-1)),
        queries=total(q.norm(dim=-1)),
        keys=total(k.norm(dim=-1)),
        entropy=total(entropy),
        most=total(most),
    )


def _sums_of_layers(
    exact: ProteinModel, approximate: ProteinModel, tokens: Tensor, documents: Tensor
) -> HeadSums:
    """Return the sums of all layers, `(layers, H)`."""
    found: list[HeadSums] = []

    def look(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, _: Tensor | None) -> None:
        assert seen is not None
        attention = approximate.blocks[len(found)].attention
        found.append(sum_heads(attention, q, k, v, seen))  # type: ignore[arg-type]

    exact.watch(tokens, documents, look)
    return HeadSums(*(torch.stack(parts) for parts in zip(*found, strict=True)))


def _entropies(q: Tensor, k: Tensor, documents: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """Return the entropy of each row of exact attention and of a uniform one, in nats, `(B, H, L)` each; 0 at padding."""
    allowed = allowed_pairs(documents, causal=causal)
    logits = (q.float() @ k.float().mT * q.shape[-1] ** -0.5).masked_fill(~allowed, -math.inf)
    real = (documents >= 0)[:, None, :, None]
    logs = logits.masked_fill(~real, 0.0).log_softmax(-1)
    entropy = -(logs.exp() * logs.masked_fill(logs == -math.inf, 0.0)).sum(-1)
    most = allowed.sum(-1).clamp_min(1).log().expand_as(entropy)
    return entropy, most


def _ratios(sums: HeadSums, drift: Tensor, *, head_dim: int) -> Approximation:
    size = sums.size.clamp_min(torch.finfo(torch.float64).tiny)  # a head may gather zeros alone

    def layer(part: Tensor) -> Tensor:
        return torch.sqrt(part.sum(-1) / size.sum(-1))

    return Approximation(
        error=torch.sqrt(sums.error / size),
        null=torch.sqrt(sums.null / size),
        logit=sums.queries * sums.keys / sums.tokens.square() * head_dim**-0.5,
        entropy=sums.entropy / sums.tokens,
        most=sums.most / sums.tokens,
        layer_error=layer(sums.error),
        layer_null=layer(sums.null),
        drift=drift,
    )
