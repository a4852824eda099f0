"""Laws of filling masked places: only they change, the most certain first, and one result whatever the batch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from wide_models import wide_model

from protperf.inference import filling, sampling
from protperf.inference.filling import Filled, fill
from protperf.inference.sampling import Sampling
from protperf.model import ProteinModel
from protperf.vocab import VOCABULARY

GREEDY = Sampling(temperature=0.0)


@pytest.fixture(scope="module")
def model() -> ProteinModel:
    return wide_model("favor", causal=False)


def masked(text: str) -> np.ndarray:
    """Return residue tokens; `_` stands for `<mask>`."""
    return np.array(
        [VOCABULARY.mask if letter == "_" else VOCABULARY.id_of(letter) for letter in text], np.uint8
    )


def random_protein(length: int, places: int, seed: int = 0) -> np.ndarray:
    generator = np.random.default_rng(seed)
    tokens = generator.integers(20, size=length).astype(np.uint8)
    tokens[generator.choice(length, places, replace=False)] = VOCABULARY.mask
    return tokens


def log_p_at(model: ProteinModel, residues: np.ndarray) -> np.ndarray:
    """Return log p of all tokens at each residue, `(L, V)`."""
    tokens = torch.tensor([[VOCABULARY.bos, *residues.tolist(), VOCABULARY.eos]])
    with torch.no_grad():
        return model.logits(model(tokens))[0, 1:-1].double().log_softmax(-1).numpy()


def plain(made: list[Filled | None]) -> list[object]:
    return [
        each and (each.protein, each.sample, each.tokens.tobytes(), each.filled, each.perplexity)
        for each in made
    ]


PROTEINS = [random_protein(40, 12), masked("MK_"), random_protein(90, 30, seed=1), masked("_")]


def test_masked_places_alone_change(model: ProteinModel):
    for made in fill(model, PROTEINS, 2):
        asked = PROTEINS[made.protein]
        places = asked == VOCABULARY.mask
        assert made.filled == places.sum()
        np.testing.assert_array_equal(made.tokens[~places], asked[~places])
        assert (made.tokens[places] < 20).all()


@pytest.mark.parametrize("kind", ["favor", "softmax"])
def test_same_seed_same_residues_whatever_is_computed_beside(kind: str):
    model = wide_model(kind, causal=False)
    made = {budget: plain(list(fill(model, PROTEINS, 3, token_budget=budget))) for budget in (1, 150, 10_000)}
    assert made[1] == made[150] == made[10_000]
    assert [each[:2] for each in made[1]] == [
        (protein, sample) for protein in range(4) for sample in range(3)
    ]
    assert len({each[2] for each in made[1] if each[0] == 0}) == 3
    few = plain(list(fill(model, PROTEINS, 1)))
    assert few == [each for each in made[1] if each[1] == 0]


def test_errors_of_a_batch_never_decide(model: ProteinModel, monkeypatch: pytest.MonkeyPatch):
    proteins = [random_protein(30, 8, seed=seed) for seed in range(12)]
    alone = plain(list(fill(model, proteins, token_budget=1)))
    expected, generator = filling._Filling._expected, np.random.default_rng(0)

    def disturbed(self, jobs):
        found = expected(self, jobs)
        if len(jobs) == 1:
            return found
        return [log_p + generator.uniform(-2e-3, 2e-3, log_p.shape) for log_p in found]

    monkeypatch.setattr(filling._Filling, "_expected", disturbed)
    assert plain(list(fill(model, proteins))) != alone
    for module, name in ((filling, "ROUNDING"), (sampling, "ROUNDING"), (sampling, "ROUNDING_OF_MEANS")):
        monkeypatch.setattr(module, name, 4.1e-3)
    assert plain(list(fill(model, proteins))) == alone


def test_the_most_certain_place_is_filled_first_and_then_known(model: ProteinModel):
    tokens = masked("MKVA_QQ_WLLPG")
    first = log_p_at(model, tokens)[:, :20]
    places = sorted((4, 7), key=lambda place: -first[place].max())
    known = tokens.copy()
    known[places[0]] = first[places[0]].argmax()
    second = log_p_at(model, known)[:, :20]
    known[places[1]] = second[places[1]].argmax()
    (made,) = fill(model, [tokens], sampling=GREEDY)
    np.testing.assert_array_equal(made.tokens, known)
    nll = -(first[places[0]].max() + second[places[1]].max()) / 2
    assert made.perplexity == pytest.approx(math.exp(nll), abs=0.0051)


def test_one_step_fills_all_places_from_one_pass(model: ProteinModel):
    tokens = PROTEINS[0]
    places = np.flatnonzero(tokens == VOCABULARY.mask)
    log_p = log_p_at(model, tokens)[places, :20]
    (made,) = fill(model, [tokens], sampling=GREEDY, steps=1)
    np.testing.assert_array_equal(made.tokens[places], log_p.argmax(1))
    assert made.perplexity == pytest.approx(math.exp(-log_p.max(1).mean()), abs=0.0051)


@pytest.mark.parametrize(
    ("places", "steps", "passes"), [(12, 5, 5), (12, 32, 12), (12, 12, 12), (1, 3, 1), (0, 3, 0)]
)
def test_steps_are_forward_passes(
    model: ProteinModel, monkeypatch: pytest.MonkeyPatch, places: int, steps: int, passes: int
):
    count = 0
    states = ProteinModel.states

    def counted(self, *arguments, **options):
        nonlocal count
        count += 1
        return states(self, *arguments, **options)

    monkeypatch.setattr(ProteinModel, "states", counted)
    (made,) = fill(model, [random_protein(40, places)], steps=steps)
    assert count == passes
    assert VOCABULARY.mask not in made.tokens
    assert math.isnan(made.perplexity) == (places == 0)


def test_a_residue_comes_as_often_as_the_model_says(model: ProteinModel):
    tokens = masked("MKVA_QQ")
    probabilities = np.exp(log_p_at(model, tokens)[4, :20])
    probabilities /= probabilities.sum()
    made = list(fill(model, [tokens], 500))
    found = np.bincount([each.tokens[4] for each in made], minlength=20) / 500
    assert (np.abs(found - probabilities) < 4.5 * np.sqrt(probabilities / 500)).all()


def test_a_protein_too_large_for_memory_is_none_and_the_others_are_right(
    model: ProteinModel, monkeypatch: pytest.MonkeyPatch
):
    expected = plain(list(fill(model, PROTEINS, 2)))
    states = ProteinModel.states

    def refuse(self, tokens, *arguments, **options):
        if tokens.shape[1] > 60:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return states(self, tokens, *arguments, **options)

    monkeypatch.setattr(ProteinModel, "states", refuse)
    made = plain(list(fill(model, PROTEINS, 2)))
    assert made == [None if each[0] == 2 else each for each in expected]


def test_a_causal_model_is_refused_at_once():
    with pytest.raises(ValueError, match="--prompt"):
        fill(wide_model("favor"), PROTEINS)


@pytest.mark.parametrize("asked", [{"num": 0}, {"steps": 0}])
def test_what_cannot_be_is_refused(model: ProteinModel, asked: dict[str, int]):
    with pytest.raises(ValueError, match="is 0; allowed: 1 or more"):
        fill(model, PROTEINS, **asked)
