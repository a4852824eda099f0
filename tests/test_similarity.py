"""Similarity of amino acids: what heads pay by explicit matrices, correlations by hand, BLOSUM62 by known entries."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from Bio.Align import substitution_matrices
from checkpoints import make_checkpoint

from protperf.attention import attention_rows
from protperf.checkpoint import load_model
from protperf.inference.similarity import (
    agreement,
    attention_to_residues,
    chance_of,
    read_blosum,
    residue_similarity,
)
from protperf.maps.similarity import DRAWN_ORDER
from protperf.model import ProteinModel
from protperf.vocab import STANDARD_RESIDUES, VOCABULARY

PROTEINS = [
    VOCABULARY.encode(letters) for letters in ("MKVLAAGIX", "W", "ACDEFGHIKLMNPQRSTVWYBOUXZJ", "GGGGSGGGGS")
]
PROTEINS[0][3] = VOCABULARY.mask


def paid_by_matrices(model: ProteinModel, proteins: list[np.ndarray]) -> np.ndarray:
    """Return the attention from residues to residues of each kind, `(N, H, A)`, out of each protein's own matrices."""
    config = model.config
    totals = np.zeros((config.num_layers, config.num_heads, VOCABULARY.num_residues))
    for protein in proteins:
        tokens = torch.tensor([[VOCABULARY.bos, *protein.tolist(), VOCABULARY.eos]])
        seen: list[tuple[torch.Tensor, torch.Tensor]] = []
        model.watch(tokens, None, lambda q, k, *_, seen=seen: seen.append((q, k)))
        for layer, (q, k) in enumerate(seen):
            projection = model.blocks[layer].attention._buffers.get("projection")
            rows = torch.arange(tokens.shape[1])
            maps = attention_rows(
                q, k, rows=rows, kind=config.attention, causal=model.causal, projection=projection
            )
            for i, looking in enumerate(protein, start=1):
                for j, seen_kind in enumerate(protein, start=1):
                    if looking < VOCABULARY.num_residues and seen_kind < VOCABULARY.num_residues:
                        totals[layer, :, seen_kind] += maps[0, :, i, j].double().numpy()
    return totals


@pytest.mark.parametrize("budget", [1, 30, 4096])
@pytest.mark.parametrize(
    ("attention", "kind"), [("relu", "masked"), ("favor", "causal"), ("softmax", "masked")]
)
def test_attention_paid_is_the_sum_of_the_matrices_however_proteins_are_packed(
    tmp_path: Path, attention: str, kind: str, budget: int
):
    model = load_model(make_checkpoint(tmp_path / "m.ckpt", attention=attention, kind=kind)).model
    done: list[int] = []
    found = attention_to_residues(model, PROTEINS, token_budget=budget, advance=done.append)
    np.testing.assert_allclose(found, paid_by_matrices(model, PROTEINS), atol=1e-5)
    assert sum(done) == len(PROTEINS)


def test_correlation_of_shares_by_hand():
    """Three heads: D and E get equal shares, F twice A's plus a constant's worth: Pearson is 1; W mirrors A: -1."""
    attention = np.ones((3, 1, 26))
    rest = VOCABULARY.id_of("X")
    for kind, shares in {
        "A": (1, 2, 3),
        "D": (5, 1, 2),
        "E": (5, 1, 2),
        "F": (2, 4, 6),
        "W": (3, 2, 1),
    }.items():
        attention[:, 0, VOCABULARY.id_of(kind)] = shares
    for kind in "CGHIKLMNPQRSTVY":
        attention[:, 0, VOCABULARY.id_of(kind)] = (1, 1, 2)
    attention[:, 0, rest] = 0
    attention[:, 0, rest] = 100 - attention[:, 0].sum(-1)  # each head pays 100 in all
    attention *= np.array([1.0, 7.0, 0.1])[:, None, None]  # a head's total does not matter
    found = residue_similarity(attention)
    at = VOCABULARY.id_of
    assert found.shape == (20, 20)
    assert found[at("D"), at("E")] == pytest.approx(1)
    assert found[at("A"), at("F")] == pytest.approx(1)
    assert found[at("A"), at("W")] == pytest.approx(-1)
    # A: -1 0 1; D: 7/3 -5/3 -2/3 about their means: -3 / sqrt(2 * 78/9)
    assert found[at("A"), at("D")] == pytest.approx(-3 / np.sqrt(2 * 78 / 9))


def test_what_says_nothing_is_refused():
    with pytest.raises(ValueError, match="2 head"):
        residue_similarity(np.ones((2, 1, 26)))
    alike = np.ones((2, 2, 26))
    with pytest.raises(ValueError, match="the same in all heads"):
        residue_similarity(alike)
    alike[..., VOCABULARY.id_of("W")] = 0
    with pytest.raises(ValueError, match="hold no W; give more proteins"):
        residue_similarity(alike)


def test_agreement_is_over_pairs_of_different_amino_acids():
    generator = np.random.default_rng(0)
    blosum = read_blosum()
    assert agreement(2 * blosum + np.diag(generator.normal(size=20)), blosum) == pytest.approx(1)
    noise = generator.normal(size=(20, 20))
    noise = noise + noise.T
    pairs = [(noise[i, j], blosum[i, j]) for i in range(20) for j in range(i)]
    x, y = np.array(pairs).T
    x, y = x - x.mean(), y - y.mean()
    assert len(x) == 190
    assert agreement(noise, blosum) == pytest.approx((x @ y) / np.sqrt((x @ x) * (y @ y)))


def test_chance_is_small_for_what_agrees_and_a_half_for_what_does_not():
    blosum = read_blosum()
    assert chance_of(blosum, blosum, num=200, generator=np.random.default_rng(0)) == 0
    chances = []
    for seed in range(20):
        noise = np.random.default_rng(seed).normal(size=(20, 20))
        chances.append(chance_of(noise + noise.T, blosum, num=100, generator=np.random.default_rng(1)))
    assert 0.3 < np.mean(chances) < 0.7  # uniform: 0.5 with a standard error of 0.065


def test_blosum_is_in_the_order_of_the_vocabulary():
    """Entries as printed in Henikoff and Henikoff 1992."""
    blosum = read_blosum()
    for pair, score in {"AA": 4, "WW": 11, "DE": 2, "FY": 3, "IV": 3, "CW": -2, "GI": -4, "KR": 2}.items():
        a, b = (VOCABULARY.id_of(letter) for letter in pair)
        assert blosum[a, b] == blosum[b, a] == score
    assert sorted(DRAWN_ORDER) == sorted(STANDARD_RESIDUES)
    assert set(STANDARD_RESIDUES) < set(substitution_matrices.load("BLOSUM62").alphabet)
