"""Where a model looks: matrices of attention, whole or by chosen rows, of chosen layers and heads.

Layers and heads count from 0. A matrix is what attention does to the identity, so it is that of any kind of attention,
normalised as the model normalises it: each row sums to one, but for `linformer`, whose weights may be of either sign.

Axis letters: `B` batch, `H` heads, `L` length in tokens, `K` head width, `C` columns of values, `R` chosen rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from protperf.attention import attend, attention_rows
from protperf.attention.features import FEATURE_MAPS
from protperf.model import ProteinModel

ALL = slice(None)

_ROW_NUMBERS = 1 << 24
"""Numbers in one go where rows are worked out pair by pair: 64 MiB."""


def attention_maps(
    model: ProteinModel,
    tokens: Tensor,
    *,
    layers: Sequence[int],
    heads: Sequence[int],
    rows: Tensor | None = None,
) -> dict[int, Tensor]:
    """Return the attention matrices of one protein: layer -> float32 `(heads, L, L)`, or `(heads, R, L)` of chosen rows.

    Args:
        model: left in the mode that it was in.
        tokens: as shown, `<bos>` and `<eos>` included, `(1, L)`, on the model's device.
        layers: from 0.
        heads: from 0.
        rows: int64 `(R,)` places of the tokens that look; memory is then linear in the length. `None`: all.
    """
    maps: dict[int, Tensor] = {}
    places = None if rows is None else rows.to(tokens.device)

    def look(layer: int, q: Tensor, k: Tensor, gate: Tensor | None) -> None:
        if layer in layers:
            maps[layer] = torch.cat([_map_of(model, layer, q, k, gate, head, places) for head in heads])

    watch_layers(model, tokens, None, look)
    return {layer: maps[layer] for layer in layers}


def watch_layers(
    model: ProteinModel,
    tokens: Tensor,
    documents: Tensor | None,
    look: Callable[[int, Tensor, Tensor, Tensor | None], None],
) -> None:
    """Show `look` the number of each layer with its queries and keys `(B, H, L, K)` and its gates, from first to last.

    Args:
        model: left in the mode that it was in.
        tokens: `(B, L)`.
        documents: as in `ProteinModel.forward`.
        look: called once a layer, without gradients.
    """
    seen = 0

    def count(q: Tensor, k: Tensor, _: Tensor, __: Tensor | None, gate: Tensor | None) -> None:
        nonlocal seen
        look(seen, q, k, gate)
        seen += 1

    model.watch(tokens, documents, count)


def gather(
    model: ProteinModel,
    layer: int,
    q: Tensor,
    k: Tensor,
    values: Tensor,
    documents: Tensor | None = None,
    *,
    gate: Tensor | None,
    heads: slice = ALL,
) -> Tensor:
    """Let a layer's attention gather other values than its own: float32 `(B, heads, L, C)`.

    Args:
        model: whose attention.
        layer: from 0.
        q: `(B, H, L, K)`, as the layer was seen to have them.
        k: as q.
        values: what is gathered, the same for each head, `(B, L, C)`; the identity gives the matrix itself.
        documents: as in `attend`.
        gate: as the layer was seen to have it.
        heads: which.
    """
    q, k = q[:, heads].float(), k[:, heads].float()
    v = values.float().unsqueeze(1).expand(-1, q.shape[1], -1, -1)
    return attend(q, k, v, documents, causal=model.causal, **_kind_of(model, layer, heads, gate))


def _map_of(
    model: ProteinModel,
    layer: int,
    q: Tensor,
    k: Tensor,
    gate: Tensor | None,
    head: int,
    rows: Tensor | None,
) -> Tensor:
    """Return the matrix of one head, or its chosen rows, float32 `(1, R, L)`."""
    length = q.shape[2]
    heads = slice(head, head + 1)
    if rows is None:
        identity = torch.eye(length, device=q.device).unsqueeze(0)
        return gather(model, layer, q, k, identity, gate=gate, heads=heads)[0]
    features = 2 * model.config.num_features if model.config.attention_of(layer) in FEATURE_MAPS else 1
    together = max(1, _ROW_NUMBERS // (length * features))
    q, k = q[:, heads].float(), k[:, heads].float()
    how = _kind_of(model, layer, heads, gate)
    parts = [attention_rows(q, k, rows=part, causal=model.causal, **how) for part in rows.split(together)]
    return torch.cat(parts, dim=2)[0]


def _kind_of(model: ProteinModel, layer: int, heads: slice, gate: Tensor | None) -> dict[str, Any]:
    """Return what `attend` must know of some heads of a layer."""
    attention: Any = model.blocks[layer].attention
    choices = attention.choices()
    projection, pair_square = attention.projection, attention.pair_square
    own = projection is not None and projection.dim() == 3  # learned, for each head
    return choices | {
        "projection": projection[heads] if own else projection,
        "pair_square": None if pair_square is None else pair_square[heads],
        "gate": None if gate is None else gate[:, heads],
    }
