"""The gate of random feature attention: a learned forgetting, which is nothing but a factor of each key.

With S_t = g_t S_{t-1} + (1 - g_t) phi(k_t) v_t^T, and the normaliser likewise, the weight of key j at query i is
(1 - g_j) g_{j+1} ... g_i phi(q_i).phi(k_j). Let G_i = log g_1 + ... + log g_i over the document: the product is
exp(G_i - G_j), and exp(G_i) cancels when the row is divided by its sum. What is left is a logarithm of a scale,
log(1 - g_j) - G_j, for each key alone, and a running maximum over keys carries it as it carries any other.

Source: Peng et al. 2021, section 3.2, arXiv:2103.02143.

Axis letters: `B` batch, `H` heads, `L` length in tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, pad

from protperf.attention.state import NO_DOCUMENT

_DOUBLINGS = (13, 17, 21, 25, 29, 33)
"""Numbers of doublings to choose from: lengths up to 8,192 share one, and none makes more than 16 times what it needs."""


class GateScales(NamedTuple):
    """What the gates of a segment do to it, and to what came before.

    Attributes:
        keys: `(B, H, L)` logarithm of each key's scale, from where its document begins in the segment.
        passed: `(B, H)` logarithm of what the segment's last document leaves of a state before it.
    """

    keys: Tensor
    passed: Tensor


def gate_scales(gate: Tensor, documents: Tensor | None) -> GateScales:
    """Turn the logits of gates into logarithms of scales, float64 where the device has it.

    Sums of thousands of logarithms stand against each other, of which float32 would lose the digits that count.

    Args:
        gate: `(B, H, L)`, g = sigmoid(gate): the share that is kept; whatever stands at padding must be finite.
        documents: int32 `(B, L)` or `None`.
    """
    gate = gate.to(torch.float32 if gate.device.type == "mps" else torch.float64)
    sums = _sums_in_documents(logsigmoid(gate), documents)
    return GateScales(logsigmoid(-gate) - sums, sums[..., -1])


def _sums_in_documents(x: Tensor, documents: Tensor | None) -> Tensor:
    """Return the running sum of `x (B, H, L)` within each document.

    Each sum is a tree over its own document's tokens, doubled step by step: what stands before or behind a document
    changes no bit of it. The number of steps hardly depends on the length, for a graph holds each of them.
    """
    length = x.shape[-1]
    if length == 1:
        return x
    for doubling in range(next(count for count in _DOUBLINGS if length <= 2**count)):
        step = 2**doubling
        earlier = pad(x, (step, 0))[..., :length]
        if documents is not None:
            same = documents == pad(documents, (step, 0), value=NO_DOCUMENT)[:, :length]
            earlier = torch.where(same.unsqueeze(1), earlier, 0.0)
        x = x + earlier
    return x
