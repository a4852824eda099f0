"""Reading on, through the model: read token by token or in pieces, a protein gets the states of one pass over it whole."""

from __future__ import annotations

import time

import pytest
import torch
from attention_cases import every_causal_model_kind
from torch import Tensor
from wide_models import random_tokens, wide_model

from protperf.config import ModelConfig
from protperf.model import ModelState, ProteinModel

TOLERANCE = {"rtol": 0.0, "atol": 1e-5}
"""That of attention read on, for hidden states of order one."""


def in_pieces(model: ProteinModel, tokens: Tensor, lengths: list[int]) -> tuple[Tensor, list[ModelState]]:
    """Return the hidden states of all pieces joined, and the state after each."""
    found, states, state = [], [], None
    for piece in tokens.split(lengths, dim=1):
        hidden, state = model.onward(piece, state)
        found.append(hidden)
        states.append(state)
    return torch.cat(found, dim=1), states


def bytes_of(state: ModelState) -> int:
    return sum(part.numel() * part.element_size() for layer in state.layers for part in layer)


@every_causal_model_kind
@torch.no_grad()
def test_token_by_token_equals_one_pass(kind: str):
    model, tokens = wide_model(kind), random_tokens(300)
    found, states = in_pieces(model, tokens, [1] * 300)
    torch.testing.assert_close(found, model(tokens), **TOLERANCE)
    sizes = {bytes_of(state) for state in states}
    assert len(sizes) == (300 if kind in ("softmax", "reformer") else 1)
    assert states[-1].position.tolist() == [300]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["favor", "relu"])
@torch.no_grad()
def test_time_and_size_of_a_step_do_not_grow(kind: str):
    """At 10 and at 8,000 tokens; the shortest of many steps, which other work on the machine does not lengthen."""
    model, tokens = wide_model(kind), random_tokens(8000)
    found = []
    for length in (10, 8000):
        _, (*_, state) = in_pieces(model, tokens[:, :length], [10] if length == 10 else [10, *[799] * 10])
        seconds = []
        for _ in range(100):
            start = time.perf_counter()
            model.onward(tokens[:, :1], state)
            seconds.append(time.perf_counter() - start)
        found.append((min(seconds), bytes_of(state)))
    assert found[0][1] == found[1][1]
    assert found[1][0] < 1.5 * found[0][0]


@pytest.mark.parametrize("lengths", [[1, 127, 1, 171], [299, 1], [20, 5, 275]], ids=str)
@pytest.mark.parametrize("kind", ["favor", "relu", "softmax", "rfa", "reformer"])
@torch.no_grad()
def test_a_protein_may_be_split_anywhere(kind: str, lengths: list[int]):
    model, tokens = wide_model(kind), random_tokens(300, batch=2)
    torch.testing.assert_close(in_pieces(model, tokens, lengths)[0], model(tokens), **TOLERANCE)


@pytest.mark.parametrize(
    "shape",
    [
        {"positions": "absolute"},
        {"positions": "none"},
        {"qk_norm": True},
        {"feedforward": "swiglu", "activation_checkpointing": True, "dropout": 0.5},
    ],
    ids=str,
)
@torch.no_grad()
def test_every_part_of_the_model_goes_onward(shape: dict[str, object]):
    model, tokens = wide_model("favor", **shape), random_tokens(100)
    torch.testing.assert_close(in_pieces(model, tokens, [40, 1, 59])[0], model(tokens), **TOLERANCE)


@pytest.mark.parametrize("kind", ["favor", "trig", "softmax", "rfa", "reformer"])
@torch.no_grad()
def test_rows_come_and_go_and_each_goes_on_with_its_own_protein(kind: str):
    """Three proteins that have read 5, 30 and 12 tokens become one batch; the second leaves after 10 steps."""
    model = wide_model(kind)
    proteins = [random_tokens(length + 20, seed=length) for length in (5, 30, 12)]
    states = [
        model.onward(protein[:, :length])[1] for protein, length in zip(proteins, (5, 30, 12), strict=True)
    ]
    state, found = ModelState.join(states), {0: [], 1: [], 2: []}
    rows = [0, 1, 2]
    for step in range(20):
        if step == 10:
            rows, state = [0, 2], state.of_rows(torch.tensor([0, 2]))
        following = torch.cat([proteins[row][:, (5, 30, 12)[row] + step] for row in rows])
        hidden, state = model.onward(following.unsqueeze(1), state)
        for row, states_of_row in zip(rows, hidden, strict=True):
            found[row].append(states_of_row)
    for row, start in enumerate((5, 30, 12)):
        expected = model(proteins[row])[0, start : start + len(found[row])]
        torch.testing.assert_close(torch.cat(found[row]), expected, **TOLERANCE)
    assert state.position.tolist() == [25, 32]


@torch.no_grad()
def test_columns_that_no_row_needs_are_let_go():
    model = wide_model("softmax")
    states = [model.onward(random_tokens(length))[1] for length in (5, 30)]
    joined = ModelState.join(states)
    assert joined.layers[0].keys.shape == (2, 2, 30, 8)
    assert joined.of_rows(torch.tensor([0])).layers[0].keys.shape == (1, 2, 5, 8)


def test_gradients_flow_through_the_state():
    model, tokens = wide_model("favor"), random_tokens(40)
    parameters = list(model.parameters())
    weights = torch.linspace(-1, 1, 16)
    whole = torch.autograd.grad((model(tokens) * weights).sum(), parameters, allow_unused=True)
    pieces = torch.autograd.grad(
        (in_pieces(model, tokens, [13, 1, 26])[0] * weights).sum(), parameters, allow_unused=True
    )
    for one, other in zip(pieces, whole, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_a_masked_model_has_no_onward():
    model = ProteinModel(ModelConfig(num_layers=1, num_heads=1, model_dim=8), causal=False)
    with pytest.raises(AssertionError, match="masked"):
        model.onward(random_tokens(3))
