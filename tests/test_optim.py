"""AdamW decays matrices alone; the learning rate is a function of the step."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from protperf.config import ModelConfig, OptimConfig
from protperf.model import ProteinModel
from protperf.optim import build_optimizer, learning_rate_factor

CONFIG = OptimConfig(learning_rate=2.0, warmup_steps=10, decay_steps=110, final_fraction=0.1)


@pytest.mark.parametrize(
    ("step", "factor"),
    [
        (0, 0.1),
        (4, 0.5),
        (9, 1.0),
        (10, 1.0),
        (35, 0.1 + 0.9 * (1 + math.sqrt(0.5)) / 2),
        (60, 0.55),
        (85, 0.1 + 0.9 * (1 - math.sqrt(0.5)) / 2),
        (110, 0.1),
        (111, 0.1),
        (10**9, 0.1),
    ],
)
def test_the_schedule_by_hand(step: int, factor: float):
    assert learning_rate_factor(step, CONFIG) == pytest.approx(factor, abs=1e-12)


@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        OptimConfig(warmup_steps=0),
        OptimConfig(warmup_steps=1, decay_steps=1),
        OptimConfig(warmup_steps=500, decay_steps=100),
        OptimConfig(final_fraction=0.0),
        OptimConfig(final_fraction=1.0),
    ],
)
def test_the_schedule_rises_once_and_falls_once_within_its_bounds(config: OptimConfig):
    factors = [learning_rate_factor(step, config) for step in range(1500)]
    assert all(0 < factor <= 1 for factor in factors[: config.warmup_steps])
    assert all(config.final_fraction <= factor <= 1 for factor in factors[config.warmup_steps :])
    assert max(factors) == 1.0
    peak = factors.index(1.0)
    assert factors[: peak + 1] == sorted(factors[: peak + 1])
    assert factors[peak:] == sorted(factors[peak:], reverse=True)
    assert factors[-1] == pytest.approx(config.final_fraction, abs=1e-12)


@pytest.mark.parametrize("attention", ["relu", "softmax"])
@pytest.mark.parametrize("feedforward", ["gelu", "swiglu"])
def test_each_weight_is_moved_once_and_decay_acts_on_matrices_of_blocks_alone(
    attention: str, feedforward: str
):
    model = ProteinModel(ModelConfig(attention=attention, feedforward=feedforward), causal=True)
    optimizer = build_optimizer(model, OptimConfig(weight_decay=0.3, beta1=0.8, beta2=0.9, eps=1e-7))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decay = {names[id(p)]: g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(names) == len(decay)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            assert decay[f"{name}.weight"] == 0.3
        if isinstance(module, nn.LayerNorm):
            assert decay[f"{name}.weight"] == decay[f"{name}.bias"] == 0.0
    assert decay["embedding.weight"] == 0.0
    assert optimizer.defaults["betas"] == (0.8, 0.9)
    assert optimizer.defaults["eps"] == 1e-7


def test_one_step_is_adamw_by_hand():
    model = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(3.0)
    optimizer = build_optimizer(model, OptimConfig(learning_rate=0.5, weight_decay=0.2, eps=0.0))
    (5.0 * model.weight).sum().backward()
    optimizer.step()
    # decoupled decay 3 (1 - 0.5 * 0.2), then a first Adam step of exactly the learning rate against the gradient's sign
    assert model.weight.item() == pytest.approx(3 * 0.9 - 0.5, rel=1e-6)
