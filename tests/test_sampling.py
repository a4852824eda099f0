"""Laws of drawing tokens: the distribution asked for, streams of their own, and knowing where rounding decides."""

from __future__ import annotations

import numpy as np
import pytest

from protperf.inference import sampling
from protperf.inference.sampling import ROUNDING, Sampling, choose, gumbel, perplexity_of
from protperf.vocab import VOCABULARY

SIZE = len(VOCABULARY)
DRAWS = 20_000


def log_p_of(shares: dict[str, float]) -> np.ndarray:
    """Return log p `(1, V)` of a distribution over a few tokens; all others are next to impossible."""
    log_p = np.full(SIZE, np.log(1e-12))
    for letter, share in shares.items():
        log_p[VOCABULARY.id_of(letter)] = np.log(share)
    return log_p[None]


HALVES = log_p_of({"A": 0.5, "C": 0.25, "D": 0.125, "E": 0.125})
STANDARD = Sampling().residues[None]


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, [0.5, 0.25, 0.125, 0.125]),
        ({"temperature": 0.5}, [16 / 22, 4 / 22, 1 / 22, 1 / 22]),  # squares
        ({"temperature": 2.0}, [0.3694, 0.2612, 0.1847, 0.1847]),  # roots
        ({"top_k": 1}, [1.0, 0, 0, 0]),
        ({"top_k": 2}, [2 / 3, 1 / 3, 0, 0]),
        ({"top_p": 0.6}, [2 / 3, 1 / 3, 0, 0]),
        ({"top_p": 0.4}, [1.0, 0, 0, 0]),
        ({"top_p": 0.7, "temperature": 0.5}, [1.0, 0, 0, 0]),  # 16/22 is enough
        ({"top_k": 2, "top_p": 0.7}, [2 / 3, 1 / 3, 0, 0]),  # of the two: 2/3 is not enough
        ({"top_k": 2, "top_p": 0.6}, [1.0, 0, 0, 0]),  # of the two: 2/3 is enough
        ({"temperature": 0.0}, [1.0, 0, 0, 0]),
    ],
    ids=str,
)
def test_tokens_come_as_often_as_asked(asked: dict[str, float], expected: list[float]):
    how = Sampling(**asked)
    noise = gumbel(how.stream(0, 0), DRAWS)
    tokens, _ = choose(np.repeat(HALVES, DRAWS, 0), np.repeat(STANDARD, DRAWS, 0), noise, how)
    found = np.bincount(tokens, minlength=SIZE)[:4] / DRAWS
    deviation = np.sqrt(np.maximum(np.multiply(expected, 1 - np.asarray(expected)), 1e-12) / DRAWS)
    assert (np.abs(found - expected) < 4 * deviation).all(), found


def test_only_allowed_tokens_are_drawn_and_share_what_the_others_had():
    log_p = log_p_of({"A": 0.5, "<eos>": 0.375, "X": 0.125})
    how = Sampling(top_k=2, nonstandard=True)
    noise = gumbel(how.stream(0, 0), DRAWS)
    tokens, _ = choose(np.repeat(log_p, DRAWS, 0), np.repeat(how.residues[None], DRAWS, 0), noise, how)
    assert set(tokens.tolist()) == {VOCABULARY.id_of("A"), VOCABULARY.id_of("X")}
    assert abs((tokens == VOCABULARY.id_of("X")).mean() - 0.2) < 4 * np.sqrt(0.16 / DRAWS)


ENDING = log_p_of({"A": 0.4, "C": 0.3, "D": 0.15, "E": 0.05, "<eos>": 0.1})


@pytest.mark.parametrize(
    ("asked", "residues", "end"),
    [
        ({}, [0.4, 0.3, 0.15, 0.05], 0.1),
        ({"top_k": 1}, [0.9, 0, 0, 0], 0.1),
        ({"top_k": 2}, [0.9 * 4 / 7, 0.9 * 3 / 7, 0, 0], 0.1),
        ({"top_p": 0.5}, [0.9 * 4 / 7, 0.9 * 3 / 7, 0, 0], 0.1),  # 4/9 of the residues is not enough
        ({"top_k": 3, "top_p": 0.8}, [0.9 * 4 / 7, 0.9 * 3 / 7, 0, 0], 0.1),  # 14/17 of the three is
        ({"temperature": 0.5}, [160 / 285, 90 / 285, 22.5 / 285, 2.5 / 285], 10 / 285),  # squares
        ({"temperature": 0.5, "top_k": 1}, [275 / 285, 0, 0, 0], 10 / 285),
        ({"temperature": 0.5, "top_p": 0.6}, [275 / 285 * 16 / 25, 275 / 285 * 9 / 25, 0, 0], 10 / 285),
    ],
    ids=str,
)
def test_top_k_and_top_p_choose_among_residues_and_proteins_end_as_often(
    asked: dict[str, float], residues: list[float], end: float
):
    """A chi-square test against shares worked out by hand; 23.5 is passed once in 10,000 times with 4 degrees of freedom."""
    how = Sampling(**asked)
    allowed = STANDARD | (np.arange(SIZE) == VOCABULARY.eos)
    noise = gumbel(how.stream(0, 0), DRAWS)
    tokens, _ = choose(np.repeat(ENDING, DRAWS, 0), np.repeat(allowed, DRAWS, 0), noise, how)
    found = np.bincount(tokens, minlength=SIZE)[[0, 1, 2, 3, VOCABULARY.eos]]
    expected = DRAWS * np.array([*residues, end])
    assert found.sum() == DRAWS
    assert (found[expected == 0] == 0).all()
    kept = expected > 0
    assert ((found - expected)[kept] ** 2 / expected[kept]).sum() < 23.5, found / DRAWS


def test_an_end_that_is_likelier_than_all_residues_is_taken_at_temperature_zero():
    log_p = log_p_of({"A": 0.3, "C": 0.2, "<eos>": 0.5})
    allowed = STANDARD | (np.arange(SIZE) == VOCABULARY.eos)
    noise = gumbel(Sampling().stream(0, 0), 1)
    for temperature in (0.0, 1e-4):
        how = Sampling(temperature=temperature, top_k=2, top_p=0.9)
        assert choose(log_p, allowed, noise, how).tokens[0] == VOCABULARY.eos
        assert choose(log_p, STANDARD, noise, how).tokens[0] == VOCABULARY.id_of("A")


def test_residues_that_may_be_drawn():
    assert VOCABULARY.decode(np.flatnonzero(Sampling().residues)) == "ACDEFGHIKLMNPQRSTVWY"
    assert (
        VOCABULARY.decode(np.flatnonzero(Sampling(nonstandard=True).residues)) == "ACDEFGHIKLMNPQRSTVWYBOUXZJ"
    )


@pytest.mark.parametrize(
    "asked", [{}, {"top_k": 3}, {"top_p": 0.8}, {"temperature": 0.3, "top_k": 9, "top_p": 0.9}], ids=str
)
@pytest.mark.parametrize("may_end", [False, True])
def test_a_sure_draw_withstands_rounding(
    asked: dict[str, float], may_end: bool, monkeypatch: pytest.MonkeyPatch
):
    """With errors much larger than real ones, so that a few thousand draws meet some that matter."""
    monkeypatch.setattr(sampling, "ROUNDING", 0.01)
    generator, how = np.random.default_rng(0), Sampling(**asked)
    log_p = np.log(generator.dirichlet(np.full(SIZE, 0.5), 4000))
    allowed = np.repeat(STANDARD, 4000, 0)
    allowed[:, VOCABULARY.eos] = may_end
    noise = gumbel(how.stream(0, 0), 4000)
    tokens, sure = choose(log_p, allowed, noise, how)
    for errors in generator.uniform(-0.005, 0.005, (5, *log_p.shape)):
        moved, _ = choose(log_p + errors, allowed, noise, how)
        assert (tokens == moved)[sure].all()
        assert (tokens != moved).any()
    assert sure.mean() > 0.2


def test_ties_are_not_sure():
    noise = np.zeros((1, SIZE))
    tie = log_p_of({"A": 0.5, "C": 0.5})
    assert not choose(tie, STANDARD, noise, Sampling(temperature=0.0)).sure[0]
    assert not choose(tie, STANDARD, gumbel(Sampling().stream(0, 0), 1), Sampling(top_k=1)).sure[0]
    assert not choose(HALVES, STANDARD, gumbel(Sampling().stream(0, 0), 1), Sampling(top_p=0.5)).sure[0]
    assert choose(HALVES, STANDARD, noise, Sampling(temperature=0.0)).sure[0]


def test_every_sequence_has_a_stream_of_its_own():
    places = [(seed, protein, sample) for seed in (0, 1) for protein in (0, 1, 2**40) for sample in (0, 1)]
    first = {place: Sampling(seed=place[0]).stream(*place[1:]).random(4).tobytes() for place in places}
    assert len(set(first.values())) == len(places)
    assert Sampling(seed=1).stream(1, 1).random(4).tobytes() == first[1, 1, 1]


def test_perplexity_is_settled_where_rounding_could_show():
    asked: list[float] = []

    def settle() -> float:
        asked.append(1)
        return np.log(17.005001) * 100

    assert perplexity_of(np.log(17.0) * 100, 100, settle) == 17.0
    assert not asked
    assert perplexity_of(np.log(17.00499) * 100, 100, settle) == 17.01
    assert asked
    assert perplexity_of(np.log(17.00499) * 100, 100, None) == 17.0
    assert np.isnan(perplexity_of(0.0, 0, None))
    assert 0 < ROUNDING < 1e-3


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"temperature": -0.1}, "temperature is -0.1; allowed: 0 or more"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_p": 0.0}, "top_p is 0.0; allowed: above 0 to 1"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_values_out_of_range_are_refused(asked: dict[str, float], message: str):
    with pytest.raises(ValueError, match=message):
        Sampling(**asked)
