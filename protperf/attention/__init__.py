"""Attention: one signature for every kind, in torch alone.

    attend(q, k, v, documents, kind=..., causal=..., projection=...) -> (B, H, L, K)

Two independent choices: a feature map (`features`) and a direction; and exact `softmax` beside them. Linear attention
has two layouts of the same mathematics, `blocked` for CPUs and `batched` for accelerators, chosen here and nowhere
else. `reference` holds the slow, obviously right twin of each kind.

Axis letters: `B` batch, `H` heads, `L` length in tokens, `K` head width, `M` rows of the projection, `R` chosen rows.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from protperf.attention.batched import batched_attention, read_state, state_after
from protperf.attention.blocked import blocked_attention
from protperf.attention.documents import allowed_pairs, positions_in_documents, share_in_documents
from protperf.attention.features import FEATURE_MAPS, UNPROJECTED, FeatureMap, unit_vectors
from protperf.attention.projection import COUPLINGS, NORMS, draw_projection, projection_generator
from protperf.attention.rows import feature_attention_rows
from protperf.attention.softmax import softmax_attention, softmax_attention_rows, softmax_onward
from protperf.attention.state import CausalState, KeyValueState, empty_state
from protperf.vocab import PADDING_DOCUMENT

__all__ = [
    "ATTENTIONS",
    "COUPLINGS",
    "LAYOUTS",
    "NORMS",
    "UNPROJECTED",
    "CausalState",
    "KeyValueState",
    "State",
    "allowed_pairs",
    "attend",
    "attend_onward",
    "attention_rows",
    "draw_projection",
    "positions_in_documents",
    "projection_generator",
    "share_in_documents",
]

ATTENTIONS = (*FEATURE_MAPS, "softmax")
"""The kinds of attention by their name in the configuration."""

LAYOUTS = {"blocked": blocked_attention, "batched": batched_attention}
"""The same mathematics in two orders: blocks that stay in a CPU's cache, and products over all chunks at once."""

State = CausalState | KeyValueState
"""What a causal attention carries on; each has `of_rows` and `join`, to let rows of a batch go and to add some."""

_FEW = 32
"""Tokens that are not worth cutting into blocks."""


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None = None,
    *,
    kind: str,
    causal: bool,
    projection: Tensor | None = None,
    pair_square: Tensor | None = None,
    layout: str | None = None,
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
        projection: float32 `(M, K)`, for every kind but `softmax` and those in `UNPROJECTED`.
        pair_square: `(H,)` mean of |q' + k'|^2, for `oprf` alone; a constant, never taken from the sequence itself.
        layout: one of `LAYOUTS`; `None` chooses by the device. A projection that asks for a gradient needs `batched`.

    Returns:
        `(B, H, L, K)`, zero at padding.
    """
    _check_shapes(q, k, v, documents)
    if not v.numel():
        return torch.zeros_like(v)
    with torch.autocast(q.device.type, enabled=False):
        if kind == "softmax":
            q, k, v = _without_padding(q, k, v, documents)
            return softmax_attention(q, k, v, documents, causal=causal)
        feature_map = _feature_map(q, kind, projection, pair_square)
        layout = layout or _best_layout(q, feature_map)
        assert layout != "blocked" or not _is_learned(feature_map), "blocks give a projection no gradient"
        if layout != "blocked" or feature_map.unit_norm:  # blocks never touch padding
            q, k, v = _without_padding(q, k, v, documents)
        if feature_map.unit_norm:
            q, k, feature_map = unit_vectors(q), unit_vectors(k), replace(feature_map, unit_norm=False)
        return LAYOUTS[layout](q, k, v, documents, feature_map, causal=causal)


def attend_onward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None = None,
    *,
    kind: str,
    projection: Tensor | None = None,
    pair_square: Tensor | None = None,
    state: State | None = None,
    layout: str | None = None,
) -> tuple[Tensor, State]:
    """Causal attention over the next segment of a sequence: token by token or in pieces of any length.

    Args:
        q: queries `(B, H, L, K)` of the segment.
        k: keys `(B, H, L, K)`.
        v: values `(B, H, L, K)`.
        documents: int32 `(B, L)` of the segment.
        kind: one of `ATTENTIONS`.
        projection: as in `attend`.
        pair_square: as in `attend`.
        state: what the call for the segment before returned; `None` at the start.
        layout: as in `attend`; by default a single token has a form of its own.

    Returns:
        `(B, H, L, K)` and the state: of a feature map a `CausalState`, whose size does not depend on how much was read;
        of `softmax` a `KeyValueState`, which grows with each token.
    """
    _check_shapes(q, k, v, documents)
    with torch.autocast(q.device.type, enabled=False):
        q, k, v = _without_padding(q, k, v, documents)
        if kind == "softmax":
            assert state is None or isinstance(state, KeyValueState)
            return softmax_onward(q, k, v, documents, state=state)
        assert state is None or isinstance(state, CausalState)
        feature_map = _feature_map(q, kind, projection, pair_square)
        if not v.numel():
            return torch.zeros_like(v), state or empty_state(k, v, feature_map)
        if feature_map.unit_norm:
            q, k, feature_map = unit_vectors(q), unit_vectors(k), replace(feature_map, unit_norm=False)
        after = state_after(k, v, documents, feature_map, state=state)
        if layout is None and q.shape[2] == 1:
            return _read_one(q, v, documents, feature_map, after), after
        if layout is None:
            layout = "batched" if q.shape[2] < _FEW else _best_layout(q, feature_map)
        return LAYOUTS[layout](q, k, v, documents, feature_map, causal=True, state=state), after


def attention_rows(
    q: Tensor,
    k: Tensor,
    documents: Tensor | None = None,
    *,
    rows: Tensor,
    kind: str,
    causal: bool,
    projection: Tensor | None = None,
    pair_square: Tensor | None = None,
) -> Tensor:
    """Return chosen rows of the attention matrix, `(B, H, R, L)`: what `attend` applies to the values.

    Args:
        q: queries `(B, H, L, K)`.
        k: keys `(B, H, L, K)`.
        documents: int32 `(B, L)`, as in `attend`.
        rows: int64 `(R,)` places of the queries.
        kind: one of `ATTENTIONS`.
        causal: the direction.
        projection: as in `attend`.
        pair_square: as in `attend`.
    """
    with torch.autocast(q.device.type, enabled=False):
        q, k, _ = _without_padding(q, k, k, documents)
        if documents is None:
            documents = torch.zeros(q.shape[0], q.shape[2], dtype=torch.int32, device=q.device)
        if kind == "softmax":
            return softmax_attention_rows(q, k, documents, rows, causal=causal)
        feature_map = _feature_map(q, kind, projection, pair_square)
        return feature_attention_rows(q, k, feature_map, documents, rows, causal=causal)


def _read_one(
    q: Tensor, v: Tensor, documents: Tensor | None, feature_map: FeatureMap, after: CausalState
) -> Tensor:
    """Return attention of a segment of one token, `(B, H, 1, K)`, from the state after it."""
    out = read_state(q, after, feature_map).to(v.dtype)
    return (
        out if documents is None else out.masked_fill(documents.eq(PADDING_DOCUMENT)[:, None, :, None], 0.0)
    )


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None) -> None:
    assert q.shape == k.shape, f"q {tuple(q.shape)}, k {tuple(k.shape)}"
    assert q.shape[:3] == v.shape[:3], f"q {tuple(q.shape)}, v {tuple(v.shape)}"
    places = (q.shape[0], q.shape[2])
    assert documents is None or documents.shape == places, f"documents {tuple(documents.shape)}, not {places}"


def _without_padding(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Put zeros where padding stands: whatever it held, infinities too, reaches neither outputs nor gradients."""
    if documents is None:
        return q, k, v
    padding = documents.eq(PADDING_DOCUMENT)[:, None, :, None]
    return q.masked_fill(padding, 0.0), k.masked_fill(padding, 0.0), v.masked_fill(padding, 0.0)


def _feature_map(q: Tensor, kind: str, projection: Tensor | None, pair_square: Tensor | None) -> FeatureMap:
    """Return the feature map of a kind, for heads as wide as those of `q` and on their device.

    Raises:
        ValueError: there is no such kind.
    """
    if kind not in FEATURE_MAPS:
        raise ValueError(f"attention {kind!r} has no feature map; allowed: {', '.join(FEATURE_MAPS)}")
    feature_map = FEATURE_MAPS[kind](projection, head_dim=q.shape[-1], pair_square=pair_square)
    return replace(feature_map, weights=feature_map.weights.to(q.device))


def _best_layout(q: Tensor, feature_map: FeatureMap) -> str:
    """Choose by the device, but for features that are being learned."""
    return "blocked" if q.device.type == "cpu" and not _is_learned(feature_map) else "batched"


def _is_learned(feature_map: FeatureMap) -> bool:
    return any(x is not None and x.requires_grad for x in (feature_map.weights, feature_map.bias))
