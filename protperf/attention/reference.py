"""The slow twins: each attention as its definition reads, one matrix of weights over all pairs, in any precision.

Nothing here is shared with the fast forms: the feature maps' formulas are written out again. Tests compare the two.

Axis letters: `B` batch, `H` heads, `L` length in tokens, `K` head width, `M` rows of the projection, `F` features.
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
    pair_square: Tensor | None = None,
) -> Tensor:
    """Attention by its definition: weights of all pairs, rows divided by their sum, times the values.

    Arguments and result as for `protperf.attention.attend`; everything in the precision of `q`.
    """
    if documents is None:
        documents = torch.zeros(q.shape[0], q.shape[2], dtype=torch.int32)
    signed = kind in ("trig", "rfa")
    if signed:
        pairs = reference_signed_weights(q, k, kind=kind, projection=projection)
    else:
        pairs = reference_log_weights(q, k, kind=kind, projection=projection, pair_square=pair_square)
    out = torch.zeros_like(v)
    for b in range(q.shape[0]):
        for i in range(q.shape[2]):
            if documents[b, i] == PADDING_DOCUMENT:
                continue
            seen = documents[b] == documents[b, i]
            if causal:
                seen = seen & (torch.arange(q.shape[2]) <= i)
            row = pairs[b, :, i, seen]
            # exp, divided by the row's sum, where the weights are known by their logarithms
            weights = row / row.sum(dim=-1, keepdim=True) if signed else torch.softmax(row, dim=-1)
            out[b, :, i] = torch.einsum("hj,hjk->hk", weights, v[b][:, seen])
    return out


def reference_log_weights(
    q: Tensor, k: Tensor, *, kind: str, projection: Tensor | None = None, pair_square: Tensor | None = None
) -> Tensor:
    """Return the logarithm of every pair's weight before normalisation, `(B, H, L, L)`, but for the signed maps.

    For the positive softmax maps this is the logarithm of the estimate of exp(q.k / sqrt(K)), constants included.
    """
    head_dim = q.shape[-1]
    if kind == "softmax":
        return torch.einsum("bhik,bhjk->bhij", q, k) / head_dim**0.5
    if kind == "relu_unprojected":
        return _log_products(q.clamp(min=0) + RELU_OFFSET, k.clamp(min=0) + RELU_OFFSET)
    if kind == "elu":
        return _log_products(*(torch.where(x > 0, x + 1, torch.exp(x.clamp(max=0))) for x in (q, k)))
    assert projection is not None
    w = projection.to(q.dtype)
    x, y = q / head_dim**0.25, k / head_dim**0.25
    if kind == "relu":
        return _log_products(
            *(torch.einsum("bhik,mk->bhim", z, w).clamp(min=0) + RELU_OFFSET for z in (x, y))
        )
    if kind == "favor_hyperbolic":
        w = torch.cat((w, -w))
    a = torch.zeros(q.shape[1], dtype=q.dtype)
    if kind == "oprf" and pair_square is not None:
        per_dim = pair_square.to(q.dtype) / head_dim
        a = (1 - 2 * per_dim - torch.sqrt((2 * per_dim + 1) ** 2 + 8 * per_dim)) / 16
    log_q, log_k = (_log_positive(z, w, a) for z in (x, y))
    # D^2 / F of the estimate's definition, D = (1 - 4 A)^(K / 4)
    log_constant = head_dim / 2 * torch.log(1 - 4 * a) - torch.log(torch.tensor(float(len(w)), dtype=q.dtype))
    rows = [torch.logsumexp(log_q[:, :, i : i + 1] + log_k, dim=-1) for i in range(q.shape[2])]
    return torch.stack(rows, dim=2) + log_constant[:, None, None]


def _log_positive(x: Tensor, w: Tensor, a: Tensor) -> Tensor:
    """Return A_h |w_f|^2 + sqrt(1 - 4 A_h) w_f.x - |x|^2 / 2, `(B, H, L, F)`, of scaled x and a `(H,)`."""
    squares = torch.einsum("h,fk,fk->hf", a, w, w)[:, None]
    return (
        squares
        + torch.einsum("h,bhik,fk->bhif", torch.sqrt(1 - 4 * a), x, w)
        - (x * x).sum(-1)[..., None] / 2
    )


def _log_products(features_q: Tensor, features_k: Tensor) -> Tensor:
    return torch.log(torch.einsum("bhif,bhjf->bhij", features_q, features_k))


def reference_signed_weights(q: Tensor, k: Tensor, *, kind: str, projection: Tensor | None) -> Tensor:
    """Return every pair's weight before normalisation, `(B, H, L, L)`, for `trig` and `rfa`: of either sign.

    Mean over w of cos(w.x - w.y): cos cos + sin sin. For `trig` times exp((|x|^2 + |y|^2) / 2).
    """
    assert projection is not None
    w = projection.to(q.dtype)
    if kind == "rfa":
        x, y = (z / z.norm(dim=-1, keepdim=True) for z in (q, k))
        scale = torch.ones(1, dtype=q.dtype)
    else:
        assert kind == "trig", kind
        x, y = (z / q.shape[-1] ** 0.25 for z in (q, k))
        scale = torch.exp(((x * x).sum(-1)[:, :, :, None] + (y * y).sum(-1)[:, :, None, :]) / 2)
    wx, wy = (torch.einsum("bhik,mk->bhim", z, w) for z in (x, y))
    rows = [torch.cos(wx[:, :, i : i + 1] - wy).mean(-1) for i in range(q.shape[2])]
    return scale * torch.stack(rows, dim=2)
