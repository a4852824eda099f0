"""How likely a model finds proteins: log-likelihood of causal models, pseudo-log-likelihood of masked ones.

A score is the sum of the log-probabilities, in nats, of all residues of a protein, each of them asked once. `<bos>` and
`<eos>` are shown and never asked. A probability is that of the softmax over the whole vocabulary, as in the training
loss and in evaluation: what a model gives to special tokens is lost to the residues, and nothing is normalised again.

Axis letters: `L` length in residues, `D` model width, `V` vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import log_softmax

from protperf.inference.passes import DEFAULT_TOKENS, ask_model, frame
from protperf.model import ProteinModel
from protperf.vocab import VOCABULARY

METHODS = {"likelihood": "causal", "pseudo-ppl": "masked", "strided-ppl": "masked"}
"""Method -> the kind of model that it is defined for; the first of a kind is its default."""

STRIDE = 7
"""Passes of `strided-ppl`: 14 % of the residues are masked in each, about as many as in training and evaluation."""

PASSES_AT_ONCE = 8
"""Full passes that are planned together: more of them fill up better, fewer are held."""

Advance = Callable[[int], object]
"""Called with the number of tokens that a model has been shown since the last call."""


class ProteinScore(NamedTuple):
    """How likely a model finds one protein.

    Attributes:
        log_probabilities: of each residue given what the method showed, in nats, float32 `(L,)`.
    """

    log_probabilities: np.ndarray

    @property
    def num_residues(self) -> int:
        """Number of residues, all of them asked."""
        return len(self.log_probabilities)

    @property
    def log_likelihood(self) -> float:
        """Sum over residues in nats; of a masked model the pseudo-log-likelihood."""
        return float(self.log_probabilities.sum(dtype=np.float64))

    @property
    def mean_log_likelihood(self) -> float:
        """Nats per residue."""
        return self.log_likelihood / self.num_residues

    @property
    def perplexity(self) -> float:
        """Exponential of the negative mean; of a masked model the pseudo-perplexity."""
        return math.exp(min(-self.mean_log_likelihood, 700.0))


class Question(NamedTuple):
    """One sequence as it is shown, and the residues that are asked of it.

    Attributes:
        shown: `<bos>`, residues and masks, `<eos>`; uint8 `(L + 2,)`.
        asked: places of residues, from 0, int64 `(n,)`.
        truth: tokens of these residues, uint8 `(n,)`.
        number: of the protein, where there are several.
    """

    shown: np.ndarray
    asked: np.ndarray
    truth: np.ndarray
    number: int = 0


def score_proteins(
    model: ProteinModel,
    proteins: Iterable[np.ndarray],
    *,
    method: str = "",
    token_budget: int = DEFAULT_TOKENS,
    precision: str = "fp32",
    advance: Advance | None = None,
) -> Iterator[ProteinScore | None]:
    """Yield the score of each protein, in the order given; proteins are taken as they are needed and shown whole.

    `likelihood` (causal): log p of each residue given all before it, in one pass.
    `pseudo-ppl` (masked): log p of each residue when it alone is masked (Salazar et al. 2020, arXiv:1910.14659), a
    protein of L residues being shown L times.
    `strided-ppl` (masked): the same with every `STRIDE`-th residue masked together, a protein being shown `STRIDE`
    times whatever its length. A residue then misses a seventh of its context, about as much as in training.

    Args:
        model: in evaluation mode, on the device to compute on.
        proteins: residue tokens, uint8 `(L,)` each, L at least 1.
        method: one of `METHODS`; by default the first that the model defines.
        token_budget: tokens in a pass; questions of several proteins share one.
        precision: as in `ask_model`; probabilities are float32.
        advance: see `Advance`.

    Yields:
        `None` in place of a protein that does not fit into memory even alone.

    Raises:
        ValueError: the method is not defined for the model, or a protein is empty.
    """
    method = check_method(model, method, METHODS)
    too_large: set[int] = set()

    def questions() -> Iterator[Question]:
        for number, protein in enumerate(proteins):
            for question in ask_protein(protein, method=method):
                if number in too_large:
                    break
                yield question._replace(number=number)

    answers = answer_questions(
        model, questions(), token_budget=token_budget, precision=precision, advance=advance
    )
    for number, of_protein in groupby(answers, key=lambda pair: pair[0].number):
        places, values = [], []
        for question, answer in of_protein:
            if answer is None:
                too_large.add(number)
                continue
            places.append(question.asked)
            values.append(answer[np.arange(len(answer)), question.truth])
        yield None if number in too_large else ProteinScore(_in_order(places, values))
        too_large.discard(number)


def _in_order(places: Sequence[np.ndarray], values: Sequence[np.ndarray]) -> np.ndarray:
    """Return values that belong to places as one array `(L,)`."""
    ordered = np.empty(sum(map(len, places)), np.float32)
    ordered[np.concatenate(places)] = np.concatenate(values)
    return ordered


def check_method(model: ProteinModel, method: str, methods: dict[str, str]) -> str:
    """Return the method, or the default for an empty name.

    Raises:
        ValueError: it is not defined for this kind of model.
    """
    allowed = methods_of(model, methods)
    if not method:
        return allowed[0]
    if method not in allowed:
        needed = f"needs a {methods[method]} model" if method in methods else "no such method"
        kind = "causal" if model.causal else "masked"
        raise ValueError(
            f"--method {method}: {needed}; this model is {kind}; allowed with it: {', '.join(allowed)}"
        )
    return method


def methods_of(model: ProteinModel, methods: dict[str, str]) -> list[str]:
    """Return those of some methods (name -> kind of model) that are defined for a model."""
    kind = "causal" if model.causal else "masked"
    return [name for name, needed in methods.items() if needed == kind]


def ask_protein(protein: np.ndarray, *, method: str) -> Iterator[Question]:
    """Yield the questions that together ask each residue of a protein `(L,)` once."""
    length = len(protein)
    if not length:
        raise ValueError("a protein without residues has no likelihood; give at least one residue")
    if method == "likelihood":
        yield Question(frame(protein), np.arange(length), protein)
        return
    passes = passes_of(length, method=method)
    yield from mask_groups(protein, (np.arange(first, length, passes) for first in range(passes)))


def passes_of(length: int, *, method: str) -> int:
    """Return how often a method shows a protein of so many residues.

    >>> [passes_of(300, method=method) for method in METHODS]
    [1, 300, 7]
    """
    return {"likelihood": 1, "pseudo-ppl": length, "strided-ppl": min(STRIDE, length)}[method]


def tokens_of(length: int, *, method: str) -> int:
    """Return how many tokens a model is shown to score a protein of so many residues."""
    return passes_of(length, method=method) * (length + 2)


def mask_groups(protein: np.ndarray, groups: Iterable[np.ndarray]) -> Iterator[Question]:
    """Yield a question for each group of places, all of its residues shown as `<mask>`."""
    for group in groups:
        shown = frame(protein)
        shown[group + 1] = VOCABULARY.mask
        yield Question(shown, group, protein[group])


def answer_questions(
    model: ProteinModel,
    questions: Iterable[Question],
    *,
    token_budget: int,
    precision: str,
    advance: Advance | None = None,
) -> Iterator[tuple[Question, np.ndarray | None]]:
    """Yield each question with the log-probabilities of all tokens at its asked places, float32 `(n, V)`.

    Of a causal model the place before a residue predicts it, of a masked one its own place. `None` stands for what does
    not fit into memory even alone. A few passes' worth of questions is held at a time.
    """
    for block in _cut_blocks(questions, num_tokens=PASSES_AT_ONCE * token_budget):
        answers = _ask(model, block, token_budget=token_budget, precision=precision)
        if advance is not None:
            advance(sum(len(question.shown) for question in block))
        yield from zip(block, answers, strict=True)


def _cut_blocks(questions: Iterable[Question], *, num_tokens: int) -> Iterator[list[Question]]:
    """Cut questions into blocks of at most so many tokens; a longer one is a block of its own."""
    block: list[Question] = []
    held = 0
    for question in questions:
        if block and held + len(question.shown) > num_tokens:
            yield block
            block, held = [], 0
        block.append(question)
        held += len(question.shown)
    if block:
        yield block


def _ask(
    model: ProteinModel, questions: Sequence[Question], *, token_budget: int, precision: str
) -> list[np.ndarray | None]:
    """Return the log-probabilities `(n, V)` of each question."""
    device = model.device
    shift = 0 if model.causal else 1  # a causal model answers one place before the residue

    def take(place: int, states: list[Tensor]) -> Tensor:
        rows = torch.from_numpy(questions[place].asked + shift)
        return states[0][rows.to(device)]  # (n, D), a copy

    shown = [question.shown for question in questions]
    found = ask_model(model, shown, take, token_budget=token_budget, precision=precision)
    hidden = [rows for rows in found if rows is not None]
    if not hidden:
        return [None] * len(questions)
    with torch.inference_mode():
        scores = log_softmax(model.logits(torch.cat(hidden)).float(), -1).cpu()
    answers = iter(scores.split([len(rows) for rows in hidden]))
    return [None if rows is None else next(answers).numpy() for rows in found]
