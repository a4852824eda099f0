"""How the causal blocked layout cuts documents: into spans of chunks, and rows copied chunk by chunk.

Axis letters: `B` batch, `H` heads (of a span: those of one block), `L` length in tokens, `C` chunk length, `N` chunks
in a span, `K` head width, `F` features, `V` = K + 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from protperf.attention.blocks import Scratch, blocks_of, document_runs, heads_at_once, whole_rows

CHUNK = 64
"""Rows of a chunk at most: measured on two cores, 48 to 64 is best for 256 features."""
SPAN = 512
"""Rows of a span at most. At 256 features of heads 64 wide, 65 KiB of state a head are kept for so many rows, half of
what the queries take."""


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


class Span(NamedTuple):
    """Some rows of one document of a few heads: N chunks of C rows, the last of which may not be full."""

    b: int
    heads: slice
    start: int
    stop: int
    place: int
    """Its number among the spans whose state is kept, or -1: the document's first."""
    goes_on: bool
    """Whether it goes on with a state from before the call."""
    num_chunks: int
    chunk: int

    def pieces(self, x: Tensor, by_chunks: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the same rows as they stand in `x (B, H, L, ...)` and in `by_chunks (N, H, C, ...)`.

        First all full chunks, then the rest.
        """
        own = x[self.b, self.heads, self.start : self.stop]
        full, rest = divmod(self.stop - self.start, self.chunk)
        if full:
            whole = own[:, : full * self.chunk].unflatten(1, (full, self.chunk)).transpose(0, 1)
            yield whole, by_chunks[:full]
        if rest:
            yield own[:, full * self.chunk :], by_chunks[full, :, :rest]


def spans_of(documents: Tensor | None, v: Tensor, start: Start | None, rows: int) -> Iterator[list[Span]]:
    """Yield the spans of every document of every group of heads."""
    batch, num_heads, length, _ = v.shape
    first_place = 0
    for b, first, stop in document_runs(documents, batch, length):
        edges = list(blocks_of(first, stop, SPAN))
        number = 0 if documents is None else documents[b, first]
        goes_on = start is not None and first == 0 and bool(start.document[b] == number)
        count = heads_at_once(num_heads, edges[0][1] - edges[0][0], rows)
        for head in range(0, num_heads, count):
            yield [
                _span(
                    b,
                    slice(head, head + count),
                    *edge,
                    place=first_place + n - 1 if n else -1,
                    goes_on=goes_on and n == 0,
                )
                for n, edge in enumerate(edges)
            ]
        first_place += len(edges) - 1


def _span(b: int, heads: slice, start: int, stop: int, *, place: int, goes_on: bool) -> Span:
    """Cut some rows into as few chunks as there can be, all of one length."""
    size = stop - start
    chunk = whole_rows(-(-size // -(-size // CHUNK)))
    return Span(b, heads, start, stop, place, goes_on, -(-size // chunk), chunk)


def extended(scratch: Scratch, name: str, span: Span, x: Tensor, *columns: float) -> Tensor:
    """Copy a span of `x (B, H, L, K)` chunk by chunk, `(N H, C, .)`, with constant columns behind it; the rest is zero."""
    width, heads = x.shape[-1], span.heads.stop - span.heads.start
    out = scratch.take(name, span.num_chunks, heads, span.chunk, width + len(columns))
    if span.num_chunks * span.chunk > span.stop - span.start:
        out[-1].zero_()
    for source, part in span.pieces(x, out):
        part[..., :width] = source
        for number, column in enumerate(columns):
            part[..., width + number] = column
    return out.flatten(0, 1)


def put(span: Span, by_chunks: Tensor, target: Tensor) -> None:
    """Copy `(N H, C, K)` to where it belongs in `target (B, H, L, K)`."""
    for place, part in span.pieces(target, by_chunks.view(span.num_chunks, -1, *by_chunks.shape[1:])):
        place.copy_(part)
