"""Which token may see which: `documents`, one int32 number a token, serves padding and packing alike.

Axis letters: `B` batch, `L` length in tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from protperf.vocab import PADDING_DOCUMENT


def allowed_pairs(documents: Tensor, *, causal: bool, rows: Tensor | None = None) -> Tensor:
    """Return which query (row) may see which key (column), bool `(B, 1, R, L)`.

    Args:
        documents: int32 `(B, L)`; equal numbers see each other, `PADDING_DOCUMENT` sees nobody.
        causal: whether a token sees only itself and what stands before it.
        rows: int64 `(R,)` places of the queries; `None` for all.
    """
    places = torch.arange(documents.shape[1], device=documents.device)
    rows = places if rows is None else rows
    queries = documents[:, rows].unsqueeze(-1)  # (B, R, 1)
    pairs = (queries == documents.unsqueeze(-2)) & queries.ne(PADDING_DOCUMENT)
    if causal:
        pairs = pairs & (places <= rows.unsqueeze(-1))
    return pairs.unsqueeze(1)


def positions_in_documents(documents: Tensor) -> Tensor:
    """Return each token's place in its document, from 0, int64 `(B, L)`."""
    index = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    starts = torch.ones_like(documents, dtype=torch.bool)
    starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return index - torch.where(starts, index, 0).cummax(1).values


def or_one_document(documents: Tensor | None, v: Tensor) -> Tensor:
    """Return `documents (B, L)`; where there are none, int32 zeros for `v (B, H, L, K)`: one document a row."""
    if documents is None:
        return torch.zeros(v.shape[0], v.shape[2], dtype=torch.int32, device=v.device)
    return documents


def share_in_documents(marked: Tensor, documents: Tensor | None) -> Tensor:
    """Return for each token the share of marked tokens in its document, float32 `(B, L)`.

    Args:
        marked: bool `(B, L)`.
        documents: int32 `(B, L)`, as in `allowed_pairs`; `None`: one document a row.
    """
    if documents is None:
        documents = torch.zeros_like(marked, dtype=torch.int32)
    starts = torch.zeros_like(marked, dtype=torch.int64)
    starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
    runs = starts.cumsum(1)
    sums = torch.zeros(2, *marked.shape, device=marked.device)
    sums[0].scatter_add_(1, runs, marked.float())
    sums[1].scatter_add_(1, runs, torch.ones_like(marked, dtype=torch.float32))
    return (sums[0] / sums[1].clamp_min(1)).gather(1, runs)
