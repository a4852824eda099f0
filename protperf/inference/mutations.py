"""What a model makes of mutations: how much likelier the mutant is than its wild type, in nats.

Every method gives log p(mutant) - log p(wild type), each in its own approximation: 0 is the wild type itself, and what
is above 0 the model prefers to it. Probabilities are those of `protperf.inference.scoring`.

Axis letters: `L` length in residues, `N` mutants, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from protperf.formats.mutations import Mutant, check_mutant, mutate
from protperf.inference.passes import DEFAULT_TOKENS, frame
from protperf.inference.scoring import (
    METHODS,
    Advance,
    Question,
    answer_questions,
    check_method,
    mask_groups,
    score_proteins,
    tokens_of,
)
from protperf.model import ProteinModel

EFFECT_METHODS = {"masked-marginals": "masked", "wt-marginals": "masked", **METHODS}
"""Method -> the kind of model that it is defined for; the first of a kind is its default."""


def mutation_effects(
    model: ProteinModel,
    wild_type: np.ndarray,
    mutants: Sequence[Mutant],
    *,
    method: str = "",
    token_budget: int = DEFAULT_TOKENS,
    precision: str = "fp32",
    advance: Advance | None = None,
) -> np.ndarray:
    """Return log p(mutant) - log p(wild type) of each mutant, float64 `(N,)`.

    `masked-marginals` (masked; Meier et al. 2021, doi 10.1101/2021.07.09.450648): log p of the mutant's residue less
    that of the wild type's, at each mutated place of the wild type, which alone is masked. Several substitutions add up;
    each place is asked once, whatever the number of mutants.
    `wt-marginals` (masked; the same source): the same, of one pass over the wild type without a mask.
    `pseudo-ppl`, `strided-ppl` (masked), `likelihood` (causal): the difference of both sequences' sums, see
    `score_proteins`. Equal sequences are scored once.

    Args:
        model: in evaluation mode, on the device to compute on.
        wild_type: residue tokens, uint8 `(L,)`.
        mutants: from `formats.mutations.read_mutant`.
        method: one of `EFFECT_METHODS`; by default the first that the model defines.
        token_budget: tokens in a pass.
        precision: as in `ask_model`; probabilities are float32.
        advance: see `scoring.Advance`; `effect_tokens` tells what it adds up to.

    Returns:
        NaN where a mutant (or, for marginals, the wild type) does not fit into memory even alone.

    Raises:
        ValueError: the method is not defined for the model, or a mutant does not fit the wild type.
    """
    method = check_method(model, method, EFFECT_METHODS)
    for mutant in mutants:
        check_mutant(mutant, wild_type)
    if method in METHODS:
        sequences = _distinct(wild_type, mutants)
        found = score_proteins(
            model,
            sequences.values(),
            method=method,
            token_budget=token_budget,
            precision=precision,
            advance=advance,
        )
        sums = [np.nan if score is None else score.log_likelihood for score in found]
        of_sequence = dict(zip(sequences, sums, strict=True))
        likelihoods = [of_sequence[mutate(wild_type, mutant).tobytes()] for mutant in mutants]
        return np.array(likelihoods, np.float64) - of_sequence[wild_type.tobytes()]
    marginals = np.full((len(wild_type), len(model.embedding.weight)), np.nan)  # (L, V)
    for question, answer in answer_questions(
        model,
        _marginal_questions(wild_type, mutants, method),
        token_budget=token_budget,
        precision=precision,
        advance=advance,
    ):
        if answer is None:
            break
        marginals[question.asked] = answer
    return np.array([_sum_marginals(marginals, mutant) for mutant in mutants], np.float64)


def effect_tokens(wild_type: np.ndarray, mutants: Sequence[Mutant], *, method: str) -> int:
    """Return how many tokens a model is shown by `mutation_effects`."""
    length = len(wild_type)
    if method in METHODS:
        return len(_distinct(wild_type, mutants)) * tokens_of(length, method=method)
    return (length + 2) * (len(_places(mutants)) if method == "masked-marginals" else 1)


def _distinct(wild_type: np.ndarray, mutants: Sequence[Mutant]) -> dict[bytes, np.ndarray]:
    """Return the wild type and its mutants, equal sequences once, in the order met."""
    sequences = {wild_type.tobytes(): wild_type}
    for mutant in mutants:
        residues = mutate(wild_type, mutant)
        sequences.setdefault(residues.tobytes(), residues)
    return sequences


def _places(mutants: Sequence[Mutant]) -> list[int]:
    """Return the places of all substitutions, ascending."""
    return sorted({each.place for mutant in mutants for each in mutant})


def _marginal_questions(wild_type: np.ndarray, mutants: Sequence[Mutant], method: str) -> Iterable[Question]:
    """Return what is asked of the wild type; one masked copy is held at a time."""
    places = np.array(_places(mutants), np.int64)
    if method == "masked-marginals":
        return mask_groups(wild_type, places[:, None])
    return [Question(frame(wild_type), places, wild_type[places])]


def _sum_marginals(marginals: np.ndarray, mutant: Mutant) -> float:
    """Return the sum of log-ratios over a mutant's substitutions; 0 for none."""
    return sum(float(marginals[place, token] - marginals[place, wild]) for place, wild, token in mutant)
