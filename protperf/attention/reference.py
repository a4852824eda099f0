"""The slow twins: each attention as its definition reads, one matrix of weights over all pairs, in any precision.

Nothing here is shared with the fast forms but the feature maps' formulas written out again. Tests compare the two.

Axis letters: `B` batch, `H` heads, `L` length in tokens, `K` head width, `M` features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from protperf.attention.features import RELU_OFFSET
from protperf.vocab import PADDING_DOCUMENT


def reference_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None = None,
    *,
    kind: str,
    causal: bool,
    projection: Tensor | None = None,
) -> Tensor:
    """Attention by its definition: weights of all pairs, rows divided by their sum, times the values.

    Arguments and result as for `protperf.attention.attend`; everything in the precision of `q`.
    """
    if documents is None:
        documents = torch.zeros(q.shape[0], q.shape[2], dtype=torch.int32)
    logs = reference_log_weights(q, k, kind=kind, projection=projection)
    out = torch.zeros_like(v)
    for b in range(q.shape[0]):
        for i in range(q.shape[2]):
            if documents[b, i] == PADDING_DOCUMENT:
                continue
            seen = documents[b] == documents[b, i]
            if causal:
                seen = seen & (torch.arange(q.shape[2]) <= i)
            weights = torch.softmax(logs[b, :, i, seen], dim=-1)  # exp, divided by the row's sum
            out[b, :, i] = torch.einsum("hj,hjk->hk", weights, v[b][:, seen])
    return out


def reference_log_weights(q: Tensor, k: Tensor, *, kind: str, projection: Tensor | None) -> Tensor:
    """Return the logarithm of every pair's weight before normalisation, `(B, H, L, L)`."""
    head_dim = q.shape[-1]
    if kind == "softmax":
        return torch.einsum("bhik,bhjk->bhij", q, k) / head_dim**0.5
    assert projection is not None
    w = projection.to(q.dtype)
    if kind == "favor_hyperbolic":
        w = torch.cat((w, -w))
    x, y = q / head_dim**0.25, k / head_dim**0.25
    wx, wy = torch.einsum("bhik,mk->bhim", x, w), torch.einsum("bhjk,mk->bhjm", y, w)
    if kind == "relu":
        features_q, features_k = (u.clamp(min=0) + RELU_OFFSET for u in (wx, wy))
        return torch.log(torch.einsum("bhim,bhjm->bhij", features_q, features_k))
    log_q = wx - (x * x).sum(-1, keepdim=True) / 2
    log_k = wy - (y * y).sum(-1, keepdim=True) / 2
    rows = [torch.logsumexp(log_q[:, :, i : i + 1] + log_k, dim=-1) for i in range(q.shape[2])]
    return torch.stack(rows, dim=2) - torch.log(torch.tensor(float(len(w)), dtype=q.dtype))
