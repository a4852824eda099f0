"""Feature maps: phi(q).phi(k) stands for the weight of key k at query q, before the row is normalised.

A map is data, not code. With u = weights . x + bias,

    phi(x)_f = g(u_f) * exp(half_square * |x|^2 / 2)        g in {exp, relu + 1e-3, elu + 1, cos}

so whatever runs a map needs one matrix product and one of four pointwise functions. A map knows nothing of
causality, padding or packing. Everything is float32 at least. Factors common to all features of a head
(1/sqrt(M) and the like) are left out: they cancel when a row is divided by its sum.

Choosing one: `relu` is what the Performer paper means by "Performer" on proteins. Of those that estimate softmax,
`favor_hyperbolic` is the most accurate at small |q + k|, `oprf` at large; `favor` is the paper's. `elu` and
`relu_unprojected` are kernels of their own without a projection. `trig` and `rfa` have features of both signs.

Axis letters: `B` batch, `H` heads, `L` length in tokens, `K` head width, `M` rows of the projection, `F` features.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

RELU_OFFSET = 1e-3
"""Added to every ReLU feature: part of that kernel's definition (Choromanski et al. 2021, appendix A.4), not a
numerical guard: it keeps a row whose projections are all negative from having no features at all."""


@dataclass(frozen=True)
class FeatureMap:
    """One feature map for heads of one width.

    Attributes:
        weights: `(F, K)` or, where heads differ, `(H, F, K)`; any K^(-1/4) is in them.
        bias: `(F,)` or `(H, F)`; `None`: zero.
        nonlinearity: g by its name: `exp`, `relu`, `elu` or `cos` (see `nonlinear`).
        half_square: the factor of |x|^2 / 2 in the exponent.
        unit_norm: whether queries and keys are divided by their norms first.
        is_gated: whether each key comes with a logarithm of a scale besides (see `gates`).
    """

    weights: Tensor
    bias: Tensor | None
    nonlinearity: str
    half_square: float
    unit_norm: bool = False
    is_gated: bool = False

    @property
    def has_scales(self) -> bool:
        """Whether keys have scales of any size, so that a maximum must be taken off."""
        return self.nonlinearity == "exp" or self.half_square != 0.0 or self.is_gated


def logits(x: Tensor, feature_map: FeatureMap) -> Tensor:
    """Return u = weights . x + bias; where g is exp, |x|^2's part of the exponent too: then these are log phi(x).

    Args:
        x: queries or keys `(B, H, L, K)`.
        feature_map: the map.

    Returns:
        `(B, H, L, F)`, float32 (float64 for float64 `x`). Call it outside of autocast.
    """
    x = _prepared(x, feature_map)
    u = x @ feature_map.weights.to(x).mT
    if feature_map.bias is not None:
        u = u + feature_map.bias.to(x).unsqueeze(-2)
    if feature_map.nonlinearity == "exp" and feature_map.half_square != 0.0:
        u = u + feature_map.half_square / 2 * x.square().sum(-1, keepdim=True)
    return u


def nonlinear(u: Tensor, kind: str) -> Tensor:
    """Return g(u), of the shape of `u`: exp(u), max(u, 0) + `RELU_OFFSET`, elu(u) + 1 or cos(u).

    elu(u) + 1 = exp(u) below zero is computed as such: through elu it would lose all digits at u = -17 in float32.
    """
    if kind == "exp":
        return torch.exp(u)
    if kind == "relu":
        return torch.relu(u) + RELU_OFFSET
    if kind == "elu":
        return torch.relu(u) + torch.exp(u.clamp(max=0.0))
    assert kind == "cos", kind
    return torch.cos(u)


def row_log_scale(x: Tensor, feature_map: FeatureMap) -> Tensor:
    """Return what `logits` leaves out of log |phi(x)|: half_square |x|^2 / 2 where g is not exp, zero elsewhere.

    A query's scale cancels when its row is normalised; a key's does not.

    Returns:
        `(B, H, L)`, float32 (float64 for float64 `x`).
    """
    x = _prepared(x, feature_map)
    if feature_map.nonlinearity == "exp" or feature_map.half_square == 0.0:
        return x.new_zeros(x.shape[:-1])
    return feature_map.half_square / 2 * x.square().sum(-1)


def unit_vectors(x: Tensor) -> Tensor:
    """Divide vectors `(..., K)` by their norms, in float32 at least; a zero vector stays zero."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    norm = x.norm(dim=-1, keepdim=True)
    return x / norm.masked_fill(norm == 0, 1.0)


def _prepared(x: Tensor, feature_map: FeatureMap) -> Tensor:
    """Return `x` in float32 at least, of norm one where the map asks for that."""
    return unit_vectors(x) if feature_map.unit_norm else x.to(torch.promote_types(x.dtype, torch.float32))


def favor(projection: Tensor | None, *, head_dim: int, pair_square: Tensor | None = None) -> FeatureMap:
    """Positive softmax features: phi(x)_f = exp(w_f.x' - |x'|^2 / 2), x' = x / K^(1/4).

    E[phi(q).phi(k)] = M exp(q.k / sqrt(K)); relative variance exp(|q' + k'|^2) - 1 of one feature: keep norms small.
    Source: Choromanski et al. 2021, Lemma 1 and Eq. 5-7, arXiv:2009.14794, without the constant that their code
    adds after the exponential.

    Args:
        projection: `(M, K)`.
        head_dim: K.
        pair_square: not used.
    """
    weights = _scaled(projection, head_dim)
    return FeatureMap(weights, None, "exp", -(head_dim**-0.5))


def favor_hyperbolic(
    projection: Tensor | None, *, head_dim: int, pair_square: Tensor | None = None
) -> FeatureMap:
    """Positive softmax features along w and -w: 2 M features, phi(x) = exp(-|x'|^2 / 2) [exp(w.x'), exp(-w.x')].

    E[phi(q).phi(k)] = 2 M exp(q.k / sqrt(K)). The variance is that of 2 M independent `favor` features times
    1 - exp(-|q' + k'|^2): much less at small norms, about the same at large ones.
    Source: Choromanski et al. 2021, Lemma 1 (the form with cosh) and Lemma 2, arXiv:2009.14794.

    Args:
        projection: `(M, K)`.
        head_dim: K.
        pair_square: not used.
    """
    weights = _scaled(projection, head_dim)
    return FeatureMap(torch.cat((weights, -weights), dim=-2), None, "exp", -(head_dim**-0.5))


def oprf(projection: Tensor | None, *, head_dim: int, pair_square: Tensor | None = None) -> FeatureMap:
    """Optimal positive features: phi(x)_f = exp(A |w_f|^2 + sqrt(1 - 4 A) w_f.x' - |x'|^2 / 2), A from `pair_square`.

    E[phi(q).phi(k)] = M (1 - 4 A)^(-K/2) exp(q.k / sqrt(K)) for Gaussian lengths of the rows. A <= 0 keeps the
    features bounded; the gain over `favor` starts at |q' + k'|^2 of 4 or so, and features made for a norm much too
    large are worse than `favor`. With regularised lengths |w| is constant, A only stretches w, and the estimate is
    no longer one of softmax.
    Source: Likhosherstov et al. 2022, "Chefs' Random Tables", section 3, arXiv:2205.15317 (with orthogonal
    rows: FAVOR++).

    Args:
        projection: `(M, K)`, norms `chi`.
        head_dim: K.
        pair_square: `(H,)`, the mean of |q' + k'|^2 over the pairs of each head, at least 0; `None`: A = 0, `favor`.
            For causal use it must not come from the sequence itself, whose future it would tell.
    """
    if pair_square is None:
        return favor(projection, head_dim=head_dim)
    assert projection is not None
    a = optimal_positive_a(pair_square, head_dim)[:, None]  # (H, 1)
    rows = projection.to(a.dtype)
    weights = torch.sqrt(1 - 4 * a)[..., None] * _scaled(rows, head_dim)  # (H, M, K)
    bias = a * rows.square().sum(-1)  # (H, M)
    return FeatureMap(weights.to(projection.dtype), bias.to(projection.dtype), "exp", -(head_dim**-0.5))


def optimal_positive_a(pair_square: Tensor, head_dim: int) -> Tensor:
    """Return the A < 1/8 of `oprf` that makes the estimate's second moment least, for S = |q' + k'|^2.

    With phi = S / K: A = (1 - 2 phi - sqrt((2 phi + 1)^2 + 8 phi)) / 16, written without a difference of near
    numbers: -phi / 2 for small S, exactly 0 at S = 0, -phi / 4 for large.
    Source: Likhosherstov et al. 2022, section 3 (there through rho*), arXiv:2205.15317.

    Args:
        pair_square: S, at least 0, any shape.
        head_dim: K.

    Returns:
        A, never above 0, of that shape, float64 where the device has it.
    """
    phi = pair_square.to(torch.float32 if pair_square.device.type == "mps" else torch.float64) / head_dim
    root = torch.sqrt(4 * phi.square() + 12 * phi + 1)
    return -phi / (1 + (1 + 12 * phi) / (2 * phi + root))


def relu(projection: Tensor | None, *, head_dim: int, pair_square: Tensor | None = None) -> FeatureMap:
    """Generalised-kernel features: phi(x)_f = max(w_f.x', 0) + `RELU_OFFSET`, x' = x / K^(1/4).

    What the paper calls Performer on proteins; a kernel of its own (arc-cosine of order one), not an estimate of
    softmax, at home at any norm.
    Source: Choromanski et al. 2021, section 4.4 and appendix A.4, arXiv:2009.14794; there with x or x', with or
    without w; here w.x'.

    Args:
        projection: `(M, K)`.
        head_dim: K.
        pair_square: not used.
    """
    return FeatureMap(_scaled(projection, head_dim), None, "relu", 0.0)


def relu_unprojected(
    projection: Tensor | None, *, head_dim: int, pair_square: Tensor | None = None
) -> FeatureMap:
    """Generalised-kernel features of the vector itself: phi(x)_f = max(x_f, 0) + `RELU_OFFSET`, K features.

    The default of the code released with the paper, which does not say whether its protein runs had a projection.
    Source: Choromanski et al. 2021, section 4.4 and appendix A.4, arXiv:2009.14794, and their `fast_attention`.

    Args:
        projection: not used.
        head_dim: K.
        pair_square: not used.
    """
    return FeatureMap(torch.eye(head_dim), None, "relu", 0.0)


def elu(projection: Tensor | None, *, head_dim: int, pair_square: Tensor | None = None) -> FeatureMap:
    """Features of the linear transformer, x_f + 1 above zero and exp(x_f) below: K positive features.

    A kernel of its own, not an estimate of softmax, at home at any norm but where all entries of queries and keys together
    are below -87, whose weights float32 cannot hold.
    Source: Katharopoulos et al. 2020, Eq. 7, arXiv:2006.16236.

    Args:
        projection: not used.
        head_dim: K.
        pair_square: not used.
    """
    return FeatureMap(torch.eye(head_dim), None, "elu", 0.0)


def trig(projection: Tensor | None, *, head_dim: int, pair_square: Tensor | None = None) -> FeatureMap:
    """Trigonometric softmax features: phi(x) = exp(|x'|^2 / 2) [cos(w.x'), sin(w.x')], x' = x / K^(1/4).

    E[phi(q).phi(k)] = M exp(q.k / sqrt(K)). Features have both signs and a row's sum may come near zero or below,
    where its output is anything: for small norms only (q, k = 0.5 N(0, 1) is the limit for K = 16 to 64), and for
    studying what positive features cure.
    Source: Rahimi and Recht 2007; Choromanski et al. 2021, Eq. 4 and Lemma 2, arXiv:2009.14794.

    Args:
        projection: `(M, K)`.
        head_dim: K.
        pair_square: not used.
    """
    weights = _scaled(projection, head_dim)
    return FeatureMap(torch.cat((weights, weights), dim=-2), _quarter_turn(weights), "cos", head_dim**-0.5)


def rfa(projection: Tensor | None, *, head_dim: int, pair_square: Tensor | None = None) -> FeatureMap:
    """Random feature attention: phi(x) = [cos(w.x^), sin(w.x^)] of the unit vector x^ = x / |x|.

    E[phi(q).phi(k)] = M exp(q^.k^ - 1), between M exp(-2) and M, a pair's relative error in proportion to
    M^(-1/2): with M >= 128 the sums of rows stay above zero, unless a query sees none but opposite keys (a pair at
    exp(-2) is known to +- 0.7 / sqrt(M)). A fixed temperature of one: lengths of q and k say nothing. The gate of
    the paper, for the causal direction alone, is not part of this map: see `gates`.
    Source: Peng et al. 2021, section 3.1, arXiv:2103.02143.

    Args:
        projection: `(M, K)`.
        head_dim: K.
        pair_square: not used.
    """
    assert projection is not None
    return FeatureMap(
        torch.cat((projection, projection), dim=-2), _quarter_turn(projection), "cos", 0.0, unit_norm=True
    )


def _scaled(projection: Tensor | None, head_dim: int) -> Tensor:
    assert projection is not None, "this map needs a projection"
    return projection * head_dim**-0.25


def _quarter_turn(weights: Tensor) -> Tensor:
    """Return `(2 M,)`, 0 for the cosines and -pi/2, which makes sines of cosines, for the others."""
    zeros = weights.new_zeros(weights.shape[-2])
    return torch.cat((zeros, zeros - math.pi / 2))


FEATURE_MAPS: dict[str, Callable[..., FeatureMap]] = {
    "favor": favor,
    "favor_hyperbolic": favor_hyperbolic,
    "oprf": oprf,
    "relu": relu,
    "relu_unprojected": relu_unprojected,
    "elu": elu,
    "trig": trig,
    "rfa": rfa,
}
"""Name in the configuration -> its map, called as `f(projection, head_dim=K, pair_square=None)`.

Weights have the type of the projection: for results in float64 hand it one."""

UNPROJECTED = frozenset({"relu_unprojected", "elu"})
"""The maps without a random projection: K features, `projection` is ignored and may be `None`."""

SIGNED = frozenset({"trig", "rfa"})
"""The maps with features of both signs: weights may be negative and a row's sum may vanish. Use `trig` at small
norms only and `rfa` with 128 rows or more."""
