"""Pretrained weights of other programs give the scores that those programs give: real models, and transformers' own."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from protperf.checkpoint import TrainedModel, load_model
from protperf.convert import main
from protperf.convert.sources import load_pretrained
from protperf.vocab import VOCABULARY

TOLERANCE = 1e-4
"""float32 sums in another order; logits are of order ten. Real models come to 1e-5."""

NAMES = {
    "<s>": "<bos>",
    "</s>": "<eos>",
    "<cls>": "<bos>",
    "[CLS]": "<bos>",
    "[SEP]": "<eos>",
    "[MASK]": "<mask>",
}
NAMES |= {"[PAD]": "<pad>", "[UNK]": "<unk>"}


def framed(residues: str) -> Tensor:
    """Return the tokens of one protein, `(1, L + 2)`."""
    return torch.tensor([[VOCABULARY.bos, *VOCABULARY.encode(residues).tolist(), VOCABULARY.eos]])


def our_columns(vocabulary: list[str]) -> list[int]:
    """Return our number of each token of a source."""
    return [VOCABULARY.id_of(NAMES.get(token, token)) for token in vocabulary]


@torch.no_grad()
def answers(trained: TrainedModel, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return hidden states and scores of one protein, `(L, D)` and `(L, V)`."""
    hidden = trained.model(tokens)
    return hidden[0], trained.model.logits(hidden)[0]


@pytest.mark.parametrize("number", [0, 1, 2])
def test_sapiens_answers_as_its_own_program(shared_dir: Path, number: int):
    weights = shared_dir / "data" / "weights"
    golden = np.load(weights / "golden_outputs.npz")
    chain = str(golden[f"sapiens_model_{number}"])
    trained = load_pretrained(weights / f"sapiens_{chain}.safetensors").trained
    hidden, logits = answers(trained, framed(str(golden[f"sequence_{number}"])))
    vocabulary = json.loads((weights / "sapiens_config.json").read_text())["vocab"]
    theirs = torch.from_numpy(golden[f"sapiens_logits_{number}"])
    torch.testing.assert_close(logits[:, our_columns(vocabulary)], theirs, atol=TOLERANCE, rtol=0)
    theirs = torch.from_numpy(golden[f"sapiens_hidden_mean_{number}"])
    torch.testing.assert_close(hidden.mean(0), theirs, atol=TOLERANCE, rtol=0)


def test_a_folder_of_sapiens_holds_the_model_and_says_where_it_is_from(
    shared_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    source = shared_dir / "data" / "weights" / "sapiens_vh.safetensors"
    assert main([str(source), str(tmp_path / "vh"), "--name", "Sapiens VH", "--license", "MIT"]) == 0
    said = capsys.readouterr().err
    assert "the source has no B O U X Z J <reserved1>" in said
    before, after = load_pretrained(source).trained, load_model(tmp_path / "vh")
    assert before.describe() == after.describe()
    tokens = framed("QVQLVQSGAEVKX")
    assert answers(before, tokens)[1].equal(answers(after, tokens)[1])
    card = (tmp_path / "vh" / "model_card.md").read_text()
    assert "Converted by protperf from `sapiens_vh.safetensors (SHA-256 3dbacd8d" in card
    assert "Proteins of more than 142 residues are refused" in card
