"""Results by the length of a protein are sums over the proteins of that length, each as if it stood alone."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from prepared import SAMPLE, read_fasta
from training import prepared

from protperf.attention import ATTENTIONS
from protperf.batches import Batch, residues_of_proteins
from protperf.config import DataConfig, ModelConfig, ObjectiveConfig
from protperf.data import WindowData
from protperf.metrics import TokenMetrics, length_bins
from protperf.model import ProteinModel
from protperf.objectives import NOT_ASKED, answer, answer_by_length
from protperf.vocab import VOCABULARY

PAD, BOS, EOS, MASK = 26, 27, 28, 29


def model_of(attention: str = "softmax") -> ProteinModel:
    options: dict[str, Any] = {"qk_norm": True} if attention == "trig" else {}
    torch.manual_seed(0)
    config = ModelConfig(
        attention=attention,
        num_layers=1,
        num_heads=2,
        model_dim=16,
        feedforward_dim=16,
        num_features=128,
        **options,
    )
    return ProteinModel(config, causal=False).eval()


def test_residues_of_proteins_are_counted_by_hand():
    rows = [
        [3, 4, MASK, EOS, BOS, 1, EOS, BOS, 5, 6],  # a rest of three, a protein of one, a beginning of two
        [BOS, 7, 8, 9, 10, EOS, PAD, PAD, PAD, PAD],
        [PAD] * 10,
    ]
    expected = [[3, 3, 3, 3, 1, 1, 1, 2, 2, 2], [4] * 6 + [0] * 4, [0] * 10]
    assert residues_of_proteins(torch.tensor(rows, dtype=torch.uint8)).tolist() == expected


@pytest.mark.parametrize(
    ("window", "names"),
    [
        (512, ["up_to_512"]),
        (600, ["up_to_512", "up_to_1024"]),
        (8192, ["up_to_512", "up_to_1024", "up_to_2048", "up_to_4096", "up_to_8192"]),
        (9000, ["up_to_512", "up_to_1024", "up_to_2048", "up_to_4096", "up_to_8192", "over_8192"]),
    ],
)
def test_bins_are_those_that_a_window_can_hold(window: int, names: list[str]):
    assert list(length_bins(window)) == names


@pytest.mark.parametrize("kind", ["masked", "causal"])
def test_sums_by_length_are_those_of_proteins_alone(kind: str):
    records = [
        *[record for record in read_fasta(SAMPLE) if len(record[1]) <= 300][:12],
        *[record for record in read_fasta(SAMPLE) if 520 <= len(record[1]) <= 900][:8],
        *[record for record in read_fasta(SAMPLE) if len(record[1]) >= 1100][:3],
    ]
    data = prepared(f"lengths-{kind}", records, window=2048, valid=0.6, test=0.0)
    config = DataConfig(path=str(data), batch_size=2, num_workers=0)
    windows = WindowData(config, ObjectiveConfig(kind=kind), seed=0)
    bins, model = length_bins(2048), model_of()
    model.causal = kind == "causal"
    for block in model.blocks:
        block.attention.causal = model.causal  # type: ignore[union-attr]
    metrics = TokenMetrics(tuple(bins))
    expected = {name: np.zeros(3) for name in bins}
    with torch.no_grad():
        for batch in windows.val_dataloader()[0]:
            metrics.update(*answer_by_length(model, batch, across=False, edges=list(bins.values())))
            for inputs, targets in zip(batch.inputs, batch.targets, strict=True):
                begins = np.flatnonzero(inputs.numpy() == BOS).tolist()
                edges = sorted({0, *begins, len(inputs)})
                for first, last in pairwise(edges):
                    piece = Batch(inputs[None, first:last], targets[None, first:last])
                    length = sum(token < 26 or token == MASK for token in piece.inputs[0].tolist())
                    name = next((name for name, most in bins.items() if length <= most), "")
                    expected[name] += [float(part) for part in answer(model, piece, across=False)]
    found = metrics.compute()
    asked = [total[1] for total in expected.values()]
    assert sum(count > 0 for count in asked) >= 2
    for name, (nll, count, correct) in expected.items():
        if count:
            assert found[f"loss_{name}"] == pytest.approx(nll / count, rel=1e-5)
            assert found[f"perplexity_{name}"] == pytest.approx(math.exp(nll / count), rel=1e-4)
            assert found[f"accuracy_{name}"] == pytest.approx(correct / count)
        else:
            assert f"loss_{name}" not in found
    nll, count, _ = sum(expected.values())
    assert found["loss"] == pytest.approx(nll / count, rel=1e-5)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_a_window_of_padding_that_asks_nothing_adds_nothing(attention: str):
    model = model_of(attention)
    nothing = torch.full((1, 40), VOCABULARY.pad, dtype=torch.uint8)
    asked_nothing = Batch(nothing, torch.full_like(nothing, NOT_ASKED))
    with torch.no_grad():
        sums = answer_by_length(model, asked_nothing, across=False, edges=[512, 1024])
    for part in sums:
        assert part.tolist() == [0, 0]
