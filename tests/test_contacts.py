"""Contact heads: features and predictions by their definition, precision by hand, planted weights found again."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import make_checkpoint

from protperf.attention import attention_rows
from protperf.checkpoint import load_model
from protperf.formats import FormatError
from protperf.formats.contact_head import (
    ContactHead,
    describe_other_model,
    read_contact_head,
    write_contact_head,
)
from protperf.inference import contacts
from protperf.inference.contacts import (
    contacts_of,
    fit_contacts,
    pair_features,
    pairs_of,
    precision_at,
    precisions,
    predict_contacts,
    score_pairs,
)
from protperf.model import ProteinModel
from protperf.vocab import VOCABULARY

LENGTH = 23
SHAPE = (2, 2)


@pytest.fixture(
    params=[("relu", "masked"), ("favor", "causal"), ("softmax", "masked"), ("softmax", "causal")],
    ids=lambda param: "-".join(param),
    scope="module",
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ProteinModel:
    attention, kind = request.param
    path = make_checkpoint(tmp_path_factory.mktemp("model") / "m.ckpt", attention=attention, kind=kind)
    return load_model(path).model


def some_residues(length: int = LENGTH) -> np.ndarray:
    return np.random.default_rng(3).integers(0, 20, length).astype(np.uint8)


def corrected_maps(model: ProteinModel, residues: np.ndarray) -> np.ndarray:
    """Return each head's map as Rao et al. define it, `(N * H, L, L)`: pair by pair, entry by entry, in float64."""
    tokens = torch.tensor([[VOCABULARY.bos, *residues.tolist(), VOCABULARY.eos]])
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    model.watch(tokens, None, lambda q, k, *_: seen.append((q, k)))
    found = []
    for block, (q, k) in zip(model.blocks, seen, strict=True):
        rows = torch.arange(tokens.shape[1])
        projection = block.attention._buffers.get("projection")
        kind = model.config.attention
        maps = attention_rows(q, k, rows=rows, kind=kind, causal=model.causal, projection=projection)
        for matrix in maps[0, :, 1:-1, 1:-1].double().numpy():
            both = matrix + matrix.T
            sums, total = both.sum(0), both.sum()
            length = len(both)
            corrected = [
                [both[i, j] - sums[i] * sums[j] / total for j in range(length)] for i in range(length)
            ]
            found.append(np.array(corrected))
    return np.stack(found)


def test_features_are_symmetric_maps_without_their_average_product(model: ProteinModel):
    residues = some_residues()
    maps = corrected_maps(model, residues)
    features = pair_features(model, residues)
    pairs = [(i, j) for i in range(LENGTH) for j in range(i + 6, LENGTH)]
    assert list(zip(*pairs_of(LENGTH), strict=True)) == pairs
    expected = np.array([[each[i, j] for each in maps] for i, j in pairs])
    np.testing.assert_allclose(features, expected, atol=2e-6)  # float32 sums of weights up to one


@pytest.mark.parametrize("columns", [7, 512])
def test_predictions_are_the_logistic_sum_in_blocks_of_any_size(
    model: ProteinModel, columns: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(contacts, "_COLUMNS", columns)
    residues = some_residues()
    head = ContactHead(np.array([[30.0, 0.0], [-20.0, 5.0]]), -0.5, {})
    found = predict_contacts(model, residues, head)
    odds = np.tensordot(head.weights.ravel(), corrected_maps(model, residues), axes=1) - 0.5
    expected = 1 / (1 + np.exp(-odds))
    np.fill_diagonal(expected, 0.0)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, found.T)
    np.testing.assert_allclose(found, expected, atol=2e-5)  # weights of 30 times the features' error
    scores = score_pairs(pair_features(model, residues), head)
    np.testing.assert_allclose(1 / (1 + np.exp(-scores)), found[pairs_of(LENGTH)], atol=2e-5)


def test_a_protein_of_one_residue_touches_nothing(model: ProteinModel):
    head = ContactHead(np.ones(SHAPE), 0.0, {})
    assert predict_contacts(model, some_residues(1), head).tolist() == [[0.0]]


def test_a_head_of_another_shape_is_refused(model: ProteinModel):
    with pytest.raises(ValueError, match="3 layers of 2 heads, the model has 2 of 2"):
        predict_contacts(model, some_residues(), ContactHead(np.ones((3, 2)), 0.0, {}))


def test_contacts_are_near_atoms_of_residues_six_apart():
    positions = np.zeros((8, 3), np.float32)
    positions[:, 0] = 100 * np.arange(8)
    positions[6] = [7.99, 0, 0]  # near residue 0
    positions[7] = [100, 8.0, 0]  # 8.0 from residue 1: not nearer than 8
    assert contacts_of(positions).tolist() == [1, 0, 0]  # pairs 0-6, 0-7, 1-7
    positions[0] = np.nan
    assert np.isnan(contacts_of(positions)).tolist() == [True, True, False]


@pytest.mark.parametrize(
    ("scores", "truth", "count", "expected"),
    [
        ([3, 2, 1, 0], [1, 0, 1, 0], 1, 1.0),
        ([3, 2, 1, 0], [1, 0, 1, 0], 2, 0.5),
        ([0, 1, 2, 3], [1, 0, 1, 0], 2, 0.5),
        ([3, 2, 1, 0], [1, 0, 1, 0], 9, 0.5),  # fewer pairs than asked
        ([5, 1, 1, 1], [1, 1, 0, 0], 2, (1 + 1 / 3) / 2),  # one of three ties
        ([5, 1, 1, 1], [0, 1, 1, 0], 3, (0 + 2 * 2 / 3) / 3),
        ([7, 7, 7, 7], [1, 0, 0, 0], 2, 0.25),  # all ties: the share of contacts
    ],
)
def test_precision_by_hand(scores: list[float], truth: list[float], count: int, expected: float):
    assert precision_at(np.array(scores, float), np.array(truth, float), count) == pytest.approx(expected)


def test_precision_of_no_pairs_is_no_number():
    assert np.isnan(precision_at(np.empty(0), np.empty(0), 3))


def test_ranges_take_their_pairs_and_unknown_ones_are_left_out():
    """30 residues: the best long-range pair is unknown, so that the next one counts."""
    i, j = pairs_of(30)
    scores = np.zeros(len(i))
    truth = np.zeros(len(i))
    scores[(i == 0) & (j == 29)], truth[(i == 0) & (j == 29)] = 3.0, np.nan
    scores[(i == 1) & (j == 25)], truth[(i == 1) & (j == 25)] = 2.0, 1.0  # 24 apart: long
    scores[(i == 1) & (j == 24)], truth[(i == 1) & (j == 24)] = 9.0, 1.0  # 23 apart: medium
    scores[(i == 2) & (j == 13)], truth[(i == 2) & (j == 13)] = 8.0, 1.0  # 11 apart: short
    found = precisions(scores, truth, 30)
    assert list(found) == ["long", "medium", "short"]
    long_pairs = 6 + 5 + 4 + 3 + 2 + 1 - 1  # one unknown
    for reach in found:
        assert found[reach]["L/5"] >= 1 / 6  # the one contact is among the first six
    assert found["long"]["L"] == pytest.approx(1 / long_pairs)
    assert found["long"]["L/5"] == pytest.approx(1 / 6)


def test_planted_weights_are_found_again():
    """Contacts drawn from a known head, features of unequal size: the fit gives the head back."""
    generator = np.random.default_rng(0)
    planted = ContactHead(np.array([[2000.0, 0.0], [-5.0, 30.0]]), -2.0, {})
    features = generator.normal(size=(40_000, 4)) * [1e-3, 1.0, 0.1, 0.02] + [0.5, 0, 0, -0.1]
    odds = score_pairs(features, planted) - 1000.0
    drawn = generator.random(len(odds)) < 1 / (1 + np.exp(-odds))
    found = fit_contacts(features, drawn.astype(float), shape=SHAPE, regularisation=1.0)
    scale = np.array([[1e-3, 1.0], [0.1, 0.02]])
    np.testing.assert_allclose(found.weights * scale, planted.weights * scale, atol=0.1)  # 3 standard errors
    assert found.intercept == pytest.approx(-1002, rel=0.05)
    weak = fit_contacts(features, drawn.astype(float), shape=SHAPE, regularisation=1e-4)
    assert np.abs(weak.weights * scale).max() < np.abs(found.weights * scale).max() / 2


def test_nothing_to_tell_apart_is_refused():
    with pytest.raises(ValueError, match="no contacts, or nothing else"):
        fit_contacts(np.zeros((4, 4)), np.zeros(4), shape=SHAPE, regularisation=1.0)
    with pytest.raises(ValueError, match="not finite"):
        fit_contacts(np.full((4, 4), np.nan), np.array([0, 1, 0, 1.0]), shape=SHAPE, regularisation=1.0)


def test_without_scikit_learn_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(__import__("sys").modules, "sklearn.linear_model", None)
    with pytest.raises(ValueError, match=r"pip install 'protperf\[contacts\]'"):
        fit_contacts(np.zeros((4, 4)), np.array([0, 1, 0, 1.0]), shape=SHAPE, regularisation=1.0)


def test_a_head_comes_back_from_its_file_exactly(tmp_path: Path):
    head = ContactHead(np.random.default_rng(0).normal(size=(3, 5)), -1 / 3, {"checkpoint": "a.ckpt"})
    write_contact_head(tmp_path / "head.json", head)
    found = read_contact_head(tmp_path / "head.json")
    np.testing.assert_array_equal(found.weights, head.weights)
    assert found.intercept == head.intercept
    assert found.provenance == head.provenance


def test_a_line_that_quotes_a_head_is_printable():
    for checkpoint, found in (("a\x1b[31m\n", r"a\x1b[31m\n"), (["a"], "an unknown model")):
        head = ContactHead(np.ones(SHAPE), 0.0, {"checkpoint": checkpoint})
        assert describe_other_model(head, Path("b.ckpt"), "0") == f"was fitted to {found}, not to b.ckpt"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, "no contact head"),
        ({"format_version": 2}, "format version 2, this protperf reads 1"),
        ({"weights": [[1.0], [1.0, 2.0]]}, "damaged contact head"),
        ({"weights": [1.0]}, "no finite matrix"),
        ({"intercept": None}, "damaged contact head"),
        ({"intercept": 10**400}, "damaged contact head"),
        ({"intercept": "1"}, "damaged contact head"),
        ({"intercept": True}, "damaged contact head"),
        ({"weights": [["1"]]}, "damaged contact head"),
        ({"weights": {"a": 1}}, "damaged contact head"),
        ({"weights": [[10**400]]}, "damaged contact head"),
    ],
)
def test_damaged_heads_are_refused(tmp_path: Path, change: dict, message: str):
    path = tmp_path / "head.json"
    write_contact_head(path, ContactHead(np.ones(SHAPE), 0.0, {}))
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(FormatError, match=message):
        read_contact_head(path)
    path.write_text("{")
    with pytest.raises(FormatError, match="not JSON"):
        read_contact_head(path)
    with pytest.raises(ValueError, match="cannot be read"):
        read_contact_head(tmp_path / "none.json")
