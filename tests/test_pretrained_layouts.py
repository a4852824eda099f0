"""Weights that transformers saved give the scores that transformers gives, whatever stands beside a protein."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from pretrained_models import CASES, ESM_TOKENS, make_esm, save, shared_tokens, their_scores

from protperf.config import ModelConfig
from protperf.convert.sources import load_pretrained
from protperf.model import ProteinModel
from protperf.positions import rope_frequencies
from protperf.vocab import VOCABULARY

TOLERANCE = 1e-4
"""float32 sums in another order; scores are of order ten."""

FELT = 100 * TOLERANCE
"""By this much scores differ at least where one part is read wrongly."""

RESIDUES = ["MKVLAAGIVTSWCYHFQNPE", "MK", "RDERSTVVLLMMKKAGTISYKAWPCHEQ", "ACDEFGHIK"]


def rows(*, masked: bool = True) -> list[Tensor]:
    """Return proteins of several lengths as our tokens; in three of them residues are masked."""
    found = []
    for number, residues in enumerate(RESIDUES):
        tokens = [VOCABULARY.bos, *VOCABULARY.encode(residues).tolist(), VOCABULARY.eos]
        if masked and number != 1:
            for place in (2, 5, 7)[: number + 1]:
                tokens[place] = VOCABULARY.mask
        found.append(torch.tensor(tokens))
    return found


@torch.no_grad()
def our_scores(model: ProteinModel, proteins: list[Tensor]) -> list[Tensor]:
    """Return our scores, `(L, V)` for each protein, asked one by one."""
    return [model.logits(model(tokens.unsqueeze(0)))[0] for tokens in proteins]


@torch.no_grad()
def packed_scores(model: ProteinModel, proteins: list[Tensor]) -> list[Tensor]:
    """Return our scores of proteins that stand one behind the other in one row, with padding at its end."""
    tokens = torch.cat([*proteins, torch.full((3,), VOCABULARY.pad)]).unsqueeze(0)
    lengths = [len(protein) for protein in proteins]
    documents = torch.repeat_interleave(torch.tensor([*range(len(lengths)), -1]), torch.tensor([*lengths, 3]))
    logits = model.logits(model(tokens, documents.int().unsqueeze(0)))[0]
    return list(logits[:-3].split(lengths))


def difference(model: ProteinModel, theirs: list[Tensor], shared: list[int]) -> float:
    """Return the largest difference between our scores and theirs."""
    ours = our_scores(model, rows())
    return max(float((a[:, shared] - b).abs().max()) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("form", ["safetensors", "bin"])
@pytest.mark.parametrize("name", CASES)
def test_scores_are_those_of_transformers(name: str, form: str, tmp_path: Path):
    make, changes, vocabulary = CASES[name]
    source = make(**changes)
    is_esm = vocabulary is ESM_TOKENS  # whose vocabulary is known
    save(source, tmp_path, form=form, vocabulary=None if is_esm else vocabulary)
    found = load_pretrained(tmp_path)
    model = found.trained.model
    numbers = shared_tokens(vocabulary)
    theirs = their_scores(source, rows(), vocabulary)
    for ours in (our_scores(model, rows()), packed_scores(model, rows())):
        for own, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(own[:, list(numbers)], other, atol=TOLERANCE, rtol=0)
            chances = torch.zeros_like(own)
            chances[:, list(numbers)] = other.softmax(-1)
            torch.testing.assert_close(own.softmax(-1), chances, atol=TOLERANCE, rtol=0)
    lacking = [token for number, token in enumerate(VOCABULARY.tokens) if number not in numbers]
    assert list(found.lacking) == lacking
    assert len(found.left_out) == len(vocabulary) - len(numbers)


def exchange_queries_and_keys(model: ProteinModel) -> None:
    for block in model.blocks:
        for parameter in block.attention.qkv.parameters():  # type: ignore[union-attr]
            q, k, v = parameter.data.chunk(3)
            parameter.data = torch.cat((k, q, v))


def interleave_pairs(model: ProteinModel) -> None:
    """Turn neighbours together instead of feature i with i + K / 2."""
    width = model.head_dim
    order = torch.arange(width).view(-1, 2).T.flatten()
    for block in model.blocks:
        for parameter in block.attention.qkv.parameters():  # type: ignore[union-attr]
            heads = parameter.data.view(3, model.config.num_heads, width, -1)
            heads[:2] = heads[:2, :, order]


def exchange_norms(model: ProteinModel) -> None:
    for block in model.blocks:
        block.attention_norm, block.feedforward_norm = block.feedforward_norm, block.attention_norm


def shift_positions(model: ProteinModel) -> None:
    assert model.position_embedding is not None
    model.position_embedding.weight.data = model.position_embedding.weight.data.roll(1, 0)


def drop_head_bias(model: ProteinModel) -> None:
    assert model.head is not None
    model.head.bias.data.clamp_(max=0.0)


def with_config(**changes: Any) -> Callable[[ProteinModel], ProteinModel]:
    """Build the same weights into a model of another config."""

    def rebuild(model: ProteinModel) -> ProteinModel:
        config = ModelConfig(**{**model.config.__dict__, **changes})
        other = ProteinModel(config, causal=False).eval()
        other.load_state_dict(model.state_dict())
        return other

    return rebuild


MISTAKES: dict[str, tuple[str, Callable[[ProteinModel], ProteinModel | None]]] = {
    "bert: q and k exchanged": ("bert", exchange_queries_and_keys),
    "bert: norms exchanged": ("bert", exchange_norms),
    "bert: positions shifted": ("bert", shift_positions),
    "bert: half the heads": ("bert", with_config(num_heads=2)),
    "bert: another eps": ("bert", with_config(norm_eps=1e-2)),
    "bert: no bias of scores": ("bert", drop_head_bias),
    "roberta: positions shifted": ("roberta", shift_positions),
    "roberta: token dropout": ("roberta", with_config(token_dropout=True)),
    "esm-2: q and k exchanged": ("esm-2", exchange_queries_and_keys),
    "esm-2: interleaved rotations": ("esm-2", interleave_pairs),
    "esm-2: frequencies of another precision": ("esm-2", with_config(rope_frequencies="half")),
    "esm-2: no token dropout": ("esm-2", with_config(token_dropout=False)),
    "esm-2: half the heads": ("esm-2", with_config(num_heads=2)),
    "esm-1b: positions shifted": ("esm-1b", shift_positions),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_part_that_is_read_wrongly_is_felt(mistake: str, tmp_path: Path):
    name, spoil = MISTAKES[mistake]
    make, changes, vocabulary = CASES[name]
    source = make(**changes)
    save(source, tmp_path, form="bin", vocabulary=vocabulary)
    model = load_pretrained(tmp_path).trained.model
    theirs, shared = their_scores(source, rows(), vocabulary), list(shared_tokens(vocabulary))
    assert difference(model, theirs, shared) < TOLERANCE
    felt = difference(spoil(model) or model, theirs, shared)
    assert felt > FELT, felt


@pytest.mark.parametrize("place", ["esm.", "esm.encoder.layer.0.attention.self."])
def test_frequencies_rounded_to_float16_stay_so(place: str, tmp_path: Path):
    source: Any = make_esm()
    source.esm.rotary_embeddings.inv_freq.copy_(rope_frequencies(8).half())
    save(source, tmp_path, form="bin", vocabulary=None)
    weights = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    weights[f"{place}rotary_embeddings.inv_freq"] = weights.pop("esm.rotary_embeddings.inv_freq")
    torch.save(weights, tmp_path / "pytorch_model.bin")
    model = load_pretrained(tmp_path).trained.model
    assert model.config.rope_frequencies == "half"
    theirs = their_scores(source, rows(), ESM_TOKENS)
    assert difference(model, theirs, list(shared_tokens(ESM_TOKENS))) < TOLERANCE
