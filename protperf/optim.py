"""How weights move: AdamW with decay on matrices only, linear warm-up, cosine decay."""

from __future__ import annotations

import math

from torch import nn
from torch.optim import AdamW

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
