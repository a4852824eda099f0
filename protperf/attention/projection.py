"""The random projection: M directions in K dimensions, drawn as a pure function of its seed.

Two independent choices: how the directions of a block of K rows are coupled, and how long the rows are.

Axis letters: `K` head width, `M` rows of the projection.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

COUPLINGS = ("iid", "orthogonal", "simplex")
"""Directions that are independent, at right angles, or spread as the corners of a regular simplex."""

NORMS = ("chi", "regularised")
"""Lengths of independent Gaussian vectors, or all sqrt(K)."""


def draw_projection(
    num_features: int, head_dim: int, *, coupling: str, norms: str, generator: torch.Generator
) -> Tensor:
    """Draw the projection matrix, float32 `(M, K)` on the CPU.

    Whatever the coupling, each row alone is uniform in direction, and with norms `chi` each row alone is Gaussian:
    every estimate is unbiased and only its variance differs. `orthogonal` blocks: Choromanski et al. 2021, section
    2.4 and appendix B.2, arXiv:2009.14794; `simplex` blocks, whose rows meet at the cosine -1 / (K - 1): Reid et
    al. 2023, arXiv:2301.13856, the coupling with the least error for positive features; `regularised` lengths
    (SMREG): Choromanski et al. 2021, Theorem 1, which are biased, a little.

    Args:
        num_features: M, at least 1; the last block of K rows may be incomplete.
        head_dim: K, at least 1.
        coupling: one of `COUPLINGS`.
        norms: one of `NORMS`.
        generator: CPU generator; two equal generators give bit-identical matrices.
    """
    assert coupling in COUPLINGS, coupling
    assert norms in NORMS, norms
    gaussian = torch.randn(num_features, head_dim, generator=generator, dtype=torch.float64, device="cpu")
    lengths = gaussian.norm(dim=1, keepdim=True)
    if coupling == "iid":
        return (gaussian if norms == "chi" else gaussian / lengths * head_dim**0.5).float()
    blocks = _haar_blocks(-(-num_features // head_dim), head_dim, generator)
    if coupling == "simplex":
        blocks = _simplex_blocks(blocks)
    rows = blocks.reshape(-1, head_dim)[:num_features]
    return (rows * (lengths if norms == "chi" else head_dim**0.5)).float()


def _haar_blocks(num_blocks: int, head_dim: int, generator: torch.Generator) -> Tensor:
    """Draw Haar-distributed orthogonal matrices, float64 `(num_blocks, K, K)`.

    QR of a Gaussian matrix is Haar only after the signs of R's diagonal are moved into Q (Mezzadri 2007,
    arXiv:math-ph/0609050); without that the positive features are biased, which redrawing does not average out.
    """
    gaussian = torch.randn(
        num_blocks, head_dim, head_dim, generator=generator, dtype=torch.float64, device="cpu"
    )
    q, r = torch.linalg.qr(gaussian)
    return (q * torch.diagonal(r, dim1=-2, dim2=-1).sign().unsqueeze(-2)).mT


def _simplex_blocks(haar: Tensor) -> Tensor:
    """Turn orthonormal rows into unit rows of a regular simplex, `(num_blocks, K, K)`, equally spread in rotation.

    K orthonormal vectors are the corners of a regular simplex about their mean: taking the mean away and rescaling
    leaves unit vectors of pairwise cosine -1 / (K - 1) and sum zero. One direction alone (K = 1) stays as it is.
    """
    head_dim = haar.shape[-1]
    if head_dim == 1:
        return haar
    return (haar - haar.mean(dim=-2, keepdim=True)) * (head_dim / (head_dim - 1)) ** 0.5


def projection_generator(seed: int, *, layer: int, redraw: int) -> torch.Generator:
    """Return the generator of one layer's projection after `redraw` redraws.

    The projection is a function of (seed, layer, redraw) alone, so every rank, every restart and every number of
    ranks draws the same one without communication.
    """
    digest = hashlib.blake2b(f"projection {seed} {layer} {redraw}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
