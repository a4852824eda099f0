"""Linear attention as batched matrix products over all chunks at once: for accelerators and for `torch.compile`.

Both directions cut the sequence into chunks: inside a chunk the masked quadratic form, between chunks a state. Since
documents are contiguous runs, packing needs three masks only: equal documents inside a chunk; keys enter the state
handed to later chunks where they belong to the chunk's last document; queries read it where they belong to the
chunk's first document. All states come from one product with a small triangular matrix over chunks.

Features are computed again in the backward pass. Nothing here looks at a number to decide what to do next, but for causal
exponential features at the end, where rows that underflowed are looked for (see `exact_rows`).

Axis letters: `B` batch, `H` heads, `L` length in tokens, `K` head width, `F` features, `N` chunks, `C` chunk length,
`V` = K + 1: the values with a column of ones, so that numerator and denominator are one product.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from protperf.attention.documents import or_one_document
from protperf.attention.exact_rows import UNDERFLOW, with_exact_rows
from protperf.attention.features import FeatureMap, logits, nonlinear, row_log_scale
from protperf.attention.gates import GateScales
from protperf.attention.state import CausalState, empty_state, entering_state, lowest_peak
from protperf.vocab import PADDING_DOCUMENT

CHUNK = 128
"""C: about where the work inside chunks, which grows with it, meets that between them (2 F K / (F + K) = 102)."""


def batched_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    feature_map: FeatureMap,
    *,
    causal: bool,
    state: CausalState | None = None,
    gates: GateScales | None = None,
    chunk: int = CHUNK,
) -> Tensor:
    """Return normalised attention `(B, H, L, K)` in the type of `v`, zero at padding.

    Args:
        q: `(B, H, L, K)`.
        k: `(B, H, L, K)`.
        v: `(B, H, L, K)`.
        documents: int32 `(B, L)` or `None`.
        feature_map: the map; its weights may ask for gradients.
        causal: the direction.
        state: causal only: `state_after` the tokens before.
        gates: causal only: of a gated map.
        chunk: C; no result depends on it beyond rounding.
    """
    length = v.shape[2]
    if not causal and documents is None:
        return recomputed(_unmasked, q, k, v, feature_map)
    chunk = min(chunk, length)
    whole = (0, 0, 0, -length % chunk)  # features are not padded: they are many times as wide
    parts = (pad(q, whole), pad(k, whole), pad(v, whole))
    chunks = pad(or_one_document(documents, v), whole[2:], value=PADDING_DOCUMENT)
    chunks = chunks.unflatten(1, (-1, chunk)).unsqueeze(1)  # (B, 1, N, C)
    if not causal:
        return recomputed(_bidirectional, *parts, chunks, feature_map)[:, :, :length]
    state = entering_state(state or empty_state(q, v, feature_map), documents)
    scales = None if gates is None else pad(gates.keys, whole[2:])
    causal_form = recomputed(_causal, *parts, chunks, feature_map, state, scales)
    out, denominators = (x[:, :, :length] for x in causal_form)
    if feature_map.nonlinearity != "exp":
        return out
    return with_exact_rows(out, denominators.detach(), q, k, v, documents, feature_map, state)


def recomputed(function: Callable[..., Any], *inputs: Any) -> Any:
    """Call a function so that nothing it computes is kept for the backward pass, which calls it again."""
    if not torch.is_grad_enabled():
        return function(*inputs)
    return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)


def state_after(
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    feature_map: FeatureMap,
    *,
    state: CausalState | None = None,
    gates: GateScales | None = None,
) -> CausalState:
    """Return what causal attention must keep of a segment and of the state before it.

    Args:
        k: `(B, H, L, K)`.
        v: `(B, H, L, K)`.
        documents: int32 `(B, L)` or `None`.
        feature_map: the map.
        state: the state before the segment.
        gates: of a gated map.
    """
    state = entering_state(state or empty_state(k, v, feature_map), documents)
    documents = or_one_document(documents, v)
    phi, log = _key_parts(k, feature_map, None if gates is None else gates.keys)
    document = documents[:, -1]
    own = (documents == document.unsqueeze(-1))[:, None, :, None]
    goes_on = (state.document == document)[:, None, None]
    lowest = lowest_peak(feature_map, phi.dtype)
    before = torch.where(goes_on, state.peak, lowest)
    peak = torch.maximum(before, log.detach().masked_fill(~own, lowest).amax(-2))
    values = _with_ones(v, phi).masked_fill(~own, 0.0)
    phi = _take_off(phi, log.masked_fill(~own, lowest), peak.unsqueeze(-2), feature_map)
    sums = state.sums * _decay(before, peak, goes_on).to(phi.dtype).unsqueeze(-1)
    # one token changes the whole state: what counts is how often it passes through memory
    sums = sums.addcmul_(phi.mT, values) if v.shape[2] == 1 else sums + phi.mT @ values
    if gates is not None:  # all scales as the last token sees them; the factor is 1, for their gradient alone
        passed = gates.passed.unsqueeze(-1)
        peak = (peak + passed.detach()).to(phi.dtype)
        sums = sums * torch.exp(passed - passed.detach()).to(phi.dtype).unsqueeze(-1)
    return CausalState(sums, peak, document.clone())


def read_state(q: Tensor, state: CausalState, feature_map: FeatureMap) -> Tensor:
    """Return what queries gather from all that a state holds, `(B, H, L, K)`: causal attention at a segment's last token.

    The peaks, one a feature, are folded into the queries of exponential features: the denominator is at least 1.

    Args:
        q: `(B, H, L, K)`.
        state: `state_after` the token of the query.
        feature_map: the map.
    """
    totals = _query_features(q, feature_map, state.peak.unsqueeze(-2)) @ state.sums
    return totals[..., :-1] / totals[..., -1:]


def _unmasked(q: Tensor, k: Tensor, v: Tensor, feature_map: FeatureMap) -> Tensor:
    """Return attention of every token to all others of its row."""
    phi_k, log_k = _key_parts(k, feature_map)
    shift = log_k.detach().amax(-2, keepdim=True)
    phi_k = _take_off(phi_k, log_k, shift, feature_map)
    totals = _query_features(q, feature_map, shift) @ (phi_k.mT @ _with_ones(v, phi_k))
    return (totals[..., :-1] / totals[..., -1:]).to(v.dtype)


def _bidirectional(q: Tensor, k: Tensor, v: Tensor, chunks: Tensor, feature_map: FeatureMap) -> Tensor:
    """Return attention to every token of the own document, `(B, H, N C, K)`; documents come as `chunks (B, 1, N, C)`.

    The maximum of each key feature over the document is taken off the keys and folded into the queries: the
    denominator cannot vanish or overflow, and the maxima cancel.
    """
    phi_k, log_k = _key_parts(k, feature_map)
    shift = _document_maxima(log_k.detach(), chunks.flatten(1))
    phi_q = _query_features(q, feature_map, shift)
    phi_k = _take_off(phi_k, log_k, shift, feature_map)
    phi_q, phi_k, values = (_cut(x, chunks) for x in (phi_q, phi_k, _with_ones(v, phi_k)))
    same = chunks.unsqueeze(-1) == chunks.unsqueeze(-2)
    totals = (phi_q @ phi_k.mT * same) @ values
    first, last = chunks[..., :1], chunks[..., -1:]
    earlier = torch.ones(chunks.shape[2], chunks.shape[2], dtype=torch.bool, device=v.device).tril(-1)
    for entering, leaving, order in ((first, last, earlier), (last, first, earlier.mT)):
        sums = (phi_k * (chunks == leaving).unsqueeze(-1)).mT @ values  # (B, H, N, F, V)
        carried = _feed(order & (leaving.mT == entering), sums)
        totals = totals + (phi_q * (chunks == entering).unsqueeze(-1)) @ carried
    return _ratio(totals, chunks.ne(PADDING_DOCUMENT)).to(v.dtype)


def _causal(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    chunks: Tensor,
    feature_map: FeatureMap,
    state: CausalState,
    scales: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return attention `(B, H, N C, K)` and its denominators; too small ones of exponential features give zero.

    The running maximum m_t of the logarithms of key features (restarting with each document) makes this linear
    attention with a decay exp(m_{t-1} - m_t) <= 1: strictly causal, and it cannot overflow. The scales of gates,
    `(B, H, N C)`, are such logarithms too, in more digits than the rest: differences are taken before they are rounded.
    """
    phi_k, log_k = _key_parts(k, feature_map, scales)
    peaks = _running_maxima(_cut(log_k.detach().amax(-1, keepdim=True), chunks).squeeze(-1), chunks, state)
    phi_k = _take_off(phi_k, log_k, peaks.flatten(2).unsqueeze(-1), feature_map)
    phi_q = _query_features(q, feature_map, None)
    phi_q, phi_k, values = (_cut(x, chunks) for x in (phi_q, phi_k, _with_ones(v, phi_k)))

    same = chunks.unsqueeze(-1) == chunks.unsqueeze(-2)
    past = torch.ones(same.shape[-2:], dtype=torch.bool, device=v.device).tril()
    decay = _decay(peaks.unsqueeze(-2), peaks.unsqueeze(-1), same & past).to(phi_k)  # (B, H, N, C, C)
    totals = (phi_q @ phi_k.mT * decay) @ values

    carried, left_document, left_peak = _carry(phi_k, values, chunks, peaks, state)
    read = (chunks == chunks[..., :1]) & (left_document == chunks[..., :1])
    read_decay = _decay(left_peak, peaks, read).to(phi_k).unsqueeze(-1)
    totals = totals + (phi_q * read_decay) @ carried

    real = chunks.ne(PADDING_DOCUMENT)
    denominators = torch.where(real, totals[..., -1], 1.0)
    if feature_map.nonlinearity == "exp":
        real = real & ~(denominators < UNDERFLOW)
    return _ratio(totals, real).to(v.dtype), denominators.flatten(2)


def _key_parts(k: Tensor, feature_map: FeatureMap, scales: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return what the features of keys are made of: `(B, H, L, F)`, and logarithms, `(B, H, L, F)` or `(B, H, L, 1)`.

    For exponential features both are log phi; for others the first lacks the factor exp(second). `scales (B, H, L)` are
    those of gates.
    """
    u = logits(k, feature_map)
    if feature_map.nonlinearity == "exp":
        return u, u
    log = row_log_scale(k, feature_map)
    return nonlinear(u, feature_map.nonlinearity), (log if scales is None else log + scales).unsqueeze(-1)


def _take_off(phi: Tensor, log: Tensor, shift: Tensor, feature_map: FeatureMap) -> Tensor:
    """Turn what `_key_parts` returned into features with `shift` taken off their logarithms."""
    if feature_map.nonlinearity == "exp":
        return torch.exp(log - shift)
    return phi * torch.exp(log - shift).to(phi.dtype) if feature_map.has_scales else phi


def _query_features(q: Tensor, feature_map: FeatureMap, shift: Tensor | None) -> Tensor:
    """Return the features of queries, of each row up to a factor, which cancels; exponential ones with `shift` added."""
    u = logits(q, feature_map)
    if feature_map.nonlinearity != "exp":
        return nonlinear(u, feature_map.nonlinearity)
    return torch.softmax(u if shift is None else u + shift, dim=-1)


def _carry(
    phi_k: Tensor, values: Tensor, chunks: Tensor, peaks: Tensor, state: CausalState
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sums that enter each chunk, `(B, H, N, F, V)`: the state's and those of the chunks before.

    Also the document `(B, 1, N, 1)` and the peak `(B, H, N, 1)` that they belong to: entry 0 is the state's, entry n
    those of the last token of chunk n - 1.
    """
    first, last, last_peak = chunks[..., :1], chunks[..., -1:], peaks[..., -1:]
    kept = _decay(peaks, last_peak, chunks == last).to(phi_k).unsqueeze(-1)
    state_peak = state.peak.amax(-1, keepdim=True)  # (B, H, 1)
    entering = state.sums * torch.exp(state.peak - state_peak).unsqueeze(-1)
    sums = torch.cat((entering.unsqueeze(2), (phi_k * kept)[:, :, :-1].mT @ values[:, :, :-1]), dim=2)
    document = torch.cat((state.document.view(-1, 1, 1, 1).to(last.dtype), last[:, :, :-1]), dim=2)
    peak = torch.cat((state_peak.unsqueeze(-1), last_peak[:, :, :-1]), dim=2)
    order = torch.ones(chunks.shape[2], chunks.shape[2], dtype=torch.bool, device=phi_k.device).tril()
    links = order & (document.mT == first) & (document == first)  # (B, 1, N, N)
    return _feed(_decay(peak.mT, peak, links), sums), document, peak


def _feed(links: Tensor, sums: Tensor) -> Tensor:
    """Return what each chunk receives: `links (B, 1 or H, N, N)` times `sums (B, H, N, F, V)`."""
    return (links.to(sums.dtype) @ sums.flatten(-2)).unflatten(-1, sums.shape[-2:])


def _decay(start: Tensor, end: Tensor, allowed: Tensor) -> Tensor:
    """Return exp(start - end) where allowed (there start <= end), else 0."""
    return torch.where(allowed, start - end, -torch.inf).exp()


def _with_ones(v: Tensor, like: Tensor) -> Tensor:
    """Return `(B, H, L, V)`: the values, in the precision of the features, and a column of ones."""
    return pad(v.to(like.dtype), (0, 1), value=1.0)


def _ratio(totals: Tensor, real: Tensor) -> Tensor:
    """Divide numerators by the last column, `(B, H, N, C, V)` to `(B, H, N C, K)`; rows that are not `real` are zero."""
    real = real.unsqueeze(-1)
    ratio = torch.where(real, totals[..., :-1], 0.0) / torch.where(real, totals[..., -1:], 1.0)
    return ratio.flatten(2, 3)


def _cut(x: Tensor, chunks: Tensor) -> Tensor:
    """Cut `(B, H, N C, .)` into `(B, H, N, C, .)`."""
    return x.unflatten(2, chunks.shape[2:])


def _running_maxima(peak: Tensor, chunks: Tensor, state: CausalState) -> Tensor:
    """Return the running maximum of `peak (B, H, N, C)` within each document, which may go on from the state.

    Two steps without a loop over the length: inside each chunk, and from the chunks before it.
    """
    lowest = torch.finfo(state.peak.dtype).min
    places = torch.arange(chunks.shape[-1], device=peak.device)
    seen = (chunks.unsqueeze(-1) == chunks.unsqueeze(-2)) & (
        places <= places.unsqueeze(-1)
    )  # (B, 1, N, C, C)
    inside = torch.where(seen, peak.unsqueeze(-2), lowest).amax(-1)
    first, last = chunks[..., :1], chunks[..., -1:]
    left = torch.where(chunks == last, peak, lowest).amax(-1)  # (B, H, N), of each chunk's last document
    order = torch.arange(chunks.shape[2], device=peak.device)
    feeds = (last.mT == first) & (order < order.unsqueeze(-1))  # (B, 1, N, N)
    carried = torch.where(feeds, left.unsqueeze(-2), lowest).amax(-1, keepdim=True)  # (B, H, N, 1)
    goes_on = state.document.view(-1, 1, 1, 1) == first
    before = torch.where(goes_on, state.peak.amax(-1)[..., None, None], lowest)
    carried = torch.maximum(carried, before)
    return torch.where(chunks == first, torch.maximum(inside, carried), inside)


def _document_maxima(log_k: Tensor, documents: Tensor) -> Tensor:
    """Return for each token the maximum of each column of `log_k (B, H, L, .)` over its document, of that shape."""
    starts = documents[:, 1:] != documents[:, :-1]
    run = pad(starts.cumsum(1), (1, 0))[:, None, :, None].expand_as(log_k)
    maxima = torch.full_like(log_k, -torch.inf).scatter_reduce(2, run, log_k, "amax")
    return maxima.gather(2, run)
