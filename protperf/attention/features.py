"""Positive feature maps, as logarithms: phi(q).phi(k) stands for an attention weight before normalisation.

A feature map knows nothing of causality, padding or packing. All return log phi(x) in float32 (float64 for float64
input); the exponential is taken in `linear`, after a maximum has been subtracted, and nothing is added after it.

Axis letters: `B` batch, `H` heads, `L` length in tokens, `K` head width, `M` rows of the projection.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

RELU_OFFSET = 1e-3
"""Added to every ReLU feature: part of that kernel's definition (Choromanski et al. 2021, appendix A.4), not a
numerical guard: it keeps a row whose projections are all negative from having no features at all."""


def _scale_and_project(x: Tensor, projection: Tensor) -> tuple[Tensor, Tensor]:
    """Return x' = x / K^(1/4), `(B, H, L, K)`, and its projections w.x', `(B, H, L, M)`, never below float32."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    scaled = x.to(dtype) * x.shape[-1] ** -0.25
    return scaled, scaled @ projection.to(dtype).mT


def favor_log_features(x: Tensor, projection: Tensor) -> Tensor:
    """Positive softmax features: log phi(x)_f = w_f.x' - |x'|^2 / 2 - log(M) / 2.

    E[phi(q).phi(k)] = exp(q.k / sqrt(K)). Source: Choromanski et al. 2021, Lemma 1 and Eq. 5-7, arXiv:2009.14794,
    without the constant that their code adds after the exponential.

    Args:
        x: queries or keys `(B, H, L, K)`.
        projection: `(M, K)`.

    Returns:
        `(B, H, L, M)`.
    """
    scaled, projected = _scale_and_project(x, projection)
    half_square = scaled.square().sum(-1, keepdim=True) / 2
    return projected - half_square - math.log(projection.shape[0]) / 2


def favor_hyperbolic_log_features(x: Tensor, projection: Tensor) -> Tensor:
    """Positive softmax features along w and -w: `(B, H, L, 2 M)`; half the variance or less at 2 M features.

    Source: Choromanski et al. 2021, Lemma 2 (the estimator with cosh), arXiv:2009.14794.
    """
    scaled, projected = _scale_and_project(x, projection)
    half_square = scaled.square().sum(-1, keepdim=True) / 2
    both = torch.cat((projected, -projected), dim=-1)
    return both - half_square - math.log(2 * projection.shape[0]) / 2


def relu_log_features(x: Tensor, projection: Tensor) -> Tensor:
    """Generalised-kernel features: phi(x)_f = max(w_f.x', 0) + `RELU_OFFSET`, `(B, H, L, M)`.

    What the paper calls Performer on proteins. Source: Choromanski et al. 2021, section 4.4 and appendix A.4,
    arXiv:2009.14794; there with x or x', with or without w; here always w.x'.
    """
    _, projected = _scale_and_project(x, projection)
    return torch.log(torch.relu(projected) + RELU_OFFSET)


FEATURE_MAPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "favor": favor_log_features,
    "favor_hyperbolic": favor_hyperbolic_log_features,
    "relu": relu_log_features,
}
"""Name in the configuration -> feature map (x, projection) -> log features."""
