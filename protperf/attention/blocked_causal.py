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

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from protperf.attention.blocks import (
    BlockFeatures,
    Scratch,
    blocks_of,
    document_runs,
    empty_result,
    heads_at_once,
    scaled_gradient,
    whole_rows,
)

CHUNK = 64
SPAN = 256
"""Rows of a span at most: 65 KiB of state a head are kept for so many rows, at 256 features of heads 64 wide."""


class Start(NamedTuple):
    """The state that a first document may go on from.

    Attributes:
        sums: `(B, H, F, V)`, exp(-peak) taken out.
        peak: `(B, H)`.
        document: `(B,)`.
    """

    sums: Tensor
    peak: Tensor
    document: Tensor


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


class Span(NamedTuple):
    """Some rows of one document of a few heads."""

    b: int
    heads: slice
    start: int
    stop: int
    place: int
    """Its number among the spans whose state is kept, or -1: the document's first."""
    goes_on: bool
    """Whether it goes on with a state from before the call."""
    is_last: bool
    """Whether its document ends with it."""

    def cut(self, x: Tensor) -> Tensor:
        """Return the span's part of `x (B, H, L, ...)`."""
        return x[self.b, self.heads, self.start : self.stop]

    @property
    def num_chunks(self) -> int:
        """N: as few chunks as there can be."""
        return -(-(self.stop - self.start) // CHUNK)

    @property
    def rows(self) -> int:
        """R: N chunks of a multiple of 4 rows, as few as hold the span."""
        return whole_rows(-(-(self.stop - self.start) // self.num_chunks)) * self.num_chunks


class Decays(NamedTuple):
    """The factors that running maxima bring into one span, each at most 1.

    Attributes:
        inside: `(H N, C, C)` exp(m_j - m_i) for j <= i, else 0.
        reading: `(H N, C, 1)` exp(m before the chunk - m_i), for what a query reads of the state.
        entering: `(H N, C, 1)` exp(m_j - m at the chunk's end), for what a key brings into the state.
        kept: `(H, N, 1, 1)` exp(m before the chunk - m at its end), for the state itself.
    """

    inside: Tensor
    reading: Tensor
    entering: Tensor
    kept: Tensor


class SpanForms(NamedTuple):
    """What forward and backward pass compute of one span, by chunks.

    Attributes:
        phi_q: `(H N, C, F)`.
        phi_k: `(H N, C, F)`.
        values: `(H N, C, V)`.
        entering: `(H N, C, V)` values as they enter the state.
        weights: `(H N, C, C)` of the pairs inside a chunk, before normalisation.
        decays: the factors; `None` if all are 1.
        peak: `(H,)` running maximum at the span's end, or `None`.
    """

    phi_q: Tensor
    phi_k: Tensor
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
    """Return attention `(B, H, L, K)` in the type of `v`, zero at padding, and what the backward pass needs.

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
    out = empty_result(v, documents)
    kept = Kept(
        features.bias.new_ones(batch, heads, length),
        features.bias.new_empty(batch * (length // SPAN), *features.bias.shape, width + 1),
        features.bias.new_empty(batch * (length // SPAN), heads),
    )
    peak: Tensor | None = None
    for span in _spans(documents, v, start, rows):
        own = features.of_heads(span.heads.start, span.heads.stop)
        sums = own.scratch.take("sums", *own.bias.shape, width + 1)
        if span.place < 0:
            peak = _enter_document(sums, span, start)
        else:
            kept.sums[span.place, span.heads] = sums
            if peak is not None:
                kept.peaks[span.place, span.heads] = peak
        forms = _span_forms(own, span, q, k, v, peak)
        states = _states(own.scratch, span, forms, sums)
        totals = torch.bmm(forms.weights, forms.values, out=own.scratch.take("totals", *forms.values.shape))
        if forms.decays is None:
            torch.baddbmm(totals, forms.phi_q, states, out=totals)
        else:
            read = torch.bmm(forms.phi_q, states, out=own.scratch.take("read", *totals.shape))
            totals.addcmul_(read, forms.decays.reading)
        peak = forms.peak
        totals = totals.view(len(sums), -1, width + 1)[:, : span.stop - span.start]
        span.cut(kept.denominators).copy_(totals[..., width])
        torch.div(totals[..., :width], totals[..., width:], out=span.cut(out))
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
    for span in _spans(documents, v, start, rows, backwards=True):
        own = features.of_heads(span.heads.start, span.heads.stop)
        scratch = own.scratch
        sums = scratch.take("sums", *own.bias.shape, v.shape[-1] + 1)
        d_sums = scratch.take("d_sums", *sums.shape)
        if span.is_last:
            d_sums.zero_()
        if span.place < 0:
            peak = _enter_document(sums, span, start)
        else:
            sums.copy_(kept.sums[span.place, span.heads])
            peak = kept.peaks[span.place, span.heads] if own.has_peaks else None
        forms = _span_forms(own, span, q, k, v, peak)
        states = _states(scratch, span, forms, sums)
        d_totals = scaled_gradient(
            scratch, span.cut(d_out), span.cut(out), span.cut(kept.denominators), rows=span.rows
        ).view_as(forms.values)
        read = d_totals
        if forms.decays is not None:
            read = torch.mul(d_totals, forms.decays.reading, out=scratch.take("read", *d_totals.shape))
        d_states = torch.bmm(forms.phi_q.mT, read, out=scratch.take("d_states", *states.shape))
        _carry(scratch, d_states, span, forms.decays, d_sums, range(span.num_chunks)[::-1])
        d_weights = torch.bmm(d_totals, forms.values.mT, out=scratch.take("d_weights", *forms.weights.shape))
        d_weights = d_weights.tril_() if forms.decays is None else d_weights.mul_(forms.decays.inside)
        _value_gradient(scratch, forms, d_totals, d_states, span.cut(d_v))
        d_phi = torch.bmm(d_weights, forms.phi_k, out=scratch.take("d_phi", *forms.phi_k.shape))
        torch.baddbmm(d_phi, read, states.mT, out=d_phi)
        shape = (len(sums), span.rows, -1)
        own.query_gradient(forms.phi_q.view(shape), d_phi.view(shape), span.cut(d_q))
        torch.bmm(d_weights.mT, forms.phi_q, out=d_phi)
        torch.baddbmm(d_phi, forms.entering, d_states.mT, out=d_phi)
        own.key_gradient(forms.phi_k.view(shape), d_phi.view(shape), span.cut(d_k))
        if span.goes_on:
            assert d_start is not None
            d_start[span.b, span.heads] = d_sums
    return d_q, d_k, d_v, d_start


def _spans(
    documents: Tensor | None, v: Tensor, start: Start | None, rows: int, *, backwards: bool = False
) -> Iterator[Span]:
    """Yield the spans of every document of every group of heads, in order or against it."""
    batch, num_heads, length, _ = v.shape
    first_place = 0
    for b, first, stop in document_runs(documents, batch, length):
        edges = list(blocks_of(first, stop, SPAN))
        number = 0 if documents is None else documents[b, first]
        goes_on = start is not None and first == 0 and bool(start.document[b] == number)
        order = range(len(edges))
        count = heads_at_once(num_heads, edges[-1][1] - edges[-1][0], rows)
        for head in range(0, num_heads, count):
            for n in reversed(order) if backwards else order:
                place = first_place + n - 1 if n else -1
                yield Span(
                    b, slice(head, head + count), *edges[n], place, goes_on and n == 0, n == len(edges) - 1
                )
        first_place += len(edges) - 1


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
    scratch, count = own.scratch, span.stop - span.start
    phi_q = own.queries(span.cut(q), rows=span.rows)
    phi_k, log = own.keys(span.cut(k), rows=span.rows)
    decays = None
    if own.has_peaks:
        running = _running_peaks(own.row_peaks(phi_k, log), count, peak)
        phi_k = own.take_off_rows(phi_k, log, running)
        decays = _decays(running, peak, span)
        peak = running[:, -1]
    phi_k[:, count:] = 0.0
    values = _chunks(scratch.extended("values", span.cut(v), 1.0, rows=span.rows), span)
    phi_q, phi_k = _chunks(phi_q, span), _chunks(phi_k, span)
    weights = scratch.take("weights", len(phi_q), phi_q.shape[1], phi_q.shape[1])
    torch.bmm(phi_q, phi_k.mT, out=weights)
    if decays is None:
        return SpanForms(phi_q, phi_k, values, values, weights.tril_(), None, peak)
    entering = torch.mul(values, decays.entering, out=scratch.take("entering", *values.shape))
    return SpanForms(phi_q, phi_k, values, entering, weights.mul_(decays.inside), decays, peak)


def _running_peaks(peaks: Tensor, count: int, before: Tensor | None) -> Tensor:
    """Return the running maximum `(H, R)` of `peaks`, of which `count` are real, going on from `before (H,)`."""
    running = peaks.cummax(1).values
    if before is not None:
        running = torch.maximum(running, before.unsqueeze(1))
    running[:, count:] = running[:, count - 1 : count]
    return running


def _decays(running: Tensor, before: Tensor | None, span: Span) -> Decays | None:
    """Return the factors of one span, `None` if all are 1: to leave them out changes no bit."""
    before = running[:, 0] if before is None else before
    if torch.equal(before, running[:, -1]):
        return None
    heads, num_chunks = len(running), span.num_chunks
    peaks = running.view(heads, num_chunks, -1)
    end = peaks[..., -1:]
    begin = torch.cat((before.view(-1, 1, 1), end[:, :-1]), dim=1)
    inside = (peaks.unsqueeze(-2) - peaks.unsqueeze(-1)).flatten(0, 1)
    future = torch.ones(inside.shape[1:], dtype=torch.bool).triu(1)
    return Decays(
        inside.masked_fill_(future, -torch.inf).exp_(),
        (begin - peaks).exp_().view(heads * num_chunks, -1, 1),
        (peaks - end).exp_().view(heads * num_chunks, -1, 1),
        (begin - end).exp_().unsqueeze(-1),
    )


def _states(scratch: Scratch, span: Span, forms: SpanForms, sums: Tensor) -> Tensor:
    """Return the state at the start of each chunk, `(H N, F, V)`; `sums (H, F, V)` goes from the span's start to its end."""
    states = scratch.take("states", len(forms.phi_k), *sums.shape[1:])
    torch.bmm(forms.phi_k.mT, forms.entering, out=states)
    _carry(scratch, states, span, forms.decays, sums, range(span.num_chunks))
    return states


def _carry(
    scratch: Scratch, parts: Tensor, span: Span, decays: Decays | None, carried: Tensor, order: range
) -> None:
    """Replace what each chunk adds, `parts (H N, F, V)`, by what reaches it, and `carried (H, F, V)` by what leaves."""
    parts = parts.view(len(carried), span.num_chunks, *carried.shape[1:])
    now, then = carried, scratch.take("carried", *carried.shape)
    for n in order:
        if decays is None:
            torch.add(now, parts[:, n], out=then)
        else:
            torch.addcmul(parts[:, n], now, decays.kept[:, n], out=then)
        parts[:, n] = now
        now, then = then, now
    if now is not carried:
        carried.copy_(now)


def _value_gradient(
    scratch: Scratch, forms: SpanForms, d_totals: Tensor, d_states: Tensor, target: Tensor
) -> None:
    """Put the gradient of the values into `target (H, R, K)`."""
    d_values = scratch.take("d_values", *d_totals.shape[:2], d_totals.shape[2] - 1)
    torch.bmm(forms.weights.mT, d_totals[..., :-1], out=d_values)
    if forms.decays is None:
        torch.baddbmm(d_values, forms.phi_k, d_states[..., :-1], out=d_values)
    else:
        read = torch.bmm(forms.phi_k, d_states[..., :-1], out=scratch.take("d_read", *d_values.shape))
        d_values.addcmul_(read, forms.decays.entering)
    target.copy_(d_values.view(len(target), -1, target.shape[2])[:, : target.shape[1]])


def _chunks(x: Tensor, span: Span) -> Tensor:
    """Cut `(H, R, .)` into `(H N, C, .)`."""
    return x.view(len(x) * span.num_chunks, -1, x.shape[-1])
