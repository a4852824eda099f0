"""Embeddings as the API gives them: rows of the model on each protein alone, layers, scores, stitched windows."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import make_checkpoint

import protperf
from protperf.inference.embedding import cut_windows, embed_proteins
from protperf.language_model import LanguageModel
from protperf.vocab import VOCABULARY

TOLERANCE = 1e-5
"""float32 sums in another order; hidden states are of order one after the final norm."""

PROTEINS = ["MKTAYIAKQR", "M", "ACDEFGHIKLMNPQRSTVWYBOUXZJ" * 6, "ac<mask>d", "MKTAYIAKQR"]


@pytest.fixture(scope="module", params=[("favor", "masked"), ("relu", "causal"), ("softmax", "masked")])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    attention, kind = request.param
    path = make_checkpoint(tmp_path_factory.mktemp("model") / "m.ckpt", attention=attention, kind=kind)
    return protperf.load(path, device="cpu")


def framed(residues: str) -> torch.Tensor:
    before, *after = residues.split("<mask>")
    tokens = VOCABULARY.encode(before).tolist()
    for part in after:
        tokens += [VOCABULARY.mask, *VOCABULARY.encode(part).tolist()]
    return torch.tensor([[VOCABULARY.bos, *tokens, VOCABULARY.eos]])


def hidden_by_layer(loaded: LanguageModel, tokens: torch.Tensor) -> list[np.ndarray]:
    """Follow one protein through the model by hand, with forward hooks on its parts."""
    model, seen = loaded.model, []
    hooks = [
        block.register_forward_hook(lambda part, given, out: seen.append((given[0], out)))
        for block in model.blocks
    ]
    with torch.no_grad():
        last = model(tokens)
    for hook in hooks:
        hook.remove()
    states = [seen[0][0], *(out for _, out in seen[:-1]), last]
    return [each[0].numpy() for each in states]


def test_states_of_every_layer_are_those_of_each_protein_alone(loaded: LanguageModel):
    found = list(loaded.embed(iter(PROTEINS), layers=[0, 1, -1]))
    for residues, embedding in zip(PROTEINS, found, strict=True):
        expected = hidden_by_layer(loaded, framed(residues))
        assert list(embedding.layers) == [0, 1, 2]
        for layer in (0, 1, 2):
            np.testing.assert_allclose(embedding.layers[layer], expected[layer][1:-1], atol=TOLERANCE)
            np.testing.assert_allclose(embedding.bos[layer], expected[layer][0], atol=TOLERANCE)
        np.testing.assert_array_equal(embedding.residues, embedding.layers[2])
        np.testing.assert_allclose(embedding.mean, expected[2][1:-1].mean(0), atol=TOLERANCE)


def test_scores_at_a_residue_are_what_the_model_says_of_it(loaded: LanguageModel):
    """A causal model says it one token before."""
    back = 1 if loaded.model.causal else 0
    for residues, embedding in zip(PROTEINS, loaded.embed(PROTEINS, logits=True), strict=True):
        tokens = framed(residues)
        with torch.no_grad():
            scores = loaded.model.logits(loaded.model(tokens))[0].numpy()
        length = tokens.shape[1] - 2
        np.testing.assert_allclose(embedding.logits, scores[1 - back : 1 - back + length], atol=1e-4)


def test_windows_cover_a_protein_and_overlap_by_half():
    for length in (1, 7, 8, 9, 12, 100, 101):
        cuts = cut_windows(length, 8)
        covered = np.zeros(length, int)
        for cut in cuts:
            covered[cut.residues] += 1
            assert cut.residues.stop - cut.residues.start == min(8, length)
        assert covered.min() >= 1
        assert cuts[0].shown.start == 0
        assert cuts[-1].shown.stop == length + 2
        starts = [cut.residues.start for cut in cuts]
        assert all(after - before <= 4 for before, after in pairwise(starts))


def test_stitched_rows_are_means_weighted_by_the_distance_from_a_window_s_ends(loaded: LanguageModel):
    """Recomputed residue by residue: windows of 8 at 0, 4, 5 of 13 residues, cut out of `<bos> ... <eos>` as training cuts."""
    residues = "MKTAYIAKQRGEH"
    tokens = framed(residues)
    shown = {0: tokens[:, :9], 4: tokens[:, 5:13], 5: tokens[:, 6:]}
    total, weights = np.zeros((13, 16)), np.zeros(13)
    scores, score_weights = np.zeros((13, 36)), np.zeros(13)
    for start, piece in shown.items():
        with torch.no_grad():
            hidden = loaded.model(piece)
            logits = loaded.model.logits(hidden)[0].numpy()
        first = 1 if start == 0 else 0
        for place in range(8):
            weight = min(place + 1, 8 - place)
            total[start + place] += weight * hidden[0, first + place].numpy()
            weights[start + place] += weight
            said_at = first + place - loaded.model.causal
            if said_at >= 0:
                scores[start + place] += weight * logits[said_at]
                score_weights[start + place] += weight
    (found,) = embed_proteins(loaded.model, [VOCABULARY.encode(residues)], window=8, logits=True)
    assert found is not None
    np.testing.assert_allclose(found.residues, total / weights[:, None], atol=TOLERANCE)
    np.testing.assert_allclose(found.logits, scores / score_weights[:, None], atol=1e-4)


def test_a_protein_that_fits_its_window_is_whole(loaded: LanguageModel):
    protein = VOCABULARY.encode("MKTAYIAK")
    (whole,), (windowed,) = (embed_proteins(loaded.model, [protein], window=window) for window in (0, 8))
    np.testing.assert_array_equal(whole.residues, windowed.residues)


def test_embedders_of_biotrainer_get_each_sequence_with_its_tensor(loaded: LanguageModel):
    direct = list(loaded.embed(PROTEINS[:3]))
    for (text, tensor), embedding in zip(loaded.embed_per_residue(PROTEINS[:3]), direct, strict=True):
        assert tensor.shape == (len(text), 16)
        np.testing.assert_array_equal(tensor.numpy(), embedding.residues)
    for (text, tensor), embedding in zip(loaded.embed_per_sequence(iter(PROTEINS[:3])), direct, strict=True):
        assert text in PROTEINS
        np.testing.assert_array_equal(tensor.numpy(), embedding.mean)


def test_the_api_streams(loaded: LanguageModel):
    """An endless input gives its first answers."""

    def endless():
        while True:
            yield "MKTAYIAKQR" * 500

    answers = loaded.embed(endless())
    assert [next(answers).residues.shape for _ in range(3)] == [(5000, 16)] * 3


def test_scores_and_new_proteins_are_those_of_the_functions_behind(loaded: LanguageModel):
    if loaded.model.causal:
        (score,) = loaded.score(["MKTAY"])
        tokens = framed("MKTAY")
        with torch.no_grad():
            log_p = loaded.model.logits(loaded.model(tokens))[0].log_softmax(-1)
        expected = sum(float(log_p[place, tokens[0, place + 1]]) for place in range(5))
        assert score.log_likelihood == pytest.approx(expected, abs=1e-4)
        (effect,) = loaded.mutation_effects("MKTAY", ["K12R"], offset=10)
        (mutant,) = loaded.score(["MRTAY"])
        assert effect == pytest.approx(mutant.log_likelihood - score.log_likelihood, abs=1e-4)
        new = list(loaded.generate(3, prompt="MK", max_length=20, seed=1))
        assert new == list(loaded.generate(5, prompt="mk", max_length=20, seed=1))[:3]
        assert all(each.startswith("MK") and len(each) <= 20 for each in new)
        with pytest.raises(ValueError, match="masked"):
            list(loaded.fill(["M<mask>V"]))
    else:
        shown = framed("MK<mask>AY")
        with torch.no_grad():
            log_p = loaded.model.logits(loaded.model(shown))[0].log_softmax(-1)
        (score,) = loaded.score(["MKTAY"])
        assert score.log_probabilities[2] == pytest.approx(float(log_p[3, VOCABULARY.id_of("T")]), abs=1e-4)
        (effect,) = loaded.mutation_effects("MKTAY", ["T3C"])
        expected = float(log_p[3, VOCABULARY.id_of("C")] - log_p[3, VOCABULARY.id_of("T")])
        assert effect == pytest.approx(expected, abs=1e-4)
        likeliest = VOCABULARY.tokens[int(log_p[3, : VOCABULARY.num_standard].argmax())]
        assert list(loaded.fill(["MK<mask>AY"], temperature=0)) == [f"MK{likeliest}AY"]
    with pytest.raises(ValueError, match="sequence 1 cannot be read: mask_token '<mask>' at character 2"):
        list(loaded.score(["M<mask>"]))


def test_one_text_is_never_taken_for_many_sequences(loaded: LanguageModel):
    for ask in (loaded.embed_per_residue, loaded.embed_per_sequence, loaded.score):
        with pytest.raises(ValueError, match="sequences is one text"):
            list(ask("MKTAYI"))


@pytest.mark.parametrize(
    ("sequences", "layers", "message"),
    [
        (
            ["MKV", "MK-V"],
            [-1],
            "sequence 2 cannot be read: gap '-' at character 3; allowed: letters A-Z and <mask>",
        ),
        (["MKV", ""], [-1], "sequence 2 cannot be read: empty; allowed"),
        ("MKV", [-1], r"sequences is one text; give a list, such as \[sequence\]"),
        (["MKV"], [3], "layer 3: the model has the layers 0 .* to 2"),
        (["MKV"], [-4], "layer -4: the model has"),
    ],
)
def test_mistakes_say_where(loaded: LanguageModel, sequences: list[str], layers: list[int], message: str):
    with pytest.raises(ValueError, match=message):
        list(loaded.embed(sequences, layers=layers))


def test_a_precision_that_a_cpu_lacks_is_refused_before_the_file_is_opened(tmp_path: Path):
    with pytest.raises(ValueError, match=r"--precision fp16: not on a CPU"):
        protperf.load(tmp_path / "no.ckpt", device="cpu", precision="fp16")
    with pytest.raises(ValueError, match="no such file"):
        protperf.load(tmp_path / "no.ckpt", device="cpu")


def test_bfloat16_is_near_float32(tmp_path: Path):
    path = make_checkpoint(tmp_path / "m.ckpt")
    exact, rounded = (
        next(protperf.load(path, device="cpu", precision=p).embed(PROTEINS)) for p in ("fp32", "bf16")
    )
    assert rounded.residues.dtype == np.float32
    assert 0 < np.abs(exact.residues - rounded.residues).max() < 0.1
