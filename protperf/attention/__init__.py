"""Attention: one signature for every kind, in torch alone.

    attend(q, k, v, documents, kind=..., causal=..., projection=...) -> (B, H, L, K)

Two independent choices: a feature map (`features`) and a direction. Linear attention has two layouts of the same
mathematics, `blocked` for CPUs and `batched` for accelerators, chosen here and nowhere else; causal `rfa` may forget by
a learned gate (`gates`), in the batched layout. Beside the feature maps stand exact `softmax`, and what Performer is
compared with: `linformer`, which pools keys and values, and `reformer`, which hashes tokens into buckets. `reference`
holds the slow, obviously right twin of each kind.

What does not hold for each kind: rows of `linformer` do not sum to one, a document has a largest length, and there is
no causal form; `reformer` sees buckets drawn at random and agrees with itself to rounding only, since what else is
sorted decides the order of additions; a causal `softmax` or `reformer` keeps all tokens as it goes on.

Axis letters: `B` batch, `H` heads, `L` length in tokens, `K` head width, `M` rows of the projection, `R` chosen rows,
`P` pooled tokens, `N` most tokens of a document.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from protperf.attention.batched import batched_attention, read_state, state_after
from protperf.attention.blocked import blocked_attention
from protperf.attention.documents import (
    allowed_pairs,
    or_one_document,
    positions_in_documents,
    share_in_documents,
)
from protperf.attention.features import FEATURE_MAPS, UNPROJECTED, FeatureMap, unit_vectors
from protperf.attention.gates import GateScales, gate_scales
from protperf.attention.linformer import linformer_attention, linformer_rows
from protperf.attention.projection import COUPLINGS, NORMS, draw_projection, projection_generator
from protperf.attention.reformer import Hashing, reformer_attention, reformer_onward, reformer_rows
from protperf.attention.rows import feature_attention_rows
from protperf.attention.softmax import softmax_attention, softmax_attention_rows, softmax_onward
from protperf.attention.state import CausalState, KeyValueState, empty_state
from protperf.vocab import PADDING_DOCUMENT

__all__ = [
    "ATTENTIONS",
    "BIDIRECTIONAL",
    "COUPLINGS",
    "LAYOUTS",
    "NORMS",
    "PROJECTED",
    "UNPROJECTED",
    "CausalState",
    "Hashing",
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

ATTENTIONS = (*FEATURE_MAPS, "softmax", "linformer", "reformer")
"""The kinds of attention by their name in the configuration."""

BIDIRECTIONAL = frozenset({"linformer"})
"""The kinds without a causal form."""

PROJECTED = frozenset({*FEATURE_MAPS, "reformer"} - UNPROJECTED)
"""The kinds with a random projection: of features, or into buckets."""

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
    gate: Tensor | None = None,
    pooling: Tensor | None = None,
    hashing: Hashing | None = None,
    layout: str | None = None,
) -> Tensor:
    """Let every token gather values from the tokens of its document that it may see.

    All is computed in float32 at least, whatever the input and autocast say, but `softmax` in the type of `v`; the result
    has the type of `v`.

    Args:
        q: queries `(B, H, L, K)`.
        k: keys `(B, H, L, K)`.
        v: values `(B, H, L, K)`.
        documents: int32 `(B, L)`; tokens with equal numbers (one contiguous run) see each other, `PADDING_DOCUMENT` is left
            out of everything; `None`: one document a row.
        kind: one of `ATTENTIONS`.
        causal: whether a token sees only itself and what stands before it.
        projection: float32 `(M, K)`, for the kinds in `PROJECTED`.
        pair_square: `(H,)` mean of `|q' + k'|^2`, for `oprf` alone; a constant, never taken from the sequence itself.
        gate: `(B, H, L)` logits of what causal `rfa` keeps of all before; `None`: it forgets nothing.
        pooling: `(2, P, N)` weights of keys and of values, for `linformer` alone.
        hashing: of `reformer` alone, whose keys are those of `q`: `k` is not looked at.
        layout: one of `LAYOUTS`; `None` chooses by the device. A projection that asks for a gradient, and a gate, need
            `batched`.

    Returns:
        `(B, H, L, K)`, zero at padding.

    Raises:
        ValueError: there is no such kind, or not in this direction, or a document is too long for it.
    """
    _check_shapes(q, k, v, documents)
    if not v.numel():
        return torch.zeros_like(v)
    with torch.autocast(q.device.type, enabled=False):
        if kind == "softmax":
            q, k, v = _without_padding(q, k, v, documents)
            return softmax_attention(q, k, v, documents, causal=causal)
        if kind == "linformer":
            q, k, v = _without_padding(q, k, v, documents)
            return linformer_attention(q, k, v, documents, _pooling(pooling, causal=causal))
        if kind == "reformer":
            q, _, v = _without_padding(q, q, v, documents)
            return reformer_attention(q, v, documents, projection, hashing or Hashing(), causal=causal)
        gates = _gates(gate, documents, kind=kind, causal=causal)
        feature_map = _feature_map(q, kind, projection, pair_square, gates)
        layout = layout or _best_layout(q, feature_map)
        if layout != "blocked" or feature_map.unit_norm:  # blocks never touch padding
            q, k, v = _without_padding(q, k, v, documents)
        if feature_map.unit_norm:
            q, k, feature_map = unit_vectors(q), unit_vectors(k), replace(feature_map, unit_norm=False)
        return _in_layout(layout, q, k, v, documents, feature_map, causal=causal, gates=gates)


def attend_onward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None = None,
    *,
    kind: str,
    projection: Tensor | None = None,
    pair_square: Tensor | None = None,
    gate: Tensor | None = None,
    pooling: Tensor | None = None,
    hashing: Hashing | None = None,
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
        gate: as in `attend`.
        pooling: as in `attend`.
        hashing: as in `attend`.
        state: what the call for the segment before returned; `None` at the start.
        layout: as in `attend`; by default a single token has a form of its own.

    Returns:
        `(B, H, L, K)` and the state: of a feature map a `CausalState`, whose size does not depend on how much was read;
        of `softmax` and `reformer` a `KeyValueState`, which grows with each token.

    Raises:
        ValueError: there is no such kind, or it has no causal form.
    """
    _check_shapes(q, k, v, documents)
    with torch.autocast(q.device.type, enabled=False):
        q, k, v = _without_padding(q, k, v, documents)
        if kind == "softmax":
            assert state is None or isinstance(state, KeyValueState)
            return softmax_onward(q, k, v, documents, state=state)
        if kind == "reformer":
            assert state is None or isinstance(state, KeyValueState)
            return reformer_onward(q, v, documents, projection, hashing or Hashing(), state=state)
        if kind == "linformer":
            _pooling(pooling, causal=True)
        assert state is None or isinstance(state, CausalState)
        gates = _gates(gate, documents, kind=kind, causal=True) if q.shape[2] else None
        feature_map = _feature_map(q, kind, projection, pair_square, gates)
        if not v.numel():
            return torch.zeros_like(v), state or empty_state(k, v, feature_map)
        if feature_map.unit_norm:
            q, k, feature_map = unit_vectors(q), unit_vectors(k), replace(feature_map, unit_norm=False)
        after = state_after(k, v, documents, feature_map, state=state, gates=gates)
        if layout is None and q.shape[2] == 1:
            return _read_one(q, v, documents, feature_map, after), after
        if layout is None:
            layout = "batched" if q.shape[2] < _FEW else _best_layout(q, feature_map)
        return _in_layout(
            layout, q, k, v, documents, feature_map, causal=True, gates=gates, state=state
        ), after


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
    gate: Tensor | None = None,
    pooling: Tensor | None = None,
    hashing: Hashing | None = None,
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
        gate: as in `attend`.
        pooling: as in `attend`.
        hashing: as in `attend`.

    Raises:
        ValueError: as in `attend`.
    """
    with torch.autocast(q.device.type, enabled=False):
        q, k, _ = _without_padding(q, k, k, documents)
        documents = or_one_document(documents, q)
        if kind == "softmax":
            return softmax_attention_rows(q, k, documents, rows, causal=causal)
        if kind == "linformer":
            return linformer_rows(q, k, documents, rows, _pooling(pooling, causal=causal))
        if kind == "reformer":
            return reformer_rows(q, documents, rows, projection, hashing or Hashing(), causal=causal)
        gates = _gates(gate, documents, kind=kind, causal=causal)
        feature_map = _feature_map(q, kind, projection, pair_square, gates)
        return feature_attention_rows(q, k, feature_map, documents, rows, causal=causal, gates=gates)


def _in_layout(
    layout: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    feature_map: FeatureMap,
    *,
    causal: bool,
    gates: GateScales | None,
    state: CausalState | None = None,
) -> Tensor:
    """Return linear attention in one of its layouts, `(B, H, L, K)`; what cannot be done in it is our own mistake."""
    if gates is not None:
        assert layout == "batched", "blocks know no gate"
        return batched_attention(q, k, v, documents, feature_map, causal=causal, state=state, gates=gates)
    assert layout != "blocked" or not _is_learned(feature_map), "blocks give a projection no gradient"
    return LAYOUTS[layout](q, k, v, documents, feature_map, causal=causal, state=state)


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


def _feature_map(
    q: Tensor, kind: str, projection: Tensor | None, pair_square: Tensor | None, gates: GateScales | None
) -> FeatureMap:
    """Return the feature map of a kind, for heads as wide as those of `q` and on their device.

    Raises:
        ValueError: there is no such kind.
    """
    if kind not in FEATURE_MAPS:
        raise ValueError(f"attention {kind!r} has no feature map; allowed: {', '.join(FEATURE_MAPS)}")
    feature_map = FEATURE_MAPS[kind](projection, head_dim=q.shape[-1], pair_square=pair_square)
    return replace(feature_map, weights=feature_map.weights.to(q.device), is_gated=gates is not None)


def _gates(gate: Tensor | None, documents: Tensor | None, *, kind: str, causal: bool) -> GateScales | None:
    """Return what the gates of a causal `rfa` do, if it has any; padding has no say."""
    if gate is None:
        return None
    assert kind == "rfa", f"{kind} has no gate"
    assert causal, "only what has an order can be forgotten"
    if documents is not None:
        gate = gate.masked_fill(documents.eq(PADDING_DOCUMENT).unsqueeze(1), 0.0)
    return gate_scales(gate, documents)


def _pooling(pooling: Tensor | None, *, causal: bool) -> Tensor:
    """Return the weights of `linformer`.

    Raises:
        ValueError: it is asked to be causal.
    """
    if causal:
        raise ValueError(
            "attention 'linformer' has no causal form, for what it pools holds the future; allowed: bidirectional"
        )
    assert pooling is not None, "linformer needs its pooling"
    return pooling


def _best_layout(q: Tensor, feature_map: FeatureMap) -> str:
    """Choose by the device, but for what blocks cannot do: features that are being learned, and gates."""
    in_blocks = q.device.type == "cpu" and not _is_learned(feature_map) and not feature_map.is_gated
    return "blocked" if in_blocks else "batched"


def _is_learned(feature_map: FeatureMap) -> bool:
    return any(x is not None and x.requires_grad for x in (feature_map.weights, feature_map.bias))
