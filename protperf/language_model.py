"""The Python API: a trained model that embeds, scores and generates, `protperf.load(path)`.

Everything takes residues as text, answers in the order of the input and streams: an iterator in, an iterator out, with a
block of proteins in memory. The commands are built from the same functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import tee
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch

from protperf.checkpoint import TrainedModel, load_model
from protperf.devices import choose_device
from protperf.formats.mutations import check_mutant, read_mutant
from protperf.formats.records import Policy, judge, quoted
from protperf.inference.embedding import ProteinEmbedding, embed_proteins
from protperf.inference.filling import fill
from protperf.inference.generation import NO_PROMPT, generate
from protperf.inference.mutations import mutation_effects
from protperf.inference.passes import DEFAULT_TOKENS
from protperf.inference.sampling import Sampling
from protperf.inference.scoring import ProteinScore, score_proteins
from protperf.model import ProteinModel
from protperf.vocab import VOCABULARY

if TYPE_CHECKING:
    from torch import Tensor

_BLOCK_TOKENS = 1 << 16
_UNMASKED, _MASKED = Policy(), Policy(mask_token=True)

T = TypeVar("T")


def load(path: Path | str, *, device: str = "auto", precision: str = "fp32") -> LanguageModel:
    """Load a trained model.

    >>> model = load("runs/demo")  # doctest: +SKIP

    Args:
        path: a `.ckpt` file, the folder of a run (its best checkpoint), or a folder with `config.json` and
            `model.safetensors`.
        device: `auto` (a GPU if there is one), `cpu`, `cuda`, `cuda:N` or `mps`.
        precision: `fp32`, or `bf16` or `fp16` under autocast.

    Raises:
        ValueError: no model there, or no such device or precision here; one line says what there is.
    """
    where = choose_device(device, precision=precision)
    trained = load_model(path)
    trained.model.to(where)
    return LanguageModel(trained, precision=precision)


@dataclass(frozen=True, eq=False)
class LanguageModel:
    """A trained model.

    Sequences are text of residues, in either case; white space and a final `*` are dropped, `<mask>` stands for a
    masked residue, and anything else is a `ValueError` that says where.

    Attributes:
        trained: model, objective and origin.
        precision: `fp32`, `bf16` or `fp16`.
        token_budget: tokens in a forward pass; a longer protein has one of its own, however long.
    """

    trained: TrainedModel
    precision: str = "fp32"
    token_budget: int = DEFAULT_TOKENS

    @property
    def model(self) -> ProteinModel:
        """The network itself, in evaluation mode."""
        return self.trained.model

    def embed(
        self, sequences: Iterable[str], *, layers: Sequence[int] = (-1,), logits: bool = False
    ) -> Iterator[ProteinEmbedding]:
        """Yield the embedding of each protein, in order: `.residues (L, D)`, `.mean (D,)`, `.layers`, `.logits`.

        Args:
            sequences: residues of each protein.
            layers: 0 is what enters the first block, -1 the last, after the final norm.
            logits: whether to add the scores of all tokens at each residue.

        Raises:
            ValueError: a sequence cannot be read, or there is no such layer.
            MemoryError: a protein does not fit into memory even alone.
        """
        number = 0
        for block in _cut(map(_encode, _numbered(sequences))):
            found = embed_proteins(
                self.model,
                block,
                layers=layers,
                logits=logits,
                token_budget=self.token_budget,
                precision=self.precision,
            )
            for embedding in found:
                number += 1
                yield _fitting(embedding, number)

    def score(self, sequences: Iterable[str], *, method: str = "") -> Iterator[ProteinScore]:
        """Yield how likely the model finds each protein, in order: `.log_likelihood`, `.perplexity`, `.log_probabilities`.

        Args:
            sequences: residues of each protein, without `<mask>`.
            method: `likelihood` of a causal model; `pseudo-ppl` (the default) or `strided-ppl` of a masked one (see
                `inference.scoring.score_proteins`).

        Raises:
            ValueError: a sequence cannot be read, or the model does not define the method.
            MemoryError: a protein does not fit into memory even alone.
        """
        proteins = map(partial(_encode, policy=_UNMASKED), _numbered(sequences))
        found = score_proteins(
            self.model, proteins, method=method, token_budget=self.token_budget, precision=self.precision
        )
        for number, score in enumerate(found, start=1):
            yield _fitting(score, number)

    def mutation_effects(
        self, wild_type: str, mutants: Sequence[str], *, method: str = "", offset: int = 0
    ) -> np.ndarray:
        """Return log p(mutant) - log p(wild type) of each mutant, float64 `(N,)`; NaN where memory is too small.

        >>> load("runs/demo").mutation_effects("MKTAYIAKQR", ["K2R", "K2R:A4G"])  # doctest: +SKIP

        Args:
            wild_type: its residues.
            mutants: `A23B`, several joined by `:`, or `WT`.
            method: `masked-marginals` (the default), `wt-marginals`, `pseudo-ppl` or `strided-ppl` of a masked model,
                `likelihood` of a causal one (see `inference.mutations.mutation_effects`).
            offset: number of the first residue, less 1.

        Raises:
            ValueError: a mutant does not fit the wild type, or the model does not define the method.
        """
        tokens = _encode((1, wild_type), policy=_UNMASKED)
        read = [read_mutant(text, offset=offset) for text in mutants]
        for mutant in read:
            check_mutant(mutant, tokens, offset=offset)
        return mutation_effects(
            self.model,
            tokens,
            read,
            method=method,
            token_budget=self.token_budget,
            precision=self.precision,
        )

    def generate(
        self,
        num: int = 1,
        *,
        prompt: str = "",
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_length: int = 1,
        max_length: int = 1024,
        seed: int = 0,
    ) -> Iterator[str]:
        """Yield new proteins of a causal model; the same seed gives the same ones, whatever their number.

        Args:
            num: how many.
            prompt: residues that each begins with.
            temperature: below 1 draws the likelier residues more often; 0 always takes the likeliest.
            top_k: only so many of the likeliest residues; 0: all.
            top_p: only the fewest of the likeliest residues that have this share of all residues' probability.
            min_length: residues, the prompt's included, before which none ends.
            max_length: residues, the prompt's included, at which one is cut.
            seed: of the draws.

        Raises:
            ValueError: a masked model, or a value out of its range.
        """
        sampling = Sampling(temperature, top_k, top_p, seed=seed)
        prompts = [_encode((1, prompt), policy=_UNMASKED)] if prompt else [NO_PROMPT]
        made = generate(
            self.model,
            num,
            prompts=prompts,
            sampling=sampling,
            min_length=min_length,
            max_length=max_length,
            token_budget=self.token_budget,
            precision=self.precision,
        )
        return (VOCABULARY.decode(each.tokens) for each in made)

    def fill(
        self, sequences: Iterable[str], *, temperature: float = 1.0, top_p: float = 1.0, seed: int = 0
    ) -> Iterator[str]:
        """Yield each protein with residues in place of its `<mask>`, drawn from a masked model.

        Args:
            sequences: residues and `<mask>` of each protein.
            temperature: see `generate`.
            top_p: see `generate`.
            seed: of the draws.

        Raises:
            ValueError: a causal model, a sequence that cannot be read, or a value out of its range.
            MemoryError: a protein does not fit into memory even alone.
        """
        found = fill(
            self.model,
            map(_encode, _numbered(sequences)),
            sampling=Sampling(temperature, top_p=top_p, seed=seed),
            token_budget=self.token_budget,
            precision=self.precision,
        )
        for number, each in enumerate(found, start=1):
            yield VOCABULARY.decode(_fitting(each, number).tokens)

    def embed_per_residue(self, sequences: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield each sequence with the states of its residues, float32 `(L, D)`: what biotrainer asks of an embedder."""
        for text, embedding in self._embed_with_text(sequences):
            yield text, torch.from_numpy(embedding.residues)

    def embed_per_sequence(self, sequences: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield each sequence with the mean over its residues, float32 `(D,)`: what biotrainer asks of an embedder."""
        for text, embedding in self._embed_with_text(sequences):
            yield text, torch.from_numpy(embedding.mean)

    def _embed_with_text(self, sequences: Iterable[str]) -> Iterator[tuple[str, ProteinEmbedding]]:
        texts, shown = tee(text for _, text in _numbered(sequences))
        return zip(texts, self.embed(shown), strict=True)


def _numbered(sequences: Iterable[str]) -> Iterator[tuple[int, str]]:
    if isinstance(sequences, str):
        raise ValueError("sequences is one text; give a list, such as [sequence]")
    return enumerate(sequences, start=1)


def _fitting(answer: T | None, number: int) -> T:
    """Return the answer for a sequence, which is missing where memory was too small."""
    if answer is None:
        raise MemoryError(f"sequence {number} does not fit into memory even alone")
    return answer


def _encode(numbered: tuple[int, str], policy: Policy = _MASKED) -> np.ndarray:
    """Return the tokens of one sequence.

    Raises:
        ValueError: it holds something else than residues; the message says which sequence and where.
    """
    number, text = numbered
    verdict = judge(text.encode(), policy)
    if verdict.tokens is None:
        where = (
            "" if verdict.offset is None else f" {quoted(verdict.found)} at character {verdict.offset + 1}"
        )
        raise ValueError(
            f"sequence {number} cannot be read: {verdict.reason}{where}; allowed: letters A-Z"
            f"{' and <mask>' if policy.mask_token else ''}"
        )
    return verdict.tokens


def _cut(proteins: Iterable[np.ndarray]) -> Iterator[list[np.ndarray]]:
    """Cut proteins into blocks of at most `_BLOCK_TOKENS` tokens; a longer one is a block of its own."""
    block: list[np.ndarray] = []
    tokens = 0
    for protein in proteins:
        if block and tokens + len(protein) > _BLOCK_TOKENS:
            yield block
            block, tokens = [], 0
        block.append(protein)
        tokens += len(protein)
    if block:
        yield block
