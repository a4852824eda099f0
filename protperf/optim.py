"""How weights move: AdamW or Adam, and the learning rate of each step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Adam, AdamW, Optimizer

from protperf.config import OptimConfig


def build_optimizer(model: nn.Module, config: OptimConfig, *, fused: bool = False) -> Adam:
    """Return AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101) or Adam over the model's weights, in two groups.

    The first group is the matrices of the blocks, which always decay; the second the embeddings, norms, biases and learned
    features, which decay only where the configuration says `all`. Both groups are always there: a run may go on under another choice.

    Args:
        model: its parameters stay the ones that move.
        config: which optimizer, and its numbers.
        fused: whether one kernel updates all weights, for parameters on a GPU; other bits than the loop over parameters.
    """
    decayed: list[nn.Parameter] = []
    free: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        is_matrix = parameter.dim() == 2 and "embedding" not in name
        (decayed if is_matrix else free).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": free, "weight_decay": config.weight_decay if config.decayed == "all" else 0.0},
    ]
    optimizer_class = AdamW if config.kind == "adamw" else Adam
    optimizer = optimizer_class(
        groups,
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=fused or None,
    )
    # A fused optimizer offers to unscale gradients by itself, and Lightning clips none that are not unscaled before.
    cast(Any, optimizer)._step_supports_amp_scaling = False
    optimizer.register_load_state_dict_pre_hook(_stay_fused_or_not)
    return optimizer


def _stay_fused_or_not(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Let the device of this run decide about the kernel, not that of the checkpoint."""
    pairs = zip(state["param_groups"], optimizer.param_groups, strict=True)
    return {**state, "param_groups": [{**saved, "fused": own["fused"]} for saved, own in pairs]}


def learning_rate_factor(step: int, config: OptimConfig) -> float:
    """Return the learning rate of the update that follows `step` updates, as a share of the peak.

    All schedules rise linearly over `warmup_steps`. After that,

    - `cosine` falls along half a cosine to `final_fraction` at `decay_steps`, then stays,
    - `constant` stays,
    - `inverse_sqrt` falls as sqrt(warmup_steps / number of the update), which is 1 where warm-up ends (Vaswani et al.
      2017, Eq. 3, arXiv:1706.03762),
    - `warmup_stable_decay` stays until `decay_steps - cooldown_steps`, falls linearly to `final_fraction` at
      `decay_steps`, then stays (Hu et al. 2024, arXiv:2404.06395, whose own fall is exponential; linear as in Hägele et al.
      2024, arXiv:2405.18392).
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return 1.0
    if config.schedule == "inverse_sqrt":
        return math.sqrt(max(1, config.warmup_steps) / (step + 1))
    if config.schedule == "warmup_stable_decay":
        progress = 1 - (config.decay_steps - step) / config.cooldown_steps
        return 1 - (1 - config.final_fraction) * min(1.0, max(0.0, progress))
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
