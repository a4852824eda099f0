"""What the model is asked: masked residues or the next token; and the loss, which is the same for both.

Axis letters: `B` batch, `L` length in tokens, `D` model width, `V` vocabulary, `W` window length in tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, log_softmax

from protperf.batches import Batch, documents_or_one, residues_of_proteins
from protperf.config import ObjectiveConfig
from protperf.vocab import VOCABULARY

NOT_ASKED = 255
"""The target of a position that is not asked."""

EVALUATION_EPOCH = 2**23 - 1
"""The epoch number under which evaluation draws its masks, the same at each validation."""


EVALUATION_FRACTION = 0.15
"""The chance that evaluation asks a residue, however the model was trained: numbers of models stay comparable."""


class LanguageModel(Protocol):
    """What an objective needs of a model."""

    def __call__(self, tokens: Tensor, documents: Tensor | None) -> Tensor:
        """Return the hidden states of tokens `(B, L)`: `(B, L, D)`."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the scores of all tokens for hidden states: `(..., V)` for `(..., D)`."""


class TokenSums(NamedTuple):
    """Sums over asked tokens, each a scalar tensor: they add up over batches and ranks.

    Attributes:
        nll: negative log-likelihood in nats, float32.
        asked: number of asked tokens, int64.
        correct: number of them whose best-scored token is the right one, int64.
    """

    nll: Tensor
    asked: Tensor
    correct: Tensor


def question_generator(seed: int, *, epoch: int, window: int) -> np.random.Generator:
    """Return the random generator of one window in one epoch: no worker or rank has a state to save."""
    return np.random.Generator(np.random.Philox(key=[seed, (epoch << 40) | window]))


def ask(
    tokens: np.ndarray, config: ObjectiveConfig, generator: np.random.Generator, *, evaluation: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Make the question for one window.

    Masked: each residue is asked with chance `mask_fraction`. In training the asked ones are shown as `<mask>`, as
    a random standard amino acid or as they are; evaluation asks `EVALUATION_FRACTION` and shows all of them as
    `<mask>`, so that a unigram model is the right floor. Causal: each token but the last of its protein is shown, the
    next one is asked; the end of a protein is asked in training alone, and there only with `ask_eos`.

    Args:
        tokens: the window, uint8 `(W,)`.
        config: the objective.
        generator: from `question_generator`.
        evaluation: whether the answer is compared with floors.

    Returns:
        shown inputs and targets (`NOT_ASKED` elsewhere), uint8 `(W,)` each.
    """
    if config.kind == "masked":
        return _ask_masked(tokens, config, generator, evaluation=evaluation)
    return _ask_causal(tokens, ask_eos=config.ask_eos and not evaluation)


def _ask_masked(
    tokens: np.ndarray, config: ObjectiveConfig, generator: np.random.Generator, *, evaluation: bool
) -> tuple[np.ndarray, np.ndarray]:
    draws = generator.random((2, len(tokens)), dtype=np.float32)
    random_residues = generator.integers(VOCABULARY.num_standard, size=len(tokens), dtype=np.uint8)
    fraction = EVALUATION_FRACTION if evaluation else config.mask_fraction
    asked = (draws[0] < fraction) & (tokens < VOCABULARY.num_residues)
    targets = np.where(asked, tokens, np.uint8(NOT_ASKED))
    hidden = asked if evaluation else asked & (draws[1] < config.shown_as_mask)
    replaced = asked & ~hidden & (draws[1] < config.shown_as_mask + config.shown_as_random)
    inputs = np.where(hidden, np.uint8(VOCABULARY.mask), tokens)
    if not evaluation:
        inputs = np.where(replaced, random_residues, inputs)
    return inputs, targets


def _ask_causal(tokens: np.ndarray, *, ask_eos: bool) -> tuple[np.ndarray, np.ndarray]:
    following = np.append(tokens[1:], np.uint8(VOCABULARY.pad))
    asked = following < VOCABULARY.num_residues
    if ask_eos:
        asked |= following == VOCABULARY.eos
    return tokens, np.where(asked, following, np.uint8(NOT_ASKED))


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the negative log-likelihood of each target in nats, float32 `(N,)`.

    Args:
        logits: scores at the asked positions, `(N, V)`.
        targets: right tokens, int64 `(N,)`.
    """
    return cross_entropy(logits.float(), targets, reduction="none")


def token_sums(logits: Tensor, targets: Tensor) -> TokenSums:
    """Sum loss and hits over asked tokens.

    Args:
        logits: scores at the asked positions, `(N, V)`.
        targets: right tokens, int64 `(N,)`.
    """
    correct = (logits.argmax(-1) == targets).sum()
    asked = targets.new_full((), len(targets))
    return TokenSums(token_losses(logits, targets).sum(), asked, correct)


def smooth_gradient(nll: Tensor, logits: Tensor, *, label_smoothing: float) -> Tensor:
    """Return a summed loss with the same value, and with the gradient that smoothed targets would give.

    A smoothed target (Szegedy et al. 2016, section 7, arXiv:1512.00567) is the right token with weight
    1 - `label_smoothing`; the rest is spread here over the residue tokens, as no other is ever to be guessed. What is
    reported and compared stays the negative log-likelihood.

    Args:
        nll: the sum of `token_losses`, scalar.
        logits: the scores that it came from, `(N, V)`.
        label_smoothing: at least 0, below 1.
    """
    spread = -log_softmax(logits.float(), -1)[:, : VOCABULARY.num_residues].mean(-1).sum()
    difference = label_smoothing * (spread - nll)
    return nll + (difference - difference.detach())


def answer(model: LanguageModel, batch: Batch, *, across: bool, label_smoothing: float = 0.0) -> TokenSums:
    """Let a model answer a batch and sum up; the head is computed at the asked positions only.

    Args:
        model: on the batch's device.
        batch: `(B, L)` each.
        across: whether proteins packed into one window see each other.
        label_smoothing: see `smooth_gradient`; changes the gradient of `nll` alone.
    """
    hidden = model(batch.inputs, documents_or_one(batch.inputs, across=across))
    asked = batch.targets != NOT_ASKED
    logits = model.logits(hidden[asked])
    sums = token_sums(logits, batch.targets[asked].long())
    if label_smoothing:
        sums = sums._replace(nll=smooth_gradient(sums.nll, logits, label_smoothing=label_smoothing))
    return sums


def answer_by_length(
    model: LanguageModel, batch: Batch, *, across: bool, edges: Sequence[float]
) -> TokenSums:
    """Let a model answer a batch and sum up by the length of the protein that a token belongs to.

    Args:
        model: on the batch's device.
        batch: `(B, L)` each.
        across: whether proteins packed into one window see each other.
        edges: ascending; bin i holds the proteins of at most `edges[i]` residues in the window, and more than the
            edge before.

    Returns:
        sums `(bins,)` each.
    """
    hidden = model(batch.inputs, documents_or_one(batch.inputs, across=across))
    asked = batch.targets != NOT_ASKED
    logits, targets = model.logits(hidden[asked]), batch.targets[asked].long()
    lengths = residues_of_proteins(batch.inputs)[asked]
    bins = torch.bucketize(lengths, torch.tensor(edges, device=lengths.device))

    def total(values: Tensor) -> Tensor:
        return values.new_zeros(len(edges)).index_add_(0, bins, values)

    hits = (logits.argmax(-1) == targets).long()
    return TokenSums(total(token_losses(logits, targets)), total(torch.ones_like(hits)), total(hits))
