"""Laws of causal attention read in pieces: any split equals the whole, with gradients, at constant size."""

from __future__ import annotations

import pytest
import torch
from attention_cases import (
    EDGE,
    GATED,
    attend,
    attend_onward,
    causal_denominators,
    documents_of,
    every_causal_model_kind,
    every_linear_kind,
    every_linear_kind_at_length,
    every_linear_kind_in_layouts,
    every_underflowing_kind,
    gaussian_projection,
    gradients,
    random_qkv,
    reference_attention,
    relative_error,
    underflowing,
    with_gradients,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from protperf.attention import CausalState

PROJECTION = gaussian_projection()
TOLERANCE = {"rtol": 0.0, "atol": 1e-5}  # outputs are means of values ~ N(0, 1)


def in_pieces(
    qkv: tuple[Tensor, ...],
    documents: Tensor | None,
    lengths: list[int],
    *,
    kind: str,
    projection: Tensor = PROJECTION,
) -> tuple[Tensor, list[CausalState]]:
    """Return the outputs of all pieces joined, and the state after each."""
    outs, states, state, start = [], [], None, 0
    for length in lengths:
        piece = slice(start, start + length)
        part = None if documents is None else documents[:, piece]
        out, state = attend_onward(
            *(x[:, :, piece] for x in qkv), part, kind=kind, projection=projection, state=state
        )
        outs.append(out)
        states.append(state)
        start += length
    assert start == qkv[0].shape[2]
    return torch.cat(outs, dim=2), states


@pytest.mark.parametrize("layout", [None, (-10, 50, -3, 237)], ids=str)
@every_linear_kind_at_length
def test_token_by_token_equals_the_parallel_form(kind: str, layout: tuple[int, ...] | None):
    documents = None if layout is None else documents_of(*layout)
    qkv = random_qkv(300)
    whole = attend(*qkv, documents, kind=kind, causal=True, projection=PROJECTION)
    found, states = in_pieces(qkv, documents, [1] * 300, kind=kind)
    torch.testing.assert_close(found, whole, **TOLERANCE)
    shapes = {tuple(x.shape for x in state) for state in states}
    assert len(shapes) == 1
    assert {tuple(x.dtype for x in state)[:2] for state in states} == {(torch.float32, torch.float32)}


@pytest.mark.parametrize("layout", [(1, 40, EDGE - 41, 60, 1, 111), (-10, 50, -3, 237)], ids=str)
@every_causal_model_kind
def test_the_form_for_single_tokens_equals_the_parallel_form(kind: str, layout: tuple[int, ...]):
    documents = documents_of(*layout)
    qkv = random_qkv(300)
    whole = attend(*qkv, documents, kind=kind, causal=True, projection=PROJECTION)
    found, _ = in_pieces(qkv, documents, [1] * 300, kind=kind)
    torch.testing.assert_close(found, whole, **TOLERANCE)


@pytest.mark.parametrize("layout", [None, (60, 40), (-7, 90, -3), (100,)], ids=str)
@pytest.mark.parametrize("kind", ["softmax", "reformer"])
def test_what_keeps_all_tokens_keeps_those_of_the_current_document_alone(
    kind: str, layout: tuple[int, ...] | None
):
    documents = None if layout is None else documents_of(*layout)
    qkv = random_qkv(100, batch=1)
    whole = attend(*qkv, documents, kind=kind, causal=True)
    found, states = in_pieces(qkv, documents, [30, 1, 50, 19], kind=kind)
    torch.testing.assert_close(found, whole, **TOLERANCE)
    last = 100 if documents is None else int((documents == documents[0, -1]).sum())
    if layout != (-7, 90, -3):
        assert states[-1].keys.shape[2] == last


@every_linear_kind
def test_state_holds_no_more_memory_than_its_size(kind: str):
    _, (state,) = in_pieces(random_qkv(300), None, [300], kind=kind)
    for tensor in state:
        assert tensor.untyped_storage().nbytes() <= 2 * tensor.numel() * tensor.element_size()


layouts = st.lists(
    st.integers(1, 90).flatmap(lambda n: st.sampled_from([n, n, n, -n])), min_size=1, max_size=6
)


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(layout=layouts, data=st.data(), scale=st.sampled_from([1.0, 4.0]))
def test_sequence_may_be_split_anywhere(layout: list[int], data: st.DataObject, scale: float):
    documents = documents_of(*layout)
    length = documents.shape[1]
    cuts = sorted(data.draw(st.sets(st.integers(1, length), max_size=4)) | {length})
    lengths = [after - before for before, after in zip([0, *cuts], cuts, strict=False)]
    qkv = random_qkv(length, scale=scale)
    whole = attend(*qkv, documents, kind="favor", causal=True, projection=PROJECTION)
    found, _ = in_pieces(qkv, documents, lengths, kind="favor")
    torch.testing.assert_close(found, whole, **TOLERANCE)


@pytest.mark.parametrize("layout", [None, (100, 90, 110), (-10, 180, -5, 105)], ids=str)
@pytest.mark.parametrize("lengths", [[150, 150], [1, 127, 1, 171], [128, 128, 44]], ids=str)
@every_linear_kind
def test_gradients_flow_through_the_state(kind: str, lengths: list[int], layout: tuple[int, ...] | None):
    documents = None if layout is None else documents_of(*layout)
    qkv = with_gradients(*random_qkv(300))
    whole = attend(*qkv, documents, kind=kind, causal=True, projection=PROJECTION)
    found, _ = in_pieces(qkv, documents, lengths, kind=kind)
    for one, other in zip(gradients(found, qkv), gradients(whole, qkv), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", [(7,), (2, 3, 2)], ids=str)
@every_linear_kind_at_length
def test_gradients_through_the_state_are_the_derivatives(kind: str, layout: tuple[int, ...]):
    documents = documents_of(*layout)
    projection = gaussian_projection(5, 3).double()
    qkv = with_gradients(*random_qkv(7, heads=1, head_dim=3, dtype=torch.float64))

    def op(*qkv: Tensor) -> Tensor:
        return in_pieces(qkv, documents, [3, 1, 3], kind=kind, projection=projection)[0]

    assert torch.autograd.gradcheck(op, qkv, fast_mode=True)


def test_a_document_that_begins_after_the_split_knows_nothing_of_the_state():
    documents = documents_of(60, 40)
    q, k, v = random_qkv(100)
    alone = attend(q[:, :, 60:], k[:, :, 60:], v[:, :, 60:], kind="favor", causal=True, projection=PROJECTION)
    found, _ = in_pieces((q, 1000 * k, v), documents, [60, 40], kind="favor")
    last = attend(*(x[:, :, 60:] for x in (q, 1000 * k, v)), kind="favor", causal=True, projection=PROJECTION)
    torch.testing.assert_close(found[:, :, 60:], last, **TOLERANCE)
    first_scaled = torch.cat((1000 * k[:, :, :60], k[:, :, 60:]), dim=2)
    found, _ = in_pieces((q, first_scaled, v), documents, [60, 40], kind="favor")
    torch.testing.assert_close(found[:, :, 60:], alone, **TOLERANCE)


def test_rows_of_a_batch_go_on_with_their_own_documents():
    documents = torch.cat((documents_of(50, 50), documents_of(100), documents_of(-60, 40)))
    qkv = random_qkv(100, batch=3)
    whole = attend(*qkv, documents, kind="favor", causal=True, projection=PROJECTION)
    found, _ = in_pieces(qkv, documents, [30, 30, 40], kind="favor")
    torch.testing.assert_close(found, whole, **TOLERANCE)


def test_gradients_flow_through_single_tokens():
    qkv = with_gradients(*random_qkv(7, heads=1, head_dim=3, dtype=torch.float64))
    projection = gaussian_projection(5, 3).double()

    def op(*qkv: Tensor) -> Tensor:
        return in_pieces(qkv, None, [1] * 7, kind="favor", projection=projection)[0]

    assert torch.autograd.gradcheck(op, qkv, fast_mode=True)


@pytest.mark.parametrize("kind", ["favor", "favor_hyperbolic"])
def test_single_tokens_never_underflow(kind: str):
    q, k, v, projection = underflowing(200, seed=2)
    wanted = reference_attention(
        q.double(), k.double(), v.double(), kind=kind, causal=True, projection=projection
    )
    found, _ = in_pieces((q, k, v), None, [1] * 200, kind=kind, projection=projection)
    assert relative_error(found, wanted) < 1e-5


@pytest.mark.parametrize("lengths", [[90, 110], [128, 72], [1] * 200], ids=lambda x: str(x[:2]))
@every_underflowing_kind
def test_rows_whose_denominator_underflows_survive_a_split(kind: str, lengths: list[int]):
    q, k, v, projection = underflowing(200, seed=2)
    assert (causal_denominators(q, k, projection)[:, :, lengths[0] :] < 1e-38).any()
    fast, slow = with_gradients(q, k, v), with_gradients(q, k, v, dtype=torch.float64)
    wanted = reference_attention(*slow, kind=kind, causal=True, projection=projection)
    found, _ = in_pieces(fast, None, lengths, kind=kind, projection=projection)
    assert relative_error(found, wanted) < 1e-5
    for one, other in zip(gradients(found, fast), gradients(wanted, slow), strict=True):
        assert one.isfinite().all()
        # nearly all rows are one-hot: their gradients cancel to rounding, which stands against the few that are not
        assert relative_error(one, other) < 1e-3


@pytest.mark.parametrize("kind", ["favor blocked", "favor batched", "relu batched"])
def test_a_later_document_with_the_number_of_the_state_begins_anew(kind: str):
    qkv = random_qkv(300)
    _, (state,) = in_pieces(tuple(x[:, :, :100] for x in qkv), documents_of(100) + 1, [100], kind=kind)
    rest = tuple(x[:, :, 100:] for x in qkv)
    documents = documents_of(90, 110)  # the second of them has number 1 too
    wanted = attend(*rest, documents, kind=kind, causal=True, projection=PROJECTION)
    found, after = attend_onward(*rest, documents, kind=kind, projection=PROJECTION, state=state)
    torch.testing.assert_close(found, wanted, **TOLERANCE)
    _, alone = attend_onward(*rest, documents, kind=kind, projection=PROJECTION)
    for one, other in zip(after, alone, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["favor blocked", "favor batched", GATED, "softmax", "reformer"])
def test_a_segment_of_nothing_changes_nothing(kind: str):
    qkv = random_qkv(50)
    _, (state,) = in_pieces(qkv, None, [50], kind=kind)
    out, after = attend_onward(*(x[:, :, :0] for x in qkv), kind=kind, projection=PROJECTION, state=state)
    assert out.shape == (1, 2, 0, 16)
    assert all(torch.equal(one, other) for one, other in zip(after, state, strict=True))
    _, nothing = attend_onward(*(x[:, :, :0] for x in qkv), kind=kind, projection=PROJECTION)
    found, _ = attend_onward(
        *qkv, kind=kind, projection=PROJECTION, state=nothing.of_rows(torch.zeros(1, dtype=torch.int64))
    )
    wanted = attend(*qkv, kind=kind, causal=True, projection=PROJECTION)
    torch.testing.assert_close(found, wanted, **TOLERANCE)


@every_linear_kind_in_layouts
def test_a_state_of_one_layout_goes_on_in_the_other(kind: str):
    name, layout = kind.split()
    other = {"blocked": "batched", "batched": "blocked"}[layout]
    qkv = random_qkv(200)
    whole = attend(*qkv, kind=kind, causal=True, projection=PROJECTION)
    first, (state,) = in_pieces(tuple(x[:, :, :90] for x in qkv), None, [90], kind=kind)
    rest = tuple(x[:, :, 90:] for x in qkv)
    second, _ = attend_onward(*rest, kind=f"{name} {other}", projection=PROJECTION, state=state)
    torch.testing.assert_close(torch.cat((first, second), dim=2), whole, **TOLERANCE)
