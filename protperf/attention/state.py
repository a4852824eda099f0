"""What causal attention carries from one segment of a sequence to the next.

Axis letters: `B` batch, `H` heads, `L` length in tokens, `K` head width, `F` features, `T` tokens kept, `S` rounds of
hashing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from protperf.attention.features import FeatureMap
from protperf.vocab import PADDING_DOCUMENT

NO_DOCUMENT = -2
"""The document number of a state before the first token: no token has it."""


class CausalState(NamedTuple):
    """What causal linear attention keeps of the tokens read so far: constant in their number.

    Attributes:
        sums: `(B, H, F, K + 1)` sum of phi(k_j) exp(-peak) [v_j, 1] over the current document.
        peak: `(B, H, F)` maximum of each key feature's logarithm over the current document: one a feature, so that no
            feature underflows for a later query that asks for it alone. Zero for features without an exponential. With
            gates, as seen from the last token: what they have since taken off is in it.
        document: `(B,)` number of the current document.
    """

    sums: Tensor
    peak: Tensor
    document: Tensor

    def of_head(self, b: int, h: int) -> CausalState:
        """Return one head's state: `(F, K + 1)`, `(F,)` and a scalar."""
        return CausalState(self.sums[b, h], self.peak[b, h], self.document[b])

    def of_rows(self, rows: Tensor) -> CausalState:
        """Return the state of some rows of the batch, int64 `(rows,)`; the others are let go."""
        return CausalState(*(part[rows] for part in self))

    @staticmethod
    def join(states: Sequence[CausalState]) -> CausalState:
        """Put the rows of several states into one batch."""
        return CausalState(*(torch.cat(parts) for parts in zip(*states, strict=True)))


class KeyValueState(NamedTuple):
    """What causal `softmax` and `reformer` keep of the tokens read so far: all of them, so that it grows with each.

    Attributes:
        keys: `(B, H, T, K)`, the latest last.
        values: `(B, H, T, K)`.
        documents: int32 `(B, T)` number of the current document, `PADDING_DOCUMENT` before it began.
        hashes: int64 `(B, H, T, S)` buckets of `reformer`; no rounds for `softmax`.
    """

    keys: Tensor
    values: Tensor
    documents: Tensor
    hashes: Tensor

    @staticmethod
    def of(keys: Tensor, values: Tensor, documents: Tensor, hashes: Tensor | None = None) -> KeyValueState:
        """Return the state of a segment alone; `hashes` may be left out."""
        if hashes is None:
            hashes = torch.empty(*keys.shape[:3], 0, dtype=torch.int64, device=keys.device)
        return KeyValueState(keys, values, documents, hashes)

    def followed_by(self, segment: KeyValueState) -> KeyValueState:
        """Return all tokens of both; those of this state are padding unless the segment begins with their document."""
        goes_on = self.documents == segment.documents[:, :1]
        before = self._replace(documents=self.documents.masked_fill(~goes_on, PADDING_DOCUMENT))
        return KeyValueState(
            torch.cat((before.keys, segment.keys), dim=2),
            torch.cat((before.values, segment.values), dim=2),
            torch.cat((before.documents, segment.documents), dim=1),
            torch.cat((before.hashes, segment.hashes), dim=2),
        )

    def current(self) -> KeyValueState:
        """Return the state with everything marked as padding but the document of the last token."""
        others = self.documents != self.documents[:, -1:]
        return self._replace(documents=self.documents.masked_fill(others, PADDING_DOCUMENT))

    def of_rows(self, rows: Tensor) -> KeyValueState:
        """Return the state of some rows of the batch, int64 `(rows,)`; the others are let go."""
        return KeyValueState(*(part[rows] for part in self)).trimmed()

    @staticmethod
    def join(states: Sequence[KeyValueState]) -> KeyValueState:
        """Put the rows of several states, which may have read unlike numbers of tokens, into one batch."""
        longest = max(state.documents.shape[1] for state in states)
        missing = [longest - state.documents.shape[1] for state in states]
        return KeyValueState(
            torch.cat([pad(state.keys, (0, 0, n, 0)) for state, n in zip(states, missing, strict=True)]),
            torch.cat([pad(state.values, (0, 0, n, 0)) for state, n in zip(states, missing, strict=True)]),
            torch.cat(
                [
                    pad(state.documents, (n, 0), value=PADDING_DOCUMENT)
                    for state, n in zip(states, missing, strict=True)
                ]
            ),
            torch.cat([pad(state.hashes, (0, 0, n, 0)) for state, n in zip(states, missing, strict=True)]),
        )

    def trimmed(self) -> KeyValueState:
        """Return the state without the columns before every row's document."""
        if not self.documents.shape[1]:
            return self
        first = int(self.documents.ne(PADDING_DOCUMENT).any(0).int().argmax())
        return KeyValueState(
            self.keys[:, :, first:],
            self.values[:, :, first:],
            self.documents[:, first:],
            self.hashes[:, :, first:],
        )


def empty_state(k: Tensor, v: Tensor, feature_map: FeatureMap) -> CausalState:
    """Return the state before the first token.

    Args:
        k: `(B, H, L, K)`, for shape and type.
        v: `(B, H, L, K)`.
        feature_map: the map.
    """
    batch, heads = k.shape[:2]
    features, dtype = feature_map.weights.shape[-2], torch.promote_types(k.dtype, torch.float32)
    return CausalState(
        torch.zeros(batch, heads, features, v.shape[-1] + 1, dtype=dtype, device=v.device),
        torch.full((batch, heads, features), lowest_peak(feature_map, dtype), dtype=dtype, device=v.device),
        torch.full((batch,), NO_DOCUMENT, dtype=torch.int32, device=v.device),
    )


def entering_state(state: CausalState, documents: Tensor | None) -> CausalState:
    """Return the state as a segment takes it: it belongs to the segment's first document or to none.

    Args:
        state: of the tokens before.
        documents: int32 `(B, L)` of the segment, or `None`: one document of number 0 a row. A later document may have the
            number of the state's by chance.
    """
    first = torch.zeros_like(state.document) if documents is None else documents[:, 0]
    return state._replace(document=torch.where(state.document == first, state.document, NO_DOCUMENT))


def lowest_peak(feature_map: FeatureMap, dtype: torch.dtype) -> float:
    """Return the peak of no keys: the lowest number, or 0 where no key has a scale."""
    return torch.finfo(dtype).min if feature_map.has_scales else 0.0
