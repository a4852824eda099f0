"""Perplexity over tokens, and floors that are what counting by hand gives."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from prepared import RESIDUES, SAMPLE, read_fasta, read_proteins
from training import prepared

from protperf.formats.ngrams import NGRAMS_NAME, NgramCounter, read_ngrams
from protperf.metrics import NgramFloor, TokenMetrics, rank_correlation, summarise
from protperf.vocab import VOCABULARY

BOS, EOS, PAD = 27, 28, 26


def metrics_of(*batches: tuple[float, int, int]) -> TokenMetrics:
    metrics = TokenMetrics()
    for nll, asked, correct in batches:
        metrics.update(torch.tensor(nll), torch.tensor(asked), torch.tensor(correct))
    return metrics


def test_perplexity_is_over_tokens_and_not_a_mean_of_means():
    result = metrics_of((1.0 * 100, 100, 50), (5.0 * 1, 1, 0)).compute()
    assert result["loss"] == pytest.approx(105 / 101)
    assert result["perplexity"] == pytest.approx(math.exp(105 / 101))
    assert result["accuracy"] == pytest.approx(50 / 101)
    assert result["perplexity"] < (math.exp(1) + math.exp(5)) / 2 / 10


@given(st.lists(st.tuples(st.floats(0, 1e5, width=32), st.integers(0, 10**6)), min_size=1), st.integers(1, 4))
def test_ranks_add_up_to_one(batches: list[tuple[float, int]], world_size: int):
    batches_ = [(nll, asked, asked // 2) for nll, asked in batches]
    whole = metrics_of(*batches_)
    ranks = [metrics_of(*batches_[rank::world_size]) for rank in range(world_size)]
    total = [sum(getattr(rank, name).item() for rank in ranks) for name in ("nll", "asked", "correct")]
    expected = [whole.nll.item(), whole.asked.item(), whole.correct.item()]
    assert total == pytest.approx(expected, rel=1e-12)


def test_a_long_sum_keeps_its_precision():
    metrics = metrics_of((2.0**24, 1, 0), *[(1.0, 1, 0)] * 100)  # in float32 each 1 would be lost
    assert metrics.compute()["loss"] == (2.0**24 + 100) / 101


def test_nothing_asked_is_not_a_number_and_a_huge_loss_does_not_overflow():
    assert all(math.isnan(value) for value in summarise(0.0, 0, 0).values())
    assert math.isfinite(summarise(1e9, 1, 0)["perplexity"])
    assert math.isnan(summarise(math.nan, 3, 0)["loss"])


def test_reset_forgets():
    metrics = metrics_of((3.0, 1, 1))
    metrics.reset()
    metrics.update(torch.tensor(0.0), torch.tensor(0), torch.tensor(0))
    assert math.isnan(metrics.compute()["loss"])


def test_rank_correlation_by_hand():
    """Ranks 2 3.5 3.5 5 1 against 1 to 5: products sum to -0.5, squares to 9.5 and 10."""
    assert rank_correlation(np.array([10, 20, 20, 40, 5.0]), np.arange(5.0)) == pytest.approx(-0.5 / 95**0.5)
    rising = np.array([1e-300, 0.5, 1e300, np.inf])
    assert rank_correlation(rising, np.arange(4.0)) == pytest.approx(1)
    assert rank_correlation(rising, -np.arange(4.0)) == pytest.approx(-1)
    assert math.isnan(rank_correlation(np.ones(3), np.arange(3.0)))
    assert math.isnan(rank_correlation(np.ones(1), np.ones(1)))


@given(st.lists(st.tuples(st.integers(-5, 5), st.floats(-1e6, 1e6)), min_size=3, max_size=40))
def test_rank_correlation_is_that_of_scipy(pairs: list[tuple[int, float]]):
    stats = pytest.importorskip("scipy.stats")
    values, others = np.array(pairs, np.float64).T
    found = rank_correlation(values, others)
    if len(set(values)) == 1 or len(set(others)) == 1:
        assert math.isnan(found)
        return
    assert found == pytest.approx(stats.spearmanr(values, others).statistic, abs=1e-12)


class WittenBell:
    """Witten-Bell interpolation from its definition, over dictionaries.

    p(w | h) = (c(h w) + N(h) p(w | h')) / (c(h) + N(h)), with c over residues w, N(h) the number of different
    residues seen after h, h' = h without its first token; p(w) = (c(w) + 1) / (total + 26).
    """

    def __init__(self, proteins: Sequence[Sequence[int]]) -> None:
        self.counts: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
        for protein in proteins:
            tokens = (BOS, *protein)
            for place in range(1, len(tokens)):
                for size in range(min(place, 3) + 1):
                    self.counts[tuple(tokens[place - size : place])][tokens[place]] += 1

    def probability(self, residue: int, context: tuple[int, ...]) -> float:
        counts = self.counts[context]
        if not context:
            return (counts[residue] + 1) / (counts.total() + 26)
        lower = self.probability(residue, context[1:])
        if not counts:
            return lower
        return (counts[residue] + len(counts) * lower) / (counts.total() + len(counts))


def tables_of(proteins: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """Count n-grams of `<bos> residues <eos>` into dense tables, one at a time."""
    tables = [np.zeros((36,) * order, np.int64) for order in (1, 2, 3, 4)]
    for protein in proteins:
        tokens = (BOS, *protein, EOS)
        for table in tables:
            for place in range(len(tokens) - table.ndim + 1):
                table[tokens[place : place + table.ndim]] += 1
    return tables


def sums_by_hand(
    reference: WittenBell, tokens: Sequence[int], asked: Sequence[int], order: int
) -> tuple[float, int]:
    """Sum losses and hits over asked places; the context ends at the protein's `<bos>` or the window's start."""
    nll, correct = 0.0, 0
    for place in asked:
        first = place
        while first > max(place - order + 1, 0) and tokens[first] != BOS:
            first -= 1
        context = tuple(tokens[first:place])
        scores = [reference.probability(residue, context) for residue in range(26)]
        nll -= math.log(scores[tokens[place]])
        correct += max(range(26), key=lambda residue: scores[residue]) == tokens[place]
    return nll, correct


PROTEINS = [
    [int(residue) for residue in np.random.default_rng(seed).integers(0, 5, 3 + 7 * seed)]
    for seed in range(6)
] + [[19, 25, 0], [7]]


def sums(floor: NgramFloor, window: np.ndarray, asked: np.ndarray, *, order: int) -> tuple[float, int, int]:
    """Return summed loss in nats, number of asked residues and number got right."""
    nll, correct = floor.losses(window, asked, order=order)
    return float(nll.sum()), len(correct), int(correct.sum())


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_floors_are_witten_bell_by_hand(order: int):
    floor, reference = NgramFloor(tables_of(PROTEINS)), WittenBell(PROTEINS)
    window = [3, 1, 4, EOS, BOS, 0, 0, 1, 2, 3, 4, 4, 25, 19, 25, EOS, BOS, 7, 7, EOS, PAD, PAD]
    asked = [place for place, token in enumerate(window) if token < 26]
    nll, count, correct = sums(floor, np.array(window, np.uint8), np.array(asked), order=order)
    expected_nll, expected_correct = sums_by_hand(reference, window, asked, order)
    assert nll == pytest.approx(expected_nll, rel=1e-9)
    assert (count, correct) == (len(asked), expected_correct)


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_probabilities_of_all_residues_sum_to_one_after_every_context(order: int):
    floor, reference = NgramFloor(tables_of(PROTEINS)), WittenBell(PROTEINS)
    contexts = [context for context in reference.counts if len(context) == order - 1]
    unseen = [context for context in itertools.product([23, 24], repeat=order - 1)]
    for context in contexts + unseen:
        places = np.array([len(context)])
        total = 0.0
        for residue in range(26):
            window = np.array([*context, residue], np.uint8)
            total += math.exp(-sums(floor, window, places, order=order)[0])
        assert total == pytest.approx(1.0, abs=1e-9)


def test_the_unigram_floor_is_the_entropy_of_counts_by_hand():
    floor = NgramFloor(tables_of([[0, 0, 0, 1]]))
    nll, asked, correct = sums(floor, np.array([BOS, 0, 1, 2, EOS], np.uint8), np.array([1, 2, 3]), order=1)
    assert nll == pytest.approx(-math.log(4 / 30) - math.log(2 / 30) - math.log(1 / 30))
    assert (asked, correct) == (3, 1)


def test_nothing_asked_costs_nothing():
    floor = NgramFloor(tables_of(PROTEINS))
    assert sums(floor, np.array([BOS, EOS], np.uint8), np.array([], np.int64), order=3) == (0.0, 0, 0)


@pytest.fixture(scope="module")
def dataset() -> Path:
    return prepared("floors", read_fasta(SAMPLE)[:80], window=128, valid=0.2, test=0.1)


def test_floors_come_from_the_training_split_alone(dataset: Path):
    proteins = read_proteins(dataset)
    assert proteins["valid"]
    assert proteins["test"]
    counts = read_ngrams(dataset / NGRAMS_NAME)
    train = [[RESIDUES.index(letter) for letter in protein] for protein in proteins["train"]]
    reference = WittenBell(train)
    floor = NgramFloor(list(counts.orders.values()))
    window = VOCABULARY.encode("".join(proteins["valid"])[:150])
    asked = np.arange(0, 150, 3)
    for order in (1, 2, 3, 4):
        nll, _, correct = sums(floor, window, asked, order=order)
        expected = sums_by_hand(reference, window.tolist(), asked.tolist(), order)
        assert (nll, correct) == pytest.approx(expected, rel=1e-9)


def test_more_context_helps_on_what_was_counted_and_order_one_is_the_null(dataset: Path):
    floor = NgramFloor(list(read_ngrams(dataset / NGRAMS_NAME).orders.values()))
    protein = read_proteins(dataset)["train"][0]
    window = np.concatenate([[BOS], VOCABULARY.encode(protein)]).astype(np.uint8)
    losses = [sums(floor, window, np.arange(1, len(window)), order=order)[0] for order in (1, 2, 3, 4)]
    assert losses == sorted(losses, reverse=True)


def test_counts_of_nothing_give_the_uniform_floor():
    floor = NgramFloor(list(NgramCounter().counts().orders.values()))
    for order in (1, 2, 3, 4):
        nll, _, _ = sums(floor, np.array([BOS, 1, 2, 3], np.uint8), np.array([1, 2, 3]), order=order)
        assert nll == pytest.approx(3 * math.log(26))
