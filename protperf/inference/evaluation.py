"""How well models and counting answer: sums over asked residues, by the length of their protein and by residue.

Axis letters: `B` batch, `W` window length in tokens, `A` asked residues, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from protperf.batches import Batch, documents_or_one, is_out_of_memory, residues_of_proteins
from protperf.config import ObjectiveConfig
from protperf.formats.scores import OTHER
from protperf.inference.passes import autocast
from protperf.metrics import NgramFloor, summarise
from protperf.model import ProteinModel
from protperf.objectives import EVALUATION_EPOCH, NOT_ASKED, ask, question_generator, token_losses
from protperf.vocab import STANDARD_RESIDUES, VOCABULARY


class Answerer(NamedTuple):
    """A model that is asked.

    Attributes:
        model: in evaluation mode, on the device to compute on.
        across: whether proteins packed into one window see each other.
        precision: `fp32`, or `bf16` or `fp16` under autocast.
    """

    model: ProteinModel
    across: bool = False
    precision: str = "fp32"


class Tally:
    """Sums over asked residues, by length bin and residue token: all that is reported follows from them.

    Args:
        bins: name -> most residues of a protein in its window, ascending (`metrics.length_bins`).

    Attributes:
        nll: negative log-likelihood in nats, float64 `(bins, residues)`.
        asked: number of asked residues, int64 `(bins, residues)`.
        correct: number of them got right, int64 `(bins, residues)`.
    """

    def __init__(self, bins: Mapping[str, float]) -> None:
        self._bins = bins
        shape = (len(bins), VOCABULARY.num_residues)
        self.nll = np.zeros(shape)
        self.asked = np.zeros(shape, np.int64)
        self.correct = np.zeros(shape, np.int64)

    def add(self, lengths: np.ndarray, residues: np.ndarray, nll: np.ndarray, correct: np.ndarray) -> None:
        """Add answers, `(A,)` each.

        Args:
            lengths: residues of the asked residue's protein in its window.
            residues: the right tokens.
            nll: of each, in nats.
            correct: whether the best-scored token is the right one.
        """
        rows = np.searchsorted(list(self._bins.values()), lengths)
        places = rows * self.nll.shape[1] + residues.astype(np.int64)
        for sums, weights in ((self.nll, nll), (self.correct, correct), (self.asked, None)):
            sums += np.bincount(places, weights, minlength=sums.size).reshape(sums.shape).astype(sums.dtype)

    def summary(self) -> dict[str, float]:
        """Return loss (nats per residue), perplexity, accuracy and the number of asked residues."""
        return _summary(self.nll, self.asked, self.correct)

    def by_length(self) -> dict[str, dict[str, float]]:
        """Return the summary of each length bin of which something was asked."""
        rows = zip(self._bins, self.nll, self.asked, self.correct, strict=True)
        return {name: _summary(*sums) for name, *sums in rows if sums[1].any()}

    def by_residue(self) -> dict[str, dict[str, float]]:
        """Return the summary of each standard residue that was asked, and of all others as `OTHER`."""
        first = len(STANDARD_RESIDUES)
        groups: dict[str, slice] = {letter: slice(i, i + 1) for i, letter in enumerate(STANDARD_RESIDUES)}
        groups[OTHER] = slice(first, None)
        found = {
            name: (self.nll[:, part], self.asked[:, part], self.correct[:, part])
            for name, part in groups.items()
        }
        return {name: _summary(*sums) for name, sums in found.items() if sums[1].any()}


def tally_windows(
    models: Mapping[str, Answerer],
    floors: Mapping[str, tuple[NgramFloor, int]],
    windows: Iterable[tuple[Sequence[int], np.ndarray]],
    *,
    objective: ObjectiveConfig,
    seed: int,
    bins: Mapping[str, float],
) -> dict[str, Tally]:
    """Ask models and floors the same residues of held-out windows.

    Args:
        models: by name; they must have this objective's direction.
        floors: name -> n-gram model and order.
        windows: numbers of some windows, which decide their masks, and their tokens, uint8 `(B, W)`.
        objective: what is asked.
        seed: of the masks.
        bins: see `Tally`.
    """
    tallies = {name: Tally(bins) for name in (*models, *floors)}
    for numbers, tokens in windows:
        batch = ask_windows(tokens, numbers, objective, seed=seed)
        asked = batch.targets != NOT_ASKED
        lengths = residues_of_proteins(batch.inputs)[asked].numpy()
        residues = batch.targets[asked].numpy()
        for name, answerer in models.items():
            tallies[name].add(lengths, residues, *answer_each(answerer, batch))
        shift = int(objective.kind == "causal")  # the target stands one place before what is asked
        for name, (floor, order) in floors.items():
            parts = [
                floor.losses(window, np.flatnonzero(places) + shift, order=order)
                for window, places in zip(tokens, asked.numpy(), strict=True)
            ]
            nll, correct = (np.concatenate(each) for each in zip(*parts, strict=True))
            tallies[name].add(lengths, residues, nll, correct)
    return tallies


def ask_windows(
    tokens: np.ndarray, numbers: Sequence[int], objective: ObjectiveConfig, *, seed: int
) -> Batch:
    """Make the questions of evaluation: inputs and targets uint8 `(B, W)`, on the CPU.

    Args:
        tokens: windows, uint8 `(B, W)`.
        numbers: of the windows in their split.
        objective: what is asked.
        seed: of the masks, which are a function of (seed, number).
    """
    questions = [
        ask(
            window,
            objective,
            question_generator(seed, epoch=EVALUATION_EPOCH, window=number),
            evaluation=True,
        )
        for number, window in zip(numbers, tokens, strict=True)
    ]
    inputs, targets = (torch.from_numpy(np.stack(part)) for part in zip(*questions, strict=True))
    return Batch(inputs, targets)


def answer_each(answerer: Answerer, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """Return the loss of each asked token in nats, float64 `(A,)`, and whether it was got right, bool `(A,)`.

    A batch that does not fit into memory is halved until it does; one window that does not is an error.
    """
    try:
        return _answer(answerer, batch)
    except (RuntimeError, MemoryError) as error:
        if len(batch.inputs) == 1 or not is_out_of_memory(error):
            raise
    half = len(batch.inputs) // 2
    parts = [
        answer_each(answerer, Batch(*(each[rows] for each in batch)))
        for rows in (slice(half), slice(half, None))
    ]
    nll, correct = (np.concatenate(each) for each in zip(*parts, strict=True))
    return nll, correct


def _answer(answerer: Answerer, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    model = answerer.model
    device = model.device
    inputs, targets = (part.to(device) for part in batch)
    asked = targets != NOT_ASKED
    with torch.inference_mode(), autocast(device, answerer.precision):
        hidden = model(inputs, documents_or_one(inputs, across=answerer.across))
        logits, right = model.logits(hidden[asked]), targets[asked].long()
        nll, correct = token_losses(logits, right), logits.argmax(-1) == right
    return nll.double().cpu().numpy(), correct.cpu().numpy()


def _summary(nll: np.ndarray, asked: np.ndarray, correct: np.ndarray) -> dict[str, float]:
    count = int(asked.sum())
    return {**summarise(float(nll.sum()), count, int(correct.sum())), "asked": count}
