"""What causal linear attention carries from one segment of a sequence to the next.

Axis letters: `B` batch, `H` heads, `K` head width, `M` features.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

NO_DOCUMENT = -2
"""The document number of a state before the first token: no token has it."""


class CausalState(NamedTuple):
    """What causal attention keeps of the tokens read so far: constant in their number.

    Attributes:
        sums: `(B, H, M, K + 1)` sum of exp(log phi(k_j) - peak) [v_j, 1] over the current document.
        peak: `(B, H, M)` maximum of each key log-feature over the current document: one a feature, so that no
            feature underflows for a later query that asks for it alone.
        document: `(B,)` number of the current document.
    """

    sums: Tensor
    peak: Tensor
    document: Tensor

    def of_head(self, b: int, h: int) -> CausalState:
        """Return one head's state: `(M, K + 1)`, `(M,)` and a scalar."""
        return CausalState(self.sums[b, h], self.peak[b, h], self.document[b])
