"""Laws of every attention about its numbers: fast = slow twin, any length and chunk, extreme inputs, low precision."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from attention_cases import (
    Choice,
    attend,
    both_directions,
    causal_denominators,
    documents_of,
    every_kind,
    every_kind_at_any_norm,
    every_layout_of_favor,
    every_linear_kind_at_length,
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
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from protperf.attention import blocked, blocked_causal, exact_rows, spans
from protperf.attention.batched import batched_attention
from protperf.attention.features import FEATURE_MAPS, logits, nonlinear, row_log_scale
from protperf.attention.reference import reference_attention as definition
from protperf.attention.state import empty_state

PROJECTION = gaussian_projection()

# Both forms in float64 (rounding 1e-16) add up to a thousand terms of up to e^30: 1e-10 is far above their rounding
# and far below any difference in algebra.
EXACT = {"rtol": 1e-10, "atol": 1e-10}

LENGTHS = [1, 2, 63, 64, 65, 130, *(pytest.param(n, marks=pytest.mark.slow) for n in (127, 128, 129))]
LAYOUTS: dict[str, Callable[[int], tuple[int, ...]]] = {
    "one document": lambda length: (length,),
    "packed": lambda length: _cut(length, (length // 3, 1, 1, length // 2)),
    "padded and packed": lambda length: _cut(length, (-(length // 5), length // 3, -1, length // 4, -1)),
}


def _cut(length: int, parts: tuple[int, ...]) -> tuple[int, ...]:
    """Return `parts` without empty ones, completed to `length` by one more document."""
    kept: list[int] = []
    for part in parts:
        if part and sum(map(abs, kept)) + abs(part) < length:
            kept.append(part)
    return (*kept, length - sum(map(abs, kept)))


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("length", LENGTHS)
@both_directions
@every_kind
def test_fast_form_equals_its_slow_twin_with_all_gradients(
    kind: str, causal: bool, length: int, layout: Callable[[int], tuple[int, ...]]
):
    check_against_twin(documents_of(*layout(length)), kind=kind, causal=causal)


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [(1000,), (-100, 300, 1, 450, -1, 148)], ids=str)
@both_directions
@every_kind
def test_a_thousand_tokens_equal_the_slow_twin_with_all_gradients(
    kind: str, causal: bool, lengths: tuple[int, ...]
):
    check_against_twin(documents_of(*lengths), kind=kind, causal=causal, heads=1)


def check_against_twin(documents: Tensor, *, kind: str, causal: bool, heads: int = 2) -> None:
    length = documents.shape[1]
    fast = with_gradients(*random_qkv(length, dtype=torch.float64, head_dim=8, heads=heads))
    slow = with_gradients(*fast)
    choice = {"kind": kind, "causal": causal, "projection": gaussian_projection(16, 8).double()}
    found, wanted = attend(*fast, documents, **choice), reference_attention(*slow, documents, **choice)
    torch.testing.assert_close(found, wanted, **EXACT)
    for one, other in zip(gradients(found, fast), gradients(wanted, slow), strict=True):
        torch.testing.assert_close(one, other, **EXACT)


@pytest.mark.parametrize("lengths", [(7,), (2, 1, 4), (-1, 3, -2, 5)], ids=str)
@both_directions
@every_linear_kind_at_length
def test_gradients_of_the_normalised_op_are_the_derivatives(
    kind: str, causal: bool, lengths: tuple[int, ...]
):
    documents = documents_of(*lengths)
    length = documents.shape[1]
    projection = gaussian_projection(5, 3).double()
    qkv = with_gradients(*random_qkv(length, dtype=torch.float64, head_dim=3))

    def op(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, documents, kind=kind, causal=causal, projection=projection)

    assert torch.autograd.gradcheck(op, qkv)


layouts = st.lists(
    st.integers(1, 12).flatmap(lambda n: st.sampled_from([n, n, n, -n])), min_size=1, max_size=7
)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(layout=layouts, chunk=st.integers(1, 40), seed=st.integers(0, 1000), causal=st.booleans())
def test_no_length_layout_or_chunk_length_matters_to_the_batched_form(
    layout: list[int], chunk: int, seed: int, causal: bool
):
    documents = documents_of(*layout)
    projection = gaussian_projection(6, 4).double()
    qkv = random_qkv(documents.shape[1], seed=seed, scale=2.0, heads=1, head_dim=4, dtype=torch.float64)
    feature_map = FEATURE_MAPS["favor"](projection, head_dim=4)
    without_padding = tuple(x.masked_fill((documents == -1)[:, None, :, None], 0.0) for x in qkv)
    found = batched_attention(*without_padding, documents, feature_map, causal=causal, chunk=chunk)
    wanted = reference_attention(*qkv, documents, kind="favor", causal=causal, projection=projection)
    torch.testing.assert_close(found, wanted, **EXACT)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    layout=layouts,
    chunk=st.integers(1, 12),
    span=st.integers(1, 30),
    rows=st.integers(1, 60),
    seed=st.integers(0, 1000),
    kind=st.sampled_from(["favor", "relu", "trig"]),
    causal=st.booleans(),
)
def test_no_length_layout_or_block_matters_to_the_blocked_form(
    layout: list[int], chunk: int, span: int, rows: int, seed: int, kind: str, causal: bool
):
    documents = documents_of(*layout)
    projection = gaussian_projection(6, 4).double()
    scale = 0.5 if kind == "trig" else 2.0
    fast = with_gradients(
        *random_qkv(documents.shape[1], seed=seed, scale=scale, heads=2, head_dim=4, dtype=torch.float64)
    )
    slow = with_gradients(*fast)
    feature_map = FEATURE_MAPS[kind](projection, head_dim=4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spans, "CHUNK", chunk)
        for module in (spans, blocked, blocked_causal):
            patch.setattr(module, "SPAN", span)
        patch.setattr(blocked, "ROWS", rows)
        found = blocked.blocked_attention(*fast, documents, feature_map, causal=causal)
        by_blocks = gradients(found, fast)
    wanted = definition(*slow, documents, kind=kind, causal=causal, projection=projection)
    wanted = wanted + 0.0 * sum(x.sum() for x in slow)  # where all is padding nothing depends on them
    torch.testing.assert_close(found, wanted, **EXACT)
    for one, other in zip(by_blocks, gradients(wanted, slow), strict=True):
        torch.testing.assert_close(one, other, **EXACT)


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
@both_directions
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
@both_directions
@every_kind_at_any_norm
def test_extreme_inputs_in_bfloat16_equal_float64(kind: str, causal: bool, case: str):
    fast = with_gradients(*extreme_qk(case), dtype=torch.bfloat16)
    choice = {"kind": kind, "causal": causal, "projection": gaussian_projection(64, 64)}
    found = attend(*fast, **choice)
    wanted = reference_attention(*(x.detach().double() for x in fast), **choice)
    assert found.dtype == torch.bfloat16
    assert relative_error(found, wanted) < 2e-2
    assert all(gradient.isfinite().all() for gradient in gradients(found, fast))


@both_directions
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
@both_directions
@every_kind
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
    results = []
    for i in rows:
        seen = slice(0, i + 1 if causal else None)
        query = q[:, :, i : i + 1].expand_as(k[:, :, seen])
        results.append(reference_row(kind, (query, k[:, :, seen], v[:, :, seen]), projection.double()))
    return torch.stack(results, dim=2)


@pytest.mark.slow
@both_directions
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
@both_directions
@every_kind
def test_float32_at_8192_tokens_equals_float64(kind: str, causal: bool):
    qkv = random_qkv(8192, heads=1)
    out = attend(*qkv, kind=kind, causal=causal, projection=PROJECTION)
    rows = [0, 1, 127, 128, 4095, 4096, 8191]
    wanted = rows_in_float64(kind, qkv, rows, causal=causal, projection=PROJECTION)
    assert relative_error(out[:, :, rows], wanted) < 1e-5


@both_directions
@every_kind
def test_attention_is_the_same_on_views_as_on_copies(kind: str, causal: bool):
    stacked = normal(2, 90, 3, 2, 16, seed=4).permute(2, 0, 3, 1, 4)
    choice = {"kind": kind, "causal": causal, "projection": PROJECTION}
    views = attend(*stacked, **choice)
    torch.testing.assert_close(views, attend(*stacked.contiguous(), **choice), rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("lengths", [(9000,), (4000, 1, 3000, -500, 1200)], ids=str)
@pytest.mark.parametrize("kind", ["favor blocked", "relu blocked"])
@both_directions
def test_no_number_of_threads_matters(kind: str, causal: bool, lengths: tuple[int, ...]):
    documents = documents_of(*lengths)
    qkv = with_gradients(*random_qkv(documents.shape[1], heads=4, head_dim=8, scale=0.5))
    results, threads = [], torch.get_num_threads()
    for count in (1, 2, 3, 16):
        torch.set_num_threads(count)
        out = attend(*qkv, documents, kind=kind, causal=causal, projection=gaussian_projection(16, 8))
        results.append((out, *gradients(out, qkv)))
        assert torch.get_num_threads() == count
    torch.set_num_threads(threads)
    for result in results[1:]:
        for one, other in zip(result, results[0], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["favor", "relu", "trig"])
@both_directions
def test_a_projection_that_is_learned_gets_its_gradient(kind: str, causal: bool):
    documents = documents_of(30, -4, 41)
    q, k, v = random_qkv(75, scale=0.25, dtype=torch.float64)
    given = gaussian_projection(256).double()
    results = []
    for compute in (attend, reference_attention):
        projection = given.clone().requires_grad_()
        out = compute(q, k, v, documents, kind=kind, causal=causal, projection=projection)
        results.append(gradients(out, (projection,))[0])
    torch.testing.assert_close(*results, **EXACT)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
@both_directions
def test_threads_are_in_the_mode_of_the_caller_and_leave_the_default_as_it_was(causal: bool, mode: Any):
    q, k, v = random_qkv(9000, heads=4, head_dim=8)
    choice = {"kind": "favor blocked", "causal": causal, "projection": gaussian_projection(16, 8)}
    wanted, threads = attend(q, k, v, **choice), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with mode():
            found = attend(q, k, v, **choice)
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(torch.get_num_threads).result() == 2
    finally:
        torch.set_num_threads(threads)
    torch.testing.assert_close(found, wanted, rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("kind", ["favor blocked", "favor batched", "relu blocked", "softmax"])
@both_directions
def test_nothing_is_attended_to_nothing(kind: str, causal: bool):
    qkv = with_gradients(*random_qkv(0))
    out = attend(*qkv, kind=kind, causal=causal, projection=PROJECTION)
    assert out.shape == (1, 2, 0, 16)


@pytest.mark.parametrize("layout", ["blocked", "batched"])
@pytest.mark.parametrize("kind", ["favor", "relu", "trig"])
@both_directions
def test_operators_keep_the_rules_of_the_dispatcher(kind: str, causal: bool, layout: str):
    documents = documents_of(70, -3, 30)
    q, k, v = with_gradients(*random_qkv(103, scale=0.25))
    feature_map = FEATURE_MAPS[kind](gaussian_projection(256), head_dim=16)
    weights = feature_map.weights.expand(2, -1, -1)
    bias = (
        torch.zeros(2, len(feature_map.weights))
        if feature_map.bias is None
        else feature_map.bias.expand(2, -1)
    )
    if layout == "blocked":
        numbers = (feature_map.nonlinearity, feature_map.half_square, causal, 1024, None, None, None)
        torch.library.opcheck(blocked._attention, (q, k, v, documents, weights, bias, *numbers))
    elif causal and kind == "favor":
        state = empty_state(k, v, feature_map)
        given = (v.detach(), torch.ones(1, 2, 103), q, k, v, documents, weights, bias)
        torch.library.opcheck(exact_rows._with_exact_rows, (*given, feature_map.half_square, *state))


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


def test_an_unknown_kind_is_named_with_what_there_is():
    with pytest.raises(ValueError, match="'favr' has no feature map; allowed: favor, favor_hyperbolic"):
        attend(*random_qkv(3), kind="favr", causal=True)


def test_an_error_in_a_thread_reaches_the_caller():
    q, k, v = random_qkv(9000, heads=4, head_dim=8)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(RuntimeError):
            attend(q, k, v, kind="favor blocked", causal=False, projection=gaussian_projection(16, 9))
    finally:
        torch.set_num_threads(threads)
