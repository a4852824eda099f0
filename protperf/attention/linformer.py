"""Linformer: keys and values of a document are pooled into P of each before exact attention. Bidirectional alone.

P mixtures of keys, P mixtures of values, by learned weights a place: with E, F `(P, N)`, n tokens in a document,

    out = softmax(q (E[:, :n] k)^T / sqrt(K)) F[:, :n] v

so that the token at place j of ITS document is weighted by column j. Documents are pooled each by itself: packing and
padding change nothing. A document has N tokens at most; the mixtures may be of either sign, and rows do not sum to one.
No causal form: every mixture holds the future.

Source: Wang et al. 2020, Eq. 7, arXiv:2006.04768, E and F shared by the heads of a layer.

Axis letters: `B` batch, `H` heads, `L` length in tokens, `K` head width, `P` pooled tokens, `N` most tokens of a
document, `R` chosen rows.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from protperf.attention.blocks import document_runs


def linformer_attention(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, pooling: Tensor) -> Tensor:
    """Return attention to pooled keys and values, `(B, H, L, K)` in the type of `v`, zero at padding.

    Everything is float32 at least. Work and memory are linear in the length, for a fixed P.

    Args:
        q: `(B, H, L, K)`.
        k: `(B, H, L, K)`.
        v: `(B, H, L, K)`.
        documents: int32 `(B, L)` or `None`.
        pooling: E and F, `(2, P, N)`.

    Raises:
        ValueError: a document has more than N tokens.
    """
    dtype = torch.promote_types(torch.promote_types(q.dtype, v.dtype), torch.float32)
    wide_q, wide_k, wide_v = (x.to(dtype) for x in (q, k, v))
    pooling = pooling.to(dtype)
    if documents is None:
        return _of_document(wide_q, wide_k, wide_v, pooling).to(v.dtype)
    rows: list[list[Tensor]] = [[] for _ in v]
    ends = [0] * len(rows)
    for b, start, stop in document_runs(documents, *documents.shape):
        own = b, slice(None), slice(start, stop)
        rows[b] += _padding(wide_v, start - ends[b])
        rows[b].append(_of_document(wide_q[own], wide_k[own], wide_v[own], pooling))
        ends[b] = stop
    for row, end in zip(rows, ends, strict=True):
        row += _padding(wide_v, v.shape[2] - end)
    return torch.stack([torch.cat(row, dim=1) for row in rows]).to(v.dtype)


def linformer_rows(q: Tensor, k: Tensor, documents: Tensor, rows: Tensor, pooling: Tensor) -> Tensor:
    """Return chosen rows of softmax(q (E k)^T / sqrt(K)) F, `(B, H, R, L)`: of either sign; zero for padding.

    Args:
        q: `(B, H, L, K)`.
        k: `(B, H, L, K)`.
        documents: int32 `(B, L)`.
        rows: int64 `(R,)` places of the queries.
        pooling: E and F, `(2, P, N)`.

    Raises:
        ValueError: a document has more than N tokens.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    weights = torch.zeros(*q.shape[:2], len(rows), q.shape[2], dtype=dtype, device=q.device)
    for b, start, stop in document_runs(documents, *documents.shape):
        own = (rows >= start) & (rows < stop)
        of_keys, of_values = _columns(pooling.to(dtype), stop - start)
        pooled = of_keys @ k[b, :, start:stop].to(dtype)
        logits = q[b, :, rows[own]].to(dtype) @ pooled.mT * q.shape[-1] ** -0.5
        weights[b, :, own, start:stop] = logits.softmax(-1) @ of_values
    return weights


def _of_document(q: Tensor, k: Tensor, v: Tensor, pooling: Tensor) -> Tensor:
    """Return attention within one document, `(..., n, K)` for q, k and v of that shape."""
    of_keys, of_values = _columns(pooling, v.shape[-2])
    return scaled_dot_product_attention(q, of_keys @ k, of_values @ v)


def _columns(pooling: Tensor, length: int) -> Tensor:
    """Return E and F for a document of some tokens, `(2, P, n)`."""
    allowed = pooling.shape[-1]
    if length > allowed:
        raise ValueError(
            f"attention 'linformer': a document has {length:,} tokens; allowed: at most {allowed:,}, the "
            "linformer_length that the model was made with; leave it out or make a model with a larger one"
        )
    return pooling[..., :length]


def _padding(v: Tensor, length: int) -> list[Tensor]:
    """Return what stands at some places of padding, `(H, length, K)`, in a list that is empty for none."""
    return [v.new_zeros(v.shape[1], length, v.shape[3])] if length else []
