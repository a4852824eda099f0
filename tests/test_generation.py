"""Laws of sampling from causal models: the model's own probabilities, and one result whatever the batch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from wide_models import wide_model

from protperf.inference import generation, sampling
from protperf.inference.generation import Generated, generate
from protperf.inference.sampling import Sampling
from protperf.model import ProteinModel
from protperf.vocab import VOCABULARY

PROMPTS = [VOCABULARY.encode(text) for text in ("MKV", "M", "WWWPPXXU")]


@pytest.fixture(scope="module")
def model() -> ProteinModel:
    return wide_model("favor")


def log_p_after(model: ProteinModel, residues: np.ndarray) -> np.ndarray:
    """Return log p of all tokens at every place of `<bos> residues`, `(L + 1, V)`, from one pass over them."""
    tokens = torch.tensor([[VOCABULARY.bos, *residues.tolist()]])
    with torch.no_grad():
        return model.logits(model(tokens))[0].double().log_softmax(-1).numpy()


def plain(made: list[Generated]) -> list[tuple[object, ...]]:
    return [(each.prompt, each.sample, each.tokens.tobytes(), each.perplexity, each.ended) for each in made]


@pytest.mark.parametrize("kind", ["favor", "relu", "softmax", "reformer"])
def test_same_seed_same_sequences_whatever_the_batch(kind: str):
    model = wide_model(kind)
    made = {
        batch: plain(list(generate(model, 4, prompts=PROMPTS, batch=batch, max_length=40)))
        for batch in (1, 5, 12)
    }
    assert made[1] == made[5] == made[12]
    assert len({tokens for _, _, tokens, _, _ in made[1]}) == 12
    assert {ended for *_, ended in made[1]} == {"eos", "max_length"}
    other = plain(list(generate(model, 4, prompts=PROMPTS, max_length=40, sampling=Sampling(seed=1))))
    assert other != made[1]


def test_more_samples_begin_with_the_fewer(model: ProteinModel):
    few, many = (plain(list(generate(model, num, prompts=PROMPTS, max_length=30))) for num in (2, 5))
    assert few == [each for each in many if each[1] < 2]


@pytest.mark.parametrize("asked", [{}, {"top_p": 0.9}, {"top_k": 8, "temperature": 0.7}], ids=str)
def test_errors_of_a_batch_never_decide(
    model: ProteinModel, asked: dict[str, float], monkeypatch: pytest.MonkeyPatch
):
    """Probabilities of steps in a batch are disturbed, a thousand times as much as rounding does."""
    how = Sampling(**asked)
    alone = plain(list(generate(model, 12, batch=1, max_length=40, sampling=how)))
    step, generator = generation._Reader.step, np.random.default_rng(0)

    def disturbed(self, tokens, state):
        log_p, after = step(self, tokens, state)
        return log_p + generator.uniform(-5e-3, 5e-3, log_p.shape), after

    monkeypatch.setattr(generation._Reader, "step", disturbed)
    assert plain(list(generate(model, 12, batch=12, max_length=40, sampling=how))) != alone
    for name in ("ROUNDING", "ROUNDING_OF_MEANS"):
        monkeypatch.setattr(sampling, name, 1.1e-2)
    assert plain(list(generate(model, 12, batch=12, max_length=40, sampling=how))) == alone


@pytest.mark.parametrize("asked", [{}, {"temperature": 0.5, "top_p": 0.9}], ids=str)
@pytest.mark.parametrize("prompt", ["", "MKVAQQ"])
def test_perplexity_is_the_models_own_over_the_drawn_residues(
    model: ProteinModel, prompt: str, asked: dict[str, float]
):
    shown = np.array([VOCABULARY.id_of(letter) for letter in prompt], np.uint8)
    for made in generate(
        model, 4, prompts=[shown], sampling=Sampling(**asked), max_length=50, token_budget=4
    ):
        assert made.shown == len(prompt)
        assert made.tokens[: len(prompt)].tolist() == shown.tolist()
        log_p = log_p_after(model, made.tokens)
        places = np.arange(len(prompt), len(made.tokens))
        expected = math.exp(-log_p[places, made.tokens[places]].mean()) if len(places) else math.nan
        assert made.perplexity == pytest.approx(expected, abs=0.0051, nan_ok=True)


def test_first_residues_come_as_often_as_the_model_says(model: ProteinModel):
    made = list(generate(model, 1000, max_length=1, batch=200))
    probabilities = np.exp(log_p_after(model, np.empty(0, np.uint8))[0, : VOCABULARY.num_standard])
    probabilities /= probabilities.sum()
    found = np.bincount([each.tokens[0] for each in made], minlength=20) / 1000
    assert (np.abs(found - probabilities) < 4.5 * np.sqrt(probabilities / 1000)).all()
    assert {each.ended for each in made} == {"max_length"}


def test_temperature_zero_takes_the_likeliest_token(model: ProteinModel):
    (made,) = generate(model, sampling=Sampling(temperature=0.0), max_length=30, min_length=30)
    log_p = log_p_after(model, made.tokens)[:-1, : VOCABULARY.num_standard]
    assert made.tokens.tolist() == log_p.argmax(1).tolist()


def test_lengths_keep_their_bounds(model: ProteinModel):
    free = [len(each.tokens) for each in generate(model, 40, max_length=20, batch=40)]
    assert min(free) < 8
    made = list(generate(model, 40, prompts=PROMPTS[:1], min_length=8, max_length=20, batch=40))
    assert all(8 <= len(each.tokens) <= 20 for each in made)
    assert {each.ended for each in made if len(each.tokens) < 20} == {"eos"}
    assert "max_length" in {each.ended for each in made}


@pytest.mark.parametrize("asked", [{"top_p": 0.5}, {"top_k": 1}], ids=str)
def test_a_cut_of_residues_leaves_proteins_their_end(model: ProteinModel, asked: dict[str, float]):
    """The second token is `<eos>` as often as the model says after the first residue, which is the likeliest one with top-k 1."""
    prompt = VOCABULARY.encode("M")
    made = list(generate(model, 600, prompts=[prompt], sampling=Sampling(**asked), max_length=2, batch=200))
    log_p = log_p_after(model, prompt)[-1]
    allowed = [*range(VOCABULARY.num_standard), VOCABULARY.eos]
    end = np.exp(log_p[VOCABULARY.eos]) / np.exp(log_p[allowed]).sum()
    ended = np.mean([each.ended == "eos" for each in made])
    assert abs(ended - end) < 4.5 * np.sqrt(end * (1 - end) / 600)
    assert 0.001 < end < 0.5


def test_standard_residues_alone_unless_others_are_allowed(model: ProteinModel):
    letters = {
        nonstandard: set(
            VOCABULARY.decode(
                np.concatenate(
                    [
                        each.tokens
                        for each in generate(
                            model, 30, sampling=Sampling(nonstandard=nonstandard), max_length=60, batch=30
                        )
                    ]
                )
            )
        )
        for nonstandard in (False, True)
    }
    assert letters[False] == set("ACDEFGHIKLMNPQRSTVWY")
    assert letters[True] == set("ABCDEFGHIJKLMNOPQRSTUVWXYZ")


def test_state_does_not_grow_and_rows_that_ended_make_room(
    model: ProteinModel, monkeypatch: pytest.MonkeyPatch
):
    """At most `batch` rows are computed at once, with states of one size, and rarely fewer while sequences wait."""
    rows: list[int] = []
    sizes: set[int] = set()
    onward = ProteinModel.onward

    def counted(self, tokens, state=None):
        hidden, after = onward(self, tokens, state)
        if state is not None:
            rows.append(len(tokens))
            sizes.add(sum(part[0].numel() for layer in after.layers for part in layer))
        return hidden, after

    monkeypatch.setattr(ProteinModel, "onward", counted)
    made = list(generate(model, 40, batch=8, max_length=40))
    assert max(rows) == 8
    assert len(sizes) == 1
    drawn = sum(len(each.tokens) + (each.ended == "eos") for each in made)
    assert sum(rows) == drawn - len(made)  # the first draw is from the prompt's pass, no step is wasted
    assert np.mean(rows) > 6


def test_prompts_are_read_as_they_are_needed(model: ProteinModel):
    taken = 0

    def prompts():
        nonlocal taken
        for _ in range(100):
            taken += 1
            yield PROMPTS[0]

    made = generate(model, 1, prompts=prompts(), batch=4, max_length=20)
    assert taken == 0
    next(made)
    assert taken < 20
    made.close()


def test_gradients_and_inference_mode_are_left_as_they_were(model: ProteinModel):
    made = generate(model, 2, max_length=5)
    next(made)
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_generates_too(model: ProteinModel, precision: str):
    made = list(generate(model, 3, max_length=20, precision=precision))
    assert all(math.isfinite(each.perplexity) for each in made)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"num": 0}, "num is 0; allowed: 1 or more"),
        ({"batch": 0}, "batch is 0"),
        ({"min_length": 0}, "min_length is 0"),
        ({"max_length": 4, "min_length": 5}, "max_length is 4; allowed: min_length, 5, or more"),
        (
            {"prompts": [PROMPTS[0]], "max_length": 3},
            "prompt 1 has 3 residues; allowed: fewer than max_length, 3",
        ),
        ({"prompts": [np.array([VOCABULARY.mask], np.uint8)]}, "prompt 1 holds tokens that are no residues"),
    ],
)
def test_what_cannot_be_is_refused(model: ProteinModel, asked: dict[str, object], message: str):
    with pytest.raises(ValueError, match=message):
        list(generate(model, **asked))


def test_a_masked_model_is_refused_at_once():
    with pytest.raises(ValueError, match="--fill"):
        generate(wide_model("favor", causal=False))
