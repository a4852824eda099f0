"""Laws of every attention about who may see whom: the future, padding, packing, batch mates, heads, maps."""

from __future__ import annotations

import pytest
import torch
from attention_cases import (
    EDGE,
    SPAN,
    assert_same_bits,
    attend,
    attention_rows,
    causal_denominators,
    documents_of,
    every_causal_kind,
    every_kind,
    every_normalised_kind,
    every_underflowing_kind,
    gaussian_projection,
    gradients,
    normal,
    random_qkv,
    runs_of,
    underflowing,
    ways,
    with_gradients,
)
from torch import Tensor

from protperf.attention.features import FEATURE_MAPS

PROJECTION = gaussian_projection()
CUTS = (1, 2, EDGE - 1, EDGE, EDGE + 1, 200, 2 * EDGE - 1, 2 * EDGE, 2 * EDGE + 1, 299)
LAYOUTS = {
    "boundary inside a chunk": (60, 68, 100),
    "boundaries on chunk edges": (EDGE, EDGE, 40),
    "boundaries beside chunk edges": (EDGE - 1, EDGE + 1, 1, 43),
    "documents of one token": (1, 1, 125, 1, 1, 1, 70),
    "documents longer than three chunks": (30, 3 * EDGE + 50, 3 * EDGE),
    "documents of several spans": (SPAN + 70, 2 * SPAN + 13, 30),
    "padding between and at both ends": (-5, 40, -3, 90, 60, -140, 20, -9),
}
every_layout = pytest.mark.parametrize("lengths", LAYOUTS.values(), ids=LAYOUTS.keys())

# Outputs are means of values ~ N(0, 1): 1e-5 absolute is the laws' tolerance for float32.
TOLERANCE = {"rtol": 0.0, "atol": 1e-5}


def other_suffix(tensors: tuple[Tensor, ...], cut: int, how: str) -> tuple[Tensor, ...]:
    """Return q, k, v with everything from `cut` on replaced."""
    changed = [tensor.clone() for tensor in tensors]
    for number, tensor in enumerate(changed):
        future = tensor[:, :, cut:]
        if how == "keys scaled by 1000":
            future.mul_(1000.0 if number == 1 else 1.0)
        elif how == "all scaled by 1000":
            future.mul_(1000.0)
        elif how == "zeros":
            future.zero_()
        else:
            future.copy_(normal(*future.shape, seed=50 + number, scale=3.0))
    return tuple(changed)


every_change = pytest.mark.parametrize(
    "how", ["keys scaled by 1000", "all scaled by 1000", "zeros", "other numbers"]
)


@every_change
@every_causal_kind
def test_future_token_never_changes_the_past_by_one_bit(kind: str, how: str):
    qkv = random_qkv(300)
    before = attend(*qkv, kind=kind, causal=True, projection=PROJECTION)
    for cut in CUTS:
        after = attend(*other_suffix(qkv, cut, how), kind=kind, causal=True, projection=PROJECTION)
        assert_same_bits(kind, before[:, :, :cut], after[:, :, :cut])
        if not kind.startswith("rfa") or how != "keys scaled by 1000":  # it divides keys by their norms
            assert not torch.equal(before[:, :, cut:], after[:, :, cut:]), cut


@every_change
@every_causal_kind
def test_future_token_never_changes_the_past_across_spans_by_one_bit(kind: str, how: str):
    qkv = random_qkv(2 * SPAN + 80)
    before = attend(*qkv, kind=kind, causal=True, projection=PROJECTION)
    for cut in (SPAN - 1, SPAN, SPAN + 1, 1000, 2 * SPAN, 2 * SPAN + 1):
        after = attend(*other_suffix(qkv, cut, how), kind=kind, causal=True, projection=PROJECTION)
        assert_same_bits(kind, before[:, :, :cut], after[:, :, :cut])


@pytest.mark.parametrize("how", ["keys scaled by 1000", "other numbers"])
@every_underflowing_kind
def test_future_token_never_changes_the_past_where_denominators_underflow(kind: str, how: str):
    *qkv, projection = underflowing(200)
    low = causal_denominators(qkv[0], qkv[1], projection) < 1e-38  # float32 holds nothing normal below
    assert 2 <= low.sum() < low.numel() / 2
    before = attend(*qkv, kind=kind, causal=True, projection=projection)
    for cut in (2, EDGE, 199):
        after = attend(*other_suffix(tuple(qkv), cut, how), kind=kind, causal=True, projection=projection)
        assert torch.equal(before[:, :, :cut], after[:, :, :cut]), cut


@every_layout
@every_causal_kind
def test_future_token_never_changes_the_past_of_packed_documents(kind: str, lengths: tuple[int, ...]):
    documents = documents_of(*lengths)
    qkv = random_qkv(documents.shape[1], scale=4.0)
    before = attend(*qkv, documents, kind=kind, causal=True, projection=PROJECTION)
    for run in runs_of(documents):
        cut = (run.start + run.stop) // 2
        changed = other_suffix(qkv, cut, "keys scaled by 1000")
        after = attend(*changed, documents, kind=kind, causal=True, projection=PROJECTION)
        assert_same_bits(kind, before[:, :, :cut], after[:, :, :cut])


@pytest.mark.parametrize("lengths", [(33,), (10, 1, 22), (16, -7, 10)])
@every_kind
def test_jacobian_is_zero_exactly_where_a_token_may_not_see(
    kind: str, causal: bool, lengths: tuple[int, ...]
):
    documents = documents_of(*lengths)
    projection = gaussian_projection(8, 4)
    qkv = random_qkv(33, heads=1, head_dim=4)

    def summed_over_width(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = attend(q, k, v, documents, kind=kind, causal=causal, projection=projection)
        return out[0, 0] @ torch.arange(1.0, 5.0)

    jacobians = torch.autograd.functional.jacobian(summed_over_width, qkv)
    influence = torch.stack([j[:, 0, 0].abs().amax(-1) for j in jacobians]).amax(0)  # (L, L)
    number = documents[0].tolist()
    for i in range(33):
        for j in range(33):
            sees = number[i] == number[j] != -1 and (j <= i or not causal)
            if not sees or kind != "reformer":  # which does not see all that it may
                assert (influence[i, j] > 0) == sees, (i, j)


@pytest.mark.parametrize(
    "extreme", ["unit normal", "16 N(0, 1)", "keys with an entry of 100", "growing keys"]
)
@pytest.mark.parametrize("lengths", [None, (60, 1, 69, 40), (-40, 60, 50, -20)], ids=str)
@every_normalised_kind
def test_rows_sum_to_one_from_the_first_position_on(
    kind: str, causal: bool, lengths: tuple[int, ...] | None, extreme: str
):
    q, k, v, projection = underflowing(170)
    q, k = (q / 16, k / 16) if extreme != "16 N(0, 1)" else (q, k)
    if extreme == "keys with an entry of 100":
        k[:, :, ::7, 3] = 100.0
    elif extreme == "growing keys":
        k = k * torch.linspace(0, 20, 170).unsqueeze(-1)
    documents = None if lengths is None else documents_of(*lengths)
    out = attend(q, k, torch.ones_like(v), documents, kind=kind, causal=causal, projection=projection)
    expected = torch.ones_like(v)
    if documents is not None:
        expected[:, :, documents[0] == -1] = 0.0
    torch.testing.assert_close(out, expected, **TOLERANCE)


def check_padding(kind: str, causal: bool, left: int, right: int) -> None:
    """Compare a protein alone with the same one between garbage: outputs, gradients, nothing at padding."""
    length = 77
    alone = with_gradients(*random_qkv(length))
    expected = attend(*alone, kind=kind, causal=causal, projection=PROJECTION)
    garbage = torch.tensor([1e30, float("inf"), float("-inf"), float("nan"), 0.0])
    padded = []
    for tensor in alone:
        shape = (*tensor.shape[:2], left + length + right, tensor.shape[3])
        filled = garbage.repeat(shape[2] // 5 + 1)[: shape[2], None].expand(shape).clone()
        filled[:, :, left : left + length] = tensor.detach()
        padded.append(filled.requires_grad_())
    documents = documents_of(*(part for part in (-left, length, -right) if part))
    out = attend(*padded, documents, kind=kind, causal=causal, projection=PROJECTION)

    real = slice(left, left + length)
    torch.testing.assert_close(out[:, :, real], expected, **TOLERANCE)
    assert out[:, :, :left].eq(0).all()
    assert out[:, :, real.stop :].eq(0).all()
    weights = normal(*expected.shape, seed=7)
    found = torch.autograd.grad((out[:, :, real] * weights).sum() + out.sum() - out[:, :, real].sum(), padded)
    for gradient, wanted in zip(found, gradients(expected, alone), strict=True):
        torch.testing.assert_close(gradient[:, :, real], wanted, **TOLERANCE)
        assert gradient[:, :, :left].eq(0).all()
        assert gradient[:, :, real.stop :].eq(0).all()


@pytest.mark.parametrize(("left", "right"), [(0, 1), (0, 223), (1, 0), (223, 0), (51, EDGE), (EDGE, 95)])
@every_kind
def test_padding_never_matters_whatever_it_holds(kind: str, causal: bool, left: int, right: int):
    check_padding(kind, causal, left, right)


@pytest.mark.slow
@pytest.mark.parametrize("left", [0, 4000])
@every_kind
def test_padding_to_8192_never_matters(kind: str, causal: bool, left: int):
    check_padding(kind, causal, left, 8192 - 77 - left)


@every_kind
def test_a_row_of_nothing_but_padding_is_zero_and_harms_nobody(kind: str, causal: bool):
    q, k, v = with_gradients(*random_qkv(40, batch=2))
    documents = torch.cat((documents_of(40), documents_of(-40)))
    out = attend(q, k, v, documents, kind=kind, causal=causal, projection=PROJECTION)
    alone = attend(q[:1], k[:1], v[:1], kind=kind, causal=causal, projection=PROJECTION)
    torch.testing.assert_close(out[:1], alone, **TOLERANCE)
    assert out[1].eq(0).all()
    assert all(gradient[1].eq(0).all() for gradient in gradients(out, (q, k, v)))


@every_layout
@every_kind
def test_packed_documents_equal_separate_ones(kind: str, causal: bool, lengths: tuple[int, ...]):
    documents = documents_of(*lengths)
    qkv = with_gradients(*random_qkv(documents.shape[1]))
    packed = attend(*qkv, documents, kind=kind, causal=causal, projection=PROJECTION)
    separate = torch.zeros_like(packed)
    for run in runs_of(documents):
        parts = [tensor[:, :, run] for tensor in qkv]
        separate[:, :, run] = attend(*parts, kind=kind, causal=causal, projection=PROJECTION)
    torch.testing.assert_close(packed, separate, **TOLERANCE)
    for found, wanted in zip(gradients(packed, qkv), gradients(separate, qkv), strict=True):
        # a gradient sums over up to 434 rows
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scale", [1.0, pytest.param(16.0, marks=pytest.mark.slow)])
@every_layout
@every_kind
def test_last_token_of_a_document_never_changes_another_by_one_bit(
    kind: str, causal: bool, lengths: tuple[int, ...], scale: float
):
    if scale == 16.0 and max(lengths) > 3 * EDGE:
        lengths = (30, EDGE + 50, EDGE)  # rows that underflow take quadratic work
    documents = documents_of(*lengths)
    q, k, v, projection = underflowing(documents.shape[1])
    qkv = (q * scale / 16, k * scale / 16, v)
    before = attend(*qkv, documents, kind=kind, causal=causal, projection=projection)
    for run in runs_of(documents):
        changed = [tensor.clone() for tensor in qkv]
        for tensor in changed:
            tensor[:, :, run.stop - 1] *= -1000.0
        after = attend(*changed, documents, kind=kind, causal=causal, projection=projection)
        others = torch.ones(documents.shape[1], dtype=torch.bool)
        others[run] = False
        assert_same_bits(kind, before[:, :, others], after[:, :, others])
        if scale == 1.0:  # at 16 N(0, 1) rows are so sharp that the changed token may have no weight at all
            assert not torch.equal(before[:, :, run], after[:, :, run])


@every_kind
def test_numbers_of_documents_have_no_meaning_but_equality(kind: str, causal: bool):
    qkv = random_qkv(150)
    plain = documents_of(50, 80, 20)
    other = torch.tensor([7, 0, 2_000_000_000], dtype=torch.int32)[plain.long()]
    one = attend(*qkv, plain, kind=kind, causal=causal, projection=PROJECTION)
    two = attend(*qkv, other, kind=kind, causal=causal, projection=PROJECTION)
    assert torch.equal(one, two)


@every_kind
def test_batch_mates_never_matter(kind: str, causal: bool):
    first, mates = random_qkv(150), random_qkv(150, seed=1, batch=3)
    alone = attend(*first, kind=kind, causal=causal, projection=PROJECTION)
    joined = [torch.cat((x, 100 * y)) for x, y in zip(first, mates, strict=True)]
    together = attend(*joined, kind=kind, causal=causal, projection=PROJECTION)
    torch.testing.assert_close(together[:1], alone, **TOLERANCE)


@pytest.mark.parametrize("scale", [1.0, 16.0])
@pytest.mark.parametrize("length", [1, 2, 3, 5, 33, 130])
@every_kind
def test_permuted_heads_give_permuted_outputs_exactly(kind: str, causal: bool, length: int, scale: float):
    if kind.endswith("batched"):
        length *= (
            4  # a CPU's BLAS treats heads alike only where all begin on the same bytes; blocks see to that
        )
    q, k, v = random_qkv(length, heads=4, scale=scale, batch=2)
    order = torch.tensor([2, 0, 3, 1])
    straight = attend(q, k, v, kind=kind, causal=causal, projection=PROJECTION)
    choice = {"kind": kind, "causal": causal, "projection": PROJECTION, "heads": order}
    permuted = attend(q[:, order], k[:, order], v[:, order], **choice)
    assert torch.equal(straight[:, order], permuted)


@pytest.mark.parametrize("scale", [1.0, 16.0])
@pytest.mark.parametrize("lengths", [None, (60, -5, 1, 100)], ids=str)
@every_kind
def test_rows_of_the_map_equal_attention_over_one_hot_values(
    kind: str, causal: bool, lengths: tuple[int, ...] | None, scale: float
):
    q, k, _, projection = underflowing(166)
    q, k = q * scale / 16, k * scale / 16
    documents = None if lengths is None else documents_of(*lengths)
    one_hot = torch.eye(166).expand(1, 2, 166, 166)
    whole = attend(q, k, one_hot, documents, kind=kind, causal=causal, projection=projection)
    rows = torch.tensor([0, 165, 7, 59, 61, 64, 65, 66, 127, 128])
    found = attention_rows(q, k, documents, rows=rows, kind=kind, causal=causal, projection=projection)
    # weights are at most 1; at 16 N(0, 1) their logarithms are in the thousands: 1e-4 of rounding
    torch.testing.assert_close(found, whole[:, :, rows], rtol=0.0, atol=1e-5 if scale == 1 else 1e-3)


@pytest.mark.parametrize("kind", ways((*FEATURE_MAPS, "softmax")))
def test_equal_keys_average_the_values_seen_so_far(kind: str):
    ones = torch.ones(1, 1, 3, 16)
    v = torch.tensor([1.0, 0.0, 0.0]).view(1, 1, 3, 1).expand(1, 1, 3, 16)
    out = attend(ones, ones, v, kind=kind, causal=True, projection=PROJECTION)
    torch.testing.assert_close(out[0, 0, :, 0], torch.tensor([1.0, 1 / 2, 1 / 3]), rtol=0.0, atol=1e-6)


@every_kind
def test_output_keeps_the_type_of_the_values(kind: str, causal: bool):
    q, k, v = random_qkv(20)
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        out = attend(q.to(dtype), k.to(dtype), v.to(dtype), kind=kind, causal=causal, projection=PROJECTION)
        assert out.dtype == dtype
