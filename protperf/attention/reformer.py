"""Reformer: a token attends to those that hash into its bucket. Queries are keys; several rounds of hashing.

Keys are the unit vectors of queries. In each round a token falls into one of several buckets of its document, by the
direction among [x R, -x R] nearest to it, and may see the tokens whose rank in its bucket is at most `window` from its
own: on both sides, or, causal, earlier ones alone. A row is a softmax over the UNION of what its rounds see, each token
once, and over the token itself only where that is empty.

This is where it departs from the paper, whose chunks of the sorted sequence move when anything behind them changes: the
future reaches the past, and batch mates, padding and packing matter. Here a rank counts tokens of the own document
and bucket, earlier ones alone where causal, so nothing else matters. The order of additions does depend on the others:
results agree to rounding, not to the last bit. A hash is a step: two computations whose vectors differ by rounding
hash about one token in a million otherwise.

Logits are q.k / (|k| sqrt(K)), as the paper's text reads.
Source: Kitaev et al. 2020, section 2, arXiv:2001.04451; hashing: Andoni et al. 2015, arXiv:1509.02897.

Axis letters: `B` batch, `H` heads, `L` length in tokens, `K` head width, `S` rounds, `W` window, `C` chunk length,
`N` chunks, `R` chosen rows, `T` tokens kept.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from protperf.attention.batched import recomputed
from protperf.attention.documents import allowed_pairs, or_one_document
from protperf.attention.features import unit_vectors
from protperf.attention.state import KeyValueState
from protperf.vocab import PADDING_DOCUMENT

_SHORTEST = 32
"""Rows of a chunk at least: smaller products are slower."""

_ROWS = 64
"""Rows in one go where rows are worked out pair by pair."""


@dataclass(frozen=True)
class Hashing:
    """How `reformer` hashes.

    Attributes:
        rounds: S.
        buckets: of a round, even, or 1 for none: it must not depend on the length, which causal tokens do not know.
        window: W, ranks to one side.
    """

    rounds: int = 4
    buckets: int = 16
    window: int = 64

    @property
    def num_rows(self) -> int:
        """Rows M of the projection: half of the buckets of each round, the other half lies opposite."""
        return self.rounds * (self.buckets // 2)


def reformer_attention(
    q: Tensor,
    v: Tensor,
    documents: Tensor | None,
    projection: Tensor | None,
    hashing: Hashing,
    *,
    causal: bool,
) -> Tensor:
    """Return attention within buckets, `(B, H, L, K)` in the type of `v`, zero at padding.

    Everything is float32 at least. Memory is linear in the length, work too but for the sorting; nothing of the size of W a token is kept
    for the backward pass. Nothing here looks at a number to decide what to do next.

    Args:
        q: queries, whose unit vectors are keys, `(B, H, L, K)`.
        v: `(B, H, L, K)`.
        documents: int32 `(B, L)` or `None`.
        projection: `(M, K)`, M = `hashing.num_rows`; not used with one bucket.
        hashing: how.
        causal: the direction.
    """
    own = or_one_document(documents, v)
    if hashing.window > v.shape[2] and not torch.compiler.is_compiling():  # chunks are no shorter than it
        hashing = replace(hashing, window=v.shape[2])
    dtype = torch.promote_types(torch.promote_types(q.dtype, v.dtype), torch.float32)
    queries, values = q.to(dtype), v.to(dtype)
    order, places, codes = _sort(hashes(q, projection, hashing), own, hashing)
    rounds = [
        recomputed(
            _round,
            queries,
            values,
            order[:, :, s],
            places[:, :, s],
            codes[:, :, : s + 1],
            hashing.window,
            causal,
        )
        for s in range(hashing.rounds)
    ]
    totals, peaks = (torch.stack(parts) for parts in zip(*rounds, strict=True))  # (S, B, H, L, .)
    totals = (totals * torch.exp(peaks - peaks.amax(0))).sum(0)
    found = totals[..., -1:] > 0
    out = torch.where(found, totals[..., :-1] / torch.where(found, totals[..., -1:], 1.0), values)
    return out.masked_fill(own.eq(PADDING_DOCUMENT)[:, None, :, None], 0.0).to(v.dtype)


def reformer_onward(
    q: Tensor,
    v: Tensor,
    documents: Tensor | None,
    projection: Tensor | None,
    hashing: Hashing,
    *,
    state: KeyValueState | None,
) -> tuple[Tensor, KeyValueState]:
    """Causal attention within buckets over the next segment of a sequence, and what must be kept of it.

    Args:
        q: as in `reformer_attention`.
        v: as there.
        documents: as there.
        projection: as there.
        hashing: as there.
        state: of the tokens before.

    Returns:
        `(B, H, L, K)`, zero at padding, and the state, which grows with each token.
    """
    own = or_one_document(documents, v)
    seen = KeyValueState.of(unit_vectors(q), v, own, hashes(q, projection, hashing))
    if not v.shape[2]:
        return torch.zeros_like(v), state or seen
    if state is None:
        out = reformer_attention(q, v, documents, projection, hashing, causal=True)
        return out, seen.current() if documents is None else seen.current().trimmed()
    seen = state.followed_by(seen)
    rows = torch.arange(seen.documents.shape[1] - v.shape[2], seen.documents.shape[1], device=v.device)
    outs = []
    for part, queries in zip(rows.split(_ROWS), q.split(_ROWS, dim=2), strict=True):
        weights = _weights(queries, seen.keys, seen.hashes, seen.documents, part, hashing, causal=True)
        outs.append((weights @ seen.values.to(weights.dtype)).to(v.dtype))
    return torch.cat(outs, dim=2), seen.current() if documents is None else seen.current().trimmed()


def reformer_rows(
    q: Tensor,
    documents: Tensor,
    rows: Tensor,
    projection: Tensor | None,
    hashing: Hashing,
    *,
    causal: bool,
) -> Tensor:
    """Return chosen rows of the attention matrix, `(B, H, R, L)`; zero for padding.

    Args:
        q: as in `reformer_attention`.
        documents: int32 `(B, L)`.
        rows: int64 `(R,)` places of the queries.
        projection: as in `reformer_attention`.
        hashing: as there.
        causal: the direction.
    """
    found, keys = hashes(q, projection, hashing), unit_vectors(q)
    parts = [
        _weights(q[:, :, part], keys, found, documents, part, hashing, causal=causal)
        for part in rows.split(_ROWS)
    ]
    return torch.cat(parts, dim=2)


@torch.no_grad()
def hashes(q: Tensor, projection: Tensor | None, hashing: Hashing) -> Tensor:
    """Return the bucket of each token in each round, int64 `(B, H, L, S)`.

    Args:
        q: `(B, H, L, K)`.
        projection: `(M, K)`, a round's rows one after the other.
        hashing: how.
    """
    if hashing.buckets == 1:
        return torch.zeros(*q.shape[:3], hashing.rounds, dtype=torch.int64, device=q.device)
    assert projection is not None
    assert len(projection) == hashing.num_rows, (
        f"projection of {len(projection)} rows, not {hashing.num_rows}"
    )
    x = unit_vectors(q)
    turned = (x @ projection.to(x).mT).unflatten(-1, (hashing.rounds, -1))
    return torch.cat((turned, -turned), dim=-1).argmax(-1)


def _sort(found: Tensor, documents: Tensor, hashing: Hashing) -> tuple[Tensor, Tensor, Tensor]:
    """Sort tokens by document, bucket and place, a round at a time.

    Args:
        found: buckets `(B, H, L, S)`.
        documents: int32 `(B, L)`.
        hashing: how.

    Returns:
        `(B, H, S, L)` each: the tokens in order and each token's place in it, int64; and each token's code, int32: those
        of two tokens differ by W at most if and only if they are of one document and bucket and their ranks do.
    """
    starts = documents[:, 1:] != documents[:, :-1]
    run = pad(starts.cumsum(1), (1, 0))  # (B, L)
    group, order = (run[:, None, None] * hashing.buckets + found.movedim(-1, 2)).sort(dim=-1, stable=True)
    rank = torch.arange(order.shape[-1], device=order.device).expand_as(order)
    number = pad(
        (group[..., 1:] != group[..., :-1]).cumsum(-1), (1, 0)
    )  # counted without gaps: codes stay small
    codes = (rank + number * (hashing.window + 1)).int()
    places = torch.empty_like(order).scatter(-1, order, rank)
    return order, places, codes.gather(-1, places)


def _round(
    q: Tensor, v: Tensor, order: Tensor, places: Tensor, codes: Tensor, window: int, causal: bool
) -> tuple[Tensor, Tensor]:
    """Return what the tokens gather in one round from those that no earlier round showed them.

    Chunks of the sorted tokens, each with its neighbours; since a chunk is no shorter than the window, they hold all that
    a token may see, and where chunks begin decides nothing.

    Args:
        q: `(B, H, L, K)`.
        v: `(B, H, L, K)`.
        order: the sorted tokens, `(B, H, L)`.
        places: of the tokens in it, `(B, H, L)`.
        codes: of this round, the last, and of those before it, `(B, H, s, L)`.
        window: W.
        causal: the direction.

    Returns:
        numerators and denominators, `(B, H, L, K + 1)`, with the row's largest logit `(B, H, L, 1)` taken off.
    """
    chunk = max(window, _SHORTEST)
    sides = (1, 0) if causal else (1, 0, -1)
    queries, values = _cut(_taken(q, order), chunk), _taken(v, order)
    values = _beside(_cut(pad(values, (0, 1), value=1.0), chunk), sides)
    keys = _beside(_cut(_taken(unit_vectors(q), order), chunk), sides)
    sorted_codes = _taken(codes.movedim(2, -1), order)  # (B, H, L, s)
    nowhere = -2 * (window + 1)  # no token's code is so near to it
    sorted_codes = _cut(sorted_codes, chunk, value=nowhere)  # (B, H, N, C, s)
    allowed = _fresh_pairs(sorted_codes, _beside(sorted_codes, sides, value=nowhere), window, causal)

    logits = (queries @ keys.mT * q.shape[-1] ** -0.5).masked_fill(~allowed, -torch.inf)
    peaks = logits.detach().amax(-1, keepdim=True).clamp_min(torch.finfo(logits.dtype).min)
    totals = torch.exp(logits - peaks) @ values
    return _taken(totals.flatten(2, 3), places), _taken(peaks.flatten(2, 3), places)


def _fresh_pairs(queries: Tensor, keys: Tensor, window: int, causal: bool) -> Tensor:
    """Return which query may see which key in the last round and in none before, bool `(B, H, N, C, J)`.

    Args:
        queries: codes `(B, H, N, C, s)`.
        keys: codes `(B, H, N, J, s)`.
        window: W.
        causal: the direction.
    """
    fresh: Tensor | None = None
    for s in reversed(range(queries.shape[-1])):
        ahead = queries[..., s].unsqueeze(-1) - keys[..., s].unsqueeze(-2)
        near = (ahead > 0) & (ahead <= window) if causal else (ahead != 0) & (ahead.abs() <= window)
        fresh = near if fresh is None else fresh & ~near
    assert fresh is not None
    return fresh


def _taken(x: Tensor, places: Tensor) -> Tensor:
    """Return the rows of `x (B, H, L, .)` at some places `(B, H, L)`."""
    return x.gather(2, places.unsqueeze(-1).expand(*places.shape, x.shape[-1]))


def _cut(x: Tensor, chunk: int, *, value: float = 0) -> Tensor:
    """Cut `(B, H, L, .)` into chunks, `(B, H, N, C, .)`, filled up with `value`."""
    return pad(x, (0, 0, 0, -x.shape[2] % chunk), value=value).unflatten(2, (-1, chunk))


def _beside(x: Tensor, sides: tuple[int, ...], *, value: float = 0) -> Tensor:
    """Put beside each chunk of `x (B, H, N, C, .)` those so many before it, `(B, H, N, len(sides) C, .)`."""
    # a negative width cuts off
    moved = [pad(x, (0, 0, 0, 0, side, -side), value=value) if side else x for side in sides]
    return torch.cat(moved, dim=3)


def _weights(
    q: Tensor, keys: Tensor, found: Tensor, documents: Tensor, rows: Tensor, hashing: Hashing, *, causal: bool
) -> Tensor:
    """Return rows of the attention matrix pair by pair, `(B, H, R, T)`; zero for padding.

    Args:
        q: queries of the rows, `(B, H, R, K)`.
        keys: `(B, H, T, K)`.
        found: buckets of the keys, `(B, H, T, S)`.
        documents: int32 `(B, T)`.
        rows: int64 `(R,)` the queries' places among the keys.
        hashing: how.
        causal: the direction.
    """
    allowed = allowed_pairs(documents, causal=causal, rows=rows)  # (B, 1, R, T)
    itself = torch.arange(keys.shape[2], device=keys.device) == rows.unsqueeze(-1)
    union = torch.zeros_like(allowed)
    for bucket in found.unbind(-1):
        same = (bucket[:, :, rows].unsqueeze(-1) == bucket.unsqueeze(-2)) & allowed
        rank = same.cumsum(-1)
        own = rank.take_along_dim(rows.view(1, 1, -1, 1), -1)
        union = union | (same & ((own - rank).abs() <= hashing.window))
    union = union & ~itself
    union = union | (itself & ~union.any(-1, keepdim=True))
    logits = q.to(keys.dtype) @ keys.mT * q.shape[-1] ** -0.5
    weights = logits.masked_fill(~union, -torch.inf).softmax(-1)
    return weights.masked_fill(~allowed.any(-1, keepdim=True), 0.0)
