"""Laws of every attention about its numbers: fast = slow twin, any length, chunk, block and number of threads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import pytest
import torch
from attention_cases import (
    GATED,
    SPAN,
    attend,
    both_directions,
    documents_of,
    every_differentiable_kind,
    every_kind,
    every_kind_of_form,
    gaussian_projection,
    gradients,
    normal,
    random_qkv,
    reference_attention,
    with_gradients,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from protperf.attention import blocked, blocked_causal, exact_rows, spans
from protperf.attention.batched import batched_attention
from protperf.attention.features import FEATURE_MAPS
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
@every_kind
def test_fast_form_equals_its_slow_twin_with_all_gradients(
    kind: str, causal: bool, length: int, layout: Callable[[int], tuple[int, ...]]
):
    check_against_twin(layout(length), kind=kind, causal=causal)


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [(SPAN + 70,), (-60, 180, 1, 300, -1, 40)], ids=str)
@every_kind_of_form
def test_tokens_of_several_spans_equal_the_slow_twin_with_all_gradients(
    kind: str, causal: bool, lengths: tuple[int, ...]
):
    check_against_twin(lengths, kind=kind, causal=causal, heads=1)


def check_against_twin(lengths: tuple[int, ...], *, kind: str, causal: bool, heads: int = 2) -> None:
    found = with_all_gradients(attend, kind, causal, lengths, heads)
    wanted = slow_twin(kind if kind == GATED else kind.partition(" ")[0], causal, lengths, heads)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, **EXACT)


@cache
def slow_twin(kind: str, causal: bool, lengths: tuple[int, ...], heads: int) -> tuple[Tensor, ...]:
    """Compute once what both layouts of a kind are compared with."""
    return with_all_gradients(reference_attention, kind, causal, lengths, heads)


def with_all_gradients(
    attention: Callable[..., Tensor], kind: str, causal: bool, lengths: tuple[int, ...], heads: int
) -> tuple[Tensor, ...]:
    """Return the output of attention in float64 and its gradients to queries, keys and values."""
    documents = documents_of(*lengths)
    qkv = with_gradients(*random_qkv(documents.shape[1], dtype=torch.float64, head_dim=8, heads=heads))
    projection = gaussian_projection(16, 8).double()
    out = attention(*qkv, documents, kind=kind, causal=causal, projection=projection)
    return out.detach(), *gradients(out, qkv)


@pytest.mark.parametrize("lengths", [(7,), (2, 1, 4), (-1, 3, -2, 5)], ids=str)
@every_differentiable_kind
def test_gradients_of_the_normalised_op_are_the_derivatives(
    kind: str, causal: bool, lengths: tuple[int, ...]
):
    documents = documents_of(*lengths)
    length = documents.shape[1]
    projection = gaussian_projection(5, 3).double()
    qkv = with_gradients(*random_qkv(length, dtype=torch.float64, head_dim=3))

    def op(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, documents, kind=kind, causal=causal, projection=projection)

    assert torch.autograd.gradcheck(op, qkv, fast_mode=True)


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
