"""Weights move as the papers say; decay acts on matrices unless told otherwise; the learning rate is a function of the step."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning.plugins.precision import MixedPrecision
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    ConstantLR,
    CosineAnnealingLR,
    LinearLR,
    LRScheduler,
    SequentialLR,
)
from training import train_small

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


CONSTANT = OptimConfig(schedule="constant", warmup_steps=4)
INVERSE_SQRT = OptimConfig(schedule="inverse_sqrt", warmup_steps=4)
STABLE = OptimConfig(
    schedule="warmup_stable_decay", warmup_steps=4, decay_steps=100, cooldown_steps=20, final_fraction=0.2
)


@pytest.mark.parametrize(
    ("config", "factors"),
    [
        (CONSTANT, {0: 0.25, 3: 1.0, 4: 1.0, 10**9: 1.0}),
        (INVERSE_SQRT, {0: 0.25, 2: 0.75, 3: 1.0, 4: 2 / math.sqrt(5), 15: 0.5, 399: 0.1}),
        (STABLE, {0: 0.25, 3: 1.0, 4: 1.0, 80: 1.0, 85: 0.8, 90: 0.6, 99: 0.24, 100: 0.2, 10**9: 0.2}),
    ],
)
def test_the_other_schedules_by_hand(config: OptimConfig, factors: dict[int, float]):
    for step, factor in factors.items():
        assert learning_rate_factor(step, config) == pytest.approx(factor, abs=1e-12)


def test_inverse_sqrt_is_the_formula_of_vaswani_et_al():
    width, warmup = 512, 4000
    config = OptimConfig(schedule="inverse_sqrt", warmup_steps=warmup)
    peak = width**-0.5 * warmup**-0.5
    for number in (1, 17, 3999, 4000, 4001, 100_000):  # of the update, the first is 1
        expected = width**-0.5 * min(number**-0.5, number * warmup**-1.5)
        assert peak * learning_rate_factor(number - 1, config) == pytest.approx(expected, rel=1e-12)


def rates_of_torch(num_steps: int, schedule: Callable[[Optimizer], LRScheduler]) -> list[float]:
    """Return the learning rates of the first updates under one of torch's own schedulers, with a peak of 1."""
    optimizer = torch.optim.SGD([torch.zeros((), requires_grad=True)], lr=1.0)
    scheduler = schedule(optimizer)
    rates = []
    for _ in range(num_steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def after_warmup(
    warmup: int, *parts: tuple[int, Callable[[Optimizer], LRScheduler]]
) -> Callable[[Optimizer], LRScheduler]:
    """Return a linear warm-up and then these schedulers, each from its step on."""

    def build(optimizer: Optimizer) -> LRScheduler:
        rise = LinearLR(optimizer, 1 / warmup, 1.0, total_iters=warmup - 1)
        rest = [part(optimizer) for _, part in parts]
        return SequentialLR(optimizer, [rise, *rest], milestones=[start for start, _ in parts])

    return build


@pytest.mark.parametrize(
    ("config", "reference", "num_steps"),
    [
        (CONFIG, after_warmup(10, (10, partial(CosineAnnealingLR, T_max=100, eta_min=0.1))), 111),
        (CONSTANT, after_warmup(4, (4, partial(ConstantLR, factor=1.0))), 50),
        (
            STABLE,
            after_warmup(
                4,
                (4, partial(ConstantLR, factor=1.0)),
                (80, partial(LinearLR, start_factor=1.0, end_factor=0.2, total_iters=20)),
            ),
            150,
        ),
    ],
    ids=["cosine", "constant", "warmup_stable_decay"],
)
@pytest.mark.filterwarnings(
    "ignore:The epoch parameter in `scheduler.step:UserWarning"
)  # torch's own, of SequentialLR
def test_schedules_are_those_of_torch(
    config: OptimConfig, reference: Callable[[Optimizer], LRScheduler], num_steps: int
):
    factors = [learning_rate_factor(step, config) for step in range(num_steps)]
    assert factors == pytest.approx(rates_of_torch(num_steps, reference), abs=1e-9)


@pytest.mark.parametrize("schedule", ["constant", "cosine", "inverse_sqrt"])
def test_without_warmup_the_first_step_is_at_the_peak(schedule: str):
    config = OptimConfig(schedule=schedule, warmup_steps=0)
    factors = [learning_rate_factor(step, config) for step in range(1200)]
    assert factors[0] == 1.0
    assert factors == sorted(factors, reverse=True)


@pytest.mark.parametrize(
    ("choice", "allowed"),
    [
        ({"cooldown_steps": 5}, "allowed with schedule 'cosine': 0, or set schedule to warmup_stable_decay"),
        ({"schedule": "constant", "cooldown_steps": 5}, "allowed with schedule 'constant': 0"),
        ({"schedule": "warmup_stable_decay"}, "1 to decay_steps - warmup_steps, 1000 - 100 here"),
        (
            {"schedule": "warmup_stable_decay", "warmup_steps": 60, "decay_steps": 100, "cooldown_steps": 41},
            "1 to decay_steps - warmup_steps, 100 - 60 here",
        ),
    ],
)
def test_a_cooldown_without_a_schedule_or_without_room_is_refused_in_one_line(
    choice: dict[str, Any], allowed: str
):
    with pytest.raises(ValueError, match=r"OptimConfig.cooldown_steps is \d+; allowed") as error:
        OptimConfig(**choice)
    assert allowed in str(error.value)
    assert "\n" not in str(error.value)


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


def moved_by_hand(
    weight: float, gradients: list[float], *, kind: str, rate: float, decay: float, eps: float
) -> float:
    """Return a weight after updates with these gradients: Kingma & Ba 2015, Alg. 1; Loshchilov & Hutter 2019, Alg. 2."""
    mean = square = 0.0
    for number, gradient in enumerate(gradients, 1):
        g = gradient + decay * weight if kind == "adam" else gradient
        mean = 0.9 * mean + 0.1 * g
        square = 0.98 * square + 0.02 * g * g
        update = mean / (1 - 0.9**number) / (math.sqrt(square / (1 - 0.98**number)) + eps)
        if kind == "adamw":
            update += decay * weight
        weight -= rate * update
    return weight


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", ["adam", "adamw"])
def test_five_steps_of_both_kinds_by_hand(kind: str, fused: bool):
    model = nn.Linear(1, 1, bias=False).double()
    with torch.no_grad():
        model.weight.fill_(3.0)
    config = OptimConfig(kind=kind, learning_rate=0.05, weight_decay=0.2, eps=1e-3)
    optimizer = build_optimizer(model, config, fused=fused)
    gradients = [-0.5, 2.0, -0.7, 0.01, 1.0]
    for gradient in gradients:
        optimizer.zero_grad()
        (gradient * model.weight).sum().backward()
        optimizer.step()
    expected = moved_by_hand(3.0, gradients, kind=kind, rate=0.05, decay=0.2, eps=1e-3)
    assert model.weight.item() == pytest.approx(expected, rel=1e-9)


def test_decay_of_all_reaches_norms_biases_and_embeddings():
    model = ProteinModel(ModelConfig(qk_norm=True), causal=False)
    optimizer = build_optimizer(model, OptimConfig(decayed="all", weight_decay=0.3))
    assert len(optimizer.param_groups) == 2  # as with `matrices`, so that a run may go on with either
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert decay == {id(parameter): 0.3 for parameter in model.parameters()}


@pytest.mark.parametrize("fused", [False, True])
def test_gradients_are_clipped_in_mixed_precision_whatever_moves_the_weights(fused: bool):
    model = nn.Linear(3, 1, bias=False)
    optimizer = build_optimizer(model, OptimConfig(), fused=fused)
    (100 * model(torch.ones(1, 3))).sum().backward()
    MixedPrecision("bf16-mixed", "cpu").clip_gradients(optimizer, 0.5)
    assert model.weight.grad is not None
    assert model.weight.grad.norm().item() == pytest.approx(0.5, rel=1e-4)


def test_a_run_goes_on_with_another_optimizer_and_schedule(tmp_path: Path):
    train_small(tmp_path, "trainer.max_steps=10")
    changed = ("optim.kind=adam", "optim.decayed=all", "optim.weight_decay=0.01")
    cooled = ("optim.schedule=warmup_stable_decay", "optim.cooldown_steps=5", "optim.final_fraction=0")
    run, record = train_small(tmp_path, "trainer.max_steps=20", *changed, *cooled)
    expected = [1e-2 * factor for factor in (1, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2)]
    assert [float.fromhex(rate) for rate in record.rates] == pytest.approx(expected, rel=1e-9)
    for group in run.trainer.optimizers[0].param_groups:
        assert group["weight_decay"] == 0.01
        assert not group["decoupled_weight_decay"]


def test_a_run_goes_on_where_the_optimizer_is_fused_and_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    train_small(tmp_path, "trainer.max_steps=4", "trainer.precision=bf16-mixed")

    def build_fused(model: nn.Module, config: OptimConfig, *, fused: bool) -> Optimizer:
        assert not fused  # no GPU here
        return build_optimizer(model, config, fused=True)

    with monkeypatch.context() as patched:
        patched.setattr("protperf.task.build_optimizer", build_fused)
        run, _ = train_small(tmp_path, "trainer.max_steps=8", "trainer.precision=bf16-mixed")
    assert all(group["fused"] for group in run.trainer.optimizers[0].param_groups)
    run, _ = train_small(tmp_path, "trainer.max_steps=12", "trainer.precision=bf16-mixed")
    assert not any(group["fused"] for group in run.trainer.optimizers[0].param_groups)
    assert {int(state["step"]) for state in run.trainer.optimizers[0].state.values()} == {12}


@pytest.mark.parametrize("fused", [False, True])
def test_the_device_decides_about_the_kernel_and_not_the_checkpoint(fused: bool):
    model = nn.Linear(3, 1)
    saved, own = (build_optimizer(model, OptimConfig(), fused=kernel) for kernel in (not fused, fused))
    model(torch.ones(1, 3)).sum().backward()
    saved.step()
    own.load_state_dict(saved.state_dict())
    assert {bool(group["fused"]) for group in own.param_groups} == {fused}
    own.step()
    assert {int(state["step"]) for state in own.state.values()} == {2}
