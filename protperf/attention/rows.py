"""Single rows of the attention matrix of a feature map, such as attention maps show.

Quadratic work, so for chosen rows only. Exponential features stay in log space, whatever their size.

Axis letters: `B` batch, `H` heads, `L` length in tokens, `K` head width, `F` features, `R` chosen rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from protperf.attention.documents import allowed_pairs
from protperf.attention.features import FeatureMap, logits, nonlinear, row_log_scale
from protperf.attention.gates import GateScales

_BLOCK = 8
"""Rows in one go: `(8, L, F)` numbers a head."""


def feature_attention_rows(
    q: Tensor,
    k: Tensor,
    feature_map: FeatureMap,
    documents: Tensor,
    rows: Tensor,
    *,
    causal: bool,
    gates: GateScales | None = None,
) -> Tensor:
    """Return chosen rows of phi(q) phi(k)^T, each divided by its sum: `(B, H, R, L)`.

    Args:
        q: `(B, H, L, K)`.
        k: `(B, H, L, K)`.
        feature_map: the map.
        documents: int32 `(B, L)`.
        rows: int64 `(R,)` places of the queries.
        causal: the direction.
        gates: of a gated map.
    """
    allowed = allowed_pairs(documents, causal=causal, rows=rows)
    log_q, log_k = logits(q[:, :, rows], feature_map), logits(k, feature_map)
    if feature_map.nonlinearity == "exp":
        pairs = [log_weights(part, log_k) for part in log_q.split(_BLOCK, dim=2)]
        weights = torch.cat(pairs, dim=2).masked_fill(~allowed, -torch.inf).softmax(-1)
        return weights.masked_fill(~allowed.any(-1, keepdim=True), 0.0)
    phi_q, phi_k = (nonlinear(u, feature_map.nonlinearity) for u in (log_q, log_k))
    scale = row_log_scale(k, feature_map) if gates is None else row_log_scale(k, feature_map) + gates.keys
    scale = scale.unsqueeze(-2).masked_fill(~allowed, -torch.inf)
    scale = torch.exp(scale - scale.amax(-1, keepdim=True).clamp_min(torch.finfo(scale.dtype).min))
    weights = phi_q @ phi_k.mT * scale.to(phi_q.dtype)
    return weights / weights.sum(-1, keepdim=True).masked_fill(~allowed.any(-1, keepdim=True), 1.0)


def log_weights(log_q: Tensor, log_k: Tensor) -> Tensor:
    """Return log(phi(q).phi(k)): `(..., R, F)` and `(..., L, F)` give `(..., R, L)`."""
    return torch.logsumexp(log_q.unsqueeze(-2) + log_k.unsqueeze(-3), dim=-1)
