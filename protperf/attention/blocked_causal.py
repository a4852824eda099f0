"""Causal linear attention in blocks that stay in cache; forward and backward.

A document is cut into spans and a span into chunks. Inside a chunk the masked quadratic form; between chunks a state
S = sum_j phi(k_j) [v_j, 1] that is walked forward, and its gradient that is walked backward. Key features carry the
factor exp(-m_j), m_j the running maximum of their logarithms, so weights are phi(q_i).phi(k_j) exp(m_j - m_i) and S
decays by exp(m_{t-1} - m_t) <= 1. Features without an exponential need no maximum: all factors are 1.

The backward pass computes features and the states inside a span again; the state at the start of each span but a
document's first is kept, never rebuilt by subtraction.

Axis letters: `B` batch, `H` heads, `L` length in tokens, `R` rows of one span, `C` chunk length, `N` chunks in a span,
`K` head width, `F` features, `V` = K + 1, `P` spans that go on with a state of the same call.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from protperf.attention.blocks import BlockFeatures, Scratch, empty_result, in_threads
from protperf.attention.spans import SPAN, Span, Start, extended, put, spans_of


class Kept(NamedTuple):
    """What the forward pass keeps for the backward pass.

    Attributes:
        denominators: `(B, H, L)`.
        sums: `(P, H, F, V)` states at the start of spans.
        peaks: `(P, H)` their running maxima.
    """

    denominators: Tensor
    sums: Tensor
    peaks: Tensor


class Decays(NamedTuple):
    """The factors that running maxima bring into one span, each at most 1.

    Attributes:
        inside: `(N H, C, C)` exp(m_j - m_i) for j <= i, else 0.
        reading: `(N H, C, 1)` exp(m before the chunk - m_i), for what a query reads of the state.
        entering: `(N H, C, 1)` exp(m_j - m at the chunk's end), for what a key brings into the state.
        kept: `(N, H, 1, 1)` exp(m before the chunk - m at its end), for the state itself.
    """

    inside: Tensor
    reading: Tensor
    entering: Tensor
    kept: Tensor


class SpanForms(NamedTuple):
    """What forward and backward pass compute of one span, chunk by chunk.

    Attributes:
        features: the map of all chunks.
        phi_q: `(N H, C, F)`.
        phi_k: `(N H, C, F)`.
        key_rows: `(N H, C, K + 2)`, for the gradient of the keys.
        values: `(N H, C, V)`.
        entering: `(N H, C, V)` values as they enter the state.
        weights: `(N H, C, C)` of the pairs inside a chunk, before normalisation.
        decays: the factors; `None` if all are 1.
        peak: `(H,)` running maximum at the span's end, or `None`.
    """

    features: BlockFeatures
    phi_q: Tensor
    phi_k: Tensor
    key_rows: Tensor
    values: Tensor
    entering: Tensor
    weights: Tensor
    decays: Decays | None
    peak: Tensor | None


def causal_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    features: BlockFeatures,
    *,
    start: Start | None,
    rows: int,
) -> tuple[Tensor, Kept]:
    """Return attention `(B, H, L, K)` in the type of the features, zero at padding, and what the backward pass needs.

    Args:
        q: `(B, H, L, K)`.
        k: `(B, H, L, K)`.
        v: `(B, H, L, K)`.
        documents: int32 `(B, L)` or `None`.
        features: the feature map of all heads.
        start: a state that the first document of a row goes on from if it has the same number.
        rows: rows of a block over all its heads.
    """
    batch, heads, length, width = v.shape
    out = empty_result(v, documents, dtype=features.bias.dtype)
    kept = Kept(
        features.bias.new_ones(batch, heads, length),
        features.bias.new_empty(batch * (length // SPAN), *features.bias.shape, width + 1),
        features.bias.new_empty(batch * (length // SPAN), heads),
    )

    def work(spans: list[Span], features: BlockFeatures) -> None:
        own, peak = features.of_heads(spans[0].heads.start, spans[0].heads.stop), None
        for span in spans:
            sums = own.scratch.take("sums", *own.bias.shape, width + 1)
            if span.place < 0:
                peak = _enter_document(sums, span, start)
            else:
                kept.sums[span.place, span.heads] = sums
                if peak is not None:
                    kept.peaks[span.place, span.heads] = peak
            forms = _span_forms(own, span, q, k, v, peak)
            totals = _totals(own.scratch, forms, _states(own.scratch, span, forms, sums))
            peak = forms.peak
            by_chunks = totals.view(span.num_chunks, len(sums), *totals.shape[1:])
            for target, part in span.pieces(out, by_chunks):
                torch.div(part[..., :width], part[..., width:], out=target)
            for target, part in span.pieces(kept.denominators, by_chunks):
                target.copy_(part[..., width])

    in_threads(work, list(spans_of(documents, v, start, rows)), features, num_rows=batch * heads * length)
    return out, kept


def causal_backward(
    d_out: Tensor,
    out: Tensor,
    kept: Kept,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    features: BlockFeatures,
    *,
    start: Start | None,
    rows: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of q, k, v and of the sums of `start`.

    Args:
        d_out: gradient of `out`, `(B, H, L, K)`.
        out: what `causal_forward` returned.
        kept: what it kept.
        q: as there.
        k: as there.
        v: as there.
        documents: as there.
        features: as there.
        start: as there.
        rows: as there.
    """
    d_q, d_k, d_v = (empty_result(x, documents) for x in (q, k, v))
    d_start = None if start is None else torch.zeros_like(start.sums)

    def work(spans: list[Span], features: BlockFeatures) -> None:
        own = features.of_heads(spans[0].heads.start, spans[0].heads.stop)
        sums = own.scratch.take("sums", *own.bias.shape, v.shape[-1] + 1)
        d_sums = own.scratch.take("d_sums", *sums.shape).zero_()
        for span in reversed(spans):
            if span.place < 0:
                peak = _enter_document(sums, span, start)
            else:
                sums.copy_(kept.sums[span.place, span.heads])
                peak = kept.peaks[span.place, span.heads] if own.has_peaks else None
            forms = _span_forms(own, span, q, k, v, peak)
            d_totals = _scaled_gradient(own.scratch, span, d_out, out, kept.denominators)
            _span_gradients(own.scratch, span, forms, d_totals, (sums, d_sums), (d_q, d_k, d_v))
        if spans[0].goes_on:
            assert d_start is not None
            d_start[spans[0].b, spans[0].heads] = d_sums

    in_threads(work, list(spans_of(documents, v, start, rows)), features, num_rows=v[..., 0].numel())
    return d_q, d_k, d_v, d_start


def _totals(scratch: Scratch, forms: SpanForms, states: Tensor) -> Tensor:
    """Return numerators and denominators, `(N H, C, V)`."""
    totals = torch.bmm(forms.weights, forms.values, out=scratch.take("totals", *forms.values.shape))
    read = torch.bmm(forms.phi_q, states, out=scratch.take("read", *totals.shape))
    if forms.decays is None:  # added as below: whether a later key of the span has a peak must change no bit
        return totals.add_(read)
    return totals.addcmul_(read, forms.decays.reading)


def _span_gradients(
    scratch: Scratch,
    span: Span,
    forms: SpanForms,
    d_totals: Tensor,
    carried: tuple[Tensor, Tensor],
    targets: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Put one span's part into the gradients of q, k and v.

    Args:
        scratch: the buffers.
        span: which rows.
        forms: what `_span_forms` returned.
        d_totals: gradient of numerators and denominators, `(N H, C, V)`.
        carried: the state at the span's start and the gradient of that at its end, `(H, F, V)`; the second becomes the
            gradient of the state at the span's start.
        targets: gradients of q, k, v, `(B, H, L, K)`.
    """
    sums, d_sums = carried
    d_q, d_k, d_v = targets
    states = _states(scratch, span, forms, sums)
    read = d_totals
    if forms.decays is not None:
        read = torch.mul(d_totals, forms.decays.reading, out=scratch.take("read", *d_totals.shape))
    d_states = _state_gradients(scratch, span, forms, read, d_sums)
    d_weights = torch.bmm(d_totals, forms.values.mT, out=scratch.take("d_weights", *forms.weights.shape))
    d_weights = d_weights.tril_() if forms.decays is None else d_weights.mul_(forms.decays.inside)
    put(span, _value_gradient(scratch, forms, d_totals, d_states), d_v)
    d_phi = torch.bmm(d_weights, forms.phi_k, out=scratch.take("d_phi", *forms.phi_k.shape))
    torch.baddbmm(d_phi, read, states.mT, out=d_phi)
    d_rows = scratch.take("d_rows", *forms.phi_q.shape[:2], d_q.shape[-1])
    forms.features.query_gradient(forms.phi_q, d_phi, d_rows)
    put(span, d_rows, d_q)
    torch.bmm(d_weights.mT, forms.phi_q, out=d_phi)
    torch.baddbmm(d_phi, forms.entering, d_states.mT, out=d_phi)
    forms.features.key_gradient(forms.phi_k, d_phi, forms.key_rows, d_rows)
    put(span, d_rows, d_k)


def _enter_document(sums: Tensor, span: Span, start: Start | None) -> Tensor | None:
    """Fill `sums (H, F, V)` with the state that enters a document's first span; return its peak, `None` for none."""
    if not span.goes_on:
        sums.zero_()
        return None
    assert start is not None
    sums.copy_(start.sums[span.b, span.heads])
    return start.peak[span.b, span.heads]


def _span_forms(
    own: BlockFeatures, span: Span, q: Tensor, k: Tensor, v: Tensor, peak: Tensor | None
) -> SpanForms:
    """Return features, values and weights of one span; `peak (H,)` is the running maximum before it."""
    scratch, features = own.scratch, own.of_chunks(span.num_chunks)
    phi_q = features.queries(extended(scratch, "query_rows", span, q, 0.0, 1.0))
    key_rows = extended(scratch, "key_rows", span, k, 0.0, 1.0)
    phi_k, log = features.keys(key_rows)
    decays = None
    if own.has_peaks:
        running = _running_peaks(features.row_peaks(phi_k, log), span, peak)
        phi_k = features.take_off_rows(phi_k, log, running.flatten(0, 1))
        decays = _decays(running, peak)
        peak = running[-1, :, -1]
    empty = span.num_chunks * span.chunk - (span.stop - span.start)
    if empty:
        phi_k.view(span.num_chunks, -1, *phi_k.shape[1:])[-1, :, span.chunk - empty :] = 0.0
    values = extended(scratch, "values", span, v, 1.0)
    weights = scratch.take("weights", len(phi_q), span.chunk, span.chunk)
    torch.bmm(phi_q, phi_k.mT, out=weights)
    if decays is None:
        return SpanForms(features, phi_q, phi_k, key_rows, values, values, weights.tril_(), None, peak)
    entering = torch.mul(values, decays.entering, out=scratch.take("entering", *values.shape))
    weights.mul_(decays.inside)
    return SpanForms(features, phi_q, phi_k, key_rows, values, entering, weights, decays, peak)


def _running_peaks(peaks: Tensor, span: Span, before: Tensor | None) -> Tensor:
    """Return the running maximum `(N, H, C)` of `peaks (N H, C)`, going on from `before (H,)`; the last real one stays."""
    by_head = peaks.view(span.num_chunks, -1, span.chunk).transpose(0, 1).flatten(1)  # (H, N C)
    count = span.stop - span.start
    by_head[:, count:] = torch.finfo(peaks.dtype).min
    running = by_head.cummax(1).values
    if before is not None:
        running = torch.maximum(running, before.unsqueeze(1))
    return running.view(len(running), span.num_chunks, -1).transpose(0, 1)


def _decays(peaks: Tensor, before: Tensor | None) -> Decays | None:
    """Return the factors of running maxima `(N, H, C)`, `None` if all are 1: to leave them out changes no bit."""
    before = peaks[0, :, 0] if before is None else before
    end = peaks[..., -1:]
    if torch.equal(before, end[-1, :, 0]):
        return None
    begin = torch.cat((before.view(1, -1, 1), end[:-1]))
    inside = (peaks.unsqueeze(-2) - peaks.unsqueeze(-1)).flatten(0, 1)
    future = torch.ones(inside.shape[1:], dtype=torch.bool).triu(1)
    return Decays(
        inside.masked_fill_(future, -torch.inf).exp_(),
        (begin - peaks).exp_().flatten(0, 1).unsqueeze(-1),
        (peaks - end).exp_().flatten(0, 1).unsqueeze(-1),
        (begin - end).exp_().unsqueeze(-1),
    )


def _states(scratch: Scratch, span: Span, forms: SpanForms, sums: Tensor) -> Tensor:
    """Return the state at the start of each chunk, `(N H, F, V)`; `sums (H, F, V)` goes from the span's start to its end."""
    states = scratch.take("states", span.num_chunks + 1, *sums.shape)
    states[0] = sums
    torch.bmm(forms.phi_k.mT, forms.entering, out=states[1:].flatten(0, 1))
    for n in range(span.num_chunks):
        _add(states[n + 1], states[n], forms.decays, n)
    sums.copy_(states[-1])
    return states[:-1].flatten(0, 1)


def _state_gradients(scratch: Scratch, span: Span, forms: SpanForms, read: Tensor, d_sums: Tensor) -> Tensor:
    """Return the gradient of the state at the end of each chunk; `d_sums` goes from the span's end to its start."""
    d_states = scratch.take("d_states", span.num_chunks + 1, *d_sums.shape)
    d_states[-1] = d_sums
    torch.bmm(forms.phi_q.mT, read, out=d_states[:-1].flatten(0, 1))
    for n in reversed(range(span.num_chunks)):
        _add(d_states[n], d_states[n + 1], forms.decays, n)
    d_sums.copy_(d_states[0])
    return d_states[1:].flatten(0, 1)


def _add(target: Tensor, carried: Tensor, decays: Decays | None, n: int) -> None:
    """Add to `target (H, F, V)` what chunk n keeps of `carried`."""
    if decays is None:
        target.add_(carried)
    else:
        target.addcmul_(carried, decays.kept[n])


def _scaled_gradient(
    scratch: Scratch, span: Span, d_out: Tensor, out: Tensor, denominators: Tensor
) -> Tensor:
    """Return the gradient of `[numerator, denominator]` given that of their ratio, `(N H, C, V)`."""
    d_totals = extended(scratch, "d_totals", span, d_out, 0.0)
    by_chunks = d_totals.view(span.num_chunks, -1, *d_totals.shape[1:])
    for below, part in span.pieces(denominators, by_chunks):
        part[..., :-1].div_(below.unsqueeze(-1))
    for ratio, part in span.pieces(out, by_chunks):
        part[..., -1] = torch.linalg.vecdot(part[..., :-1], ratio.to(part.dtype)).neg_()
    return d_totals


def _value_gradient(scratch: Scratch, forms: SpanForms, d_totals: Tensor, d_states: Tensor) -> Tensor:
    """Return the gradient of the values, `(N H, C, K)`."""
    d_values = scratch.take("d_values", *d_totals.shape[:2], d_totals.shape[2] - 1)
    torch.bmm(forms.weights.mT, d_totals[..., :-1], out=d_values)
    if forms.decays is None:
        return torch.baddbmm(d_values, forms.phi_k, d_states[..., :-1], out=d_values)
    read = torch.bmm(forms.phi_k, d_states[..., :-1], out=scratch.take("d_read", *d_values.shape))
    return d_values.addcmul_(read, forms.decays.entering)
