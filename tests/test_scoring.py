"""Likelihoods and mutation effects: what asking the model by hand, one residue at a time, gives."""

from __future__ import annotations

import doctest
import math
from collections.abc import Iterator, Sequence
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor

from protperf import metrics
from protperf.config import ModelConfig
from protperf.formats import mutations
from protperf.formats.mutations import Mutant, read_mutant
from protperf.inference import scoring
from protperf.inference.mutations import EFFECT_METHODS, effect_tokens, mutation_effects
from protperf.inference.scoring import METHODS, ProteinScore, check_method, score_proteins, tokens_of
from protperf.model import ProteinModel
from protperf.score import output
from protperf.vocab import VOCABULARY

BOS, EOS, MASK = 27, 28, 29

TOLERANCE = 2e-4
"""Log-probabilities of wide weights are of order ten; sums in float32 are taken in another order."""


def make_model(kind: str, *, attention: str = "favor") -> ProteinModel:
    """Return a small model with weights so wide that context decides."""
    config = ModelConfig(
        attention=attention, num_layers=2, num_heads=2, model_dim=16, feedforward_dim=32, num_features=16
    )
    model = ProteinModel(config, causal=kind == "causal")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.4, generator=generator)
    return model.eval()


@pytest.fixture(scope="module")
def masked() -> ProteinModel:
    return make_model("masked")


@pytest.fixture(scope="module")
def causal() -> ProteinModel:
    return make_model("causal")


def random_proteins(*lengths: int) -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    return [generator.integers(0, 26, length).astype(np.uint8) for length in lengths]


def asked_alone(model: ProteinModel, tokens: Sequence[int]) -> Tensor:
    """Return log-probabilities `(len, V)` in float64 of one unpadded sequence."""
    with torch.no_grad():
        hidden = model(torch.tensor([list(tokens)]))[0].double()
        logits = hidden @ model.embedding.weight.double().T
        return logits - logits.exp().sum(-1, keepdim=True).log()


def by_hand(model: ProteinModel, protein: np.ndarray, method: str) -> list[float]:
    """Ask for each residue of a protein by itself, as the method's definition says."""
    residues = protein.tolist()
    values = []
    for place, residue in enumerate(residues):
        if method == "likelihood":  # only what stands before is shown at all; the last state predicts
            values.append(asked_alone(model, [BOS, *residues[:place]])[-1, residue].item())
            continue
        hidden = {place} if method == "pseudo-ppl" else set(range(place % 7, len(residues), 7))
        shown = [MASK if other in hidden else token for other, token in enumerate(residues)]
        values.append(asked_alone(model, [BOS, *shown, EOS])[1 + place, residue].item())
    return values


def scored(model: ProteinModel, proteins: Sequence[np.ndarray], **settings: object) -> list[ProteinScore]:
    found = list(score_proteins(model, proteins, **settings))  # type: ignore[arg-type]
    assert all(score is not None for score in found)
    return found  # type: ignore[return-value]


@pytest.mark.parametrize("attention", ["favor", "relu", "softmax"])
@pytest.mark.parametrize("method", METHODS)
def test_each_residue_is_asked_as_its_method_says(method: str, attention: str):
    model = make_model(METHODS[method], attention=attention)
    proteins = random_proteins(1, 5, 7, 33, 8, 2)
    for protein, score in zip(proteins, scored(model, proteins, method=method), strict=True):
        expected = by_hand(model, protein, method)
        np.testing.assert_allclose(score.log_probabilities, expected, atol=TOLERANCE)
        assert score.log_likelihood == pytest.approx(sum(expected), abs=TOLERANCE * len(protein))
        assert score.mean_log_likelihood == pytest.approx(sum(expected) / len(protein), abs=TOLERANCE)
        assert score.perplexity == pytest.approx(math.exp(-sum(expected) / len(protein)), rel=TOLERANCE)


@pytest.mark.parametrize("kind", ["masked", "causal"])
def test_a_model_that_knows_nothing_has_a_perplexity_of_its_whole_vocabulary(kind: str):
    """Special tokens keep their share: nothing is normalised over residues alone."""
    model = make_model(kind)
    torch.nn.init.zeros_(model.embedding.weight)
    for score in scored(model, random_proteins(3, 20)):
        assert score.perplexity == pytest.approx(36, rel=1e-6)
        assert score.log_likelihood == pytest.approx(-score.num_residues * math.log(36), rel=1e-6)


def model_of_residues(scores: dict[str, float]) -> ProteinModel:
    """Return a masked model of which the logit of a residue at any masked place is as given, and 0 for other tokens.

    Blocks add nothing, so the state of a mask is its normed embedding: sqrt(D / 2) times (1, -1, 0, ...).
    """
    model = make_model("masked")
    height = math.sqrt(model.config.model_dim / 2)
    with torch.no_grad():
        for block in model.blocks:
            block.attention.out.weight.zero_()
            block.feedforward.out.weight.zero_()
        model.embedding.weight.zero_()
        model.embedding.weight[MASK, :2] = torch.tensor([1e3, -1e3])
        for residue, value in scores.items():
            model.embedding.weight[VOCABULARY.id_of(residue), :2] = torch.tensor([value, -value]) / (
                2 * height
            )
    return model


def test_a_known_model_gives_known_effects():
    model = model_of_residues({"A": 1.0, "C": -2.0, "D": 0.5})
    wild_type = VOCABULARY.encode("ACDE")
    mutants = [read_mutant(name) for name in ("A1C", "C2A", "D3E", "A1D:E4C", "WT", "D3D")]
    effects = mutation_effects(model, wild_type, mutants, method="masked-marginals")
    np.testing.assert_allclose(effects, [-3.0, 3.0, -0.5, -0.5 - 2.0, 0.0, 0.0], atol=1e-5)


@pytest.mark.parametrize("method", EFFECT_METHODS)
def test_an_effect_is_that_of_its_definition(method: str):
    model = make_model(EFFECT_METHODS[method])
    wild_type = random_proteins(21)[0]
    text = VOCABULARY.decode(wild_type)
    names = [f"{text[4]}5C", f"{text[0]}1W:{text[20]}21A", f"{text[20]}21X", f"{text[4]}5C"]
    mutants = [read_mutant(name) for name in names]
    found = mutation_effects(model, wild_type, mutants, method=method, token_budget=100)
    for effect, mutant in zip(found, mutants, strict=True):
        assert effect == pytest.approx(effect_by_hand(model, wild_type, mutant, method), abs=21 * TOLERANCE)


def effect_by_hand(model: ProteinModel, wild_type: np.ndarray, mutant: Mutant, method: str) -> float:
    if method in METHODS:
        mutated = wild_type.copy()
        for place, _, token in mutant:
            mutated[place] = token
        return sum(by_hand(model, mutated, method)) - sum(by_hand(model, wild_type, method))
    total = 0.0
    for place, wild, token in mutant:
        shown = wild_type.tolist()
        if method == "masked-marginals":
            shown[place] = MASK
        row = asked_alone(model, [BOS, *shown, EOS])[1 + place]
        total += float(row[token] - row[wild])
    return total


@pytest.mark.parametrize("method", EFFECT_METHODS)
def test_wild_type_and_synonymous_mutants_have_no_effect_at_all(method: str):
    model = make_model(EFFECT_METHODS[method])
    wild_type = VOCABULARY.encode("MKTAYIAKQR")
    mutants = [read_mutant(name) for name in ("WT", "K2K", "M1M:R10R", "K2A")]
    effects = mutation_effects(model, wild_type, mutants, method=method)
    assert effects[:3].tolist() == [0.0, 0.0, 0.0]
    assert abs(effects[3]) > 1e-3


def test_marginal_effects_add_up(masked: ProteinModel):
    wild_type = VOCABULARY.encode("MKTAYIAKQR")
    for method in ("masked-marginals", "wt-marginals"):
        names = ["K2A", "Q9W", "M1C", "K2A:Q9W:M1C"]
        *single, together = mutation_effects(
            masked, wild_type, [read_mutant(name) for name in names], method=method
        )
        assert together == pytest.approx(sum(single), abs=1e-9)


@pytest.mark.parametrize("attention", ["favor", "softmax"])
@pytest.mark.parametrize("method", METHODS)
def test_budget_and_company_never_matter(method: str, attention: str):
    model = make_model(METHODS[method], attention=attention)
    proteins = random_proteins(40, 1, 64, 3, 65, 40)
    alone = [scored(model, [protein], method=method)[0].log_probabilities for protein in proteins]
    for budget in (1, 50, 300, 100_000):
        for one, other in zip(
            alone, scored(model, proteins, method=method, token_budget=budget), strict=True
        ):
            np.testing.assert_allclose(other.log_probabilities, one, atol=TOLERANCE)


def test_proteins_are_taken_as_needed_and_masks_are_made_as_needed(
    masked: ProteinModel, monkeypatch: pytest.MonkeyPatch
):
    """However long a protein and however many there are, what is held is a few passes' worth."""
    taken = []
    asked: list[int] = []
    ask_model = scoring.ask_model

    def counted(model: ProteinModel, sequences: Sequence[np.ndarray], *rest, **settings):
        asked.append(sum(map(len, sequences)))
        return ask_model(model, sequences, *rest, **settings)

    def stream() -> Iterator[np.ndarray]:
        for protein in random_proteins(200, *[20] * 100):
            taken.append(protein)
            yield protein

    monkeypatch.setattr(scoring, "ask_model", counted)
    for number, _ in enumerate(score_proteins(masked, stream(), method="pseudo-ppl", token_budget=600), 1):
        assert len(taken) - number <= 1 + 8 * 600 / (20 * 22)
    assert number == 101
    assert max(asked) <= 8 * 600
    assert sum(asked) == 200 * 202 + 100 * 20 * 22


def test_tokens_are_counted_as_they_are_shown(masked: ProteinModel, causal: ProteinModel):
    protein = random_proteins(50)[0]
    text = VOCABULARY.decode(protein)
    mutants = [read_mutant(name) for name in (f"{text[2]}3C", f"{text[2]}3D", f"{text[8]}9C", "WT")]
    for method, kind in EFFECT_METHODS.items():
        shown: list[int] = []
        model = masked if kind == "masked" else causal
        mutation_effects(model, protein, mutants, method=method, advance=shown.append, token_budget=9)
        assert sum(shown) == effect_tokens(protein, mutants, method=method)
    expected = {"likelihood": 52, "pseudo-ppl": 50 * 52, "strided-ppl": 7 * 52}
    assert {method: tokens_of(50, method=method) for method in METHODS} == expected
    assert effect_tokens(protein, mutants, method="masked-marginals") == 2 * 52
    assert effect_tokens(protein, mutants, method="likelihood") == 4 * 52


def out_of_memory_beyond(model: ProteinModel, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    states = model.states

    def limited(shown: Tensor, *rest, **settings):
        if shown.numel() > tokens:
            raise torch.OutOfMemoryError("out of memory")
        return states(shown, *rest, **settings)

    monkeypatch.setattr(model, "states", limited)


@pytest.mark.parametrize("method", METHODS)
def test_what_does_not_fit_into_memory_is_none_and_the_rest_is_right(
    method: str, monkeypatch: pytest.MonkeyPatch
):
    model = make_model(METHODS[method])
    proteins = random_proteins(20, 60, 30)
    expected = [scored(model, [protein], method=method)[0].log_probabilities for protein in proteins]
    out_of_memory_beyond(model, 50, monkeypatch)
    found = list(score_proteins(model, proteins, method=method, token_budget=1000))
    assert found[1] is None
    for place in (0, 2):
        score = found[place]
        assert score is not None
        np.testing.assert_allclose(score.log_probabilities, expected[place], atol=TOLERANCE)


def test_a_protein_that_does_not_fit_is_not_tried_again_for_each_residue(
    masked: ProteinModel, monkeypatch: pytest.MonkeyPatch
):
    shown: list[int] = []
    out_of_memory_beyond(masked, 50, monkeypatch)
    proteins = random_proteins(20, 400, 20)
    found = score_proteins(masked, proteins, method="pseudo-ppl", token_budget=100, advance=shown.append)
    assert [score is None for score in found] == [False, True, False]
    assert sum(shown) <= 2 * 20 * 22 + 2 * 8 * 100


@pytest.mark.parametrize("method", EFFECT_METHODS)
def test_effects_that_do_not_fit_into_memory_are_nan(method: str, monkeypatch: pytest.MonkeyPatch):
    model = make_model(EFFECT_METHODS[method])
    out_of_memory_beyond(model, 11, monkeypatch)
    effects = mutation_effects(model, VOCABULARY.encode("MKTAYIAKQR"), [read_mutant("K2A")], method=method)
    assert np.isnan(effects).all()


def test_a_long_protein_is_scored_whole(masked: ProteinModel, causal: ProteinModel):
    protein = random_proteins(9_000)[0]
    (score,) = scored(causal, [protein])
    tokens = [BOS, *protein.tolist()]
    expected = asked_alone(causal, tokens)[torch.arange(9_000), torch.from_numpy(protein).long()]
    np.testing.assert_allclose(score.log_probabilities, expected, atol=TOLERANCE)
    (score,) = scored(masked, [protein], method="strided-ppl")
    shown = [MASK if place % 7 == 3 else token for place, token in enumerate(protein.tolist())]
    row = asked_alone(masked, [BOS, *shown, EOS])[1:-1].numpy()
    places = np.arange(3, 9_000, 7)
    np.testing.assert_allclose(score.log_probabilities[places], row[places, protein[places]], atol=TOLERANCE)


def test_half_precision_is_near(masked: ProteinModel):
    protein = random_proteins(60)[0]
    exact = scored(masked, [protein], method="strided-ppl")[0].mean_log_likelihood
    half = scored(masked, [protein], method="strided-ppl", precision="bf16")[0].mean_log_likelihood
    assert half != exact
    assert half == pytest.approx(exact, rel=0.05)


def test_a_method_is_for_one_kind_of_model(masked: ProteinModel, causal: ProteinModel):
    assert check_method(masked, "", METHODS) == "pseudo-ppl"
    assert check_method(causal, "", METHODS) == "likelihood"
    assert check_method(masked, "", EFFECT_METHODS) == "masked-marginals"
    assert check_method(causal, "", EFFECT_METHODS) == "likelihood"
    with pytest.raises(
        ValueError, match=r"pseudo-ppl: needs a masked model; this model is causal; allowed .*: likelihood"
    ):
        next(score_proteins(causal, [], method="pseudo-ppl"))
    with pytest.raises(ValueError, match="likelihood: needs a causal model; this model is masked; allowed"):
        mutation_effects(masked, random_proteins(3)[0], [], method="likelihood")
    with pytest.raises(ValueError, match="--method best: no such method"):
        check_method(masked, "best", EFFECT_METHODS)


def test_nothing_is_not_scored(masked: ProteinModel):
    assert list(score_proteins(masked, [])) == []
    with pytest.raises(ValueError, match="a protein without residues"):
        list(score_proteins(masked, random_proteins(3, 0)))
    with pytest.raises(ValueError, match="'A2C' has A at residue 2; the wild type has K there"):
        mutation_effects(masked, VOCABULARY.encode("MKT"), [read_mutant("A2C")])


@pytest.mark.parametrize("module", [scoring, mutations, output, metrics], ids=lambda module: module.__name__)
def test_examples_in_docstrings_are_true(module: ModuleType):
    found = doctest.testmod(module)
    assert found.attempted
    assert not found.failed
