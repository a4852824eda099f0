"""Who may see whom, and where a token stands in its document: against cases written by hand."""

from __future__ import annotations

import torch

from protperf.attention import allowed_pairs, positions_in_documents


def test_positions_restart_in_each_document_and_in_padding():
    documents = torch.tensor(
        [
            [0, 0, 0, 1, 2, 2, -1, -1],
            [-1, -1, 5, 5, 5, 0, 0, -1],
            [3, 3, 3, 3, 3, 3, 3, 3],
        ],
        dtype=torch.int32,
    )
    expected = torch.tensor(
        [
            [0, 1, 2, 0, 0, 1, 0, 1],
            [0, 1, 0, 1, 2, 0, 1, 0],
            [0, 1, 2, 3, 4, 5, 6, 7],
        ]
    )
    assert torch.equal(positions_in_documents(documents), expected)


def test_a_single_token_stands_at_place_zero():
    assert positions_in_documents(torch.tensor([[4]], dtype=torch.int32)).tolist() == [[0]]


def test_allowed_pairs_are_those_of_equal_documents_without_padding():
    documents = torch.tensor([[0, 0, 1, -1, -1]], dtype=torch.int32)
    expected = torch.tensor(
        [
            [1, 1, 0, 0, 0],
            [1, 1, 0, 0, 0],
            [0, 0, 1, 0, 0],
            [0, 0, 0, 0, 0],
            [0, 0, 0, 0, 0],
        ],
        dtype=torch.bool,
    )
    assert torch.equal(allowed_pairs(documents, causal=False)[0, 0], expected)


def test_allowed_pairs_of_the_causal_direction_never_lie_in_the_future():
    documents = torch.tensor([[0, 0, 0, 2], [-1, 7, 7, 7]], dtype=torch.int32)
    expected = torch.tensor(
        [
            [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [0, 0, 0, 1]],
            [[0, 0, 0, 0], [0, 1, 0, 0], [0, 1, 1, 0], [0, 1, 1, 1]],
        ],
        dtype=torch.bool,
    )
    found = allowed_pairs(documents, causal=True)
    assert found.shape == (2, 1, 4, 4)
    assert torch.equal(found[:, 0], expected)
