"""Rows of causal attention whose denominator underflows, computed again in log space: forward and backward.

A row with exponential features is lost in float32 where all that it may see has features some e^70 below those of
its running maximum: queries and keys of 16 N(0, 1), say. The work for one is linear in what it sees, in float64, for the
logarithms are in the thousands. In ordinary models there is no such row; where norms have run away there may be many,
and attention is slow, which `attention/qk_norm_LL` in the metrics explains.

Axis letters: `B` batch, `H` heads, `L` length in tokens, `K` head width, `F` features, `R` rows of a block, `J` keys,
`V` = K + 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from protperf.attention.features import FeatureMap, logits
from protperf.attention.rows import log_weights
from protperf.attention.state import CausalState

UNDERFLOW = 1e-30
"""Below this a causal denominator may have lost terms in float32."""

_BLOCK = 8
"""Rows in one go: `(8, J, F)` numbers. Always as many, so that which other rows there are changes no bit of a row."""

_SMALLEST = 1e-37
"""Stands in for the sum of a feature that no key has, whose weight is zero."""

_KEYS = 1024
"""Keys in one go."""


def replace_rows(
    out: Tensor,
    low: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    feature_map: FeatureMap,
    state: CausalState | None,
) -> None:
    """Compute the rows of causal attention marked in `low (B, H, L)` in log space and put them into `out`.

    Args:
        out: `(B, H, L, K)`.
        low: bool `(B, H, L)`.
        q: `(B, H, L, K)`.
        k: `(B, H, L, K)`.
        v: `(B, H, L, K)`.
        documents: int32 `(B, L)` or `None`.
        feature_map: an exponential map.
        state: what the first document may go on from.
    """
    for block in _blocks(low, documents, state):
        forms = _forms(block, q, k, v, feature_map)
        block.of(out)[block.rows] = (forms.weights @ forms.values)[: block.num_rows].to(out.dtype)


def add_row_gradients(
    gradients: RowGradients,
    d_out: Tensor,
    low: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    feature_map: FeatureMap,
    state: CausalState | None,
) -> None:
    """Add what the rows marked in `low` owe to the gradients of q, k, v and the state's sums.

    Args:
        gradients: changed in place.
        d_out: gradient of the output, `(B, H, L, K)`; only marked rows are read.
        low: as in `replace_rows`.
        q: as there.
        k: as there.
        v: as there.
        documents: as there.
        feature_map: as there.
        state: as there.
    """
    for block in _blocks(low, documents, state):
        forms = _forms(block, q, k, v, feature_map)
        given = _full(block.of(d_out)[block.rows]).to(forms.weights.dtype)
        given[block.num_rows :] = 0.0
        out = forms.weights @ forms.values
        surplus = (given * out).sum(-1, keepdim=True)
        d_logits = forms.weights * (given @ forms.values.mT - surplus)  # (R, J + F)
        num_keys = forms.pairs.shape[1]
        d_log_q, d_log_k = _feature_gradients(forms, d_logits[:, :num_keys])
        if block.state is not None:
            d_log_q = d_log_q + d_logits[:, num_keys:]
            share = forms.weights[:, num_keys:] / block.state.sums[:, -1].double().clamp_min(_SMALLEST)
            assert gradients.sums is not None
            owed = share.mT @ torch.cat((given, -surplus), dim=-1)
            gradients.sums[block.b, block.h] += owed.to(gradients.sums.dtype)
        weights = _of_head(feature_map.weights, block.h, 2).to(d_log_q.dtype)
        block.of(gradients.q)[block.rows] += (d_log_q @ weights)[: block.num_rows].to(gradients.q.dtype)
        keys = slice(block.start, block.stop)
        own = block.of(k)[keys].to(d_log_k.dtype)
        moved = d_log_k @ weights + feature_map.half_square * own * d_log_k.sum(-1, keepdim=True)
        block.of(gradients.k)[keys] += moved.to(gradients.k.dtype)
        block.of(gradients.v)[keys] += (forms.weights[:, :num_keys].mT @ given).to(gradients.v.dtype)

        if gradients.weights is not None:
            assert gradients.bias is not None
            queries = _full(block.of(q)[block.rows]).to(d_log_q.dtype)
            gradients.weights[block.h] += (d_log_q.mT @ queries + d_log_k.mT @ own).to(
                gradients.weights.dtype
            )
            gradients.bias[block.h] += (d_log_q.sum(0) + d_log_k.sum(0)).to(gradients.bias.dtype)


class RowGradients(NamedTuple):
    """Gradients that `add_row_gradients` adds to.

    Attributes:
        q: `(B, H, L, K)`.
        k: `(B, H, L, K)`.
        v: `(B, H, L, K)`.
        sums: `(B, H, F, V)`, or `None` without a state.
        weights: `(H, F, K)`, or `None` if the feature map is given.
        bias: `(H, F)`, with `weights`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    sums: Tensor | None
    weights: Tensor | None = None
    bias: Tensor | None = None


def _feature_gradients(forms: _Forms, d_pairs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of the log-features, `(R, F)` and `(J, F)`, given that of the pairs' logarithms `(R, J)`."""
    d_log_q, d_log_k = torch.zeros_like(forms.log_q), torch.empty_like(forms.log_k)
    for start in range(0, len(forms.log_k), _KEYS):
        part = slice(start, start + _KEYS)
        shares = forms.log_q.unsqueeze(1) + forms.log_k[part] - forms.pairs[:, part, None]  # (R, J, F)
        d_joint = shares.exp_().mul_(d_pairs[:, part, None])
        d_log_q += d_joint.sum(1)
        d_log_k[part] = d_joint.sum(0)
    return d_log_q, d_log_k


class _Block(NamedTuple):
    """A few rows of one document of one head."""

    b: int
    h: int
    start: int
    stop: int
    """The document, up to the last row."""
    rows: Tensor
    """Their places."""
    num_rows: int
    state: CausalState | None
    """The head's state, if the document goes on from it."""

    def of(self, x: Tensor) -> Tensor:
        """Return the head's part of `x (B, H, L, .)`."""
        return x[self.b, self.h]


class _Forms(NamedTuple):
    """Log-features, weights and values of one block: its keys, then the state's features."""

    log_q: Tensor  # (R, F)
    log_k: Tensor  # (J, F)
    pairs: Tensor  # (R, J) logarithms of weights
    weights: Tensor  # (R, J + F), or (R, J) without a state
    values: Tensor  # (J + F, K)


def _blocks(low: Tensor, documents: Tensor | None, state: CausalState | None) -> Iterator[_Block]:
    """Yield the marked rows, a few of one document and head at a time."""
    for b, h in low.any(-1).nonzero().tolist():
        row = low[b, h]
        numbers = torch.zeros_like(row, dtype=torch.int32) if documents is None else documents[b]
        for number in numbers[row].unique().tolist():
            own = numbers == number
            start = int(own.int().argmax())
            goes_on = state is not None and start == 0 and bool(state.document[b] == number)
            for part in (row & own).nonzero().squeeze(-1).split(_BLOCK):
                stop = int(part[-1]) + 1
                head = state.of_head(b, h) if state is not None and goes_on else None
                yield _Block(b, h, start, stop, part, len(part), head)


def _forms(block: _Block, q: Tensor, k: Tensor, v: Tensor, feature_map: FeatureMap) -> _Forms:
    """Compute one block, filled up to `_BLOCK` rows with its last one."""
    rows = _full(block.rows)
    one = FeatureMap(
        _of_head(feature_map.weights, block.h, 2),
        None if feature_map.bias is None else _of_head(feature_map.bias, block.h, 1),
        feature_map.nonlinearity,
        feature_map.half_square,
    )
    keys = slice(block.start, block.stop)
    values = block.of(v)[keys].double()
    log_q, log_k = logits(block.of(q)[rows].double(), one), logits(block.of(k)[keys].double(), one)
    pairs = torch.cat([log_weights(log_q, part) for part in log_k.split(_KEYS)], dim=1)
    future = torch.arange(block.start, block.stop, device=rows.device) > rows.unsqueeze(-1)
    weights = pairs.masked_fill(future, -torch.inf)
    if block.state is not None:
        sums, peak = block.state.sums.double(), block.state.peak.double()
        weights = torch.cat((weights, log_q + sums[:, -1].log() + peak), dim=-1)
        values = torch.cat((values, sums[:, :-1] / sums[:, -1:].clamp_min(_SMALLEST)))
    return _Forms(log_q, log_k, pairs, weights.softmax(-1), values)


def _full(rows: Tensor) -> Tensor:
    """Repeat the last of a few rows until there are `_BLOCK`."""
    return torch.cat((rows, rows[-1:].expand(_BLOCK - len(rows), *rows.shape[1:])))


def _of_head(x: Tensor, h: int, dims: int) -> Tensor:
    """Return one head's part of weights or biases that heads may share."""
    return x if x.dim() == dims else x[h]


def with_exact_rows(
    out: Tensor,
    denominators: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    feature_map: FeatureMap,
    state: CausalState,
) -> Tensor:
    """Return `out (B, H, L, K)` with the rows of too small `denominators (B, H, L)` computed in log space.

    One operator for autograd and `torch.compile`. On an accelerator it waits for the denominators. Other arguments
    as in `replace_rows`.
    """
    heads, dtype = q.shape[1], denominators.dtype
    weights = feature_map.weights.to(dtype)
    bias = weights.new_zeros(weights.shape[:-1]) if feature_map.bias is None else feature_map.bias
    return _with_exact_rows(
        out,
        denominators,
        q,
        k,
        v,
        documents,
        weights.expand(heads, *weights.shape[-2:]),
        bias.to(dtype).expand(heads, bias.shape[-1]),
        feature_map.half_square,
        *state,
    )


@torch.library.custom_op("protperf::with_exact_rows", mutates_args=())
def _with_exact_rows(
    out: Tensor,
    denominators: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    weights: Tensor,
    bias: Tensor,
    half_square: float,
    sums: Tensor,
    peak: Tensor,
    document: Tensor,
) -> Tensor:
    result, low = out.clone(), denominators < UNDERFLOW
    if low.any():
        feature_map = FeatureMap(weights, bias, "exp", half_square)
        replace_rows(result, low, q, k, v, documents, feature_map, CausalState(sums, peak, document))
    return result


@torch.library.custom_op("protperf::with_exact_rows_backward", mutates_args=())
def _with_exact_rows_backward(
    d_out: Tensor,
    denominators: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    weights: Tensor,
    bias: Tensor,
    half_square: float,
    sums: Tensor,
    peak: Tensor,
    document: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    gradients = [torch.zeros_like(x) for x in (q, k, v, sums)]
    gradients += [torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (weights, bias)]
    low = denominators < UNDERFLOW
    if low.any():
        feature_map = FeatureMap(weights, bias, "exp", half_square)
        state = CausalState(sums, peak, document)
        add_row_gradients(RowGradients(*gradients), d_out, low, q, k, v, documents, feature_map, state)
    d_q, d_k, d_v, d_sums, d_weights, d_bias = gradients
    return d_q, d_k, d_v, d_sums, d_weights, d_bias


@_with_exact_rows.register_fake
def _with_exact_rows_fake(out: Tensor, *inputs: Any) -> Tensor:
    return torch.empty_like(out)


@_with_exact_rows_backward.register_fake
def _with_exact_rows_backward_fake(
    d_out: Tensor, denominators: Tensor, q: Tensor, k: Tensor, v: Tensor, *inputs: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    _, weights, bias, _, sums, *_ = inputs
    d_weights, d_bias = weights.new_empty(weights.shape), bias.new_empty(bias.shape)
    like = torch.empty_like
    return like(q), like(k), like(v), like(sums), d_weights, d_bias


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, *kept, half_square, sums, peak, document = inputs
    ctx.save_for_backward(*kept, sums, peak, document)
    ctx.half_square = half_square


def _backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
    *kept, sums, peak, document = ctx.saved_tensors
    rows = _with_exact_rows_backward(d_out, *kept, ctx.half_square, sums, peak, document)
    d_q, d_k, d_v, d_sums, d_weights, d_bias = rows
    low = kept[0] < UNDERFLOW
    d_passed = d_out.masked_fill(low.unsqueeze(-1), 0.0)
    return d_passed, None, d_q, d_k, d_v, None, d_weights, d_bias, None, d_sums, None, None


_with_exact_rows.register_autograd(_backward, setup_context=_keep_for_backward)
