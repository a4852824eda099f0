"""The random projection of FAVOR+: M directions in K dimensions, drawn as a pure function of its seed.

Axis letters: `K` head width, `M` random features.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

PROJECTIONS = ("orthogonal", "iid", "regularised")


def draw_projection(num_features: int, head_dim: int, *, kind: str, generator: torch.Generator) -> Tensor:
    """Draw the projection matrix, float32 `(M, K)` on the CPU.

    `orthogonal` stacks blocks of K Haar-distributed orthogonal rows, each row scaled to the length of an
    independent Gaussian vector; `regularised` scales them to sqrt(K) instead; `iid` draws Gaussian rows.

    QR of a Gaussian matrix is Haar only after the signs of R's diagonal are moved into Q (Mezzadri 2007,
    arXiv:math-ph/0609050); without that the positive features are biased, which redrawing does not average out.

    Source: Choromanski et al. 2021, section 2.4 and appendix B.2, arXiv:2009.14794 (who leave the signs open).

    Args:
        num_features: M, at least 1.
        head_dim: K, at least 1.
        kind: one of `PROJECTIONS`.
        generator: CPU generator; two equal generators give bit-identical matrices.
    """
    gaussian = torch.randn(num_features, head_dim, generator=generator, dtype=torch.float64)
    if kind == "iid":
        return gaussian.float()
    num_blocks = -(-num_features // head_dim)
    blocks = torch.randn(num_blocks, head_dim, head_dim, generator=generator, dtype=torch.float64)
    q, r = torch.linalg.qr(blocks)
    haar = q * torch.diagonal(r, dim1=-2, dim2=-1).sign().unsqueeze(-2)
    rows = haar.mT.reshape(-1, head_dim)[:num_features]
    lengths = gaussian.norm(dim=1, keepdim=True) if kind == "orthogonal" else head_dim**0.5
    return (rows * lengths).float()


def projection_generator(seed: int, *, layer: int, redraw: int) -> torch.Generator:
    """Return the generator of one layer's projection after `redraw` redraws.

    The projection is a function of (seed, layer, redraw) alone, so every rank, every restart and every number of
    ranks draws the same one without communication.
    """
    digest = hashlib.blake2b(f"projection {seed} {layer} {redraw}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
