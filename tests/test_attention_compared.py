"""What gated random features, Linformer and Reformer are, by hand and by their papers' definitions.

The laws that they share with every attention stand in the other files of attention.
"""

from __future__ import annotations

import pytest
import torch
from attention_cases import (
    documents_of,
    gaussian_projection,
    gradients,
    normal,
    random_qkv,
    relative_error,
    with_gradients,
)
from torch import Tensor

from protperf.attention import Hashing, attend, attend_onward, attention_rows, reformer
from protperf.attention.reference import reference_attention

EXACT = {"rtol": 1e-10, "atol": 1e-10}


def test_a_gate_of_one_half_by_hand():
    ones, v = torch.ones(1, 1, 3, 8), torch.tensor([1.0, 0.0, 0.0]).view(1, 1, 3, 1)
    out = attend(
        ones, ones, v, kind="rfa", causal=True, projection=torch.ones(4, 8), gate=torch.zeros(1, 1, 3)
    )
    # S = 1/2, 1/4, 1/8 and z = 1/2, 3/4, 7/8, each times phi . phi
    torch.testing.assert_close(out[0, 0, :, 0], torch.tensor([1.0, 1 / 3, 1 / 7]), rtol=0.0, atol=1e-6)


def test_a_gate_that_keeps_everything_is_none():
    q, k, v = random_qkv(300)
    choice = {"kind": "rfa", "causal": True, "projection": gaussian_projection(256)}
    wanted = attend(q, k, v, **choice)
    torch.testing.assert_close(
        attend(q, k, v, gate=torch.full((1, 2, 300), 30.0), **choice), wanted, rtol=0.0, atol=1e-5
    )


@pytest.mark.parametrize("lengths", [(150,), (-7, 60, 1, 70, -3, 9)], ids=str)
def test_gates_get_the_gradient_of_the_recurrence(lengths: tuple[int, ...]):
    documents = documents_of(*lengths)
    qkv = random_qkv(documents.shape[1], dtype=torch.float64, head_dim=8)
    choice = {"kind": "rfa", "causal": True, "projection": gaussian_projection(64, 8).double()}
    results = []
    for compute in (attend, reference_attention):
        gate = normal(1, 2, documents.shape[1], seed=5, scale=2.0).double().requires_grad_()
        results.append(gradients(compute(*qkv, documents, gate=gate, **choice), (gate,))[0])
    torch.testing.assert_close(*results, **EXACT)


@pytest.mark.parametrize(
    ("length", "offset", "scale"), [(600, 0.0, 8.0), pytest.param(8192, 3.0, 4.0, marks=pytest.mark.slow)]
)
def test_gates_that_open_and_shut_cost_no_digits(length: int, offset: float, scale: float):
    """Sums of their logarithms reach thousands: float32 would be off by 1e-4."""
    fast = with_gradients(
        *random_qkv(length, heads=1, head_dim=8), offset + normal(1, 1, length, seed=4, scale=scale)
    )
    slow = with_gradients(*fast, dtype=torch.float64)
    assert torch.nn.functional.logsigmoid(slow[3]).sum() < -1000
    choice = {"kind": "rfa", "causal": True, "projection": gaussian_projection(256, 8)}
    found = attend(*fast[:3], gate=fast[3], **choice)
    wanted = reference_attention(*slow[:3], gate=slow[3], **choice)
    assert relative_error(found, wanted) < 1e-5
    if length < 1000:
        for one, other in zip(gradients(found, fast), gradients(wanted, slow), strict=True):
            assert relative_error(one, other) < 1e-4


def test_gradients_reach_the_gates_of_an_earlier_segment():
    q, k, v = random_qkv(60, dtype=torch.float64, head_dim=8)
    choice = {"kind": "rfa", "projection": gaussian_projection(64, 8).double()}
    gate = normal(1, 2, 60, seed=5).double().requires_grad_()
    whole = attend(q, k, v, causal=True, gate=gate, **choice)
    outs, state = [], None
    for piece in (slice(0, 25), slice(25, 26), slice(26, 60)):
        parts = (x[:, :, piece] for x in (q, k, v))
        out, state = attend_onward(*parts, gate=gate[..., piece], state=state, **choice)
        outs.append(out)
    found = torch.cat(outs, dim=2)
    torch.testing.assert_close(found, whole, **EXACT)
    torch.testing.assert_close(gradients(found, (gate,)), gradients(whole, (gate,)), **EXACT)


def test_pooling_gets_the_gradient_of_the_definition():
    documents = documents_of(30, -4, 1, 40)
    qkv = random_qkv(75, dtype=torch.float64)
    results = []
    for compute in (attend, reference_attention):
        pooling = normal(2, 5, 50, seed=6, scale=0.2).double().requires_grad_()
        out = compute(*qkv, documents, kind="linformer", causal=False, pooling=pooling)
        results.append(gradients(out, (pooling,))[0])
    torch.testing.assert_close(*results, **EXACT)
    assert results[0][:, :, 40:].eq(0).all()
    assert results[0][:, :, :40].ne(0).all()


def test_pooling_by_the_identity_is_exact_attention():
    q, k, v = random_qkv(20)
    pooling = torch.eye(20).expand(2, 20, 20)
    found = attend(q, k, v, kind="linformer", causal=False, pooling=pooling)
    torch.testing.assert_close(found, attend(q, k, v, kind="softmax", causal=False), rtol=0.0, atol=1e-6)


@pytest.mark.parametrize("documents", [None, documents_of(3, 9)], ids=["one document", "packed"])
def test_a_document_longer_than_the_pooling_is_refused_and_nothing_cut(documents: Tensor | None):
    q, k, v = random_qkv(12)
    pooling = torch.ones(2, 4, 8)
    longest = 12 if documents is None else 9
    message = f"a document has {longest} tokens; allowed: at most 8, the linformer_length"
    with pytest.raises(ValueError, match=message):
        attend(q, k, v, documents, kind="linformer", causal=False, pooling=pooling)
    with pytest.raises(ValueError, match=message):
        attention_rows(
            q, k, documents, rows=torch.arange(12), kind="linformer", causal=False, pooling=pooling
        )


def test_pooling_has_no_causal_form():
    q, k, v = random_qkv(3)
    choice = {"kind": "linformer", "pooling": torch.ones(2, 4, 8)}
    for call in (
        lambda: attend(q, k, v, causal=True, **choice),
        lambda: attend_onward(q, k, v, **choice),
        lambda: attention_rows(q, k, rows=torch.arange(3), causal=True, **choice),
    ):
        with pytest.raises(ValueError, match="'linformer' has no causal form"):
            call()


@pytest.mark.parametrize("buckets", [1, 2])
def test_one_bucket_with_a_wide_window_is_exact_attention_to_all_others(buckets: int):
    q, _, v = random_qkv(70)
    q = q.abs()  # with R = (1, ..., 1) all hash alike
    hashing = Hashing(rounds=2, buckets=buckets, window=70)
    projection = torch.ones(hashing.num_rows, 16)
    for causal in (False, True):
        logits = q @ (q / q.norm(dim=-1, keepdim=True)).mT / 4  # K = 16
        hidden = torch.eye(70, dtype=torch.bool) | torch.ones(70, 70, dtype=torch.bool).triu(1).logical_and(
            torch.tensor(causal)
        )
        if causal:
            hidden[0, 0] = False  # nothing else to see
        wanted = logits.masked_fill(hidden, -torch.inf).softmax(-1) @ v
        found = attend(q, q, v, kind="reformer", causal=causal, projection=projection, hashing=hashing)
        torch.testing.assert_close(found, wanted, rtol=0.0, atol=1e-5)


def test_who_sees_whom_by_hand():
    """Signs + + - + - of one number, two buckets, a window of one: + are tokens 0, 1, 3 and - are 2, 4."""
    q = torch.tensor([1.0, 2.0, -1.0, 3.0, -2.0]).view(1, 1, 5, 1)
    choice = {"kind": "reformer", "projection": torch.ones(1, 1), "hashing": Hashing(1, 2, 1)}
    rows = torch.arange(5)
    causal = attention_rows(q, q, rows=rows, causal=True, **choice)[0, 0]
    assert (causal > 0).nonzero().tolist() == [[0, 0], [1, 0], [2, 2], [3, 1], [4, 2]]
    both = attention_rows(q, q, rows=rows, causal=False, **choice)[0, 0]
    assert (both > 0).nonzero().tolist() == [[0, 1], [1, 0], [1, 3], [2, 4], [3, 1], [4, 2]]
    packed = attention_rows(q, q, documents_of(2, 3), rows=rows, causal=False, **choice)[0, 0]
    assert (packed > 0).nonzero().tolist() == [[0, 1], [1, 0], [2, 4], [3, 3], [4, 2]]


@pytest.mark.parametrize("causal", [False, True])
def test_a_token_seen_in_two_rounds_counts_once(causal: bool):
    q, _, v = random_qkv(200)
    projection = gaussian_projection(3)
    once = attend(q, q, v, kind="reformer", causal=causal, projection=projection, hashing=Hashing(1, 6, 20))
    twice = attend(
        q, q, v, kind="reformer", causal=causal, projection=projection.repeat(2, 1), hashing=Hashing(2, 6, 20)
    )
    torch.testing.assert_close(once, twice, rtol=0.0, atol=1e-6)


@pytest.mark.parametrize("causal", [False, True])
def test_where_chunks_begin_decides_nothing(causal: bool, monkeypatch: pytest.MonkeyPatch):
    documents = documents_of(70, 1, -3, 126)
    q, _, v = random_qkv(200, dtype=torch.float64)
    hashing = Hashing(3, 4, 7)
    choice = {"kind": "reformer", "causal": causal, "projection": gaussian_projection(6), "hashing": hashing}
    results = []
    for shortest in (1, 9, 50, 300):
        monkeypatch.setattr(reformer, "_SHORTEST", shortest)
        results.append(attend(q, q, v, documents, **choice))
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], **EXACT)


def test_a_window_longer_than_the_sequence_costs_no_more_than_one_as_long(monkeypatch: pytest.MonkeyPatch):
    q, _, v = random_qkv(50)
    widths: list[int] = []
    cut = reformer._cut

    def watched(x: Tensor, chunk: int, **choice: int) -> Tensor:
        widths.append(chunk)
        return cut(x, chunk, **choice)

    monkeypatch.setattr(reformer, "_cut", watched)
    choice = {"kind": "reformer", "causal": True, "projection": gaussian_projection(6)}
    found, wanted = (attend(q, q, v, hashing=Hashing(2, 6, window), **choice) for window in (5_000, 50))
    assert torch.equal(found, wanted)
    assert max(widths) == 50
