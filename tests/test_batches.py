"""Windows in a random order without a memory, proteins told apart inside a window, batches within a budget."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from protperf.batches import documents_of, documents_or_one, pad_together, permuted, plan_batches

PAD, BOS, EOS, MASK, M, K = 26, 27, 28, 29, 10, 8


@pytest.mark.parametrize("size", [*range(1, 301), 1023, 1024, 1025, 65_536, 100_003])
def test_permutation_is_a_bijection(size: int):
    places = permuted(np.arange(size), size, seed=3, epoch=5)
    assert places.dtype == np.int64
    np.testing.assert_array_equal(np.sort(places), np.arange(size))


def test_permutation_of_more_windows_than_trembl_has_stays_inside_and_apart():
    size = 11_000_003
    generator = np.random.default_rng(0)
    asked = generator.choice(size, 50_000, replace=False)
    places = permuted(asked, size, seed=0, epoch=0)
    assert 0 <= places.min() <= places.max() < size
    assert len(np.unique(places)) == len(asked)


def test_permutation_of_a_place_does_not_depend_on_what_is_asked_with_it():
    whole = permuted(np.arange(77), 77, seed=1, epoch=2)
    for place in range(77):
        assert permuted(np.array([place]), 77, seed=1, epoch=2)[0] == whole[place]
    assert permuted(np.empty(0, np.int64), 77, seed=1, epoch=2).shape == (0,)


def test_each_epoch_and_each_seed_has_its_own_permutation():
    size = 1000
    orders = [permuted(np.arange(size), size, seed=s, epoch=e) for s in range(4) for e in range(5)]
    for i, one in enumerate(orders):
        for other in orders[:i]:
            assert (one == other).sum() < 10  # two random permutations agree in 1 place on average
            assert abs(np.corrcoef(one, other)[0, 1]) < 5 / size**0.5


def test_permutation_shows_no_regularity():
    size = 20_000
    order = permuted(np.arange(size), size, seed=0, epoch=0)
    noise = 5 / size**0.5
    for lag in (1, 2, 3, 64, 1000):
        assert abs(np.corrcoef(order[:-lag], order[lag:])[0, 1]) < noise
    steps = np.diff(order)
    assert len(np.unique(steps)) > size / 2  # an affine map has one or two
    quarters = np.histogram(order[: size // 4], bins=100, range=(0, size))[0]
    chi_square = ((quarters - size / 400) ** 2 / (size / 400)).sum()
    assert 40 < chi_square < 160  # 99 degrees of freedom, less a quarter for drawing without replacement


def test_seeds_and_epochs_up_to_the_largest_are_taken():
    for seed, epoch in ((2**32 - 1, 0), (2**63, 2**24 - 1)):
        assert sorted(permuted(np.arange(9), 9, seed=seed, epoch=epoch)) == list(range(9))


def test_documents_are_numbered_by_hand():
    tokens = torch.tensor(
        [
            [BOS, M, K, EOS, BOS, K, EOS, PAD],
            [K, M, EOS, BOS, M, M, EOS, BOS],
            [M, K, M, K, M, K, M, K],
            [EOS, BOS, EOS, BOS, MASK, EOS, PAD, PAD],
        ],
        dtype=torch.uint8,
    )
    expected = [
        [1, 1, 1, 1, 2, 2, 2, -1],
        [0, 0, 0, 1, 1, 1, 1, 2],
        [0, 0, 0, 0, 0, 0, 0, 0],
        [0, 1, 1, 2, 2, 2, -1, -1],
    ]
    documents = documents_of(tokens)
    assert documents.dtype == torch.int32
    assert documents.tolist() == expected
    across = documents_of(tokens, across=True)
    assert across.dtype == torch.int32
    assert across.tolist() == [[min(number, 0) for number in row] for row in expected]


def test_only_windows_of_one_document_without_padding_need_no_numbers():
    full, padded = torch.tensor([[BOS, M, EOS, BOS, M]]), torch.tensor([[BOS, M, EOS, PAD, PAD]])
    assert documents_or_one(full, across=True) is None
    for tokens, across in ((padded, True), (full, False), (torch.cat((full, padded)), True)):
        torch.testing.assert_close(
            documents_or_one(tokens, across=across), documents_of(tokens, across=across)
        )


@given(st.lists(st.integers(0, 12), min_size=1, max_size=40), st.integers(0, 60))
def test_documents_of_packed_proteins_are_the_proteins(lengths: list[int], cut: int):
    stream = [token for length in lengths for token in (BOS, *[M] * length, EOS)]
    numbers = [number for number, length in enumerate(lengths) for _ in range(length + 2)]
    tokens, owners = stream[cut : cut + 64], numbers[cut : cut + 64]
    if tokens:
        found = documents_of(torch.tensor([tokens]))[0].tolist()
        same = [a == b for a, b in pairwise(owners)]
        assert same == [a == b for a, b in pairwise(found)]


def test_proteins_are_padded_side_by_side():
    tokens, documents = pad_together([np.array([BOS, M, EOS], np.uint8), np.array([BOS], np.uint8)])
    assert tokens.dtype == torch.uint8
    assert tokens.tolist() == [[BOS, M, EOS], [BOS, PAD, PAD]]
    assert documents.tolist() == [[0, 0, 0], [0, -1, -1]]


@pytest.mark.parametrize(
    ("lengths", "budget", "expected"),
    [
        ([], 10, []),
        ([5], 10, [[0]]),
        ([5, 5], 10, [[0, 1]]),
        ([5, 6], 10, [[0], [1]]),
        ([9, 1, 1, 1], 10, [[1, 2, 3], [0]]),
        ([50, 3, 2], 9, [[2, 1], [0]]),
        ([4, 4, 4], 4, [[0], [1], [2]]),
    ],
)
def test_batches_by_hand(lengths: list[int], budget: int, expected: list[list[int]]):
    assert list(plan_batches(lengths, token_budget=budget)) == expected


@given(st.lists(st.integers(1, 300)), st.integers(1, 400))
def test_batches_hold_each_protein_once_within_the_budget(lengths: list[int], budget: int):
    batches = list(plan_batches(lengths, token_budget=budget))
    assert sorted(place for batch in batches for place in batch) == list(range(len(lengths)))
    for batch in batches:
        longest = max(lengths[place] for place in batch)
        assert len(batch) * longest <= budget or len(batch) == 1
    longest_first = [max(lengths[place] for place in batch) for batch in batches]
    assert longest_first == sorted(longest_first)
