"""`torch.compile` takes attention and the model whole, at any length, and changes nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from attention_cases import (
    GATED,
    IN_LAYOUT,
    WITHOUT_LAYOUT,
    attend,
    gaussian_projection,
    gradients,
    random_qkv,
    with_gradients,
)
from torch import Tensor
from torch._dynamo.utils import counters

from protperf.attention import ATTENTIONS
from protperf.config import ModelConfig
from protperf.model import ProteinModel
from protperf.vocab import VOCABULARY

LENGTHS = (64, 100, 600, 33, 257)
PROJECTION = gaussian_projection(256)  # enough for signed kinds

ONE_WAY = (*IN_LAYOUT, "reformer")
QUICK = ("favor blocked", "relu blocked", "softmax")


def cases() -> list[object]:
    """Return (kind and layout, causal, packed) of what is compiled: all kinds packed, whose graphs hold all that the others do.

    A kind that goes the way of a quick one has another map before the same operator: it is compiled in one direction. In
    batched products and in Reformer a case takes half a minute: one map with chunks, both with documents in one direction,
    and Reformer causal, which has one mask more. Linformer walks over documents, whose number no graph knows.
    """
    found = [
        ("favor blocked", True, False),
        ("relu blocked", False, False),
        ("softmax", False, False),
        ("softmax", True, False),
        *(
            (kind if kind in WITHOUT_LAYOUT else f"{kind} blocked", causal, True)
            for kind in ATTENTIONS
            for causal in (False, True)
            if kind != "linformer"
            and not (kind in ONE_WAY and causal != (kind in ("oprf", "rfa", "reformer")))
        ),
        ("linformer", False, False),
        ("favor batched", False, False),
        ("favor batched", True, True),
        ("relu batched", False, True),
        (GATED, True, True),
    ]
    return [pytest.param(*case, marks=() if case[0] in QUICK else pytest.mark.slow) for case in found]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def packed(length: int) -> Tensor:
    """Return documents int32 `(2, L)` with padding."""
    generator = torch.Generator().manual_seed(length)
    return torch.randint(-1, 4, (2, length), generator=generator).sort(-1).values.int()


@pytest.mark.parametrize(("way", "causal", "is_packed"), cases())
def test_compiled_attention_is_one_graph_equal_to_eager_at_five_lengths(
    way: str, causal: bool, is_packed: bool
):
    def compute(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None) -> Tensor:
        return attend(q, k, v, documents, kind=way, causal=causal, projection=PROJECTION)

    compiled = torch.compile(compute, fullgraph=True, backend="aot_eager")
    for length in LENGTHS:
        documents = packed(length) if is_packed else None
        qkv = with_gradients(*random_qkv(length, batch=2))
        found, wanted = compiled(*qkv, documents), compute(*qkv, documents)
        torch.testing.assert_close(found, wanted, rtol=0.0, atol=1e-5)
        for one, other in zip(gradients(found, qkv), gradients(wanted, qkv), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] <= 1 + 2  # the first, and at most two recompilations


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:.*torch.jit.script:DeprecationWarning"
)  # torch's own, when inductor is imported
@pytest.mark.parametrize(
    ("kind", "layout", "causal"),
    [
        ("favor", "blocked", True),
        ("favor", "batched", False),
        ("relu", "blocked", False),
        ("relu", "batched", True),
    ],
)
def test_machine_code_of_the_default_compiler_agrees_with_eager(kind: str, layout: str, causal: bool):
    documents = packed(200)
    qkv = with_gradients(*random_qkv(200, batch=2))

    def compute(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, documents, kind=f"{kind} {layout}", causal=causal, projection=PROJECTION)

    found, wanted = torch.compile(compute, fullgraph=True)(*qkv), compute(*qkv)
    torch.testing.assert_close(found, wanted, rtol=0.0, atol=1e-5)
    for one, other in zip(gradients(found, qkv), gradients(wanted, qkv), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "causal", "checkpointing"),
    [
        ("favor", False, True),
        ("favor", True, False),
        ("oprf", True, True),
        ("softmax", False, True),
        ("relu", False, False),
        ("relu", True, True),
    ],
)
def test_compiled_model_is_one_graph_and_changes_no_buffer(kind: str, causal: bool, checkpointing: bool):
    config = ModelConfig(
        attention=kind,
        num_layers=2,
        num_heads=2,
        model_dim=32,
        feedforward_dim=32,
        num_features=128,
        qk_norm=True,
        activation_checkpointing=checkpointing,
    )
    torch.manual_seed(0)
    model = ProteinModel(config, causal=causal)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for length in (40, 90, 150):
        tokens = torch.randint(VOCABULARY.num_residues, (2, length))
        documents = packed(length)
        results = []
        for forward in (compiled, model):
            hidden = forward(tokens, documents)
            real = hidden[documents >= 0]
            results.append((real, *torch.autograd.grad(real.square().mean(), tuple(model.parameters()))))
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    assert not counters["graph_break"]
    assert all(torch.equal(before[name], buffer) for name, buffer in model.named_buffers())
