"""The arithmetic of attention and of whole models, against what torch counts on plain products of matrices."""

from __future__ import annotations

import doctest
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from lightning_fabric.utilities.throughput import measure_flops
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from protperf import work
from protperf.bench.replaced import attention_replaced
from protperf.config import ModelConfig
from protperf.model import ProteinModel
from protperf.vocab import VOCABULARY

SHAPE = ModelConfig(num_layers=3, num_heads=2, model_dim=16, feedforward_dim=24, num_features=6)


def test_examples_in_docstrings_are_true():
    found = doctest.testmod(work)
    assert found.attempted > 0
    assert found.failed == 0


def count(function, *inputs: torch.Tensor) -> tuple[int, int]:
    """Return torch's own count of the products of matrices, forward and backward."""
    with FlopCounterMode(display=False) as counter:
        out = function(*inputs)
    forward = counter.get_total_flops()
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    return forward, counter.get_total_flops()


def features(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return (x @ weights.mT).exp()


@pytest.mark.parametrize(("kind", "rows", "num_features"), [("favor", 6, 6), ("trig", 3, 6), ("elu", 99, 5)])
def test_bidirectional_arithmetic_is_what_torch_counts(kind: str, rows: int, num_features: int):
    length, head_dim = 7, 5
    q, k, v = (torch.randn(length, head_dim, requires_grad=True) for _ in range(3))
    weights = torch.randn(num_features, head_dim)

    def attend(q, k, v):
        if kind == "elu":
            return q.exp() @ (k.exp().mT @ v)
        return features(q, weights) @ (features(k, weights).mT @ v)

    found = work.attention_work(kind, causal=False, documents=[3, 4], head_dim=head_dim, rows=rows)
    assert (found.forward, found.backward) == count(attend, q, k, v)
    mapped = 0 if kind == "elu" else 2
    assert found.again == mapped * 2 * length * num_features * head_dim
    if mapped:
        assert sum(found) == 24 * length * num_features * head_dim


def test_causal_arithmetic_is_what_torch_counts_inside_a_chunk():
    """One chunk, row by row: features, the state's two products, and the triangle of pairs."""
    length, head_dim, num_features = work.CHUNK, 4, 6
    q, k, v = (torch.randn(length, head_dim, requires_grad=True) for _ in range(3))
    state = torch.randn(num_features, head_dim, requires_grad=True)
    weights = torch.randn(num_features, head_dim)

    def attend(q, k, v):
        phi_q, phi_k = features(q, weights), features(k, weights)
        rows = [phi_q[i : i + 1] @ phi_k[: i + 1].mT @ v[: i + 1] for i in range(length)]
        return torch.cat(rows) + phi_q @ state + (phi_k.mT @ v).sum()

    found = work.attention_work(
        "favor", causal=True, documents=[length], head_dim=head_dim, rows=num_features
    )
    assert (found.forward, found.backward) == count(attend, q, k, v)
    triangle = length * (length + 1) // 2
    assert found.again == (4 * length * num_features * head_dim) + 2 * num_features * triangle


def test_exact_arithmetic_counts_the_pairs_of_each_document():
    head_dim = 5
    q, k, v = (torch.randn(7, head_dim, requires_grad=True) for _ in range(3))
    whole = work.attention_work("softmax", causal=False, documents=[7], head_dim=head_dim, rows=0)
    assert (whole.forward, whole.backward) == count(lambda q, k, v: (q @ k.mT).softmax(-1) @ v, q, k, v)
    assert whole.again == 2 * 7 * 7 * head_dim  # the weights, which a fused kernel does not keep
    packed = work.attention_work("softmax", causal=True, documents=[3, 4], head_dim=head_dim, rows=0)
    assert packed.forward == 4 * head_dim * (1 + 2 + 3 + 1 + 2 + 3 + 4)


# whole models


def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1) @ v


def linear(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.randn(SHAPE.num_features, q.shape[-1], device=q.device)
    phi_q, phi_k = features(q, weights), features(k, weights)
    return phi_q @ (phi_k.mT @ v) / (phi_q * phi_k.sum(-2, keepdim=True)).sum(-1, keepdim=True)


def counted(
    config: ModelConfig, attend: Callable[..., Tensor], *, batch: int, length: int, asked: int
) -> int:
    """Return Lightning's count of a step of a model whose attention is made of plain products."""
    with torch.device("meta"):
        tokens = torch.zeros(batch, length, dtype=torch.int64)
        model = ProteinModel(config, causal=False)
    with attention_replaced(attend):
        return measure_flops(
            model,
            lambda: model.logits(model(tokens).flatten(0, 1)[:asked]),
            lambda scores: scores.logsumexp(-1).sum(),
        )


@pytest.mark.parametrize("feedforward", ["gelu", "swiglu"])
@pytest.mark.parametrize(("attention", "attend"), [("softmax", exact), ("relu", linear)])
def test_arithmetic_of_a_model_is_what_lightning_counts(attention: str, attend, feedforward: str):
    config = replace(SHAPE, attention=attention, feedforward=feedforward)
    found = work.training_work(config, causal=False, documents=[[40], [40]], num_asked=11)
    assert found.forward + found.backward == counted(config, attend, batch=2, length=40, asked=11)


def test_a_window_of_several_documents_is_as_much_work_as_windows_of_one():
    config = replace(SHAPE, attention="softmax")
    found = work.training_work(config, causal=False, documents=[[7], [5, 4]], num_asked=3)
    alone = [counted(config, exact, batch=1, length=length, asked=1) for length in (7, 5, 4)]
    assert found.forward + found.backward == sum(alone)


@pytest.mark.parametrize("attention", ["softmax", "relu"])
def test_a_causal_model_differs_by_its_attention_alone(attention: str):
    config, lengths = replace(SHAPE, attention=attention), [30, 34]
    both, causal = (
        work.training_work(config, causal=causal, documents=[lengths], num_asked=9)
        for causal in (False, True)
    )
    heads = [
        work.attention_work(attention, causal=causal, documents=lengths, head_dim=8, rows=6)
        for causal in (False, True)
    ]
    assert causal.forward - both.forward == 3 * 2 * (heads[1].forward - heads[0].forward) != 0
    assert causal.backward - both.backward == 3 * 2 * (heads[1].backward - heads[0].backward)


def test_what_activation_checkpointing_computes_again_is_what_lightning_counts_more():
    config = replace(SHAPE, attention="softmax")
    twice = replace(config, activation_checkpointing=True)
    settings = {"batch": 2, "length": 40, "asked": 11}
    more = counted(twice, exact, **settings) - counted(config, exact, **settings)
    asked = {"causal": False, "documents": [[40], [40]], "num_asked": 11}
    once_more = work.training_work(twice, **asked).again - work.training_work(config, **asked).again
    assert once_more == more
    assert work.training_work(twice, **asked)[:2] == work.training_work(config, **asked)[:2]
    # all of the forward pass but the scores and the last matrix of each layer, whose product no gradient needs
    scores, last = 2 * 11 * 16 * len(VOCABULARY), 3 * 2 * 80 * 24 * 16
    assert more == work.training_work(config, **asked).forward - scores - last
