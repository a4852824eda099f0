"""Linear attention on a CPU: blocks that stay in cache, as one operator that autograd and `torch.compile` take whole.

Axis letters: `B` batch, `H` heads, `L` length in tokens, `K` head width, `F` features, `V` = K + 1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from protperf.attention import blocked_bidirectional as bidirectional
from protperf.attention import blocked_causal as causal_form
from protperf.attention.blocks import ROWS, BlockFeatures, Scratch
from protperf.attention.exact_rows import UNDERFLOW, RowGradients, add_row_gradients, replace_rows
from protperf.attention.features import FeatureMap
from protperf.attention.spans import SPAN, Start
from protperf.attention.state import CausalState

_Results = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def blocked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    feature_map: FeatureMap,
    *,
    causal: bool,
    state: CausalState | None = None,
) -> Tensor:
    """Return normalised attention `(B, H, L, K)` in the type of `v`, zero at padding.

    Args:
        q: `(B, H, L, K)`.
        k: `(B, H, L, K)`.
        v: `(B, H, L, K)`.
        documents: int32 `(B, L)` or `None`.
        feature_map: weights and bias get no gradient here.
        causal: the direction.
        state: causal only: `state_after` the tokens before.
    """
    dtype = torch.promote_types(torch.promote_types(q.dtype, v.dtype), torch.float32)
    weights = feature_map.weights.detach().to(dtype)
    bias = feature_map.bias
    bias = weights.new_zeros(weights.shape[:-1]) if bias is None else bias.detach().to(dtype)
    heads = q.shape[1]
    sums, peak, document = (None, None, None) if state is None else state
    return _attention(
        q,
        k,
        v,
        documents,
        weights.expand(heads, *weights.shape[-2:]),
        bias.expand(heads, bias.shape[-1]),
        feature_map.nonlinearity,
        feature_map.half_square,
        causal,
        ROWS,
        sums,
        peak,
        document,
    )[0]


@torch.library.custom_op("protperf::blocked_attention", mutates_args=())
def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    weights: Tensor,
    bias: Tensor,
    nonlinearity: str,
    half_square: float,
    causal: bool,
    rows: int,
    sums: Tensor | None,
    peak: Tensor | None,
    document: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return attention in the type of `v`, what is kept, and attention as it was before it was rounded, if it was."""
    features = BlockFeatures(
        weights, bias, nonlinearity=nonlinearity, half_square=half_square, scratch=Scratch(weights.dtype)
    )
    if not causal:
        out, kept = bidirectional.bidirectional_forward(q, k, v, documents, features, rows=rows)
        return _rounded(out, v), *kept, _unrounded(out, v)
    state = _state(sums, peak, document)
    out, kept_states = causal_form.causal_forward(
        q, k, v, documents, features, start=_start(state), rows=rows
    )
    denominators = kept_states.denominators
    if features.is_exponential:
        low = denominators < UNDERFLOW
        if low.any():
            replace_rows(out, low, q, k, v, documents, features.feature_map, state)
            denominators.masked_fill_(low, torch.inf)  # the blocks give such rows no gradient
    return _rounded(out, v), *kept_states, _unrounded(out, v)


def _rounded(out: Tensor, v: Tensor) -> Tensor:
    return out.to(v.dtype)


def _unrounded(out: Tensor, v: Tensor) -> Tensor:
    """Return what the backward pass needs in full precision: nothing if the result is in full precision itself."""
    return out.new_empty(0) if out.dtype == v.dtype else out


@_attention.register_fake
def _attention_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    weights: Tensor,
    bias: Tensor,
    nonlinearity: str,
    half_square: float,
    causal: bool,
    rows: int,
    sums: Tensor | None,
    peak: Tensor | None,
    document: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    batch, heads, length, width = v.shape
    if causal:
        places = batch * (length // SPAN)
    else:
        kept_from = bidirectional.rows_of_kept(weights.shape[1], rows)
        places = batch * bidirectional.most_kept(length, kept_from, is_packed=documents is not None)
    shift = (places, heads) if causal else (places, heads, weights.shape[1])
    return (
        v.new_empty(v.shape),
        weights.new_empty(batch, heads, length),
        weights.new_empty(places, heads, weights.shape[1], width + 1),
        weights.new_empty(shift),
        weights.new_empty(0 if weights.dtype == v.dtype else v.shape),
    )


@torch.library.custom_op("protperf::blocked_attention_backward", mutates_args=())
def _attention_backward(
    d_out: Tensor,
    out: Tensor,
    denominators: Tensor,
    kept_sums: Tensor,
    kept_shifts: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    weights: Tensor,
    bias: Tensor,
    nonlinearity: str,
    half_square: float,
    causal: bool,
    rows: int,
    sums: Tensor | None,
    peak: Tensor | None,
    document: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    features = BlockFeatures(
        weights, bias, nonlinearity=nonlinearity, half_square=half_square, scratch=Scratch(weights.dtype)
    )
    if not causal:
        kept = bidirectional.Kept(denominators, kept_sums, kept_shifts)
        gradients = bidirectional.bidirectional_backward(
            d_out, out, kept, q, k, v, documents, features, rows=rows
        )
        return *gradients, weights.new_empty(0)
    state = _state(sums, peak, document)
    kept_states = causal_form.Kept(denominators, kept_sums, kept_shifts)
    d_q, d_k, d_v, d_sums = causal_form.causal_backward(
        d_out, out, kept_states, q, k, v, documents, features, start=_start(state), rows=rows
    )
    if state is not None:
        assert d_sums is not None
        d_sums.mul_(_relative(state).unsqueeze(-1))
    low = denominators.isinf()
    if features.is_exponential and low.any():
        add_row_gradients(
            RowGradients(d_q, d_k, d_v, d_sums), d_out, low, q, k, v, documents, features.feature_map, state
        )
    return d_q, d_k, d_v, weights.new_empty(0) if d_sums is None else d_sums


@_attention_backward.register_fake
def _attention_backward_fake(
    d_out: Tensor,
    out: Tensor,
    denominators: Tensor,
    kept_sums: Tensor,
    kept_shifts: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    weights: Tensor,
    bias: Tensor,
    nonlinearity: str,
    half_square: float,
    causal: bool,
    rows: int,
    sums: Tensor | None,
    peak: Tensor | None,
    document: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    d_q, d_k, d_v = (x.new_empty(x.shape) for x in (q, k, v))
    return d_q, d_k, d_v, weights.new_empty(0) if sums is None else sums.new_empty(sums.shape)


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: _Results) -> None:
    q, k, v, documents, weights, bias, *choices, sums, peak, document = inputs
    out, *kept, unrounded = output
    out = unrounded if unrounded.numel() else out
    ctx.save_for_backward(out, *kept, q, k, v, documents, weights, bias, sums, peak, document)
    ctx.choices = choices


def _backward(ctx: Any, d_out: Tensor, *unused: Tensor) -> tuple[Tensor | None, ...]:
    *saved, sums, peak, document = ctx.saved_tensors
    d_q, d_k, d_v, d_sums = _attention_backward(d_out, *saved, *ctx.choices, sums, peak, document)
    return d_q, d_k, d_v, *[None] * 7, None if sums is None else d_sums, None, None


_attention.register_autograd(_backward, setup_context=_keep_for_backward)


def _state(sums: Tensor | None, peak: Tensor | None, document: Tensor | None) -> CausalState | None:
    if sums is None:
        return None
    assert peak is not None
    assert document is not None
    return CausalState(sums, peak, document)


def _start(state: CausalState | None) -> Start | None:
    """Return the state as the blocks use it: with one peak a head."""
    if state is None:
        return None
    sums = state.sums * _relative(state).unsqueeze(-1)
    return Start(sums, state.peak.amax(-1), state.document)


def _relative(state: CausalState) -> Tensor:
    """Return the factor of each feature's sum with one peak a head, `(B, H, F)`."""
    return torch.exp(state.peak - state.peak.amax(-1, keepdim=True))
