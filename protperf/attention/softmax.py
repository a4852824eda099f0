"""Exact softmax attention with the same signature as the linear ones.

Axis letters: `B` batch, `H` heads, `L` length in tokens, `K` head width, `R` chosen rows, `T` tokens kept.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from protperf.attention.documents import allowed_pairs, or_one_document
from protperf.attention.state import KeyValueState
from protperf.vocab import PADDING_DOCUMENT


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, *, causal: bool) -> Tensor:
    """Softmax attention through torch's fused kernel, in the precision of `v`; `(B, H, L, K)`, zero at padding.

    Args:
        q: `(B, H, L, K)`.
        k: `(B, H, L, K)`.
        v: `(B, H, L, K)`.
        documents: int32 `(B, L)` or `None`.
        causal: the direction.
    """
    q, k = q.to(v.dtype), k.to(v.dtype)
    if documents is None:
        return scaled_dot_product_attention(q, k, v, is_causal=causal)
    itself = torch.eye(documents.shape[1], dtype=torch.bool, device=q.device)
    allowed = allowed_pairs(documents, causal=causal) | itself  # a row of padding needs somebody to see
    out = scaled_dot_product_attention(q, k, v, attn_mask=allowed)
    return out.masked_fill(documents.eq(PADDING_DOCUMENT)[:, None, :, None], 0.0)


def softmax_onward(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, *, state: KeyValueState | None
) -> tuple[Tensor, KeyValueState]:
    """Causal softmax attention over the next segment of a sequence, and what must be kept: every key and value.

    Args:
        q: `(B, H, L, K)`.
        k: `(B, H, L, K)`.
        v: `(B, H, L, K)`.
        documents: int32 `(B, L)` or `None`: one document of number 0 a row.
        state: of the tokens before.

    Returns:
        `(B, H, L, K)`, zero at padding, and the state.
    """
    length, own = v.shape[2], or_one_document(documents, v)
    seen = KeyValueState.of(k.to(v.dtype), v, own)
    if not length:
        return torch.zeros_like(v), state or seen
    if state is not None:
        seen = state.followed_by(seen)
    rows = torch.arange(seen.documents.shape[1] - length, seen.documents.shape[1], device=v.device)
    itself = torch.arange(seen.documents.shape[1], device=v.device) == rows.unsqueeze(-1)
    allowed = allowed_pairs(seen.documents, causal=True, rows=rows) | itself  # padding needs somebody to see
    out = scaled_dot_product_attention(q.to(v.dtype), seen.keys, seen.values, attn_mask=allowed)
    if documents is None:
        return out, seen.current()
    return out.masked_fill(documents.eq(PADDING_DOCUMENT)[:, None, :, None], 0.0), seen.current().trimmed()


def softmax_attention_rows(q: Tensor, k: Tensor, documents: Tensor, rows: Tensor, *, causal: bool) -> Tensor:
    """Return chosen rows of softmax(q k^T / sqrt(K)), `(B, H, R, L)`; zero for padding.

    Args:
        q: `(B, H, L, K)`.
        k: `(B, H, L, K)`.
        documents: int32 `(B, L)`.
        rows: int64 `(R,)` places of the queries.
        causal: the direction.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    logits = q[:, :, rows].to(dtype) @ k.to(dtype).mT * q.shape[-1] ** -0.5
    allowed = allowed_pairs(documents, causal=causal, rows=rows)
    weights = logits.masked_fill(~allowed, -torch.inf).softmax(-1)
    return weights.masked_fill(~allowed.any(-1, keepdim=True), 0.0)
