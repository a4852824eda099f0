"""How weights move: AdamW with decay on matrices only, linear warm-up, cosine decay."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

from protperf.config import OptimConfig


def build_optimizer(model: nn.Module, config: OptimConfig) -> AdamW:
    """Return AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101) over the model's weights.

    Weight decay acts on the matrices of the blocks; embeddings, norms and biases are free of it.
    """
    decayed: list[nn.Parameter] = []
    free: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        is_matrix = parameter.dim() >= 2 and "embedding" not in name
        (decayed if is_matrix else free).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": free, "weight_decay": 0.0},
    ]
    betas = (config.beta1, config.beta2)
    return AdamW(groups, lr=config.learning_rate, betas=betas, eps=config.eps)


def learning_rate_factor(step: int, config: OptimConfig) -> float:
    """Return the learning rate of the update that follows `step` updates, as a share of the peak.

    Rises linearly over `warmup_steps`, falls along half a cosine to `final_fraction` at `decay_steps`, then stays.
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    whole = max(1, config.decay_steps - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / whole)
    cosine = (1 + math.cos(math.pi * progress)) / 2
    return config.final_fraction + (1 - config.final_fraction) * cosine


def number_by_model(state: dict[str, Any], optimizer: Optimizer, model: nn.Module) -> dict[str, Any]:
    """Return an optimizer's state dict with parameters numbered as in `model.parameters()`, not group by group."""
    place_of = {parameter: place for place, parameter in enumerate(model.parameters())}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    places = {number: place_of[parameter] for number, parameter in enumerate(parameters)}
    groups = [
        {**group, "params": [places[number] for number in group["params"]]} for group in state["param_groups"]
    ]
    return {
        "state": {places[number]: values for number, values in state["state"].items()},
        "param_groups": groups,
    }


def total_norm(tensors: Iterable[Tensor]) -> float:
    """Return the 2-norm of all entries together; of sharded tensors over all ranks, which must all ask."""
    norm = torch.nn.utils.get_total_norm(tensors)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
