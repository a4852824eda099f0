"""Single rows of the attention matrix of a feature map, in log space: exact, whatever the size of the features.

Quadratic work, so for chosen rows only: attention maps, and the few rows whose denominator underflows in the linear
form.

Axis letters: `B` batch, `H` heads, `L` length in tokens, `K` head width, `M` features, `R` chosen rows.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from protperf.attention.documents import allowed_pairs
from protperf.attention.state import CausalState

_BLOCK = 8


def feature_attention_rows(
    log_q: Tensor, log_k: Tensor, documents: Tensor, rows: Tensor, *, causal: bool
) -> Tensor:
    """Return chosen rows of phi(q) phi(k)^T, each divided by its sum: `(B, H, R, L)`.

    Args:
        log_q: `(B, H, L, M)` log-features of the queries.
        log_k: `(B, H, L, M)` log-features of the keys.
        documents: int32 `(B, L)`.
        rows: int64 `(R,)` places of the queries.
        causal: the direction.
    """
    logits = torch.cat([_log_weights(log_q[:, :, block], log_k) for block in rows.split(_BLOCK)], dim=2)
    allowed = allowed_pairs(documents, causal=causal, rows=rows)
    weights = logits.masked_fill(~allowed, -torch.inf).softmax(-1)
    return weights.masked_fill(~allowed.any(-1, keepdim=True), 0.0)


def replace_rows(
    out: Tensor,
    low: Tensor,
    log_q: Tensor,
    log_k: Tensor,
    v: Tensor,
    documents: Tensor,
    state: CausalState,
) -> Tensor:
    """Return causal attention's `out (B, H, L, K)` with the rows marked in `low (B, H, L)` computed in log space.

    Rows go in blocks of one size, so that which other rows are marked changes no bit of a row.
    """
    places, results = [], []
    for b, h in low.any(-1).nonzero().tolist():
        rows = low[b, h].nonzero().squeeze(-1)
        head = (
            log_q[b, h],
            log_k[b, h],
            v[b, h],
            documents[b],
            state.of_head(b, h),
        )
        for block in rows.split(_BLOCK):
            full = torch.cat((block, block[-1:].expand(_BLOCK - len(block))))
            # The (R, L, M) intermediates of thousands of rows would not fit: they are computed again for gradients.
            exact = checkpoint(_exact_rows, full, *head, use_reentrant=False)
            results.append(exact[: len(block)])
            places.append((torch.full_like(block, b), torch.full_like(block, h), block))
    index = tuple(torch.cat(axis) for axis in zip(*places, strict=True))
    return out.index_put(index, torch.cat(results))


def _exact_rows(
    rows: Tensor, log_q: Tensor, log_k: Tensor, v: Tensor, documents: Tensor, state: CausalState
) -> Tensor:
    """Return the outputs `(R, K)` of some rows of one head."""
    logits, values = _causal_logits(rows, log_q, log_k, v, documents)
    logits, values = _append_state(logits, values, log_q[rows], documents[rows], state)
    return logits.softmax(-1) @ values


def _causal_logits(
    rows: Tensor, log_q: Tensor, log_k: Tensor, v: Tensor, documents: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the logits `(R, L)` of one head's rows and its values `(L, K)`."""
    past = torch.arange(len(documents), device=rows.device) <= rows.unsqueeze(-1)
    allowed = past & (documents == documents[rows].unsqueeze(-1))
    logits = _log_weights(log_q[rows], log_k)
    return logits.masked_fill(~allowed, -torch.inf), v.to(logits.dtype)


def _append_state(
    logits: Tensor, values: Tensor, log_q: Tensor, documents: Tensor, state: CausalState
) -> tuple[Tensor, Tensor]:
    """Append one head's state as M more keys: a feature's sum as weight, its mean value as value."""
    sums, peak = state.sums, state.peak
    counted = sums[:, -1] > 0
    if not counted.any():
        return logits, values
    weight = log_q[:, counted] + sums[counted, -1].log() + peak[counted]
    weight = weight.masked_fill((documents != state.document).unsqueeze(-1), -torch.inf)
    mean = sums[counted, :-1] / sums[counted, -1:]
    return torch.cat((logits, weight), dim=-1), torch.cat((values, mean))


def _log_weights(log_q: Tensor, log_k: Tensor) -> Tensor:
    """Return log(phi(q).phi(k)): `(..., R, M)` and `(..., L, M)` give `(..., R, L)`."""
    return torch.logsumexp(log_q.unsqueeze(-2) + log_k.unsqueeze(-3), dim=-1)
