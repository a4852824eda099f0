"""Inputs and oracles shared by the tests of attention: nothing here imports the code under test but names.

Axis letters: `B` batch, `H` heads, `L` length in tokens, `K` head width, `M` features.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import protperf.attention
from protperf.attention import ATTENTIONS, BIDIRECTIONAL, LAYOUTS, CausalState, Hashing
from protperf.attention.features import FEATURE_MAPS, SIGNED
from protperf.attention.reference import reference_attention as definition

DIRECTIONS = [pytest.param(False, id="bidirectional"), pytest.param(True, id="causal")]
EDGE = 128
"""A multiple of the chunk length of both layouts: lengths and boundaries below lie inside, on and beside its multiples."""

SPAN = 512
"""The rows from which on a state goes from span to span in the blocked layout."""

ANY_NORM = tuple(kind for kind in ATTENTIONS if kind != "trig")
"""Kinds for any input: the rows of `trig` may sum to zero at large norms."""

IN_EVERY_QUICK_RUN = ("favor", "relu", "trig")
"""One kind for each way that a form may go: peaks a feature, none, peaks a row; the others are in slow runs only."""


WITHOUT_LAYOUT = ("softmax", "linformer", "reformer")
"""Kinds with one form."""

GATED = "rfa gated"
"""Causal `rfa` with gates, in its only layout; they depend on the keys, so that all laws of keys are laws of gates."""


IN_LAYOUT = {
    "favor_hyperbolic": ("batched",),
    "oprf": ("blocked",),
    "relu_unprojected": ("blocked",),
    "elu": ("batched",),
    "rfa": ("blocked",),
}
"""A kind is its feature map, a layout the order of its sums: a kind that goes the way of a quick one is tested in one of them."""


def ways(kinds: tuple[str, ...]) -> list[object]:
    """Return `kind layout` for every kind, in every layout or (`IN_LAYOUT`) in one."""
    found: list[object] = [kind for kind in kinds if kind in WITHOUT_LAYOUT]
    for kind in kinds:
        for layout in IN_LAYOUT.get(kind, LAYOUTS) if kind not in WITHOUT_LAYOUT else ():
            quick = kind in IN_EVERY_QUICK_RUN
            found.append(pytest.param(f"{kind} {layout}", marks=[] if quick else pytest.mark.slow))
    return found


def costly_ways(kinds: tuple[str, ...]) -> list[object]:
    """Return the same as `ways`, most of them for slow runs only."""
    quick = {f"{kind} blocked" for kind in IN_EVERY_QUICK_RUN}
    names = [f"{kind} {layout}" for kind in kinds for layout in IN_LAYOUT.get(kind, LAYOUTS)]
    return [pytest.param(name, marks=[] if name in quick else pytest.mark.slow) for name in names]


def _causal(kinds: tuple[str, ...]) -> list[object]:
    """Return the ways of all kinds that have a causal form, gated ones too."""
    return [*ways(tuple(kind for kind in kinds if kind not in BIDIRECTIONAL)), GATED]


def in_directions(kinds: tuple[str, ...]) -> pytest.MarkDecorator:
    """Return every way of some kinds in every direction that it has, as (kind, causal)."""
    cases = []
    for causal, found in ((False, ways(kinds)), (True, _causal(kinds))):
        for way in found:
            name, marks = (way, ()) if isinstance(way, str) else (way.values[0], way.marks)  # type: ignore[attr-defined]
            direction = "causal" if causal else "bidirectional"
            cases.append(pytest.param(name, causal, marks=marks, id=f"{name}-{direction}"))
    return pytest.mark.parametrize(("kind", "causal"), cases)


LINEAR = tuple(FEATURE_MAPS)
every_kind = in_directions(ATTENTIONS)
every_normalised_kind = in_directions(tuple(kind for kind in ATTENTIONS if kind != "linformer"))
every_dense_kind = in_directions(tuple(kind for kind in ATTENTIONS if kind != "reformer"))
"""Kinds whose tokens look at all that they may see."""
every_causal_kind = pytest.mark.parametrize("kind", _causal(ATTENTIONS))
every_kind_at_any_norm = in_directions(ANY_NORM)
every_model_kind = pytest.mark.parametrize("kind", ATTENTIONS)
every_causal_model_kind = pytest.mark.parametrize(
    "kind", [kind for kind in ATTENTIONS if kind not in BIDIRECTIONAL]
)
every_model_kind_in_directions = pytest.mark.parametrize(
    ("kind", "causal"),
    [
        (kind, causal)
        for kind in ATTENTIONS
        for causal in (False, True)
        if not (causal and kind in BIDIRECTIONAL)
    ],
)
every_linear_kind = pytest.mark.parametrize("kind", [*ways(LINEAR), GATED])
every_linear_kind_in_layouts = pytest.mark.parametrize("kind", ways(LINEAR))
every_linear_kind_at_length = pytest.mark.parametrize("kind", [*costly_ways(LINEAR), GATED])
every_differentiable_kind = pytest.mark.parametrize(
    ("kind", "causal"),
    [
        *(
            pytest.param(*way.values, causal, marks=way.marks)
            for way in costly_ways(LINEAR)
            for causal in (False, True)
        ),  # type: ignore[attr-defined]
        (GATED, True),
        ("linformer", False),
        pytest.param("reformer", False, marks=pytest.mark.slow),
        pytest.param("reformer", True, marks=pytest.mark.slow),
    ],
)
every_kind_of_form = in_directions((*IN_EVERY_QUICK_RUN, *WITHOUT_LAYOUT))
every_layout_of_favor = pytest.mark.parametrize("kind", ways(("favor",)))
every_underflowing_kind = pytest.mark.parametrize("kind", ways(("favor", "favor_hyperbolic")))
both_directions = pytest.mark.parametrize("causal", DIRECTIONS)


class Choice:
    """What `attend` and its relatives are called with for a `kind layout`, in the kind's domain of use.

    Signed kinds get many rows, and `trig` small queries and keys: else rows may sum to nothing. The queries and keys of
    `reformer`, one and the same, are the sum of those given, so that all laws of either are laws of them.
    """

    def __init__(self, way: str, projection: Tensor | None, q: Tensor, k: Tensor) -> None:
        self.kind, _, layout = way.partition(" ")
        self.layout = layout if layout in LAYOUTS else None
        self.gate = gates_of(k) if way == GATED else None
        self.projection = projection
        if self.kind in SIGNED and projection is not None and len(projection) < 256:
            self.projection = gaussian_projection(256, q.shape[-1]).to(projection)
        if self.kind == "trig":
            q, k = 0.25 * q, 0.25 * k
        self.hashing = Hashing(rounds=3, buckets=4, window=20) if self.kind == "reformer" else None
        if self.hashing is not None:
            wide = torch.promote_types(q.dtype, torch.float32)  # a sum has more digits than its parts
            q = k = q.to(wide) + k.to(wide)
            if projection is None or len(projection) < self.hashing.num_rows:
                projection = gaussian_projection(self.hashing.num_rows, q.shape[-1])
            self.projection = projection[: self.hashing.num_rows]
        self.q, self.k = q, k
        self.pair_square = torch.linspace(0.5, 4.0, q.shape[1]) if self.kind == "oprf" else None
        self.pooling = (
            POOLING.to(torch.promote_types(q.dtype, torch.float32)) if self.kind == "linformer" else None
        )

    @property
    def features(self) -> dict[str, object]:
        """Return the arguments that say which attention."""
        return {
            "kind": self.kind,
            "projection": self.projection,
            "pair_square": self.pair_square,
            "gate": self.gate,
            "pooling": self.pooling,
            "hashing": self.hashing,
        }


def gates_of(k: Tensor) -> Tensor:
    """Return logits of gates between -1 and 5, `(B, H, L)`, which keys `(B, H, L, K)` decide; NaN where a key is no number."""
    k = k.to(torch.promote_types(k.dtype, torch.float32))
    real = k.isfinite().all(-1)
    gate = 2 + 3 * torch.tanh(2 * k.masked_fill(~real.unsqueeze(-1), 0.0).mean(-1))
    return torch.where(real, gate, torch.nan)


def assert_same_bits(kind: str, found: Tensor, expected: Tensor) -> None:
    """Check that two results are one; of `reformer`, which adds in another order where others change, to rounding."""
    if kind == "reformer":
        torch.testing.assert_close(found, expected, rtol=0.0, atol=2e-6)
    else:
        assert torch.equal(found, expected)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None = None,
    *,
    kind: str,
    causal: bool,
    projection: Tensor | None = None,
    heads: Tensor | None = None,
) -> Tensor:
    """Call `protperf.attention.attend` for a `kind layout`; `heads` says which heads these are."""
    c = Choice(kind, projection, q, k)
    if heads is not None and c.pair_square is not None:
        c.pair_square = c.pair_square[heads]
    return protperf.attention.attend(c.q, c.k, v, documents, causal=causal, layout=c.layout, **c.features)  # type: ignore[arg-type]


def attend_onward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None = None,
    *,
    kind: str,
    projection: Tensor,
    state: CausalState | None = None,
) -> tuple[Tensor, CausalState]:
    """Call `protperf.attention.attend_onward` for a `kind layout`."""
    c = Choice(kind, projection, q, k)
    return protperf.attention.attend_onward(
        c.q, c.k, v, documents, state=state, layout=c.layout, **c.features
    )  # type: ignore[arg-type]


def attention_rows(
    q: Tensor,
    k: Tensor,
    documents: Tensor | None = None,
    *,
    rows: Tensor,
    kind: str,
    causal: bool,
    projection: Tensor | None = None,
) -> Tensor:
    """Call `protperf.attention.attention_rows` for a `kind layout`."""
    c = Choice(kind, projection, q, k)
    return protperf.attention.attention_rows(c.q, c.k, documents, rows=rows, causal=causal, **c.features)  # type: ignore[arg-type]


def reference_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None = None,
    *,
    kind: str,
    causal: bool,
    projection: Tensor | None = None,
) -> Tensor:
    """Call the slow twin for a `kind layout`."""
    c = Choice(kind, projection, q, k)
    return definition(c.q, c.k, v, documents, causal=causal, **c.features)  # type: ignore[arg-type]


def normal(*shape: int, seed: int, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return scale * N(0, 1), drawn in float64 so that all types hold the same numbers."""
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype)


def random_qkv(
    length: int,
    *,
    seed: int = 0,
    scale: float = 1.0,
    batch: int = 1,
    heads: int = 2,
    head_dim: int = 16,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k ~ scale N(0, 1) and v ~ N(0, 1), each `(B, H, L, K)`."""
    shape = (batch, heads, length, head_dim)
    q, k = (normal(*shape, seed=3 * seed + i, scale=scale, dtype=dtype) for i in range(2))
    return q, k, normal(*shape, seed=3 * seed + 2, dtype=dtype)


def gaussian_projection(num_features: int = 32, head_dim: int = 16) -> Tensor:
    """Return Gaussian rows `(M, K)`: the laws of attention hold whatever the projection."""
    return normal(num_features, head_dim, seed=99)


def underflowing(length: int, *, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return q, k, v and a projection at 16 N(0, 1): some causal denominators are too small for float32."""
    q, k, v = random_qkv(length, seed=seed, scale=16.0, head_dim=64)
    return q, k, v, gaussian_projection(256, 64)


def causal_denominators(q: Tensor, k: Tensor, projection: Tensor) -> Tensor:
    """Return sum_j phi(q_i).phi(k_j), each maximum subtracted, for the causal form, float64 `(B, H, L)`."""
    log_q, log_k = (_favor(x.double(), projection.double()) for x in (q, k))
    log_q = log_q - log_q.amax(-1, keepdim=True)
    peak = log_k.amax(-1).cummax(-1).values
    sums = torch.logcumsumexp(log_k, dim=2)
    return torch.exp(torch.logsumexp(log_q + sums, dim=-1) - peak)


def _favor(x: Tensor, projection: Tensor) -> Tensor:
    scaled = x / x.shape[-1] ** 0.25
    return scaled @ projection.mT - scaled.square().sum(-1, keepdim=True) / 2


POOLING = normal(2, 16, 8192, seed=98, scale=0.05)
"""E and F `(2, P, N)` of `linformer`: a mixture of 400 tokens is about as long as one of them."""


def documents_of(*lengths: int) -> Tensor:
    """Return documents int32 `(1, L)`: 0, 1, 2, ... for positive lengths, padding for negative ones."""
    parts, number = [], 0
    for length in lengths:
        parts.append(torch.full((abs(length),), number if length > 0 else -1, dtype=torch.int32))
        number += length > 0
    return torch.cat(parts).unsqueeze(0)


def runs_of(documents: Tensor) -> list[slice]:
    """Return the slice of each document in documents `(1, L)`, padding left out."""
    row = documents[0].tolist()
    numbers = sorted(set(row) - {-1})
    return [slice(row.index(number), len(row) - row[::-1].index(number)) for number in numbers]


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return |found - expected| / |expected|, norms over everything."""
    expected = expected.double()
    return ((found.double() - expected).norm() / expected.norm()).item()


def gradients(out: Tensor, inputs: tuple[Tensor, ...], *, seed: int = 7) -> tuple[Tensor, ...]:
    """Return the gradients of a fixed random linear function of `out`."""
    weights = normal(*out.shape, seed=seed).to(out.dtype)
    return torch.autograd.grad(out, inputs, weights)


def with_gradients(*tensors: Tensor, dtype: torch.dtype | None = None) -> tuple[Tensor, ...]:
    """Return copies that ask for gradients, in another type where one is named."""
    return tuple(tensor.detach().to(dtype or tensor.dtype).requires_grad_() for tensor in tensors)
