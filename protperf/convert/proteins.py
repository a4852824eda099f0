"""The proteins that a model is moved with: which it learns from and which are held out, and what it is asked of them.

Axis letters: `B` batch, `L` length in tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from protperf.batches import Batch, documents_of, plan_batches
from protperf.config import ObjectiveConfig
from protperf.formats.fasta import SequenceReader
from protperf.inference.evaluation import Answerer, answer_each
from protperf.inference.passes import frame
from protperf.metrics import summarise
from protperf.model import ProteinModel
from protperf.objectives import EVALUATION_EPOCH, NOT_ASKED, ask, question_generator
from protperf.vocab import VOCABULARY

HELD_OUT = 10
"""One protein in so many is held out where no file of its own is given."""

MOST_TOKENS = 512
"""Longer proteins are cut: the matrices of exact attention are looked at whole."""

_ORDER_EPOCH = EVALUATION_EPOCH - 1
"""The epoch of the draws that say which proteins are in a step: no step has it."""


class Proteins(NamedTuple):
    """Pieces of proteins, tokens as shown, uint8 `(L,)` each.

    Attributes:
        learned: what is learned from; empty where nothing is.
        measured: what is measured on.
        notes: what to say of both, a line each.
        about: numbers of both, for the report.
    """

    learned: list[np.ndarray]
    measured: list[np.ndarray]
    notes: tuple[str, ...]
    about: dict[str, int | str]


def gather_proteins(fasta: Path | None, evaluate: Path | None, *, learns: bool, most: int) -> Proteins:
    """Read proteins and share them out: from which is learned, and on which is measured.

    Args:
        fasta: proteins for both; a tenth of them is held out where something is learned and `evaluate` is `None`.
        evaluate: proteins to measure on alone.
        learns: whether something is learned.
        most: tokens of a piece; longer proteins are cut.

    Raises:
        ValueError: a file that cannot be read, or too few proteins.
    """
    notes: list[str] = []

    def read(path: Path) -> list[np.ndarray]:
        proteins, lines = read_proteins(path)
        notes.extend(lines)
        return proteins

    given = [] if fasta is None else read(fasta)
    learned, measured = (given if learns else []), given
    if evaluate is not None:
        measured = read(evaluate)
    elif learns:
        try:
            learned, measured = hold_out(given)
        except ValueError as error:
            raise ValueError(f"{fasta}: {error}") from None
    shared = count_shared(measured, learned)
    about = {"learned_from": len(learned), "measured_on": len(measured), "measured_and_learned_from": shared}
    if learns:
        notes.append(
            f"learns from {len(learned):,} proteins, measured on {len(measured):,} "
            f"{'held-out ones' if evaluate is None else f'of {evaluate}'}"
            + (f", {shared:,} of which it learns from" if shared else "")
        )
    cut = sum(len(protein) + 2 > most for protein in (*learned, *measured))
    if cut:
        notes.append(f"{cut:,} proteins of more than {most - 2:,} residues are read in pieces")
    pieces = [cut_proteins(part, most=most) for part in (learned, measured)]
    files = {name: str(path) for name, path in (("fasta", fasta), ("evaluate", evaluate)) if path is not None}
    return Proteins(pieces[0], pieces[1], tuple(notes), {**files, **about})


def read_proteins(path: Path) -> tuple[list[np.ndarray], list[str]]:
    """Read a sequence file: residues of each protein, uint8 `(L,)`, and what to say of the reading.

    Raises:
        ValueError: there is no such file, or no protein in it that can be read.
    """
    reader = SequenceReader([path])
    proteins = [record.tokens for record in reader]
    if not proteins:
        raise ValueError(
            f"{path}: no protein that can be read; {next(iter(reader.skipped_examples)).message}"
        )
    return proteins, list(reader.summary())


def hold_out(proteins: Sequence[np.ndarray]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Split proteins into those to learn from and a tenth, at least one, that is held out.

    The hash of its residues decides of each: neither the order of a file nor a name does, and equal proteins stay together.

    Raises:
        ValueError: all are the same protein.
    """
    keys = [_key(protein) for protein in proteins]
    different = sorted(set(keys))
    if len(different) < 2:
        raise ValueError("one protein alone: none is left to measure on; give more, or others to --evaluate")
    last = different[(len(different) - 1) // HELD_OUT]
    parts: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    for key, protein in zip(keys, proteins, strict=True):
        parts[key <= last].append(protein)
    return parts


def count_shared(proteins: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> int:
    """Return how many proteins are among the others, residue by residue."""
    known = {_key(other) for other in others}
    return sum(_key(protein) in known for protein in proteins)


def cut_proteins(proteins: Sequence[np.ndarray], *, most: int) -> list[np.ndarray]:
    """Return proteins as they are shown, between `<bos>` and `<eos>`, in pieces of at most so many tokens each.

    Args:
        proteins: residues of each.
        most: tokens of a piece; `<bos>` stands before the first piece alone, `<eos>` behind the last.
    """
    whole = [frame(protein) for protein in proteins]
    return [each[start : start + most] for each in whole for start in range(0, len(each), most)]


def ask_pieces(
    pieces: Sequence[np.ndarray],
    numbers: Sequence[int],
    objective: ObjectiveConfig,
    *,
    seed: int,
    epoch: int,
) -> tuple[Batch, Tensor]:
    """Ask some pieces, side by side: questions uint8 `(B, L)` and documents int32 `(B, L)`.

    Args:
        pieces: of all proteins.
        numbers: of those asked; with `seed` and `epoch` they decide the masks.
        objective: what is asked.
        seed: of the masks.
        epoch: number of the step, or `EVALUATION_EPOCH`: then answers may be compared with floors.
    """
    evaluation = epoch == EVALUATION_EPOCH
    questions = [
        ask(
            pieces[number],
            objective,
            question_generator(seed, epoch=epoch, window=number),
            evaluation=evaluation,
        )
        for number in numbers
    ]
    shape = (len(numbers), max(len(inputs) for inputs, _ in questions))
    inputs, targets = np.full(shape, VOCABULARY.pad, np.uint8), np.full(shape, NOT_ASKED, np.uint8)
    for row, question in enumerate(questions):
        for whole, part in zip((inputs, targets), question, strict=True):
            whole[row, : len(part)] = part
    batch = Batch(torch.from_numpy(inputs), torch.from_numpy(targets))
    return batch, documents_of(batch.inputs, across=True)


def practice(
    pieces: Sequence[np.ndarray], objective: ObjectiveConfig, *, steps: int, size: int, seed: int
) -> Iterator[tuple[Batch, Tensor]]:
    """Yield the questions of each step: pieces drawn by chance, each with masks of its own in each step.

    Args:
        pieces: to draw from.
        objective: what is asked.
        steps: how many.
        size: pieces in a step, all different.
        seed: of the draws.
    """
    for step in range(steps):
        generator = question_generator(seed, epoch=_ORDER_EPOCH, window=step)
        numbers = generator.choice(len(pieces), min(size, len(pieces)), replace=False)
        yield ask_pieces(pieces, [int(number) for number in numbers], objective, seed=seed, epoch=step)


def exam(
    pieces: Sequence[np.ndarray], objective: ObjectiveConfig, *, seed: int, token_budget: int
) -> Iterator[tuple[Batch, Tensor]]:
    """Yield the questions of evaluation, the same whatever the budget of tokens: of every piece, once."""
    for numbers in plan_batches([len(piece) for piece in pieces], token_budget=token_budget):
        yield ask_pieces(pieces, numbers, objective, seed=seed, epoch=EVALUATION_EPOCH)


def measure_accuracy(
    model: ProteinModel,
    pieces: Sequence[np.ndarray],
    objective: ObjectiveConfig,
    *,
    seed: int,
    token_budget: int,
) -> dict[str, float]:
    """Return loss, perplexity and accuracy of a model on the questions of evaluation, and how many these are.

    Args:
        model: in evaluation mode.
        pieces: from `cut_proteins`.
        objective: what is asked.
        seed: of the masks.
        token_budget: tokens in a forward pass.
    """
    nll, correct, asked = 0.0, 0, 0
    for batch, _ in exam(pieces, objective, seed=seed, token_budget=token_budget):
        losses, hits = answer_each(Answerer(model, across=True), batch)
        nll, correct, asked = nll + float(losses.sum()), correct + int(hits.sum()), asked + len(hits)
    if not asked:
        raise ValueError(
            "no residue was asked: the proteins to measure on are too few and too short; give more"
        )
    return {**summarise(nll, asked, correct), "asked": asked}


def _key(protein: np.ndarray) -> bytes:
    return hashlib.sha256(protein.tobytes()).digest()
