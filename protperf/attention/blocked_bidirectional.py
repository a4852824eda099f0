"""Bidirectional linear attention in blocks that stay in cache; forward and backward.

A document's keys are summed up first, S = phi(k)^T [v, 1], then its queries read S. For exponential features the
maximum of each feature over the document's keys is subtracted from the keys and folded into the queries: the
denominator cannot vanish or overflow, and the maxima cancel.

The backward pass computes features again. S is kept for it only of documents as long as there are features, or of more
than one block: for shorter ones it is one product away, and of many short ones it would take more memory than the
features that are not kept.

Axis letters: `B` batch, `H` heads, `L` length in tokens, `R` rows of one block, `K` head width, `F` features,
`V` = K + 1, `D` documents of which S is kept.
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
    in_threads,
    whole_rows,
)


class Kept(NamedTuple):
    """What the forward pass keeps for the backward pass.

    Attributes:
        denominators: `(B, H, L)`.
        sums: `(D, H, F, V)` S of each document of which it is kept.
        shifts: `(D, H, F)` the maxima subtracted in it.
    """

    denominators: Tensor
    sums: Tensor
    shifts: Tensor


class Block(NamedTuple):
    """One document of a few heads: `cut` takes it out of `(B, H, L, ...)`."""

    b: int
    heads: slice
    start: int
    stop: int
    place: int
    """Its number among the documents of which S is kept, or -1."""

    def cut(self, x: Tensor, start: int | None = None, stop: int | None = None) -> Tensor:
        """Return the block's part of `x (B, H, L, ...)`, all rows or some."""
        first = self.start if start is None else start
        return x[self.b, self.heads, first : self.stop if stop is None else stop]


def bidirectional_forward(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, features: BlockFeatures, *, rows: int
) -> tuple[Tensor, Kept]:
    """Return attention `(B, H, L, K)` in the type of the features, zero at padding, and what the backward pass needs.

    Args:
        q: `(B, H, L, K)`.
        k: `(B, H, L, K)`.
        v: `(B, H, L, K)`.
        documents: int32 `(B, L)` or `None`.
        features: the feature map of all heads.
        rows: rows of a block over all its heads.
    """
    batch, heads, length, width = v.shape
    out = empty_result(v, documents, dtype=features.bias.dtype)
    kept_from = rows_of_kept(features.bias.shape[1], rows)
    num_kept = batch * most_kept(length, kept_from, is_packed=documents is not None)
    kept = Kept(
        features.bias.new_ones(batch, heads, length),
        features.bias.new_empty(num_kept, *features.bias.shape, width + 1),
        features.bias.new_empty(num_kept, *features.bias.shape),
    )

    def work(block: Block, features: BlockFeatures) -> None:
        own = features.of_heads(block.heads.start, block.heads.stop)
        sums, shift, *_ = _summarise(own, block.cut(k), block.cut(v), rows)
        if block.place >= 0:
            kept.sums[block.place, block.heads] = sums
            kept.shifts[block.place, block.heads] = shift
        for start, stop in blocks_of(block.start, block.stop, rows):
            phi = own.queries(_query_rows(own, block.cut(q, start, stop)), shift)
            totals = torch.bmm(phi, sums, out=own.scratch.take("totals", *phi.shape[:2], width + 1))
            totals = totals[:, : stop - start]
            block.cut(kept.denominators, start, stop).copy_(totals[..., width])
            torch.div(totals[..., :width], totals[..., width:], out=block.cut(out, start, stop))

    blocks = list(_blocks(documents, v, rows, kept_from))
    in_threads(work, blocks, features, num_rows=batch * heads * length)
    return out, kept


def bidirectional_backward(
    d_out: Tensor,
    out: Tensor,
    kept: Kept,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    features: BlockFeatures,
    *,
    rows: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v.

    Args:
        d_out: gradient of `out`, `(B, H, L, K)`.
        out: what `bidirectional_forward` returned.
        kept: what it kept.
        q: as there.
        k: as there.
        v: as there.
        documents: as there.
        features: as there.
        rows: as there.
    """
    d_q, d_k, d_v = (empty_result(x, documents) for x in (q, k, v))
    kept_from = rows_of_kept(features.bias.shape[1], rows)

    def work(block: Block, features: BlockFeatures) -> None:
        own = features.of_heads(block.heads.start, block.heads.stop)
        if block.place >= 0:
            sums, shift = kept.sums[block.place, block.heads], kept.shifts[block.place, block.heads]
        else:
            sums, shift, phi_k, key_rows = _summarise(own, block.cut(k), block.cut(v), rows)
        d_sums = own.scratch.take("d_sums", *sums.shape)
        for start, stop in blocks_of(block.start, block.stop, rows):
            phi = own.queries(_query_rows(own, block.cut(q, start, stop)), shift)
            parts = (block.cut(x, start, stop) for x in (d_out, out, kept.denominators))
            d_totals = _scaled_gradient(own.scratch, *parts)
            torch.baddbmm(d_sums, phi.mT, d_totals, beta=float(start > block.start), out=d_sums)
            d_phi = torch.bmm(d_totals, sums.mT, out=own.scratch.take("d_phi", *phi.shape))
            own.query_gradient(phi, d_phi, block.cut(d_q, start, stop))
        for start, stop in blocks_of(block.start, block.stop, rows):
            if block.place >= 0:
                key_rows = _key_rows(own, block.cut(k, start, stop))
                phi_k = own.shifted_keys(key_rows, shift)
                phi_k[:, stop - start :] = 0.0
            values = _values(own, block.cut(v, start, stop))
            d_phi = torch.bmm(values, d_sums.mT, out=own.scratch.take("d_phi", *phi_k.shape))
            own.scratch.product(block.cut(d_v, start, stop), phi_k, d_sums[..., :-1])
            own.key_gradient(phi_k, d_phi, key_rows, block.cut(d_k, start, stop))

    blocks = list(_blocks(documents, v, rows, kept_from))
    in_threads(work, blocks, features, num_rows=v[..., 0].numel())
    return d_q, d_k, d_v


def _blocks(documents: Tensor | None, v: Tensor, rows: int, kept_from: int) -> Iterator[Block]:
    """Yield every document of every group of heads; sums are kept of those of `kept_from` rows or more."""
    batch, num_heads, length, _ = v.shape
    place = -1
    for b, start, stop in document_runs(documents, batch, length):
        is_kept = stop - start >= kept_from
        place += is_kept
        count = heads_at_once(num_heads, stop - start, rows)
        for head in range(0, num_heads, count):
            yield Block(b, slice(head, head + count), start, stop, place if is_kept else -1)


def rows_of_kept(features: int, rows: int) -> int:
    """Return from which length on a document's sums are kept: its features would take more, or it has several blocks."""
    return min(features, rows + 1)


def most_kept(length: int, kept_from: int, *, is_packed: bool) -> int:
    """Return of how many documents in one row of a batch sums may have to be kept."""
    return length // kept_from if is_packed else int(length >= kept_from)


def _summarise(
    features: BlockFeatures, k: Tensor, v: Tensor, rows: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sum up one document's keys and values `(H, L, K)`.

    Returns:
        S `(H, F, V)`, the maxima taken off `(H, F)`, and the features and rows of its last block of keys.
    """
    sums = features.scratch.take("sums", *features.bias.shape, v.shape[-1] + 1)
    shift = features.scratch.take("shift", *features.bias.shape).zero_()
    for number, (start, stop) in enumerate(blocks_of(0, k.shape[1], rows)):
        key_rows = _key_rows(features, k[:, start:stop])
        phi, log = features.keys(key_rows)
        if features.has_peaks:
            peak = features.peaks(phi[:, : stop - start], log[:, : stop - start])
            if number:
                peak = torch.maximum(peak, shift)
                sums.mul_(torch.exp(shift - peak).unsqueeze(-1))
            phi = features.take_off(phi, log, shift.copy_(peak))
        phi[:, stop - start :] = 0.0
        values = _values(features, v[:, start:stop])
        torch.baddbmm(sums, phi.mT, values, beta=float(number > 0), out=sums)
    return sums, shift, phi, key_rows


def _query_rows(features: BlockFeatures, q: Tensor) -> Tensor:
    return features.scratch.extended("query_rows", q, 0.0, 1.0, rows=whole_rows(q.shape[1]))


def _key_rows(features: BlockFeatures, k: Tensor) -> Tensor:
    return features.scratch.extended("key_rows", k, 0.0, 1.0, rows=whole_rows(k.shape[1]))


def _values(features: BlockFeatures, v: Tensor) -> Tensor:
    return features.scratch.extended("values", v, 1.0, rows=whole_rows(v.shape[1]))


def _scaled_gradient(scratch: Scratch, d_out: Tensor, out: Tensor, denominators: Tensor) -> Tensor:
    """Return the gradient of `[numerator, denominator]` given that of their ratio, `(H, R, V)`.

    Args:
        scratch: the buffers.
        d_out: `(H, R, K)`.
        out: the ratio, `(H, R, K)`.
        denominators: `(H, R)`.
    """
    d_totals = scratch.extended("d_totals", d_out, 0.0, rows=whole_rows(d_out.shape[1]))
    real = d_totals[:, : d_out.shape[1]]
    real[..., :-1].div_(denominators.unsqueeze(-1))
    real[..., -1] = torch.linalg.vecdot(real[..., :-1], out.to(real.dtype)).neg_()
    return d_totals
