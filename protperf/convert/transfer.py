"""Attention transfer: features and temperatures learn to gather what exact attention gathers; all else stays as it is.

The layers learn side by side, each from the queries, keys and values of the exact model: one forward pass of that model
trains them all, and none has to make up for another. Source: Zhang et al. 2024, "LoLCATs", arXiv:2410.10254, which
learns another feature map; here the features are those of the swap.

Axis letters: `B` batch, `H` heads, `L` length in tokens, `K` head width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import cast

import torch
from torch import Tensor, nn

from protperf.attention import attend
from protperf.batches import Batch
from protperf.layers import SelfAttention
from protperf.model import ProteinModel

WARMUP_STEPS = 10


def transfer_attention(
    exact: ProteinModel,
    model: ProteinModel,
    questions: Iterable[tuple[Batch, Tensor]],
    *,
    steps: int,
    rate: float,
    advance: Callable[[Tensor], None],
) -> None:
    """Train the learned features of a model and the factors of its heads' logits; no other weight moves.

    Args:
        exact: the model before the swap.
        model: after it, with learned features, on the same device.
        questions: as many as there are steps; only what is shown counts.
        steps: of Adam, whose rate rises over ten steps and then falls along half a cosine to zero.
        rate: its peak.
        advance: told the loss of each layer, `(layers,)`, after each step; 0 where attention is exact.
    """
    learned = learned_features(model)
    optimizer = torch.optim.Adam(learned, lr=rate, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate_factor(step, steps))
    for batch, documents in questions:
        optimizer.zero_grad()
        losses = transfer_losses(exact, model, batch.inputs, documents, backward=True)
        optimizer.step()
        schedule.step()
        advance(losses)
    optimizer.zero_grad()


def rate_factor(step: int, steps: int) -> float:
    """Return the learning rate of the update that follows `step` updates, as a share of the peak."""
    return min(1.0, (step + 1) / WARMUP_STEPS) * (1 + math.cos(math.pi * step / steps)) / 2


def learned_features(model: ProteinModel) -> list[nn.Parameter]:
    """Return the projections and factors of all layers that have them."""
    names = ("attention.projection", "attention.log_factor")
    return [parameter for name, parameter in model.named_parameters() if name.endswith(names)]


def transfer_losses(
    exact: ProteinModel, model: ProteinModel, tokens: Tensor, documents: Tensor, *, backward: bool = False
) -> Tensor:
    """Return the loss of each layer, `(layers,)`: sum |z - y|^2 / sum |y|^2 over tokens and heads.

    Args:
        exact: says what is gathered, y.
        model: what it gathers from the same queries, keys and values is z.
        tokens: as shown, `(B, L)`.
        documents: int32 `(B, L)`: one a row, padding behind it.
        backward: whether to add the gradients of their sum to those of the learned features, layer by layer, so
            that memory is that of one layer.
    """
    losses: list[Tensor] = []

    def look(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, _: Tensor | None) -> None:
        assert seen is not None
        attention = cast(SelfAttention, model.blocks[len(losses)].attention)
        with torch.set_grad_enabled(backward):
            loss = gathering_loss(attention, q, k, v, seen)
        if loss.requires_grad:  # not where attention is exact
            loss.backward()
        losses.append(loss.detach())

    exact.watch(tokens, documents, look)
    return torch.stack(losses)


def gathering_loss(attention: SelfAttention, q: Tensor, k: Tensor, v: Tensor, documents: Tensor) -> Tensor:
    """Return sum |z - y|^2 / sum |y|^2 over tokens and heads; z is what `attention` gathers, y what softmax does.

    Row by row, so that padding and masks are not there at all: on a CPU that takes a third of the time.

    Args:
        attention: the approximation; its factor of the logits is applied here.
        q: `(B, H, L, K)`, of exact attention.
        k: likewise.
        v: likewise.
        documents: int32 `(B, L)`: one a row, padding behind it.
    """
    scaled_q, scaled_k = attention.with_factor(q, k)
    error, size = q.new_zeros(()), q.new_zeros(())
    for row, length in enumerate((documents >= 0).sum(1).tolist()):
        part = (slice(row, row + 1), slice(None), slice(length))
        y = attend(q[part], k[part], v[part], kind="softmax", causal=attention.causal)
        z = attention.gather(scaled_q[part], scaled_k[part], v[part], None)
        error, size = error + (z - y).square().sum(), size + y.square().sum()
    return error / size
