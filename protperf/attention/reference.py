"""The slow twins: each attention as its definition reads, one matrix of weights over all pairs, in any precision.

Nothing here is shared with the fast forms: the feature maps' formulas are written out again. Tests compare the two.

Axis letters: `B` batch, `H` heads, `L` length in tokens, `K` head width, `M` rows of the projection, `F` features,
`P` pooled tokens, `N` most tokens of a document, `S` rounds of hashing.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from protperf.attention.features import RELU_OFFSET
from protperf.attention.reformer import Hashing
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
    gate: Tensor | None = None,
    pooling: Tensor | None = None,
    hashing: Hashing | None = None,
) -> Tensor:
    """Attention by its definition: weights of all pairs, rows divided by their sum, times the values.

    Arguments and result as for `protperf.attention.attend`; everything in the precision of `q`.
    """
    if documents is None:
        documents = torch.zeros(q.shape[0], q.shape[2], dtype=torch.int32)
    if gate is not None:
        assert projection is not None
        return reference_gated_attention(q, k, v, documents, projection=projection, gate=gate)
    if kind == "linformer":
        assert pooling is not None
        return reference_pooled_attention(q, k, v, documents, pooling=pooling)
    if kind == "reformer":
        assert hashing is not None
        seen_by = reference_hashed_pairs(q, documents, projection=projection, hashing=hashing, causal=causal)
        return reference_hashed_attention(q, v, seen_by)
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


def reference_gated_attention(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor, *, projection: Tensor, gate: Tensor
) -> Tensor:
    """Causal random feature attention with a gate, token by token: S and z are kept by g and fed by 1 - g.

    S_t = g_t S_{t-1} + (1 - g_t) phi(k_t) v_t^T, z_t = g_t z_{t-1} + (1 - g_t) phi(k_t), both nothing where a document
    begins; the output is phi(q_t)^T S_t / phi(q_t)^T z_t. Peng et al. 2021, section 3.2, arXiv:2103.02143.
    """
    w = projection.to(q.dtype)
    phi_q, phi_k = (
        torch.cat((torch.cos(y), torch.sin(y)), dim=-1)
        for y in (z / z.norm(dim=-1, keepdim=True) @ w.mT for z in (q, k))
    )
    kept, fed = torch.sigmoid(gate.to(q.dtype)), torch.sigmoid(-gate.to(q.dtype))
    rows = []
    for b in range(q.shape[0]):
        outs = []
        for t in range(q.shape[2]):
            if documents[b, t] == PADDING_DOCUMENT:
                outs.append(torch.zeros_like(v[b, :, t]))
                continue
            if t == 0 or documents[b, t] != documents[b, t - 1]:
                s, z = torch.zeros_like(phi_k[b, :, t, :, None] * v[b, :, t, None, :]), 0 * phi_k[b, :, t]
            g, f = kept[b, :, t, None], fed[b, :, t, None]
            s = g[..., None] * s + f[..., None] * phi_k[b, :, t, :, None] * v[b, :, t, None, :]
            z = g * z + f * phi_k[b, :, t]
            numerator = torch.einsum("hf,hfk->hk", phi_q[b, :, t], s)
            outs.append(numerator / (phi_q[b, :, t] * z).sum(-1, keepdim=True))
        rows.append(torch.stack(outs, dim=1))
    return torch.stack(rows)


def reference_pooled_attention(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor, *, pooling: Tensor
) -> Tensor:
    """Linformer, document by document: softmax over P mixtures of its keys, applied to P mixtures of its values."""
    of_keys, of_values = pooling.to(q.dtype)
    out = torch.zeros_like(v)
    for b in range(q.shape[0]):
        for number in documents[b].unique().tolist():
            if number == PADDING_DOCUMENT:
                continue
            (places,) = torch.where(documents[b] == number)
            keys = torch.einsum("pj,hjk->hpk", of_keys[:, : len(places)], k[b][:, places])
            values = torch.einsum("pj,hjk->hpk", of_values[:, : len(places)], v[b][:, places])
            logits = torch.einsum("hik,hpk->hip", q[b][:, places], keys) / q.shape[-1] ** 0.5
            out[b, :, places] = torch.einsum("hip,hpk->hik", torch.softmax(logits, dim=-1), values)
    return out


def reference_hashed_pairs(
    q: Tensor, documents: Tensor, *, projection: Tensor | None, hashing: Hashing, causal: bool
) -> Tensor:
    """Return which token sees which in at least one round, bool `(B, H, L, L)`: bucket by bucket, member by member.

    A token that sees nobody else sees itself; padding sees nobody.
    """
    batch, heads, length, _ = q.shape
    half = hashing.buckets // 2
    seen_by = torch.zeros(batch, heads, length, length, dtype=torch.bool)
    for b, h, s in itertools.product(range(batch), range(heads), range(hashing.rounds)):
        members: dict[tuple[int, int], list[int]] = {}
        for i in range(length):
            bucket = 0
            if half:
                assert projection is not None
                dots = projection[s * half : (s + 1) * half].to(q.dtype) @ q[b, h, i].detach()
                bucket = int(torch.cat((dots, -dots)).argmax())
            members.setdefault((int(documents[b, i]), bucket), []).append(i)
        for (number, _), places in members.items():
            for rank, i in enumerate(places if number != PADDING_DOCUMENT else ()):
                others = places[max(0, rank - hashing.window) : rank]
                if not causal:
                    others = others + places[rank + 1 : rank + 1 + hashing.window]
                seen_by[b, h, i, others] = True
    alone = ~seen_by.any(-1) & (documents != PADDING_DOCUMENT)[:, None]
    return seen_by | torch.diag_embed(alone)


def reference_hashed_attention(q: Tensor, v: Tensor, seen_by: Tensor) -> Tensor:
    """Reformer, given who sees whom `(B, H, L, L)`: softmax over them of q.k / (|k| sqrt(K)), where k is q."""
    keys = q / q.norm(dim=-1, keepdim=True)
    out = torch.zeros_like(v)
    for b, h, i in seen_by.any(-1).nonzero().tolist():
        seen = seen_by[b, h, i]
        weights = torch.softmax(keys[b, h, seen] @ q[b, h, i] / q.shape[-1] ** 0.5, dim=-1)
        out[b, h, i] = weights @ v[b, h, seen]
    return out
