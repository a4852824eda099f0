"""Queries and keys of the model: how long they are, `qk_norm`, and what `oprf` is told of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_model_laws import residues, small_model
from torch import Tensor
from training import assert_same, train_small

from protperf.attention import ATTENTIONS, BIDIRECTIONAL
from protperf.config import ModelConfig
from protperf.formats.metrics_file import read_metrics
from protperf.model import ProteinModel

BOUNDED = [kind for kind in ATTENTIONS if kind != "rfa"]  # which divides by norms itself


def queries_and_keys(model: ProteinModel, tokens: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return what each layer's projections of q and k give, `(L, H, K)` each: turned by position they are as long."""
    seen: list[tuple[Tensor, Tensor]] = []

    def note(layer: torch.nn.Module, given: tuple[Tensor, ...], qkv: Tensor) -> None:
        q, k, _ = qkv[0].double().unflatten(-1, (3, model.config.num_heads, -1)).unbind(1)
        seen.append((q, k))

    hooks = [block.attention.qkv.register_forward_hook(note) for block in model.blocks]  # type: ignore[union-attr]
    with torch.no_grad():
        model(tokens)
    for hook in hooks:
        hook.remove()
    return seen


def test_lengths_of_queries_and_keys_are_those_that_enter_attention():
    model = small_model("favor", causal=True, positions="none")
    tokens = residues(1, 60)
    sums = model.query_key_sums(tokens)
    for layer, (q, k) in enumerate(queries_and_keys(model, tokens)):
        lengths = q.norm(dim=-1).mean(0) * k.norm(dim=-1).mean(0) / 16**0.5
        torch.testing.assert_close(sums.products()[layer].double(), lengths, rtol=1e-5, atol=0)
        pairs = q.unsqueeze(0) + k.unsqueeze(1)  # (L, L, H, K), all of them
        squares = pairs.square().sum(-1).mean((0, 1)) / 16**0.5
        torch.testing.assert_close(sums.pair_squares()[layer].double(), squares, rtol=1e-5, atol=0)


def test_padding_and_dropout_are_left_out_and_nothing_of_the_model_changes():
    model = small_model("favor", causal=True, dropout=0.5).train()
    tokens = residues(1, 60)
    wanted = model.query_key_sums(tokens)
    state = torch.random.get_rng_state()
    padded = torch.cat((residues(1, 9, seed=3), tokens, residues(1, 20, seed=4)), dim=1)
    documents = torch.tensor([[-1] * 9 + [0] * 60 + [-1] * 20], dtype=torch.int32)
    found = model.query_key_sums(padded, documents)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-3)
    assert model.training
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("positions", ["rope", "none"])
@pytest.mark.parametrize("kind", BOUNDED)
def test_qk_norm_makes_the_largest_logit_the_temperature_of_the_head(kind: str, positions: str):
    model = small_model(kind, causal=False, qk_norm=True, positions=positions)
    temperatures = torch.tensor([0.5, 3.0])
    for block in model.blocks:
        block.attention.log_temperature.data.copy_(temperatures.log())  # type: ignore[union-attr, operator]
    sums = model.query_key_sums(residues(2, 50))
    torch.testing.assert_close(sums.products(), temperatures.expand(2, 2), rtol=1e-5, atol=0)
    assert (
        sums.pair_squares() <= 4 * temperatures + 1e-4
    ).all()  # |q' + k'|^2 with |q'|^2 = |k'|^2 = temperature


@pytest.mark.parametrize("kind", BOUNDED)
def test_qk_norm_makes_the_size_of_projections_irrelevant_and_learns_temperatures(kind: str):
    model = small_model(kind, causal=kind not in BIDIRECTIONAL, qk_norm=True)
    queries_and_keys = 32 if kind == "reformer" else 64  # whose queries are its keys
    tokens = residues(1, 50)
    before = model(tokens)
    gradients = torch.autograd.grad(
        before.square().mean() + before[..., 0].mean(),
        [block.attention.log_temperature for block in model.blocks],  # type: ignore[union-attr]
    )
    assert all((gradient != 0).all() for gradient in gradients)
    with torch.no_grad():
        for block in model.blocks:
            block.attention.qkv.weight[:queries_and_keys].mul_(10.0)  # type: ignore[union-attr, index]
        torch.testing.assert_close(model(tokens), before, rtol=0.0, atol=2e-5)


def test_at_a_temperature_of_nothing_attention_is_the_mean_of_what_it_sees():
    model = small_model("softmax", causal=False, qk_norm=True, positions="none")
    attention = model.blocks[0].attention
    with torch.no_grad():
        attention.log_temperature.fill_(-30.0)  # type: ignore[union-attr, operator]
        x = torch.randn(1, 20, 32)
        _, _, v = attention.queries_keys_values(x, None)  # type: ignore[union-attr, operator]
        mean = attention.out(v.mean(2).flatten(1))  # type: ignore[union-attr, operator]
        torch.testing.assert_close(attention(x, None, None), mean.expand(1, 20, 32), rtol=0.0, atol=1e-5)  # type: ignore[operator]


def test_oprf_without_norms_is_favor_and_with_them_still_strictly_causal():
    favor, oprf = (small_model(kind, causal=True) for kind in ("favor", "oprf"))
    tokens = residues(1, 90)
    with torch.no_grad():
        torch.testing.assert_close(oprf(tokens), favor(tokens), rtol=0.0, atol=1e-6)
        oprf.set_pair_squares(torch.tensor([[1.0, 8.0], [4.0, 2.0]]))
        before = oprf(tokens)
        assert (before - favor(tokens)).abs().max() > 1e-3
        changed = torch.cat((tokens[:, :50], (tokens[:, 50:] + 7) % 20), dim=1)
        assert torch.equal(oprf(changed)[:, :50], before[:, :50])


OPRF = ("model.attention=oprf", "objective=causal", "trainer.redraw_every=4", "optim.decay_steps=10")


def test_oprf_is_told_its_norms_at_the_start_and_at_redraws_and_resumes_exactly(tmp_path: Path):
    whole, recorder = train_small(tmp_path / "whole", *OPRF, "trainer.max_steps=10")
    squares = whole.task.model.state_dict()["blocks.0.attention.pair_square"]
    assert (squares > 0).all()
    _, first = train_small(tmp_path / "halves", *OPRF, "trainer.max_steps=6")
    halves, second = train_small(tmp_path / "halves", *OPRF, "trainer.max_steps=10")
    assert first.losses + second.losses == recorder.losses
    assert_same(halves.task.model.state_dict(), whole.task.model.state_dict())


def test_norms_of_every_layer_are_in_the_metrics(tmp_path: Path):
    run, _ = train_small(tmp_path, "trainer.max_steps=10", "model.qk_norm=true")
    metrics = read_metrics(tmp_path / "metrics.csv")
    for layer, block in enumerate(run.task.model.blocks):
        temperature = block.attention.log_temperature.exp().mean().item()  # type: ignore[union-attr, operator]
        assert metrics[f"attention/qk_norm_{layer:02d}"][10] == pytest.approx(temperature, rel=1e-5)


def test_every_parameter_gets_a_gradient_for_every_choice():
    for kind in ATTENTIONS:
        config = ModelConfig(
            attention=kind, num_layers=1, num_heads=2, model_dim=16, num_features=128, qk_norm=kind != "rfa"
        )
        model = ProteinModel(config, causal=kind not in BIDIRECTIONAL)
        model.logits(model(residues(1, 20))).square().sum().backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, (kind, name)
            assert parameter.grad.abs().sum() > 0, (kind, name)
