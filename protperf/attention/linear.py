"""Attention linear in length, from log-features: bidirectional and causal, padded and packed, and with a state.

A weight is phi(q_i).phi(k_j); a row is normalised by its sum. Only maxima that cancel exactly are subtracted before
the exponential, so no constant is added after it: rows sum to one and the causal form is strictly causal.

Both directions cut the sequence into chunks: inside a chunk the masked quadratic form, between chunks a state. Since
documents are contiguous runs, packing needs three masks only: equal documents inside a chunk; keys enter the state
handed to later chunks where they belong to the chunk's last document; queries read it where they belong to the
chunk's first document.

Axis letters: `B` batch, `H` heads, `L` length in tokens, `K` head width, `M` features, `N` chunks, `C` chunk length.
`V` = K + 1: the values with a column of ones, so that numerator and denominator are one product.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from protperf.attention.rows import replace_rows
from protperf.attention.state import NO_DOCUMENT, CausalState
from protperf.vocab import PADDING_DOCUMENT

CHUNK = 128

_UNDERFLOW = 1e-30
"""Below this a float32 denominator may have lost terms: such rows are computed again in log space."""


def bidirectional_attention(
    log_q: Tensor, log_k: Tensor, v: Tensor, documents: Tensor | None = None, *, chunk: int = CHUNK
) -> Tensor:
    """Normalised attention to every token of the own document.

    From each key feature its maximum over the document is subtracted and folded into the query, whose own maximum
    is subtracted last: the denominator is at least 1, whatever the input.

    Args:
        log_q: `(B, H, L, M)` log-features of the queries.
        log_k: `(B, H, L, M)` log-features of the keys.
        v: `(B, H, L, K)`.
        documents: int32 `(B, L)`, equal numbers (in one contiguous run) see each other, `PADDING_DOCUMENT` sees nobody;
            `None` for one document a row.
        chunk: C; no result depends on it beyond rounding.

    Returns:
        `(B, H, L, K)`, zero at padding.
    """
    if documents is None:
        shift = log_k.detach().amax(-2, keepdim=True)
        phi_q, phi_k = _exponentials(log_q + shift, log_k - shift)
        return phi_q @ (phi_k.mT @ v.to(log_k.dtype)) / (phi_q @ phi_k.sum(-2).unsqueeze(-1))
    shift = _document_maxima(log_k.detach(), documents)
    phi_q, phi_k = _exponentials(log_q + shift, log_k - shift)
    length = v.shape[2]
    phi_q, phi_k, values, chunks = _chunked(phi_q, phi_k, _with_ones(v, log_k), documents, min(chunk, length))
    same = chunks.unsqueeze(-1) == chunks.unsqueeze(-2)
    totals = (phi_q @ phi_k.mT * same) @ values
    first, last = chunks[..., :1], chunks[..., -1:]
    earlier = torch.ones(chunks.shape[2], chunks.shape[2], dtype=torch.bool, device=v.device).tril(-1)
    for entering, leaving, order in ((first, last, earlier), (last, first, earlier.mT)):
        sums = (phi_k * (chunks == leaving).unsqueeze(-1)).mT @ values  # (B, H, N, M, V)
        carried = _feed(order & (leaving.mT == entering), sums)
        totals = totals + (phi_q * (chunks == entering).unsqueeze(-1)) @ carried
    return _normalise(totals.flatten(2, 3)[:, :, :length], documents.ne(PADDING_DOCUMENT)[:, None, :, None])


def causal_attention(
    log_q: Tensor,
    log_k: Tensor,
    v: Tensor,
    documents: Tensor | None = None,
    *,
    state: CausalState | None = None,
    chunk: int = CHUNK,
) -> Tensor:
    """Normalised attention to the tokens of the own document up to and with the own one.

    The running maximum m_t of the key log-features (restarting with each document) makes this linear attention
    with a decay exp(m_{t-1} - m_t) <= 1: strictly causal, and it cannot overflow. Rows whose denominator
    underflows all the same are computed again in log space.

    Args:
        log_q: `(B, H, L, M)` log-features of the queries.
        log_k: `(B, H, L, M)` log-features of the keys.
        v: `(B, H, L, K)`.
        documents: int32 `(B, L)` as in `bidirectional_attention`.
        state: `state_after` the tokens before, to go on from there; its document goes on where `documents` has
            the same number.
        chunk: C; no result depends on it beyond rounding.

    Returns:
        `(B, H, L, K)`, zero at padding.
    """
    length, chunk = v.shape[2], min(chunk, v.shape[2])
    if documents is None:
        documents = torch.zeros(v.shape[0], length, dtype=torch.int32, device=v.device)
    state = state or _empty_state(log_k, v)
    peak = _running_maxima(log_k.detach().amax(-1), documents, state)  # (B, H, L)
    phi_q, phi_k = _exponentials(log_q, log_k - peak.unsqueeze(-1))
    phi_q, phi_k, values, chunks = _chunked(phi_q, phi_k, _with_ones(v, log_k), documents, chunk)
    peaks = pad(peak, (0, -length % chunk), mode="replicate").unflatten(-1, (-1, chunk))  # (B, H, N, C)

    same = chunks.unsqueeze(-1) == chunks.unsqueeze(-2)
    past = torch.ones(chunk, chunk, dtype=torch.bool, device=v.device).tril()
    decay = _decay(peaks.unsqueeze(-2), peaks.unsqueeze(-1), same & past)  # (B, H, N, C, C)
    totals = (phi_q @ phi_k.mT * decay) @ values

    carried, left_document, left_peak = _carry(phi_k, values, chunks, peaks, state)
    read = (chunks == chunks[..., :1]) & (left_document == chunks[..., :1])
    read_decay = _decay(left_peak, peaks, read).unsqueeze(-1)
    totals = (totals + (phi_q * read_decay) @ carried).flatten(2, 3)[:, :, :length]

    real = documents.ne(PADDING_DOCUMENT).unsqueeze(1)
    low = (totals[..., -1] < _UNDERFLOW) & real
    out = _normalise(totals, (real & ~low).unsqueeze(-1))
    if low.any():
        out = replace_rows(out, low, log_q, log_k, v, documents, state)
    return out


def state_after(
    log_k: Tensor, v: Tensor, documents: Tensor | None = None, *, state: CausalState | None = None
) -> CausalState:
    """Return what causal attention must keep of a segment and of the state before it.

    Args:
        log_k: `(B, H, L, M)` log-features of the keys.
        v: `(B, H, L, K)`.
        documents: int32 `(B, L)` as in `bidirectional_attention`.
        state: the state before the segment.
    """
    if documents is None:
        documents = torch.zeros(v.shape[0], v.shape[2], dtype=torch.int32, device=v.device)
    state = state or _empty_state(log_k, v)
    document, lowest = documents[:, -1], torch.finfo(log_k.dtype).min
    own = (documents == document.unsqueeze(-1))[:, None, :, None]
    goes_on = (state.document == document)[:, None, None]
    before = torch.where(goes_on, state.peak, lowest)
    peak = torch.maximum(before, log_k.detach().masked_fill(~own, lowest).amax(-2))
    phi_k = torch.exp((log_k - peak.unsqueeze(-2)).masked_fill(~own, -torch.inf))
    kept = _decay(before, peak, goes_on).unsqueeze(-1)
    return CausalState(state.sums * kept + phi_k.mT @ _with_ones(v, log_k), peak, document.clone())


def _carry(
    phi_k: Tensor, values: Tensor, chunks: Tensor, peaks: Tensor, state: CausalState
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sums that enter each chunk, `(B, H, N, M, V)`: the state's and those of the chunks before.

    Also the document `(B, 1, N, 1)` and the peak `(B, H, N, 1)` that they belong to: entry 0 is the state's, entry n
    those of the last token of chunk n - 1.
    """
    first, last, last_peak = chunks[..., :1], chunks[..., -1:], peaks[..., -1:]
    kept = _decay(peaks, last_peak, chunks == last).unsqueeze(-1)
    state_peak = state.peak.amax(-1, keepdim=True)  # (B, H, 1)
    entering = state.sums * torch.exp(state.peak - state_peak).unsqueeze(-1)
    sums = torch.cat((entering.unsqueeze(2), (phi_k * kept)[:, :, :-1].mT @ values[:, :, :-1]), dim=2)
    document = torch.cat((state.document.view(-1, 1, 1, 1).to(last.dtype), last[:, :, :-1]), dim=2)
    peak = torch.cat((state_peak.unsqueeze(-1), last_peak[:, :, :-1]), dim=2)
    order = torch.ones(chunks.shape[2], chunks.shape[2], dtype=torch.bool, device=phi_k.device).tril()
    links = order & (document.mT == first) & (document == first)  # (B, 1, N, N)
    return _feed(_decay(peak.mT, peak, links), sums), document, peak


def _feed(links: Tensor, sums: Tensor) -> Tensor:
    """Return what each chunk receives: `links (B, 1 or H, N, N)` times `sums (B, H, N, M, V)`."""
    return (links.to(sums.dtype) @ sums.flatten(-2)).unflatten(-1, sums.shape[-2:])


def _exponentials(log_q: Tensor, log_k: Tensor) -> tuple[Tensor, Tensor]:
    """Return the features of queries (shifted by their own maximum) and of keys (shifted by the caller)."""
    return torch.exp(log_q - log_q.detach().amax(-1, keepdim=True)), torch.exp(log_k)


def _decay(start: Tensor, end: Tensor, allowed: Tensor) -> Tensor:
    """Return exp(start - end) where allowed (there start <= end), else 0."""
    return torch.where(allowed, start - end, -torch.inf).exp()


def _with_ones(v: Tensor, like: Tensor) -> Tensor:
    """Return `(B, H, L, V)`: the values, in the precision of the features, and a column of ones."""
    return pad(v.to(like.dtype), (0, 1), value=1.0)


def _normalise(totals: Tensor, real: Tensor) -> Tensor:
    """Divide the numerators by the last column; rows that are not `real` become zero."""
    numerator, denominator = totals[..., :-1], totals[..., -1:]
    return torch.where(real, numerator, 0.0) / torch.where(real, denominator, 1.0)


def _chunked(
    phi_q: Tensor, phi_k: Tensor, values: Tensor, documents: Tensor, chunk: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Cut the length into N chunks of C: `(B, H, N, C, .)` and documents `(B, 1, N, C)`.

    The filling up to a multiple of C has features and values of zero and goes on with the last document.
    """
    missing = -documents.shape[1] % chunk
    features = (pad(x, (0, 0, 0, missing)).unflatten(2, (-1, chunk)) for x in (phi_q, phi_k, values))
    filling = documents[:, -1:].expand(-1, missing)
    return (*features, torch.cat((documents, filling), dim=1).unflatten(1, (-1, chunk)).unsqueeze(1))


def _empty_state(log_k: Tensor, v: Tensor) -> CausalState:
    """Return the state before the first token."""
    batch, heads, _, features = log_k.shape
    return CausalState(
        log_k.new_zeros(batch, heads, features, v.shape[-1] + 1),
        log_k.new_full((batch, heads, features), torch.finfo(log_k.dtype).min),
        torch.full((batch,), NO_DOCUMENT, dtype=torch.int32, device=v.device),
    )


def _running_maxima(peak: Tensor, documents: Tensor, state: CausalState) -> Tensor:
    """Return the running maximum of `peak (B, H, L)` within each document, which may go on from the state."""
    peak = torch.cat((state.peak.amax(-1, keepdim=True), peak), dim=-1)
    documents = torch.cat((state.document.unsqueeze(-1).to(documents.dtype), documents), dim=-1)
    step = 1
    while step < documents.shape[1]:
        same = (documents[:, step:] == documents[:, :-step]).unsqueeze(1)
        reached = torch.where(same, torch.maximum(peak[..., step:], peak[..., :-step]), peak[..., step:])
        peak = torch.cat((peak[..., :step], reached), dim=-1)
        step *= 2
    return peak[..., 1:]


def _document_maxima(log_k: Tensor, documents: Tensor) -> Tensor:
    """Return for each token the maximum of each key feature over its document, `(B, H, L, M)`."""
    starts = documents[:, 1:] != documents[:, :-1]
    run = pad(starts.cumsum(1), (1, 0))[:, None, :, None].expand_as(log_k)  # (B, H, L, M)
    shape = (*log_k.shape[:2], int(run.amax()) + 1, log_k.shape[-1])
    maxima = log_k.new_full(shape, -torch.inf).scatter_reduce(2, run, log_k, "amax")
    return maxima.gather(2, run)
