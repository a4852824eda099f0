"""New protein sequences from causal models, residue by residue.

Axis letters: `B` batch, `L` length in tokens, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from protperf.inference.passes import DEFAULT_TOKENS, autocast
from protperf.inference.sampling import Sampling, choose, gumbel, log_softmax, perplexity_of
from protperf.model import ModelState, ProteinModel
from protperf.vocab import VOCABULARY

NO_PROMPT = np.empty(0, np.uint8)
ENDED_BY_EOS = "eos"
ENDED_BY_LENGTH = "max_length"


class Generated(NamedTuple):
    """One sampled protein.

    Attributes:
        prompt: number of its prompt, from 0.
        sample: number among the samples of that prompt, from 0.
        tokens: residues, the prompt's first, uint8 `(L,)`.
        shown: how many of them are the prompt's.
        perplexity: exp of the mean of -log p(residue | all before it) over the residues that were drawn: not the prompt's,
            not `<eos>`. p is the model's own probability among all 36 tokens, whatever temperature, top-k and top-p made of
            it. Rounded to hundredths; NaN if none was drawn.
        ended: `eos`, or `max_length`: it was cut there, the model had not ended it.
    """

    prompt: int
    sample: int
    tokens: np.ndarray
    shown: int
    perplexity: float
    ended: str


@dataclass
class _Row:
    """A sequence in the making: `tokens` begin with `<bos>` and the prompt; `nll` is that of the residues drawn."""

    number: int
    prompt: int
    sample: int
    tokens: list[int]
    shown: int
    stream: np.random.Generator
    nll: float = 0.0

    @property
    def length(self) -> int:
        return len(self.tokens) - 1


class _Start(NamedTuple):
    """A sequence about to begin: its row, what the model expects after the prompt `(1, V)`, and the state there."""

    row: _Row
    log_p: np.ndarray
    state: ModelState


def generate(
    model: ProteinModel,
    num: int = 1,
    *,
    prompts: Iterable[np.ndarray] = (NO_PROMPT,),
    sampling: Sampling | None = None,
    min_length: int = 1,
    max_length: int = 1024,
    batch: int = 16,
    token_budget: int = DEFAULT_TOKENS,
    precision: str = "fp32",
) -> Iterator[Generated]:
    """Sample protein sequences from a causal model, `num` of each prompt, in order.

    `batch` sequences grow at once; one that ends makes room for the next. With linear attention the memory and the time of
    a step do not depend on what was generated; exact attention keeps keys and values of every residue. In `fp32` the
    sequences are a function of the model, the prompt and the seed: not of the batch, nor of the number of samples.

    Args:
        model: causal, in evaluation mode, on the device to compute on.
        num: sequences a prompt.
        prompts: residue tokens that sequences begin with, uint8 `(L,)` each; read one after another as they are needed.
        sampling: how tokens are drawn; drawn are residues and `<eos>` alone, and top-k and top-p choose among the residues.
        min_length: `<eos>` is not drawn before so many residues, the prompt's included; at least 1.
        max_length: a sequence is cut at so many residues, the prompt's included.
        batch: sequences that grow at once.
        token_budget: tokens of a prompt that are read at once.
        precision: `fp32`, or `bf16` or `fp16` under autocast.

    Raises:
        ValueError: a masked model, a value out of its range, or a prompt that leaves no room.
    """
    if not model.causal:
        raise ValueError(
            "this model was trained to fill masked places, which is no order to generate in; "
            "`protperf generate --fill FASTA` fills the <mask> places of proteins with it"
        )
    for name, value in (("num", num), ("min_length", min_length), ("batch", batch)):
        if value < 1:
            raise ValueError(f"{name} is {value}; allowed: 1 or more")
    if model.max_residues is not None and max_length > model.max_residues:
        raise ValueError(
            f"max_length is {max_length}; allowed: at most {model.max_residues}, which this model takes"
        )
    if max_length < min_length:
        raise ValueError(f"max_length is {max_length}; allowed: min_length, {min_length}, or more")
    growing = _Growing(
        _Reader(model, token_budget, precision), sampling or Sampling(), min_length, max_length, batch
    )
    return growing.run(growing.starts(prompts, num))


@dataclass(frozen=True)
class _Reader:
    """A causal model that reads protein by protein, or a token of each of many.

    Attributes:
        model: on its device.
        token_budget: tokens of one protein read at once.
        precision: of the computation.
    """

    model: ProteinModel
    token_budget: int
    precision: str

    @property
    def is_exact(self) -> bool:
        """Whether `ROUNDING` bounds what a batch does to probabilities."""
        return self.precision == "fp32"

    def read(self, tokens: Sequence[int]) -> tuple[np.ndarray, ModelState]:
        """Return what is expected after one protein's tokens, `(1, V)`, and the state there: a function of them alone."""
        hidden, state = None, None
        for piece in self._pieces(tokens):
            hidden, state = self._onward(piece, state)
        assert hidden is not None
        assert state is not None
        return self._log_p(hidden[:, -1]), state

    def step(self, tokens: Sequence[int], state: ModelState) -> tuple[np.ndarray, ModelState]:
        """Read one more token of each row; return what is expected after it, `(B, V)`, and the state."""
        hidden, state = self._onward(torch.tensor(tokens, dtype=torch.uint8).unsqueeze(1), state)
        return self._log_p(hidden[:, -1]), state

    def nll(self, tokens: Sequence[int], first: int) -> float:
        """Return the negative log-likelihood of one protein's tokens from place `first` on, in nats."""
        total, read, state = 0.0, 0, None
        for piece in self._pieces(tokens[:-1]):
            hidden, state = self._onward(piece, state)
            following = np.asarray(tokens[read + 1 : read + 1 + piece.shape[1]])
            log_p = self._log_p(hidden[0])[np.arange(len(following)), following]
            total -= float(log_p[max(0, first - 1 - read) :].sum())
            read += piece.shape[1]
        return total

    def _pieces(self, tokens: Sequence[int]) -> Sequence[Tensor]:
        return torch.tensor(tokens, dtype=torch.uint8).unsqueeze(0).split(self.token_budget, dim=1)

    @torch.inference_mode()
    def _onward(self, tokens: Tensor, state: ModelState | None) -> tuple[Tensor, ModelState]:
        device = self.model.device
        with autocast(device, self.precision):
            return self.model.onward(tokens.to(device), state)

    @torch.inference_mode()
    def _log_p(self, hidden: Tensor) -> np.ndarray:
        with autocast(hidden.device, self.precision):
            return log_softmax(self.model.logits(hidden))


@dataclass(frozen=True)
class _Growing:
    """Sequences that grow together: who begins, what is drawn, who ends."""

    reader: _Reader
    sampling: Sampling
    min_length: int
    max_length: int
    batch: int
    eos: np.ndarray = field(default_factory=lambda: np.arange(len(VOCABULARY)) == VOCABULARY.eos)

    def starts(self, prompts: Iterable[np.ndarray], num: int) -> Iterator[_Start]:
        """Yield the sequences of each prompt, which is read once."""
        for number, prompt in enumerate(prompts):
            if len(prompt) and prompt.max() >= VOCABULARY.num_residues:
                raise ValueError(
                    f"prompt {number + 1} holds tokens that are no residues; allowed: letters A-Z"
                )
            if len(prompt) >= self.max_length:
                raise ValueError(
                    f"prompt {number + 1} has {len(prompt)} residues; allowed: fewer than max_length, {self.max_length}"
                )
            tokens = [VOCABULARY.bos, *prompt.tolist()]
            log_p, state = self.reader.read(tokens)
            for sample in range(num):
                stream = self.sampling.stream(number, sample)
                row = _Row(number * num + sample, number, sample, list(tokens), len(prompt), stream)
                yield _Start(row, log_p, state)

    def run(self, starts: Iterator[_Start]) -> Iterator[Generated]:
        """Yield the finished sequences in order; those that end early wait for the ones before them."""
        finished: dict[int, Generated] = {}
        rows: list[_Row] = []
        log_p, state, following = np.empty((0, len(VOCABULARY))), None, 0
        while True:
            fresh = list(islice(starts, self.batch - len(rows)))
            if fresh:
                rows += [start.row for start in fresh]
                log_p = np.concatenate([log_p, *(start.log_p for start in fresh)])
                state = ModelState.join([*([state] if state else []), *(start.state for start in fresh)])
            if not rows:
                return
            tokens = self._draw(rows, log_p)
            going = [place for place, row in enumerate(rows) if not self._is_over(row, tokens[place])]
            for place in sorted(set(range(len(rows))) - set(going)):
                finished[rows[place].number] = self._finish(rows[place], tokens[place])
            assert state is not None
            if len(going) < len(rows):
                rows = [rows[place] for place in going]
                state = state.of_rows(torch.tensor(going, device=state.position.device)) if going else None
            log_p = log_p[:0]
            if state is not None:
                log_p, state = self.reader.step([row.tokens[-1] for row in rows], state)
            while following in finished:
                yield finished.pop(following)
                following += 1

    def _draw(self, rows: Sequence[_Row], log_p: np.ndarray) -> list[int]:
        """Draw the next token of each row; residues are added to it, `<eos>` is not."""
        may_end = np.array([row.length >= self.min_length for row in rows])
        allowed = self.sampling.residues | (self.eos & may_end[:, None])
        noise = np.concatenate([gumbel(row.stream, 1) for row in rows])
        tokens, sure = choose(log_p, allowed, noise, self.sampling)
        if self.reader.is_exact:
            for place in np.flatnonzero(~sure).tolist():
                log_p[place] = self.reader.read(rows[place].tokens)[0]
                one = slice(place, place + 1)
                tokens[one] = choose(log_p[one], allowed[one], noise[one], self.sampling).tokens
        for place, (row, token) in enumerate(zip(rows, tokens.tolist(), strict=True)):
            if token != VOCABULARY.eos:
                row.tokens.append(token)
                row.nll -= float(log_p[place, token])
        return tokens.tolist()

    def _is_over(self, row: _Row, token: int) -> bool:
        return token == VOCABULARY.eos or row.length >= self.max_length

    def _finish(self, row: _Row, token: int) -> Generated:
        def alone() -> float:
            return self.reader.nll(row.tokens, row.shown + 1)

        perplexity = perplexity_of(row.nll, row.length - row.shown, alone if self.reader.is_exact else None)
        ended = ENDED_BY_EOS if token == VOCABULARY.eos else ENDED_BY_LENGTH
        residues = np.array(row.tokens[1:], np.uint8)
        return Generated(row.prompt, row.sample, residues, row.shown, perplexity, ended)
