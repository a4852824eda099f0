"""Memory is linear in length, and features (L x F numbers a head) are not kept for the backward pass."""

from __future__ import annotations

import pytest
import torch
from attention_cases import (
    both_directions,
    gaussian_projection,
    gradients,
    normal,
    random_qkv,
    with_gradients,
)
from torch import Tensor

from protperf.attention import Hashing, attend
from protperf.attention.features import FEATURE_MAPS
from protperf.bench.measure import peak_allocated

HEADS, WIDTH, FEATURES = 8, 64, 256
MIB = 2**20
CPU = torch.device("cpu")
PROJECTION = gaussian_projection(FEATURES, WIDTH)

ONE_DOCUMENT = [
    ("favor", False),
    ("relu", False),
    pytest.param("trig", False, marks=pytest.mark.slow),
    pytest.param("rfa", False, marks=pytest.mark.slow),
]
"""A kind for each way that blocks may go: peaks a feature, none, peaks a row, and unit vectors before."""


def packed(length: int) -> Tensor:
    """Return 20 documents of equal length, int32 `(1, L)`."""
    return (torch.arange(length) * 20 // length).int().unsqueeze(0)


def extra_memory(
    kind: str, length: int, *, causal: bool, layout: str, documents: Tensor | None = None
) -> int:
    """Return the peak of forward and backward beyond q, k, v, the output and all their gradients, in bytes."""
    qkv = with_gradients(*random_qkv(length, heads=HEADS, head_dim=WIDTH, scale=0.2))

    def step() -> tuple[Tensor, ...]:
        choice = {"kind": kind, "causal": causal, "projection": PROJECTION, "layout": layout}
        out = attend(*qkv, documents, **choice)  # type: ignore[arg-type]
        return gradients(out, qkv)

    step()
    results = 5 * HEADS * length * WIDTH * 4  # the output, its gradient and those of q, k and v
    return peak_allocated(step, device=CPU) - results


@pytest.mark.parametrize("is_packed", [False, True], ids=["one document", "packed"])
@pytest.mark.parametrize("kind", ["favor", "relu"])
@both_directions
def test_extra_memory_of_blocks_grows_no_faster_than_length(kind: str, causal: bool, is_packed: bool):
    choice = {"causal": causal, "layout": "blocked"}
    small, large = (
        extra_memory(kind, length, documents=packed(length) if is_packed else None, **choice)  # type: ignore[arg-type]
        for length in (2048, 4096)
    )
    assert large <= 2.1 * max(small, 8 * MIB)  # the buffers of a block do not grow at all


@pytest.mark.parametrize(("kind", "is_packed"), [*ONE_DOCUMENT, ("favor", True), ("relu", True)])
@both_directions
def test_extra_memory_of_blocks_is_far_below_that_of_kept_features(kind: str, causal: bool, is_packed: bool):
    documents = packed(8192) if is_packed else None
    extra = extra_memory(kind, 8192, causal=causal, layout="blocked", documents=documents)
    feature_map = FEATURE_MAPS[kind](PROJECTION, head_dim=WIDTH)
    features = (
        2 * HEADS * 8192 * max(FEATURES, len(feature_map.weights)) * 4
    )  # of queries and keys: 128 or 256 MiB
    copies = 4 * HEADS * 8192 * WIDTH * 4 if feature_map.unit_norm else 0  # unit vectors and their gradients
    assert extra - copies < features / 2
    if not causal and not copies:
        assert extra < 48 * MIB


@pytest.mark.parametrize(("kind", "causal"), [("linformer", False), ("reformer", True)])
def test_extra_memory_of_what_performer_is_compared_with_is_linear_in_length(kind: str, causal: bool):
    pooling = normal(2, 64, 8192, seed=0, scale=0.1)
    hashing = Hashing()
    projection = gaussian_projection(hashing.num_rows, WIDTH)
    found, kept = [], []
    for length in (2048, 4096):
        qkv = with_gradients(*random_qkv(length, heads=2, head_dim=WIDTH))

        def step(qkv: tuple[Tensor, ...] = qkv) -> None:
            choice = {"kind": kind, "causal": causal, "projection": projection, "hashing": hashing}
            out = attend(*qkv, pooling=pooling, **choice)  # type: ignore[arg-type]
            out.sum().backward()

        step()
        found.append(peak_allocated(step, device=CPU))
        with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
            attend(*qkv, kind=kind, causal=causal, projection=projection, pooling=pooling, hashing=hashing)
    assert found[1] <= 2.1 * found[0]
    assert max(x.numel() for x in kept) <= max(pooling.numel(), hashing.rounds * 2 * 4096 * (WIDTH + 1))


@pytest.mark.parametrize("layout", ["blocked", "batched"])
@pytest.mark.parametrize("kind", ["favor", "relu"])
@both_directions
def test_forward_keeps_no_features_for_the_backward_pass(kind: str, causal: bool, layout: str):
    kept: list[Tensor] = []
    qkv = with_gradients(*random_qkv(1024, heads=2, head_dim=WIDTH))
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        attend(*qkv, kind=kind, causal=causal, projection=PROJECTION, layout=layout)
    features = 2 * 1024 * FEATURES
    given = {x.data_ptr() for x in (*qkv, PROJECTION)}
    own = {x.data_ptr(): x.numel() for x in kept if x.data_ptr() not in given}
    assert sum(own.values()) < features
