"""Masked places of proteins, filled by masked models: the most certain places first.

Axis letters: `L` length in residues, `M` masked places, `V` vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from protperf.inference.passes import DEFAULT_TOKENS, ask_model, autocast, frame
from protperf.inference.sampling import ROUNDING, Sampling, choose, gumbel, log_softmax, perplexity_of
from protperf.model import ProteinModel
from protperf.vocab import VOCABULARY

DEFAULT_STEPS = 32


class Filled(NamedTuple):
    """One way to fill the masked places of a protein.

    Attributes:
        protein: number of the protein, from 0.
        sample: number among its samples, from 0.
        tokens: residues, uint8 `(L,)`, no longer masked.
        filled: number of places that were masked.
        perplexity: exp of the mean of -log p(residue) over the filled places; p is the model's own probability among all 36
            tokens when the place was filled, given the residues known then, whatever temperature, top-k and top-p made of
            it. Rounded to hundredths; NaN if none was masked.
    """

    protein: int
    sample: int
    tokens: np.ndarray
    filled: int
    perplexity: float


@dataclass
class _Job:
    """A protein in the filling.

    Attributes:
        protein: its number.
        sample: the number of the sample.
        tokens: residues and `<mask>`, uint8 `(L,)`.
        masked: number of masked places at the start.
        stream: its random numbers.
        nll: of the places filled so far.
        sure: whether rounding had no say so far.
        fits: whether it fits into memory.
    """

    protein: int
    sample: int
    tokens: np.ndarray
    masked: int
    stream: np.random.Generator
    nll: float = 0.0
    sure: bool = True
    fits: bool = True

    @property
    def places(self) -> np.ndarray:
        """Places still masked, int64 `(M,)`."""
        return np.flatnonzero(self.tokens == VOCABULARY.mask)


def fill(
    model: ProteinModel,
    proteins: Iterable[np.ndarray],
    num: int = 1,
    *,
    sampling: Sampling | None = None,
    steps: int = DEFAULT_STEPS,
    token_budget: int = DEFAULT_TOKENS,
    precision: str = "fp32",
) -> Iterator[Filled | None]:
    """Fill the `<mask>` places of proteins with a masked model, `num` times each, in order.

    A step looks at a protein with all that is known so far, fills the places where the model's best guess is most probable
    and leaves the others for the next; what is drawn at a place has no say in its turn. In `fp32` the result is a
    function of the model, the protein and the seed: not of what is computed beside it, nor of the number of samples.

    Args:
        model: masked, in evaluation mode, on the device to compute on.
        proteins: residue and mask tokens, uint8 `(L,)` each; read as they are needed.
        num: samples a protein.
        sampling: how residues are drawn.
        steps: forward passes a protein, at most; each fills an equal share. One place a step if there are no more places.
        token_budget: tokens in a forward pass; a longer protein has one of its own.
        precision: `fp32`, or `bf16` or `fp16` under autocast.

    Yields:
        `None` for a protein that does not fit into memory even alone, `num` times.

    Raises:
        ValueError: a causal model, or a value out of its range.
    """
    if model.causal:
        raise ValueError(
            "this model was trained to predict the next residue and does not see what stands after a masked place; "
            "`protperf generate --prompt` goes on from a beginning with it"
        )
    for name, value in (("num", num), ("steps", steps)):
        if value < 1:
            raise ValueError(f"{name} is {value}; allowed: 1 or more")
    filling = _Filling(model, sampling or Sampling(), steps, token_budget, precision)
    return filling.run(proteins, num)


@dataclass(frozen=True)
class _Filling:
    """How proteins are filled; see `fill`."""

    model: ProteinModel
    sampling: Sampling
    steps: int
    token_budget: int
    precision: str

    def run(self, proteins: Iterable[np.ndarray], num: int) -> Iterator[Filled | None]:
        """Yield all samples in order."""
        for group in self._groups(proteins, num):
            jobs = [self._begin(*each) for each in group]
            self._fill(jobs)
            for job, (protein, sample, tokens) in zip(jobs, group, strict=True):
                alone = None
                if len(group) > 1 and self.precision == "fp32":
                    alone = self._begin(protein, sample, tokens)
                yield self._finish(job, alone)

    def _groups(
        self, proteins: Iterable[np.ndarray], num: int
    ) -> Iterator[list[tuple[int, int, np.ndarray]]]:
        """Yield number, sample and tokens of what is filled together, `token_budget` tokens or one protein."""
        group: list[tuple[int, int, np.ndarray]] = []
        size = 0
        for number, tokens in enumerate(proteins):
            for sample in range(num):
                if group and size + len(tokens) + 2 > self.token_budget:
                    yield group
                    group, size = [], 0
                group.append((number, sample, tokens))
                size += len(tokens) + 2
        if group:
            yield group

    def _begin(self, protein: int, sample: int, tokens: np.ndarray) -> _Job:
        masked = int((tokens == VOCABULARY.mask).sum())
        return _Job(protein, sample, tokens.copy(), masked, self.sampling.stream(protein, sample))

    def _finish(self, job: _Job, alone: _Job | None) -> Filled | None:
        """Return the result; where rounding had a say, fill `alone`, which is the same job anew, and take that."""

        def settle() -> float:
            assert alone is not None
            self._fill([alone])
            return alone.nll

        if not job.sure and alone is not None:
            self._fill([alone])
            job, alone = alone, None
        if not job.fits:
            return None
        perplexity = perplexity_of(job.nll, job.masked, None if alone is None else settle)
        return Filled(job.protein, job.sample, job.tokens, job.masked, perplexity)

    def _fill(self, jobs: Sequence[_Job]) -> None:
        """Fill all places of all jobs, together."""
        for left in range(self.steps, 0, -1):
            waiting = [job for job in jobs if job.fits and len(job.places)]
            if not waiting:
                return
            for job, log_p in zip(waiting, self._expected(waiting), strict=True):
                if log_p is None:
                    job.fits = False
                else:
                    self._fill_some(job, log_p, math.ceil(len(job.places) / left))

    def _expected(self, jobs: Sequence[_Job]) -> list[np.ndarray | None]:
        """Return what the model expects at the masked places of each job, `(M, V)`; `None`: no memory for it."""

        def take(place: int, states: list[Tensor]) -> np.ndarray:
            places = torch.from_numpy(jobs[place].places + 1)  # after <bos>
            with autocast(states[0].device, self.precision):
                return log_softmax(self.model.logits(states[0][places.to(states[0].device)]))

        shown = [frame(job.tokens) for job in jobs]
        return ask_model(self.model, shown, take, token_budget=self.token_budget, precision=self.precision)

    def _fill_some(self, job: _Job, log_p: np.ndarray, count: int) -> None:
        """Fill the `count` places with the most probable best guess.

        Args:
            job: which protein.
            log_p: at its masked places, `(M, V)`.
            count: 1 to M.
        """
        allowed = np.broadcast_to(self.sampling.residues, log_p.shape)
        choice = choose(log_p, allowed, gumbel(job.stream, len(log_p)), self.sampling)
        best = np.where(allowed, log_p, -np.inf).max(1)
        turn = np.argsort(-best, kind="stable")
        now, later = turn[:count], turn[count:]
        job.sure &= bool(choice.sure[now].all())
        job.sure &= not len(later) or bool(best[now[-1]] - best[later[0]] >= ROUNDING)
        job.nll -= float(log_p[now, choice.tokens[now]].sum())
        job.tokens[job.places[now]] = choice.tokens[now]
