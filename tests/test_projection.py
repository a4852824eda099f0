"""Laws of the random projection: uniform directions, right angles and lengths, a pure function of its seed."""

from __future__ import annotations

import hashlib
import subprocess
import sys

import pytest
import torch

from protperf.attention.projection import COUPLINGS, NORMS, draw_projection, projection_generator

every_coupling = pytest.mark.parametrize("coupling", COUPLINGS)
every_norm = pytest.mark.parametrize("norms", NORMS)


def draw(
    num_features: int,
    head_dim: int,
    *,
    coupling: str = "orthogonal",
    norms: str = "chi",
    seed: int = 0,
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return draw_projection(num_features, head_dim, coupling=coupling, norms=norms, generator=generator)


def directions_of(projection: torch.Tensor) -> torch.Tensor:
    return projection.double() / projection.double().norm(dim=1, keepdim=True)


@every_coupling
@every_norm
@pytest.mark.parametrize(
    ("num_features", "head_dim"), [(1, 1), (1, 2), (5, 16), (16, 16), (64, 16), (100, 16), (3, 1)]
)
def test_projection_is_float32_on_the_cpu_in_the_shape_asked(
    num_features: int, head_dim: int, norms: str, coupling: str
):
    projection = draw(num_features, head_dim, coupling=coupling, norms=norms)
    assert projection.shape == (num_features, head_dim)
    assert projection.dtype == torch.float32
    assert projection.device.type == "cpu"
    assert projection.isfinite().all()


@pytest.mark.parametrize("coupling", ["orthogonal", "simplex"])
@every_norm
@pytest.mark.parametrize("head_dim", [1, 2, 3, 8, 16, 64])
def test_rows_of_a_block_meet_at_the_angle_of_their_coupling(head_dim: int, norms: str, coupling: str):
    cosine = 0.0 if coupling == "orthogonal" or head_dim == 1 else -1 / (head_dim - 1)
    directions = directions_of(draw(3 * head_dim + head_dim // 2, head_dim, coupling=coupling, norms=norms))
    for block in directions.split(head_dim):
        expected = torch.full((len(block), len(block)), cosine, dtype=torch.float64).fill_diagonal_(1.0)
        torch.testing.assert_close(block @ block.mT, expected, rtol=0.0, atol=1e-6)
        if coupling == "simplex" and len(block) == head_dim > 1:
            assert block.sum(0).abs().max() < 1e-5


@every_coupling
def test_different_blocks_point_in_different_directions(coupling: str):
    one, two = directions_of(draw(32, 16, coupling=coupling)).split(16)
    cosines = one @ two.mT
    # 256 cosines of independent directions of spread 1/4: a block drawn again would give 16 of them at 1
    assert 0.1 < cosines.abs().max() < 0.95


@every_coupling
@pytest.mark.parametrize("head_dim", [1, 16, 64])
def test_squared_lengths_are_those_of_independent_gaussian_vectors(head_dim: int, coupling: str):
    squares = draw(20_000, head_dim, coupling=coupling).double().square().sum(1)
    # chi squared with K degrees of freedom: mean K, variance 2 K, fourth central moment 12 K (K + 4)
    count = len(squares)
    assert abs(squares.mean() - head_dim) < 3 * (2 * head_dim / count) ** 0.5
    spread = (12 * head_dim * (head_dim + 4) - (2 * head_dim) ** 2) / count
    assert abs(squares.var() - 2 * head_dim) < 3 * spread**0.5
    neighbours = torch.corrcoef(torch.stack((squares[:-1], squares[1:])))[0, 1]
    assert abs(neighbours) < 3 / count**0.5


@every_coupling
@pytest.mark.parametrize("head_dim", [1, 16])
def test_regularised_rows_are_sqrt_of_the_width_long(head_dim: int, coupling: str):
    lengths = draw(100, head_dim, coupling=coupling, norms="regularised").double().norm(dim=1)
    torch.testing.assert_close(lengths, torch.full_like(lengths, head_dim**0.5), rtol=1e-6, atol=0.0)


@every_coupling
@every_norm
def test_norms_leave_directions_as_they_are(norms: str, coupling: str):
    chi, other = (directions_of(draw(40, 16, coupling=coupling, norms=choice)) for choice in ("chi", norms))
    torch.testing.assert_close(chi, other, rtol=0.0, atol=1e-6)


@every_coupling
@every_norm
def test_entries_have_mean_zero_and_variance_one_everywhere(norms: str, coupling: str):
    head_dim, draws = 16, 4000
    drawn = draw(draws * head_dim, head_dim, coupling=coupling, norms=norms).double()
    blocks = drawn.view(draws, head_dim, head_dim)
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


@every_coupling
def test_directions_are_uniform_on_the_circle(coupling: str):
    angles = torch.atan2(*draw(40_000, 2, coupling=coupling).double().unbind(1))
    counts = torch.histc(angles, bins=16, min=-torch.pi, max=torch.pi)
    # the second row of a block is the first turned by a right angle or the half circle, so counts vary at most
    # twice as much as independent ones (variance 2,500 each)
    assert (counts - 2500).abs().max() < 4 * 5000**0.5


@every_coupling
def test_both_directions_of_a_line_are_as_likely(coupling: str):
    signs = draw(4000, 1, coupling=coupling, norms="regularised").double()
    assert signs.unique().tolist() == [-1.0, 1.0]
    assert abs(signs.mean()) < 3 / 4000**0.5


@pytest.mark.parametrize("head_dim", [1, 4, 16])
def test_drawn_numbers_are_used_in_the_order_that_kept_checkpoints_rely_on(head_dim: int):
    # first M x K for the lengths (the rows themselves where they are independent), then the blocks, whose columns
    # are made orthonormal one after the other (Gram and Schmidt), which is QR with a positive diagonal
    num_features = 2 * head_dim + 1
    generator = torch.Generator().manual_seed(0)
    gaussian = torch.randn(num_features, head_dim, generator=generator, dtype=torch.float64)
    assert torch.equal(draw(num_features, head_dim, coupling="iid"), gaussian.float())
    rows = []
    for block in torch.randn(3, head_dim, head_dim, generator=generator, dtype=torch.float64):
        found: list[torch.Tensor] = []
        for column in block.unbind(1):
            for _ in range(2):  # twice is enough for float64
                column = column - sum((column @ other) * other for other in found)
            found.append(column / column.norm())
        rows += found
    expected = torch.stack(rows)[:num_features] * gaussian.norm(dim=1, keepdim=True)
    torch.testing.assert_close(draw(num_features, head_dim), expected.float(), rtol=1e-5, atol=1e-6)


@every_coupling
def test_projection_is_a_function_of_seed_layer_and_redraw_alone(coupling: str):
    def drawn(*key: int) -> bytes:
        generator = projection_generator(key[0], layer=key[1], redraw=key[2])
        matrix = draw_projection(32, 16, coupling=coupling, norms="chi", generator=generator)
        return matrix.numpy().tobytes()

    keys = [
        (seed, layer, redraw) for seed in (0, 1, 12, 2**40) for layer in (0, 1, 21) for redraw in (0, 1, 2)
    ]
    once = [drawn(*key) for key in keys]
    torch.manual_seed(5)
    assert once == [drawn(*key) for key in keys]
    assert len(set(once)) == len(keys)


@every_coupling
@every_norm
def test_drawing_leaves_the_global_generator_alone(norms: str, coupling: str):
    before = torch.get_rng_state()
    generator = projection_generator(3, layer=1, redraw=2)
    draw_projection(32, 16, coupling=coupling, norms=norms, generator=generator)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.slow
@every_coupling
def test_another_process_draws_the_same_projection(coupling: str):
    code = (
        "import sys, torch\n"
        "from protperf.attention.projection import draw_projection, projection_generator\n"
        "torch.manual_seed(9)\n"
        "generator = projection_generator(7, layer=3, redraw=2)\n"
        f"drawn = draw_projection(100, 64, coupling='{coupling}', norms='chi', generator=generator)\n"
        "sys.stdout.buffer.write(drawn.numpy().tobytes())\n"
    )
    elsewhere = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout
    generator = projection_generator(7, layer=3, redraw=2)
    here = draw_projection(100, 64, coupling=coupling, norms="chi", generator=generator).numpy().tobytes()
    assert hashlib.sha256(here).digest() == hashlib.sha256(elsewhere).digest()
