"""Laws of the random projection: Haar directions, right lengths, a pure function of its seed."""

from __future__ import annotations

import hashlib
import subprocess
import sys

import pytest
import torch

from protperf.attention import PROJECTIONS, draw_projection, projection_generator

every_projection = pytest.mark.parametrize("kind", PROJECTIONS)


def draw(num_features: int, head_dim: int, *, kind: str = "orthogonal", seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return draw_projection(num_features, head_dim, kind=kind, generator=generator)


@every_projection
@pytest.mark.parametrize(
    ("num_features", "head_dim"), [(1, 1), (5, 16), (16, 16), (64, 16), (100, 16), (3, 1)]
)
def test_projection_is_float32_on_the_cpu_in_the_shape_asked(kind: str, num_features: int, head_dim: int):
    projection = draw(num_features, head_dim, kind=kind)
    assert projection.shape == (num_features, head_dim)
    assert projection.dtype == torch.float32
    assert projection.device.type == "cpu"
    assert projection.isfinite().all()


@pytest.mark.parametrize("kind", ["orthogonal", "regularised"])
@pytest.mark.parametrize("head_dim", [8, 16, 64])
def test_rows_of_a_block_are_orthogonal(kind: str, head_dim: int):
    projection = draw(3 * head_dim + head_dim // 2, head_dim, kind=kind).double()
    directions = projection / projection.norm(dim=1, keepdim=True)
    for block in directions.split(head_dim):
        gram = block @ block.mT
        torch.testing.assert_close(gram, torch.eye(len(block), dtype=torch.float64), rtol=0.0, atol=1e-5)


def test_different_blocks_point_in_different_directions():
    one, two = draw(32, 16).split(16)
    assert (
        (one / one.norm(dim=1, keepdim=True)) @ (two / two.norm(dim=1, keepdim=True)).mT
    ).abs().max() > 0.1


@pytest.mark.parametrize("kind", ["orthogonal", "iid"])
@pytest.mark.parametrize("head_dim", [16, 64])
def test_squared_lengths_are_those_of_gaussian_vectors(kind: str, head_dim: int):
    squares = draw(20_000, head_dim, kind=kind).double().square().sum(1)
    # chi squared with K degrees of freedom: mean K, variance 2 K, fourth central moment 12 K (K + 4)
    count = len(squares)
    assert abs(squares.mean() - head_dim) < 3 * (2 * head_dim / count) ** 0.5
    spread = (12 * head_dim * (head_dim + 4) - (2 * head_dim) ** 2) / count
    assert abs(squares.var() - 2 * head_dim) < 3 * spread**0.5


def test_regularised_rows_are_sqrt_of_the_width_long():
    lengths = draw(100, 16, kind="regularised").double().norm(dim=1)
    torch.testing.assert_close(lengths, torch.full_like(lengths, 4.0), rtol=1e-6, atol=0.0)


@every_projection
def test_entries_have_mean_zero_and_variance_one_everywhere(kind: str):
    head_dim, draws = 16, 4000
    blocks = draw(draws * head_dim, head_dim, kind=kind).double().view(draws, head_dim, head_dim)
    # 256 means and 256 variances of N(0, 1)-like entries: 4.5 standard errors of each, once in 300 seeds by chance
    assert blocks.mean(0).abs().max() < 4.5 / draws**0.5
    assert (blocks.square().mean(0) - 1).abs().max() < 4.5 * 2**0.5 / draws**0.5


def test_qr_without_its_signs_fixed_would_not_have_mean_zero():
    generator = torch.Generator().manual_seed(0)
    gaussian = torch.randn(2000, 64, 64, generator=generator, dtype=torch.float64)
    unfixed = torch.linalg.qr(gaussian).Q.mT * 8.0
    fixed = draw(2000 * 64, 64).double().view(2000, 64, 64)
    diagonals = [blocks.diagonal(dim1=1, dim2=2).mean() for blocks in (unfixed, fixed)]
    assert diagonals[0] < -0.5  # measured elsewhere: -0.58
    assert abs(diagonals[1]) < 3 / (2000 * 64) ** 0.5


def test_directions_are_uniform_on_the_circle():
    angles = torch.atan2(*draw(40_000, 2).double().unbind(1))
    counts = torch.histc(angles, bins=16, min=-torch.pi, max=torch.pi)
    # the second row of a block is the first turned by a right angle, so counts vary at most twice as much as
    # independent ones (variance 2,500 each)
    assert (counts - 2500).abs().max() < 4 * 5000**0.5


def test_projection_is_a_function_of_seed_layer_and_redraw_alone():
    def drawn(*key: int) -> bytes:
        generator = projection_generator(key[0], layer=key[1], redraw=key[2])
        return draw_projection(32, 16, kind="orthogonal", generator=generator).numpy().tobytes()

    keys = [
        (seed, layer, redraw) for seed in (0, 1, 12, 2**40) for layer in (0, 1, 21) for redraw in (0, 1, 2)
    ]
    once = [drawn(*key) for key in keys]
    torch.manual_seed(5)
    assert once == [drawn(*key) for key in keys]
    assert len(set(once)) == len(keys)


def test_drawing_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    generator = projection_generator(3, layer=1, redraw=2)
    draw_projection(32, 16, kind="orthogonal", generator=generator)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.slow
def test_another_process_draws_the_same_projection():
    code = (
        "import sys, torch\n"
        "from protperf.attention import draw_projection, projection_generator\n"
        "torch.manual_seed(9)\n"
        "generator = projection_generator(7, layer=3, redraw=2)\n"
        "drawn = draw_projection(100, 64, kind='orthogonal', generator=generator)\n"
        "sys.stdout.buffer.write(drawn.numpy().tobytes())\n"
    )
    elsewhere = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout
    generator = projection_generator(7, layer=3, redraw=2)
    here = draw_projection(100, 64, kind="orthogonal", generator=generator).numpy().tobytes()
    assert hashlib.sha256(here).digest() == hashlib.sha256(elsewhere).digest()
