"""Where a token stands in its protein, as the model takes it: rotations of queries and keys, or sinusoids added.

Axis letters: `B` batch, `L` length in tokens, `D` model width, `H` heads, `K` head width.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROPE_BASE = 10_000.0


def rope_frequencies(head_dim: int, rounding: str = "exact", *, device: torch.device | None = None) -> Tensor:
    """Return by how much a rotary angle grows from one token to the next, float32 `(K / 2,)`.

    Args:
        head_dim: K, even.
        rounding: `exact`, or `half`: each rounded to float16.
        device: where it is made.
    """
    frequencies = ROPE_BASE ** (-torch.arange(0, head_dim, 2, device=device) / head_dim)
    return frequencies.half().float() if rounding == "half" else frequencies


def rotations(places: Tensor, head_dim: int, rounding: str = "exact") -> tuple[Tensor, Tensor]:
    """Return cosines and sines of the rotary angles, float32 `(B, 1, L, K / 2)` each.

    Source: Su et al. 2021, RoFormer, arXiv:2104.09864, Eq. 15; here feature i turns with feature i + K / 2.

    Args:
        places: position of each token in its document, int64 `(B, L)`.
        head_dim: K, even.
        rounding: of the frequencies, see `rope_frequencies`.
    """
    frequencies = rope_frequencies(head_dim, rounding, device=places.device)
    angles = places.unsqueeze(-1) * frequencies
    return angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Turn queries or keys `(B, H, L, K)` by their position; norms stay, so feature maps keep their variance."""
    cosine, sine = rotation
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)
    return turned.to(x.dtype)


def sinusoids(places: Tensor, model_dim: int) -> Tensor:
    """Return sinusoidal position embeddings, float32 `(B, L, D)`, for any length.

    Source: Vaswani et al. 2017, section 3.5, arXiv:1706.03762.
    """
    even = torch.arange(0, model_dim, 2, device=places.device)
    angles = places.unsqueeze(-1) * ROPE_BASE ** (-even / model_dim)
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2)[..., :model_dim]
