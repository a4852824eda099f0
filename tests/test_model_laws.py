"""Laws of the whole model: the future, padding, packing and batch mates, for every attention and every position code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from attention_cases import (
    EDGE,
    assert_same_bits,
    both_directions,
    documents_of,
    every_causal_model_kind,
    every_model_kind,
    every_model_kind_in_directions,
    runs_of,
)
from torch import Tensor

from protperf.attention import ATTENTIONS, BIDIRECTIONAL
from protperf.config import ModelConfig
from protperf.model import ProteinModel
from protperf.vocab import VOCABULARY

every_position_code = pytest.mark.parametrize("positions", ["rope", "absolute", "none"])

# Outputs of the final norm are of size 1; two layers of float32 sums taken in another order.
TOLERANCE = {"rtol": 0.0, "atol": 2e-5}


def small_model(kind: str, *, causal: bool, positions: str = "rope", **other: object) -> ProteinModel:
    """Return two layers of two heads, weights ten times as large as at the start so that attention is not flat."""
    config = ModelConfig(
        attention=kind,
        num_layers=2,
        num_heads=2,
        model_dim=32,
        feedforward_dim=48,
        num_features=128 if kind == "rfa" else 24,
        positions=positions,
        **{"qk_norm": kind == "trig", **other},  # type: ignore[arg-type]
    )
    torch.manual_seed(0)
    model = ProteinModel(config, causal=causal).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(10.0)
    return model


def residues(batch: int, length: int, *, seed: int = 0) -> Tensor:
    """Return random residues uint8 `(B, L)`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY.num_residues, (batch, length), generator=generator, dtype=torch.uint8)


def others(tokens: Tensor) -> Tensor:
    """Return tokens none of which is the one that stood there."""
    return (tokens + 7) % VOCABULARY.num_residues


@every_position_code
@every_causal_model_kind
def test_future_residue_never_changes_the_past_by_one_bit(kind: str, positions: str):
    model = small_model(kind, causal=True, positions=positions)
    tokens = residues(1, 300)
    with torch.no_grad():
        before = model(tokens)
        for cut in (1, EDGE - 1, EDGE, EDGE + 1, 299):
            changed = torch.cat((tokens[:, :cut], others(tokens[:, cut:])), dim=1)
            after = model(changed)
            assert_same_bits(kind, before[:, :cut], after[:, :cut])
            assert (before[:, cut:] != after[:, cut:]).any(-1).all()


@every_model_kind
def test_future_residue_matters_in_the_bidirectional_model(kind: str):
    model = small_model(kind, causal=False)
    tokens = residues(1, 40)
    changed = torch.cat((tokens[:, :39], others(tokens[:, 39:])), dim=1)
    with torch.no_grad():
        assert (model(tokens) != model(changed)).any(-1).all()


@pytest.mark.parametrize(("left", "right"), [(0, 150), (150, 0), (51, 20)])
@every_position_code
@every_model_kind_in_directions
def test_padding_never_matters_whatever_token_it_is(
    kind: str, positions: str, causal: bool, left: int, right: int
):
    model = small_model(kind, causal=causal, positions=positions)
    length = 77
    tokens = residues(1, length)
    garbage = residues(1, left + length + right, seed=5)
    garbage[:, left : left + length] = tokens
    documents = documents_of(*(part for part in (-left, length, -right) if part))
    real = slice(left, left + length)
    alone, padded = model(tokens), model(garbage, documents)[:, real]
    torch.testing.assert_close(padded, alone, **TOLERANCE)
    found = torch.autograd.grad(padded.square().mean(), model.embedding.weight)[0]
    wanted = torch.autograd.grad(alone.square().mean(), model.embedding.weight)[0]
    torch.testing.assert_close(found, wanted, **TOLERANCE)


@pytest.mark.parametrize("lengths", [(60, 68, 100), (EDGE, 1, 1, EDGE), (-3, 40, 300, -10)], ids=str)
@every_position_code
@every_model_kind_in_directions
def test_packed_proteins_equal_proteins_alone(
    kind: str, positions: str, causal: bool, lengths: tuple[int, ...]
):
    model = small_model(kind, causal=causal, positions=positions)
    documents = documents_of(*lengths)
    tokens = residues(1, documents.shape[1])
    with torch.no_grad():
        packed = model(tokens, documents)
        for run in runs_of(documents):
            torch.testing.assert_close(packed[:, run], model(tokens[:, run]), **TOLERANCE)


@every_position_code
@every_model_kind_in_directions
def test_last_residue_of_a_protein_never_changes_another_by_one_bit(kind: str, positions: str, causal: bool):
    model = small_model(kind, causal=causal, positions=positions)
    documents = documents_of(60, 68, 1, 71)
    tokens = residues(1, 200)
    with torch.no_grad():
        before = model(tokens, documents)
        for run in runs_of(documents):
            changed = tokens.clone()
            changed[:, run.stop - 1] = others(tokens)[:, run.stop - 1]
            after = model(changed, documents)
            outside = torch.ones(200, dtype=torch.bool)
            outside[run] = False
            assert_same_bits(kind, before[:, outside], after[:, outside])
            assert not torch.equal(before[:, run], after[:, run])


@every_position_code
@every_model_kind_in_directions
def test_batch_mates_never_matter(kind: str, positions: str, causal: bool):
    model = small_model(kind, causal=causal, positions=positions)
    tokens, mates = residues(1, 150), residues(3, 150, seed=1)
    with torch.no_grad():
        together = model(torch.cat((tokens, mates)))[:1]
        torch.testing.assert_close(together, model(tokens), **TOLERANCE)


@pytest.mark.parametrize("positions", ["rope", "absolute"])
@every_model_kind
def test_order_matters_with_position_codes(kind: str, positions: str):
    model = small_model(kind, causal=False, positions=positions)
    tokens = residues(1, 50)
    with torch.no_grad():
        assert not torch.allclose(model(tokens).flip(1), model(tokens.flip(1)), atol=1e-2)


@pytest.mark.parametrize("kind", [kind for kind in ATTENTIONS if kind != "linformer"])  # which weighs places
def test_order_is_invisible_without_position_codes(kind: str):
    model = small_model(kind, causal=False, positions="none")
    tokens = residues(1, 50)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).flip(1), model(tokens.flip(1)), **TOLERANCE)


@every_model_kind_in_directions
def test_evaluation_is_deterministic_and_changes_no_state(kind: str, causal: bool):
    model = small_model(kind, causal=causal, dropout=0.3)
    stored = {name: value.clone() for name, value in model.state_dict().items()}
    tokens = residues(2, 100)
    with torch.no_grad():
        first = model(tokens)
        torch.manual_seed(123)
        for _ in range(3):
            assert torch.equal(first, model(tokens))
    model.train()
    model(tokens).sum().backward()
    assert stored.keys() == model.state_dict().keys()
    assert all(torch.equal(stored[name], value) for name, value in model.state_dict().items())


@every_model_kind
def test_no_two_entries_of_the_state_dict_share_storage(kind: str):
    entries = small_model(kind, causal=kind not in BIDIRECTIONAL).state_dict()
    places = {value.untyped_storage().data_ptr() for value in entries.values()}
    assert len(places) == len(entries)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["favor", "relu"])
def test_another_process_evaluates_a_saved_model_to_the_same_bits(kind: str, tmp_path: Path):
    model = small_model(kind, causal=False)
    model.redraw_projections(3)
    tokens = residues(2, 60)
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    torch.save(tokens, tmp_path / "tokens.pt")
    code = (
        "import sys, torch\n"
        "from protperf.config import ModelConfig\n"
        "from protperf.model import ProteinModel\n"
        "folder = sys.argv[1]\n"
        f"model = ProteinModel(ModelConfig(**{vars(model.config)!r}), causal=False).eval()\n"
        "weights = torch.load(folder + '/weights.pt', weights_only=True)\n"
        "model.load_weights(weights, place='weights.pt')\n"
        "with torch.no_grad():\n"
        "    torch.save(model(torch.load(folder + '/tokens.pt', weights_only=True)), folder + '/out.pt')\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
    with torch.no_grad():
        here = model(tokens)
    assert torch.equal(here, torch.load(tmp_path / "out.pt", weights_only=True))


@pytest.mark.parametrize("kind", ["favor", "relu"])
@both_directions
def test_a_long_protein_is_the_same_on_many_threads_in_inference_mode(kind: str, causal: bool):
    model, tokens, threads = (
        small_model(kind, causal=causal),
        residues(1, 2**14 + 100),
        torch.get_num_threads(),
    )
    results = []
    try:
        for count in (1, 4):
            torch.set_num_threads(count)
            with torch.inference_mode():
                results.append(model(tokens))
    finally:
        torch.set_num_threads(threads)
    torch.testing.assert_close(*results, **TOLERANCE)
