"""What both directions of the blocked layout share: runs of rows, buffers that stay in cache, features of one block.

On a CPU a product of a thousand rows runs several times as fast as one of ten thousand, because its operands stay in
cache and no fresh page is touched. So the blocked layout walks over documents, a few heads and rows at a time, and
writes every intermediate into the same few buffers. Cores work on different heads and documents.

Axis letters: `B` batch, `H` heads (here those of one block), `L` length in tokens, `R` rows of one block, `K` head
width, `F` features, `V` = K + 1: values with a column of ones, so that numerator and denominator are one product.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from protperf.attention.features import RELU_OFFSET, FeatureMap
from protperf.vocab import PADDING_DOCUMENT

ROWS = 1024
"""Rows of one block over all its heads: 256 features of so many rows are a MiB in float32, as a core's cache."""

_WORTH_THREADS = 2**15
"""Rows over all heads from which on each core does parts of its own; starting that costs some milliseconds."""

PartT = TypeVar("PartT")


def in_threads(
    work: Callable[[PartT, BlockFeatures], None],
    parts: Sequence[PartT],
    features: BlockFeatures,
    *,
    num_rows: int,
) -> None:
    """Do independent parts of the work; where there is much of it, each in one thread with buffers of its own.

    The operations of a block are short. Split over cores, they make the cores wait for one another some thousand times,
    and each time for long where another program has one of the cores: measured with one such program on two cores,
    attention to 8,192 tokens took 2.9 times as long, with a thread for each part 1.8 times.

    Args:
        work: called with each part and a feature map of all heads.
        parts: what there is to do.
        features: the feature map.
        num_rows: rows over all heads and parts.
    """
    threads = torch.get_num_threads()
    num_workers = min(threads, len(parts))
    if num_workers < 2 or num_rows < _WORTH_THREADS:
        for part in parts:
            work(part, features)
        return
    queue = iter(parts)

    inference = torch.is_inference_mode_enabled()

    def worker() -> None:
        torch.set_num_threads(threads // num_workers)
        with torch.inference_mode(inference), torch.no_grad():
            own = features.with_own_buffers()
            for part in queue:
                work(part, own)

    try:
        with ThreadPoolExecutor(num_workers) as pool:
            for future in [pool.submit(worker) for _ in range(num_workers)]:
                future.result()
    finally:
        torch.set_num_threads(threads)  # the workers have changed what threads to come would have


def heads_at_once(num_heads: int, rows: int, rows_in_block: int) -> int:
    """Return how many heads share a block of `rows` each: a divisor of their number, so that all are treated alike."""
    most = min(rows_in_block // rows, num_heads // torch.get_num_threads())
    return next(count for count in range(max(1, most), 0, -1) if num_heads % count == 0)


def whole_rows(rows: int) -> int:
    """Return `rows` rounded up to a multiple of 4.

    Matrices of a batch then all begin on 32 bytes; where they do not, a BLAS may take another path for each head, and
    heads that hold the same numbers would differ in the last bit.
    """
    return -(-rows // 4) * 4


def blocks_of(start: int, stop: int, rows: int) -> Iterator[tuple[int, int]]:
    """Cut start ... stop into pieces of at most `rows`, as equal as multiples of 4 can be."""
    count = -(-(stop - start) // rows)
    size = min(rows, whole_rows(-(-(stop - start) // count)))
    for first in range(start, stop, size):
        yield first, min(first + size, stop)


def document_runs(documents: Tensor | None, batch: int, length: int) -> list[tuple[int, int, int]]:
    """Return `(batch row, start, stop)` of each document; padding is left out.

    Args:
        documents: int32 `(B, L)` or `None` for one document a row.
        batch: B.
        length: L.
    """
    if documents is None:
        return [(b, 0, length) for b in range(batch)]
    runs = []
    for b, row in enumerate(documents):
        numbers, counts = torch.unique_consecutive(row, return_counts=True)
        start = 0
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            if number != PADDING_DOCUMENT:
                runs.append((b, start, start + count))
            start += count
    return runs


def empty_result(like: Tensor, documents: Tensor | None, *, dtype: torch.dtype | None = None) -> Tensor:
    """Return a contiguous tensor like `like (B, H, L, K)`, zero at padding and arbitrary elsewhere."""
    result = torch.empty_like(like, dtype=dtype, memory_format=torch.contiguous_format)
    if documents is not None and documents.eq(PADDING_DOCUMENT).any():
        result.masked_fill_(documents.eq(PADDING_DOCUMENT)[:, None, :, None], 0.0)
    return result


class Scratch:
    """Named buffers that are used again and again: `take` gives a view of any shape; what it holds is arbitrary."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._buffers: dict[str, Tensor] = {}
        self._views: dict[tuple[str, tuple[int, ...]], Tensor] = {}
        self._whole: dict[str, tuple[int, ...]] = {}
        """Shapes of buffers whose constant columns stand in every row."""

    def take(self, name: str, *shape: int) -> Tensor:
        """Return the buffer `name` in this shape."""
        view = self._views.get((name, shape))
        if view is None:
            size = math.prod(shape)
            buffer = self._buffers.get(name)
            if buffer is None or buffer.numel() < size:
                buffer = self._buffers[name] = torch.empty(size, dtype=self.dtype)
                self._views = {key: value for key, value in self._views.items() if key[0] != name}
                self._whole.pop(name, None)
            view = self._views[name, shape] = buffer[:size].view(shape)
        return view

    def extended(self, name: str, x: Tensor, *columns: float, rows: int) -> Tensor:
        """Copy `x (H, R, K)` into the buffer `name` with constant columns behind it; more rows than R become zero.

        A buffer is always given the same columns; who changes one writes it anew after each call.
        """
        heads, count, width = x.shape
        shape = (heads, rows, width + len(columns))
        out = self.take(name, *shape)
        if count == shape[1] and self._whole.get(name) == shape:
            out[..., :width] = x
            return out
        out[:, :count, :width] = x
        for number, column in enumerate(columns):
            out[:, :count, width + number] = column
        if count < shape[1]:
            out[:, count:] = 0.0
        self._whole[name] = shape if count == shape[1] else ()
        return out

    def product(self, target: Tensor, a: Tensor, b: Tensor, *, plus: Tensor | None = None) -> None:
        """Put `a (H, R, .) @ b`, and what there is to be added to it, into `target`, which may have fewer rows."""
        fits = target.is_contiguous() and target.dtype == self.dtype and target.shape[1] == a.shape[1]
        out = target if fits else self.take("product", *a.shape[:2], b.shape[2])
        if plus is None:
            torch.bmm(a, b, out=out)
        else:
            torch.baddbmm(plus, a, b, out=out)
        if not fits:
            target.copy_(out[:, : target.shape[1]])


class BlockFeatures:
    """A feature map that fills buffers, one block of rows of a few heads at a time.

    One product gives the logits with everything that is added to them: rows are `[x, logarithm, 1]`, the matrix is
    `[weights, 1 or 0, bias + shift]`.

    Args:
        weights: `(H, F, K)` of those heads.
        bias: `(H, F)`.
        nonlinearity: as in `FeatureMap`.
        half_square: as in `FeatureMap`.
        scratch: the buffers.
    """

    def __init__(
        self, weights: Tensor, bias: Tensor, *, nonlinearity: str, half_square: float, scratch: Scratch
    ) -> None:
        self.nonlinearity = nonlinearity
        self.half_square = half_square
        self.scratch = scratch
        self.weights = weights
        self.bias = bias
        self.is_exponential = nonlinearity == "exp"
        self.has_peaks = self.is_exponential or half_square != 0
        """Whether key features grow exponentially in |x|, so that a maximum has to be taken off."""
        self._added = bias + RELU_OFFSET if nonlinearity == "relu" else bias
        column = torch.full_like(bias, float(self.is_exponential))
        self._matrix = torch.cat((weights, column.unsqueeze(-1), self._added.unsqueeze(-1)), dim=-1)
        self._is_shifted = False
        self._parts: dict[tuple[int, ...], BlockFeatures] = {}

    @property
    def feature_map(self) -> FeatureMap:
        """The map itself."""
        return FeatureMap(self.weights, self.bias, self.nonlinearity, self.half_square)

    def with_own_buffers(self) -> BlockFeatures:
        """Return the same map with other buffers, for another thread."""
        return BlockFeatures(
            self.weights,
            self.bias,
            nonlinearity=self.nonlinearity,
            half_square=self.half_square,
            scratch=Scratch(self.scratch.dtype),
        )

    def of_heads(self, start: int, stop: int) -> BlockFeatures:
        """Return the map of some heads, with the same buffers."""
        if (start, stop) not in self._parts:
            self._parts[start, stop] = self._part(self.weights[start:stop], self.bias[start:stop])
        return self._parts[start, stop]

    def of_chunks(self, chunks: int) -> BlockFeatures:
        """Return the map of several chunks of rows of all heads, chunk by chunk; it takes no shift."""
        if (chunks,) not in self._parts:
            heads = len(self.weights)
            if self.weights.stride(0) == 0:  # all heads share one
                part = self._part(self.weights[:1], self.bias[:1])
                for name in ("weights", "bias", "_matrix"):
                    shared = getattr(part, name)
                    setattr(part, name, shared.expand(chunks * heads, *shared.shape[1:]))
            else:
                part = self._part(self.weights.repeat(chunks, 1, 1), self.bias.repeat(chunks, 1))
            self._parts[(chunks,)] = part
        return self._parts[(chunks,)]

    def _part(self, weights: Tensor, bias: Tensor) -> BlockFeatures:
        return BlockFeatures(
            weights,
            bias,
            nonlinearity=self.nonlinearity,
            half_square=self.half_square,
            scratch=self.scratch,
        )

    def queries(self, rows: Tensor, shift: Tensor | None = None) -> Tensor:
        """Return the features of queries, of each row up to a factor, which cancels: `(H, R, F)`.

        Args:
            rows: `[q, 0, 1]`, `(H, R, K + 2)`.
            shift: `(H, F)` to be added to the logits of exponential features.
        """
        phi = self._logits("queries", rows, shift)
        return torch.softmax(phi, dim=-1, out=phi) if self.is_exponential else self._nonlinear(phi)

    def keys(self, rows: Tensor, shift: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return what the features of keys are made of: `(H, R, F)` and a logarithm, `(H, R)`.

        For exponential features the first are logits, for others features that lack a factor exp(logarithm).

        Args:
            rows: `[k, anything, 1]`, `(H, R, K + 2)`; gets the logarithm in its last but one column.
            shift: `(H, F)` to be added to the logits of exponential features.
        """
        if self.half_square:
            k = rows[..., :-2]
            torch.mul(torch.linalg.vecdot(k, k), self.half_square / 2, out=rows[..., -2])
        phi = self._logits("keys", rows, shift)
        return (phi if self.is_exponential else self._nonlinear(phi)), rows[..., -2]

    def shifted_keys(self, rows: Tensor, shift: Tensor) -> Tensor:
        """Return the features of keys (see `keys`) with `shift (H, F)` taken off their logarithms, `(H, R, F)`."""
        phi, log = self.keys(rows, -shift)
        if self.is_exponential:
            return phi.exp_()
        return self.take_off(phi, log, shift)

    def peaks(self, phi: Tensor, log: Tensor) -> Tensor:
        """Return the maxima over rows of what `keys` returned, `(H, F)`, or `(H, 1)` where features share one."""
        return phi.amax(1) if self.is_exponential else log.amax(1, keepdim=True)

    def take_off(self, phi: Tensor, log: Tensor, shift: Tensor) -> Tensor:
        """Turn what `keys` returned into features with `shift (H, F)` taken off their logarithms, in place."""
        if self.is_exponential:
            return phi.sub_(shift.unsqueeze(1)).exp_()
        if self.half_square:
            return phi.mul_((log - shift[:, :1]).exp_().unsqueeze(-1))
        return phi

    def row_peaks(self, phi: Tensor, log: Tensor) -> Tensor:
        """Return the maxima over features of what `keys` returned, `(H, R)`."""
        return phi.amax(-1) if self.is_exponential else log.clone()

    def take_off_rows(self, phi: Tensor, log: Tensor, peaks: Tensor) -> Tensor:
        """Turn what `keys` returned into features with `peaks (H, R)` taken off their logarithms, in place."""
        if self.is_exponential:
            return phi.sub_(peaks.unsqueeze(-1)).exp_()
        return phi.mul_((log - peaks).exp_().unsqueeze(-1))

    def query_gradient(self, phi: Tensor, d_phi: Tensor, target: Tensor) -> None:
        """Put the gradient of q, `(H, R, K)`, into `target`, given that of its features, which is used up."""
        self.scratch.product(target, self._logit_gradient(phi, d_phi), self.weights)

    def key_gradient(self, phi: Tensor, d_phi: Tensor, rows: Tensor, target: Tensor) -> None:
        """Put the gradient of k, `(H, R, K)`, into `target`, given that of its features, which is used up."""
        if not self.half_square:
            return self.query_gradient(phi, d_phi, target)
        if self.is_exponential:
            d_logits = d_phi.mul_(phi)
            d_log = d_logits.sum(-1, keepdim=True)
        else:
            d_log = (phi * d_phi).sum(-1, keepdim=True)
            d_logits = self._logit_gradient(phi, d_phi)
        k = rows[..., :-2]
        d_k = torch.mul(k, d_log.mul_(self.half_square), out=self.scratch.take("d_k", *k.shape))
        self.scratch.product(target, d_logits, self.weights, plus=d_k)

    def _logits(self, name: str, x: Tensor, shift: Tensor | None) -> Tensor:
        if shift is not None and self.is_exponential:
            self._matrix[..., -1] = self._added + shift
            self._is_shifted = True
        elif self._is_shifted:
            self._matrix[..., -1] = self._added
            self._is_shifted = False
        out = self.scratch.take(name, x.shape[0], x.shape[1], self._matrix.shape[1])
        return torch.bmm(x, self._matrix.mT, out=out)

    def _nonlinear(self, phi: Tensor) -> Tensor:
        """Turn logits into features, in place."""
        if self.nonlinearity == "relu":
            return phi.clamp_(min=RELU_OFFSET)  # the offset is in the bias
        if self.nonlinearity == "elu":
            return phi.copy_(torch.where(phi > 0, phi + 1, phi.exp()))
        assert self.nonlinearity == "cos"
        return phi.cos_()

    def _logit_gradient(self, phi: Tensor, d_phi: Tensor) -> Tensor:
        """Turn the gradient of features into that of their logits, in place."""
        if self.nonlinearity == "exp":
            return d_phi.mul_(phi)
        if self.nonlinearity == "relu":
            return torch.ops.aten.threshold_backward.grad_input(d_phi, phi, RELU_OFFSET, grad_input=d_phi)
        if self.nonlinearity == "elu":
            return d_phi.mul_(phi.clamp(max=1.0))
        half = (
            phi.shape[-1] // 2
        )  # features f and f + F / 2 are a quarter turn apart: cosine and sine of one angle
        d_phi.mul_(phi.roll(half, dims=-1))
        d_phi[..., :half].neg_()
        return d_phi
