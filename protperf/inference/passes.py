"""Many sequences in few forward passes: packed or padded together, fewer at once where memory is short.

Axis letters: `B` batch, `L` length in tokens, `D` model width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from protperf.batches import is_out_of_memory, pad_together, plan_batches
from protperf.model import ProteinModel
from protperf.vocab import VOCABULARY

T = TypeVar("T")

DEFAULT_TOKENS = 4096
"""Tokens in a forward pass."""


def ask_model(
    model: ProteinModel,
    sequences: Sequence[np.ndarray],
    take: Callable[[int, list[Tensor]], T],
    *,
    layers: Sequence[int] = (),
    token_budget: int = DEFAULT_TOKENS,
    precision: str = "fp32",
) -> list[T | None]:
    """Show sequences to a model, each whole and unseen by the others, and keep what `take` makes of their states.

    Linear attention sees them packed into one row, exact attention padded beside others of similar length. A pass that
    does not fit into memory is halved until it does.

    Args:
        model: in evaluation mode, on the device to compute on.
        sequences: tokens as shown, `<bos>` and `<eos>` included, uint8 `(L,)` each.
        take: called as `take(place, states)` for each sequence, in inference mode and without autocast, with float32
            `(L, D)` of each layer on the model's device; what it returns must not be a view of them. Places come in any
            order.
        layers: as in `ProteinModel.states`; the last alone by default.
        token_budget: tokens in a pass; a longer sequence has one of its own.
        precision: `fp32`, or `bf16` or `fp16` under autocast.

    Returns:
        one value a sequence, in the order given; `None` for one that does not fit into memory even alone.
    """
    answers: list[T | None] = [None] * len(sequences)
    layers = layers or (model.config.num_layers,)
    for places in plan_passes(model, [len(sequence) for sequence in sequences], token_budget=token_budget):
        waiting = [places]
        while waiting:
            part = waiting.pop()
            try:
                shown = [sequences[place] for place in part]
                with torch.inference_mode():
                    for place, states in zip(part, _states(model, shown, layers, precision), strict=True):
                        answers[place] = take(place, states)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                for place in part:
                    answers[place] = None
                if len(part) > 1:
                    waiting += [part[: len(part) // 2], part[len(part) // 2 :]]
    return answers


def frame(residues: np.ndarray) -> np.ndarray:
    """Return residue tokens `(L,)` between `<bos>` and `<eos>`, uint8 `(L + 2,)`."""
    return np.concatenate(([VOCABULARY.bos], residues, [VOCABULARY.eos])).astype(np.uint8)


def plan_passes(model: ProteinModel, lengths: Sequence[int], *, token_budget: int) -> Iterator[list[int]]:
    """Yield the places of the sequences of each pass.

    Args:
        model: its attention decides: exact attention over a packed row would be quadratic in the row.
        lengths: tokens of each sequence.
        token_budget: tokens in a pass, padding included.
    """
    if model.config.is_exact_somewhere:
        yield from plan_batches(lengths, token_budget=token_budget)
        return
    row: list[int] = []
    tokens = 0
    for place, length in enumerate(lengths):
        if row and tokens + length > token_budget:
            yield row
            row, tokens = [], 0
        row.append(place)
        tokens += length
    if row:
        yield row


def _states(
    model: ProteinModel, sequences: Sequence[np.ndarray], layers: Sequence[int], precision: str
) -> Iterator[list[Tensor]]:
    """Yield the states of each sequence of one pass, a tensor `(L, D)` a layer."""
    packed = len(sequences) == 1 or not model.config.is_exact_somewhere
    tokens, documents = pack_together(sequences) if packed else pad_together(sequences)
    device = model.device
    shown = documents.to(device) if len(sequences) > 1 else None
    with autocast(device, precision):
        found = model.states(tokens.to(device), shown, layers=layers)
    found = [states.float() for states in found]
    start = 0
    for row, sequence in enumerate(sequences):
        length = len(sequence)
        yield [states[0, start : start + length] if packed else states[row, :length] for states in found]
        start += length


def pack_together(sequences: Sequence[np.ndarray]) -> tuple[Tensor, Tensor]:
    """Put sequences behind one another in one row: tokens uint8 `(1, L)`, documents int32 `(1, L)`."""
    tokens = torch.from_numpy(np.concatenate(sequences))
    numbers = np.repeat(np.arange(len(sequences), dtype=np.int32), [len(each) for each in sequences])
    return tokens.unsqueeze(0), torch.from_numpy(numbers).unsqueeze(0)


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """Return the context in which a model computes in `fp32`, `bf16` or `fp16`."""
    dtype = torch.float16 if precision == "fp16" else torch.bfloat16
    return torch.autocast(device.type, dtype=dtype, enabled=precision != "fp32")
