"""A short training of the whole model on what it was trained to answer: of all weights, or of small matrices beside them.

Axis letters: `B` batch, `L` length in tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from protperf.batches import Batch
from protperf.convert.transfer import rate_factor
from protperf.model import ProteinModel
from protperf.objectives import answer

LORA_TARGETS = r"blocks\.\d+\.(attention\.(qkv|out)|feedforward\.(into|out))"
"""The matrices that LoRA adds to: all of the blocks."""


def tune(
    model: ProteinModel,
    questions: Iterable[tuple[Batch, Tensor]],
    *,
    steps: int,
    rate: float,
    method: str,
    lora_rank: int,
    seed: int,
    advance: Callable[[Tensor], None],
) -> None:
    """Train a model on what its objective asks; afterwards it is an ordinary one, in evaluation mode.

    Args:
        model: whose weights move in place.
        questions: as many as there are steps.
        steps: of Adam, whose rate rises over ten steps and then falls along half a cosine to zero.
        rate: its peak.
        method: `full` moves all weights, learned features too; `lora` moves the sum of each matrix in the blocks and a
            product of two thin ones, which begins as zero and is added up at the end.
        lora_rank: width of the thin matrices.
        seed: of their draw, and of dropout.
        advance: told the mean loss, nats per residue, after each step.

    Raises:
        ValueError: `lora`, and the package `peft` is not there.
    """
    with torch.random.fork_rng(devices=_cuda_of(model)):
        torch.manual_seed(seed)
        if method == "lora":
            adapted = add_lora(model, rank=lora_rank)
            _train(model, questions, steps=steps, rate=rate, advance=advance)
            adapted.merge_and_unload()
        else:
            _train(model, questions, steps=steps, rate=rate, advance=advance)
    model.requires_grad_(True).eval()


def add_lora(model: ProteinModel, *, rank: int) -> Any:
    """Put a `peft.LoraModel` around a model; all other weights of the model stay, until it is unloaded.

    Source: Hu et al. 2021, arXiv:2106.09685; its scale alpha / rank is 1 here.

    Raises:
        ValueError: the package `peft` is not there.
    """
    try:
        from peft import LoraConfig, LoraModel
    except ImportError as error:
        raise ValueError(
            f"--tune-method lora needs the package peft ({error}); pip install 'protperf[tune]', or choose full"
        ) from error
    config = LoraConfig(r=rank, lora_alpha=rank, target_modules=LORA_TARGETS, bias="none")
    return LoraModel(model, config, "default")


def _train(
    model: ProteinModel,
    questions: Iterable[tuple[Batch, Tensor]],
    *,
    steps: int,
    rate: float,
    advance: Callable[[Tensor], None],
) -> None:
    """Train all parameters that ask for a gradient."""
    moving = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(moving, lr=rate, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate_factor(step, steps))
    model.train()
    for batch, _ in questions:
        optimizer.zero_grad()
        sums = answer(model, batch, across=True)
        loss = sums.nll / sums.asked.clamp_min(1)
        loss.backward()
        nn.utils.clip_grad_norm_(moving, 1.0)
        optimizer.step()
        schedule.step()
        advance(loss.detach())
    optimizer.zero_grad()


def _cuda_of(model: ProteinModel) -> list[torch.device]:
    return [model.device] if model.device.type == "cuda" else []
