"""Attention: one signature for every kind, in torch alone.

    attend(q, k, v, documents, kind=..., causal=..., projection=...) -> (B, H, L, K)

Two independent choices: a feature map (`features`) and a direction (`linear`); and exact `softmax` beside them.
`reference` holds the slow, obviously right twin of each.

Axis letters: `B` batch, `H` heads, `L` length in tokens, `K` head width, `M` rows of the projection, `R` chosen rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from protperf.attention.documents import allowed_pairs, positions_in_documents
from protperf.attention.features import FEATURE_MAPS
from protperf.attention.linear import (
    bidirectional_attention,
    causal_attention,
    state_after,
)
from protperf.attention.projection import PROJECTIONS, draw_projection, projection_generator
from protperf.attention.rows import feature_attention_rows
from protperf.attention.softmax import softmax_attention, softmax_attention_rows
from protperf.attention.state import CausalState
from protperf.vocab import PADDING_DOCUMENT

__all__ = [
    "ATTENTIONS",
    "PROJECTIONS",
    "CausalState",
    "allowed_pairs",
    "attend",
    "attend_onward",
    "attention_rows",
    "draw_projection",
    "positions_in_documents",
    "projection_generator",
]

ATTENTIONS = (*FEATURE_MAPS, "softmax")
"""The kinds of attention by their name in the configuration."""


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None = None,
    *,
    kind: str,
    causal: bool,
    projection: Tensor | None = None,
) -> Tensor:
    """Let every token gather values from the tokens of its document that it may see.

    Feature maps are computed in float32 at least, whatever the input and autocast say, `softmax` in the type of `v`;
    the result has the type of `v`.

    Args:
        q: queries `(B, H, L, K)`.
        k: keys `(B, H, L, K)`.
        v: values `(B, H, L, K)`.
        documents: int32 `(B, L)`; tokens with equal numbers (one contiguous run) see each other, `PADDING_DOCUMENT` is left
            out of everything; `None`: one document a row.
        kind: one of `ATTENTIONS`.
        causal: whether a token sees only itself and what stands before it.
        projection: float32 `(M, K)`, for every kind but `softmax`.

    Returns:
        `(B, H, L, K)`, zero at padding.
    """
    with torch.autocast(q.device.type, enabled=False):
        q, k, v_real = _without_padding(q, k, v, documents)
        if kind == "softmax":
            return softmax_attention(q, k, v_real, documents, causal=causal)
        log_q, log_k = _log_features(q, k, kind, projection)
        if causal:
            return causal_attention(log_q, log_k, v_real, documents).to(v.dtype)
        return bidirectional_attention(log_q, log_k, v_real, documents).to(v.dtype)


def attend_onward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None = None,
    *,
    kind: str,
    projection: Tensor,
    state: CausalState | None = None,
) -> tuple[Tensor, CausalState]:
    """Causal linear attention over the next segment of a sequence: token by token or in pieces of any length.

    Args:
        q: queries `(B, H, L, K)` of the segment.
        k: keys `(B, H, L, K)`.
        v: values `(B, H, L, K)`.
        documents: int32 `(B, L)` of the segment.
        kind: one of the feature maps.
        projection: float32 `(M, K)`.
        state: what the call for the segment before returned; `None` at the start.

    Returns:
        `(B, H, L, K)` and the state, whose size does not depend on how much was read.
    """
    with torch.autocast(q.device.type, enabled=False):
        q, k, v_real = _without_padding(q, k, v, documents)
        log_q, log_k = _log_features(q, k, kind, projection)
        out = causal_attention(log_q, log_k, v_real, documents, state=state)
        return out.to(v.dtype), state_after(log_k, v_real, documents, state=state)


def attention_rows(
    q: Tensor,
    k: Tensor,
    documents: Tensor | None = None,
    *,
    rows: Tensor,
    kind: str,
    causal: bool,
    projection: Tensor | None = None,
) -> Tensor:
    """Return chosen rows of the attention matrix, `(B, H, R, L)`: what `attend` applies to the values.

    Args:
        q: queries `(B, H, L, K)`.
        k: keys `(B, H, L, K)`.
        documents: int32 `(B, L)`, as in `attend`.
        rows: int64 `(R,)` places of the queries.
        kind: one of `ATTENTIONS`.
        causal: the direction.
        projection: float32 `(M, K)`, for every kind but `softmax`.
    """
    with torch.autocast(q.device.type, enabled=False):
        q, k, _ = _without_padding(q, k, k, documents)
        if documents is None:
            documents = torch.zeros(q.shape[0], q.shape[2], dtype=torch.int32, device=q.device)
        if kind == "softmax":
            return softmax_attention_rows(q, k, documents, rows, causal=causal)
        log_q, log_k = _log_features(q, k, kind, projection)
        return feature_attention_rows(log_q, log_k, documents, rows, causal=causal)


def _without_padding(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Put zeros where padding stands: whatever it held, infinities too, reaches neither outputs nor gradients."""
    if documents is None:
        return q, k, v
    padding = documents.eq(PADDING_DOCUMENT)[:, None, :, None]
    return q.masked_fill(padding, 0.0), k.masked_fill(padding, 0.0), v.masked_fill(padding, 0.0)


def _log_features(q: Tensor, k: Tensor, kind: str, projection: Tensor | None) -> tuple[Tensor, Tensor]:
    assert projection is not None, f"{kind} attention needs a projection"
    feature_map = FEATURE_MAPS[kind]
    return feature_map(q, projection), feature_map(k, projection)
