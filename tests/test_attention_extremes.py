"""Laws of every attention at the edge of numbers: extreme inputs, rows that underflow, low precision, 8,192 tokens."""

from __future__ import annotations

import pytest
import torch
from attention_cases import (
    GATED,
    Choice,
    attend,
    both_directions,
    causal_denominators,
    documents_of,
    every_dense_kind,
    every_kind,
    every_kind_at_any_norm,
    every_layout_of_favor,
    every_underflowing_kind,
    gaussian_projection,
    gradients,
    normal,
    random_qkv,
    reference_attention,
    relative_error,
    underflowing,
    with_gradients,
)
from torch import Tensor

from protperf.attention.features import FEATURE_MAPS, logits, nonlinear, row_log_scale

PROJECTION = gaussian_projection()


def extreme_qk(case: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k, v `(1, 2, 150, 64)` of one of the extreme cases."""
    q, k, v = random_qkv(150, head_dim=64)
    if case == "keys with an entry of 100":
        k[:, :, ::5, 3] = 100.0
    elif case == "one key with an entry of -100":
        k[:, :, 70, 0] = -100.0
    elif case == "keys of |k|^2 / 2 = 500":
        k = k * (1000**0.5 / k.norm(dim=-1, keepdim=True))
    elif case == "scaled keys of |k|^2 / 2 = 500":
        k = k * (1000**0.5 * 64**0.25 / k.norm(dim=-1, keepdim=True))
    elif case == "all features of all keys underflow without a maximum":
        k = k * 10.0
    elif case == "keys growing along the sequence":
        k = k * torch.linspace(0.01, 6.0, 150).unsqueeze(-1)
    elif case == "keys shrinking along the sequence":
        k = k * torch.linspace(6.0, 0.01, 150).unsqueeze(-1)
    elif case == "q, k ~ 4 N(0, 1)":
        q, k = 4 * q, 4 * k
    else:
        q, k = q / 100, k / 100
    return q, k, v


EXTREMES = [
    "keys with an entry of 100",
    "one key with an entry of -100",
    "keys of |k|^2 / 2 = 500",
    "scaled keys of |k|^2 / 2 = 500",
    "all features of all keys underflow without a maximum",
    "keys growing along the sequence",
    "keys shrinking along the sequence",
    "q, k ~ 4 N(0, 1)",
    "q, k ~ 0.01 N(0, 1)",
]


@pytest.mark.parametrize("case", EXTREMES)
@every_kind_at_any_norm
def test_extreme_inputs_in_float32_equal_float64(kind: str, causal: bool, case: str):
    projection = gaussian_projection(64, 64)
    fast = with_gradients(*extreme_qk(case))
    slow = with_gradients(*fast, dtype=torch.float64)
    choice = {"kind": kind, "causal": causal, "projection": projection}
    found, wanted = attend(*fast, **choice), reference_attention(*slow, **choice)
    assert relative_error(found, wanted) < 1e-5
    for one, other in zip(gradients(found, fast), gradients(wanted, slow), strict=True):
        assert one.isfinite().all()
        # a gradient is a difference of numbers as large as |x| times itself: one more digit is lost
        assert relative_error(one, other) < 1e-4


@pytest.mark.parametrize("case", EXTREMES[::2])
@every_kind_at_any_norm
def test_extreme_inputs_in_bfloat16_equal_float64(kind: str, causal: bool, case: str):
    fast = with_gradients(*extreme_qk(case), dtype=torch.bfloat16)
    choice = {"kind": kind, "causal": causal, "projection": gaussian_projection(64, 64)}
    found = attend(*fast, **choice)
    wanted = reference_attention(*(x.detach().double() for x in fast), **choice)
    assert found.dtype == torch.bfloat16
    assert relative_error(found, wanted) < 2e-2
    assert all(gradient.isfinite().all() for gradient in gradients(found, fast))


@every_kind_at_any_norm
def test_bfloat16_autocast_leaves_attention_in_float32(kind: str, causal: bool):
    q, k, v = with_gradients(*extreme_qk("q, k ~ 4 N(0, 1)"))
    choice = {"kind": kind, "causal": causal, "projection": gaussian_projection(64, 64)}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = attend(q, k, v, **choice)
    wanted = reference_attention(*(x.detach().double() for x in (q, k, v)), **choice)
    assert relative_error(found, wanted) < 1e-5  # bfloat16 anywhere would cost 4e-3
    assert all(gradient.isfinite().all() for gradient in gradients(found, (q, k, v)))


@every_underflowing_kind
def test_rows_whose_denominator_underflows_equal_float64_with_gradients(kind: str):
    q, k, v, projection = underflowing(150)
    low = causal_denominators(q, k, projection) < 1e-38
    assert low.any()
    fast, slow = with_gradients(q, k, v), with_gradients(q, k, v, dtype=torch.float64)
    choice = {"kind": kind, "causal": True, "projection": projection}
    found, wanted = attend(*fast, **choice), reference_attention(*slow, **choice)
    assert relative_error(found, wanted) < 1e-5
    assert relative_error(found[low], wanted[low]) < 1e-5
    for one, other in zip(gradients(found, fast), gradients(wanted, slow), strict=True):
        assert one.isfinite().all()
        # nearly all rows are one-hot: their gradients cancel to rounding, which stands against the few that are not
        assert relative_error(one, other) < 1e-3


@pytest.mark.parametrize("scale", [12.0, 24.0, 40.0])
@pytest.mark.parametrize("seed", range(3))
@every_layout_of_favor
def test_gradients_stay_finite_however_far_denominators_underflow(kind: str, seed: int, scale: float):
    q, k, v = with_gradients(*random_qkv(100, seed=seed, scale=scale, head_dim=64))
    out = attend(q, k, v, kind=kind, causal=True, projection=gaussian_projection(128, 64))
    assert out.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in gradients(out, (q, k, v)))


@pytest.mark.parametrize("lengths", [None, (40, 60)], ids=str)
@every_dense_kind
def test_a_value_that_is_not_a_number_is_never_hidden(
    kind: str, causal: bool, lengths: tuple[int, ...] | None
):
    documents = None if lengths is None else documents_of(*lengths)
    for number in range(3):
        qkv = random_qkv(100)
        qkv[number][:, :, 50] = float("nan")
        out = attend(*qkv, documents, kind=kind, causal=causal, projection=PROJECTION)
        seen_by = slice(50, 51) if number == 0 else slice(50, 100)
        assert out[:, :, seen_by].isnan().all()


def reference_row(kind: str, qkv: tuple[Tensor, Tensor, Tensor], projection: Tensor) -> Tensor:
    """Return attention of the last query to all keys by the definition, `(1, H, K)`."""
    choice = Choice(kind, projection, *qkv[:2])
    q, k, v = choice.q[:, :, -1:], choice.k, qkv[2]
    if choice.kind == "softmax":
        return ((q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v)[:, :, 0]
    feature_map = FEATURE_MAPS[choice.kind](
        choice.projection, head_dim=q.shape[-1], pair_square=choice.pair_square
    )
    if feature_map.nonlinearity == "exp":
        weights = torch.logsumexp(logits(q, feature_map) + logits(k, feature_map), -1).softmax(-1)
        return torch.einsum("bhj,bhjk->bhk", weights, v)
    phi_q, phi_k = (nonlinear(logits(x, feature_map), feature_map.nonlinearity) for x in (q, k))
    weights = (phi_q * phi_k).sum(-1) * row_log_scale(k, feature_map).exp()
    return torch.einsum("bhj,bhjk->bhk", weights / weights.sum(-1, keepdim=True), v)


def rows_in_float64(
    kind: str, qkv: tuple[Tensor, ...], rows: list[int], *, causal: bool, projection: Tensor
) -> Tensor:
    """Return a few rows of attention `(1, H, R, K)` by the definition, the rest of the queries left out."""
    q, k, v = (x.double() for x in qkv)
    if kind in ("linformer", "reformer", GATED):
        return reference_attention(q, k, v, kind=kind, causal=causal, projection=projection)[:, :, rows]
    results = []
    for i in rows:
        seen = slice(0, i + 1 if causal else None)
        query = q[:, :, i : i + 1].expand_as(k[:, :, seen])
        results.append(reference_row(kind, (query, k[:, :, seen], v[:, :, seen]), projection.double()))
    return torch.stack(results, dim=2)


@pytest.mark.slow
@every_kind
def test_float16_at_8192_tokens_is_finite_and_right(kind: str, causal: bool):
    qkv = with_gradients(*random_qkv(8192, heads=1), dtype=torch.float16)
    out = attend(*qkv, kind=kind, causal=causal, projection=PROJECTION)
    assert out.dtype == torch.float16
    assert out.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in gradients(out, qkv))
    rows = [0, 1, 127, 128, 4095, 4096, 8191]
    detached = tuple(x.detach() for x in qkv)
    wanted = rows_in_float64(kind, detached, rows, causal=causal, projection=PROJECTION)
    # inputs are taken as they are: what is left is the rounding of the result, 2^-11, and of fused float16 softmax
    assert relative_error(out[:, :, rows], wanted) < 2e-3


@pytest.mark.slow
@every_kind
def test_float32_at_8192_tokens_equals_float64(kind: str, causal: bool):
    qkv = random_qkv(8192, heads=1)
    out = attend(*qkv, kind=kind, causal=causal, projection=PROJECTION)
    rows = [0, 1, 127, 128, 4095, 4096, 8191]
    wanted = rows_in_float64(kind, qkv, rows, causal=causal, projection=PROJECTION)
    assert relative_error(out[:, :, rows], wanted) < 1e-5


@pytest.mark.parametrize("kind", ["favor blocked", "favor batched", "relu blocked"])
@both_directions
def test_gradients_in_bfloat16_are_right_where_values_have_an_offset(kind: str, causal: bool):
    q, k, v = (x.to(torch.bfloat16) for x in random_qkv(200, scale=0.5))
    v = v + 10 * normal(1, 2, 1, 16, seed=5).to(torch.bfloat16)
    fast = with_gradients(q, k, v)
    slow = with_gradients(*fast, dtype=torch.float64)
    choice = {"kind": kind, "causal": causal, "projection": PROJECTION}
    pairs = zip(
        gradients(attend(*fast, **choice), fast),
        gradients(reference_attention(*slow, **choice), slow),
        strict=True,
    )
    for found, wanted in pairs:
        assert relative_error(found, wanted) < 1e-2  # rounding of the result alone: 2e-3


def test_a_learned_projection_gets_its_gradient_from_rows_that_underflow_too():
    q, k, v, given = underflowing(80)
    projection = given[:64].clone().requires_grad_()
    exact = given[:64].double().requires_grad_()
    out = attend(q, k, v, kind="favor batched", causal=True, projection=projection)
    wanted = reference_attention(
        q.double(), k.double(), v.double(), kind="favor", causal=True, projection=exact
    )
    (found,), (right,) = gradients(out, (projection,)), gradients(wanted, (exact,))
    assert relative_error(found, right) < 1e-3
