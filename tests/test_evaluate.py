"""`protperf evaluate`: the model is asked what the floors are asked, and sums do not depend on batching."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from prepared import random_records, read_proteins
from safetensors import safe_open
from training import WINDOW, prepared, protperf, small_dataset, train_small

from protperf.checkpoint import load_model
from protperf.convert import main as convert
from protperf.evaluate import draw_scores, evaluate, format_groups, format_table, main
from protperf.figures import save_figure
from protperf.formats.scores import read_scores
from protperf.formats.shards import ShardSet
from protperf.inference.evaluation import Answerer, Tally, answer_each, ask_windows
from protperf.vocab import VOCABULARY


@pytest.fixture(scope="module", params=["masked", "causal"])
def run(request, tmp_path_factory):
    """A model after a few steps of training, with what its own validation said at the end."""
    run_dir = tmp_path_factory.mktemp("evaluate")
    run, _ = train_small(
        run_dir, f"objective={request.param}", "trainer.max_steps=20", "trainer.validate_every=20"
    )
    return run_dir, run.task.results


def unigram_logits():
    """Log-frequencies of residues in the training split, counted one by one, with add-one smoothing."""
    counts = Counter(residue for protein in read_proteins(small_dataset())["train"] for residue in protein)
    letters = VOCABULARY.tokens[: VOCABULARY.num_residues]
    total = sum(counts[letter] + 1 for letter in letters)
    logits = torch.full((len(VOCABULARY),), -math.inf)
    for token, letter in enumerate(letters):
        logits[token] = math.log((counts[letter] + 1) / total)
    return logits


def test_a_model_that_only_knows_frequencies_scores_exactly_the_unigram_floor(run):
    trained = load_model(run[0])
    trained.model.logits = lambda hidden: unigram_logits().expand(len(hidden), -1)
    results = evaluate(trained, small_dataset(), splits=["valid", "test"])
    for scores in results.values():
        assert scores["model"]["asked"] > 20
        for key in ("asked", "accuracy"):
            assert scores["model"][key] == scores["unigram"][key]
        assert scores["model"]["loss"] == pytest.approx(scores["unigram"]["loss"], rel=1e-6)


def test_evaluation_equals_the_validation_of_training(run):
    run_dir, valid_results = run
    scores = evaluate(load_model(run_dir), small_dataset(), splits=["valid"])["valid"]["model"]
    assert scores["loss"] == pytest.approx(valid_results["valid/loss"], rel=1e-6)
    assert scores["accuracy"] == valid_results["valid/accuracy"]


def test_numbers_do_not_depend_on_the_batch_budget(run):
    trained = load_model(run[0])
    small, large = (
        evaluate(trained, small_dataset(), splits=["valid"], token_budget=budget)["valid"]
        for budget in (1, 10**6)
    )
    for name, scores in small.items():
        for group in ("by_length", "by_residue"):
            assert scores[group].keys() == large[name][group].keys()
            for part, values in scores[group].items():
                assert values == pytest.approx(large[name][group][part], rel=1e-5)
        assert scores["loss"] == pytest.approx(large[name]["loss"], rel=1e-6)
        assert (scores["asked"], scores["accuracy"]) == (large[name]["asked"], large[name]["accuracy"])


def test_causal_evaluation_asks_each_residue_that_has_something_before_it_in_its_window(tmp_path):
    run_dir = tmp_path / "causal"
    train_small(run_dir, "objective=causal", "trainer.max_steps=1")
    shards = ShardSet(small_dataset(), "valid")
    windows = shards.read_many(range(len(shards)))
    expected = int((windows[:, 1:] < VOCABULARY.num_residues).sum())
    assert (
        evaluate(load_model(run_dir), small_dataset(), splits=["valid"])["valid"]["model"]["asked"]
        == expected
    )


def test_only_so_many_windows_are_asked_as_one_wants(run):
    trained = load_model(run[0])
    asked = [
        evaluate(trained, small_dataset(), splits=["valid"], max_windows=count)["valid"]["model"]["asked"]
        for count in (1, 2, 0)
    ]
    assert asked == sorted(set(asked))


def test_the_seed_changes_masks_and_nothing_of_a_causal_question(run):
    trained = load_model(run[0])
    first, second = (
        evaluate(trained, small_dataset(), splits=["valid"], seed=seed)["valid"]["unigram"]["loss"]
        for seed in (0, 1)
    )
    assert (first == second) == (trained.objective.kind == "causal")


def test_the_table_has_a_line_for_each_split_and_predictor():
    scores = {"asked": 1234, "perplexity": 17.25, "accuracy": 0.1168}
    table = format_table({"valid": {"model": scores, "unigram": scores}}).splitlines()
    assert [line.split() for line in table[1:]] == [
        ["valid", "model", "1,234", "17.250", "11.68%"],
        ["valid", "unigram", "1,234", "17.250", "11.68%"],
    ]


def test_the_command_prints_a_table_and_writes_json(run, tmp_path):
    done = protperf("evaluate", run[0], small_dataset(), "--json", "scores.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    rows = [line.split()[:2] for line in done.stdout.splitlines()[2:]]
    predictors = ["model", "unigram", "trigram", "4-gram"]
    assert rows == [[split, name] for split in ("valid", "test") for name in predictors]
    scores = json.loads((tmp_path / "scores.json").read_text())
    assert set(scores) == {"valid", "test"}
    manifest = json.loads((small_dataset() / "manifest.json").read_text())
    assert scores["test"]["model"]["dataset_digest"] == manifest["digest"]
    options = ["--scores", tmp_path / "scores.json"]
    assert convert([str(each) for each in (run[0], tmp_path / "model", *options)]) == 0
    with safe_open(tmp_path / "model" / "model.safetensors", "np") as file:
        assert file.metadata()["protperf_sha256"] == scores["test"]["model"]["weights_sha256"]


def test_other_data_than_the_model_was_trained_on_is_said(run, capsys):
    trained = load_model(run[0])
    assert replace(trained, dataset_digest="other").dataset_digest != trained.dataset_digest
    checkpoint = torch.load(trained.path, weights_only=True)
    checkpoint["protperf"]["dataset_digest"] = "other"
    other = run[0] / "other.ckpt"
    torch.save(checkpoint, other)
    assert main([str(other), str(small_dataset())]) == 0
    assert "not the dataset the model was trained on" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["nowhere", "DATA"],
            "nowhere: no such file or folder; give a .ckpt file, or the folder of a run or a model",
        ),
        (["RUN", "nowhere"], "nowhere"),
        (
            ["RUN", "DATA", "--splits", "holdout"],
            "split 'holdout' is not known; there are: train valid test",
        ),
        (["RUN", "DATA", "--device", "cuda:7"], "--device cuda:7: not here; there is: cpu"),
        (
            ["RUN", "DATA", "--json", "taken.json"],
            "taken.json: exists already; give another name, or --force",
        ),
    ],
)
def test_mistakes_end_with_one_line(run, tmp_path, arguments, said, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken.json").touch()
    places = {"RUN": str(run[0]), "DATA": str(small_dataset())}
    with pytest.raises(ValueError, match=re.escape(said)) as caught:
        main([places.get(word, word) for word in arguments])
    assert "\n" not in str(caught.value)


def test_a_dataset_without_held_out_proteins_is_said_to_have_none(run, tmp_path):
    whole = prepared(f"whole-{tmp_path.name}", random_records([30] * 8), window=WINDOW, valid=0.0, test=0.0)
    done = protperf("evaluate", run[0], whole, cwd=tmp_path)
    assert done.returncode == 1
    assert "holds no split but 'train'; prepare it with --valid or --test above 0" in done.stderr


@pytest.mark.parametrize(
    "wrong",
    [["--max-windows", "-1"], ["--toks-per-batch", "0"], ["--figure", "f.txt"], ["--by", "colour"]],
)
def test_wrong_usage_exits_with_status_2(wrong):
    with pytest.raises(SystemExit) as caught:
        main(["run", "data", *wrong])
    assert caught.value.code == 2


def test_asked_places_of_the_floor_are_those_of_the_model(run):
    trained = load_model(run[0])
    shards = ShardSet(small_dataset(), "valid")
    results = evaluate(trained, small_dataset(), splits=["valid"])["valid"]
    assert len({scores["asked"] for scores in results.values()}) == 1
    assert results["model"]["asked"] < np.prod((len(shards), shards.window))


def test_a_tally_adds_up_by_hand():
    tally = Tally({"up_to_10": 10, "up_to_20": 20})
    a, c, x = (VOCABULARY.id_of(letter) for letter in "ACX")
    for _ in range(2):
        tally.add(
            np.array([10, 11, 3]),
            np.array([a, a, x]),
            np.array([1.0, 2.0, 4.0]),
            np.array([True, False, True]),
        )
    tally.add(np.array([20]), np.array([c]), np.array([0.5]), np.array([False]))
    assert tally.summary()["asked"] == 7
    assert tally.summary()["loss"] == pytest.approx(14.5 / 7)
    assert tally.summary()["accuracy"] == pytest.approx(4 / 7)
    by_length, by_residue = tally.by_length(), tally.by_residue()
    assert {name: values["asked"] for name, values in by_length.items()} == {"up_to_10": 4, "up_to_20": 3}
    assert by_length["up_to_10"]["loss"] == pytest.approx(2.5)
    assert by_length["up_to_20"]["perplexity"] == pytest.approx(math.exp(4.5 / 3))
    assert {name: values["asked"] for name, values in by_residue.items()} == {"A": 4, "C": 1, "other": 2}
    assert by_residue["A"]["loss"] == pytest.approx(1.5)
    assert by_residue["other"]["accuracy"] == 1.0


def test_parts_add_up_to_the_whole(run):
    for scores in evaluate(load_model(run[0]), small_dataset(), splits=["valid"])["valid"].values():
        for group in ("by_length", "by_residue"):
            parts = scores[group].values()
            assert sum(part["asked"] for part in parts) == scores["asked"]
            nll = sum(part["loss"] * part["asked"] for part in parts)
            assert nll / scores["asked"] == pytest.approx(scores["loss"])
            hits = sum(part["accuracy"] * part["asked"] for part in parts)
            assert hits / scores["asked"] == pytest.approx(scores["accuracy"])


def test_the_unigram_floor_of_a_residue_is_one_over_its_frequency(run):
    """And its accuracy is all or nothing: it always says the most frequent one."""
    scores = evaluate(load_model(run[0]), small_dataset(), splits=["valid"])["valid"]["unigram"]["by_residue"]
    logits = unigram_logits()
    best = VOCABULARY.tokens[int(logits.argmax())]
    assert len(scores) > 15
    for letter, values in scores.items():
        if letter != "other":
            assert values["perplexity"] == pytest.approx(
                math.exp(-float(logits[VOCABULARY.id_of(letter)])), rel=1e-5
            )
            assert values["accuracy"] == float(letter == best)


def test_length_bins_are_those_of_the_validation_of_training(tmp_path):
    records = random_records([60] * 6 + [600] * 6 + [1500] * 2)
    data = prepared(f"lengths-{tmp_path.name}", records, window=2048, valid=0.4, test=0.0)
    run, _ = train_small(
        tmp_path / "run", "trainer.max_steps=1", "trainer.validate_every=1", "data.batch_size=1", data=data
    )
    by_length = evaluate(load_model(tmp_path / "run"), data, splits=["valid"])["valid"]["model"]["by_length"]
    assert len(by_length) > 1
    for name, values in by_length.items():
        for metric in ("loss", "accuracy"):
            assert values[metric] == pytest.approx(run.task.results[f"valid/{metric}_{name}"], rel=1e-5)


def test_a_batch_too_large_for_memory_is_halved(run):
    trained = load_model(run[0])
    shards = ShardSet(small_dataset(), "valid")
    batch = ask_windows(shards.read_many(range(4)), range(4), trained.objective, seed=0)
    expected = answer_each(Answerer(trained.model), batch)
    forward, sizes = trained.model.forward, []

    def crowded(tokens, documents):
        sizes.append(len(tokens))
        if len(tokens) > 1:
            raise RuntimeError("CUDA out of memory")
        return forward(tokens, documents)

    trained.model.forward = crowded
    found = answer_each(Answerer(trained.model), batch)
    assert sizes == [4, 2, 1, 1, 2, 1, 1]
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    np.testing.assert_array_equal(found[1], expected[1])


def test_another_model_is_asked_the_same(run, tmp_path):
    trained = load_model(run[0])
    other = load_model(run[0])
    with torch.no_grad():
        other.model.embedding.weight.zero_()
    results = evaluate(trained, small_dataset(), splits=["valid"], against=other)["valid"]
    assert list(results) == ["model", "unigram", "trigram", "4-gram", "against"]
    assert results["against"]["asked"] == results["model"]["asked"]
    assert results["against"]["perplexity"] == pytest.approx(len(VOCABULARY))  # all tokens alike
    alone = evaluate(trained, small_dataset(), splits=["valid"])["valid"]
    assert results["model"] == alone["model"]


def test_half_precision_is_near(run):
    trained = load_model(run[0])
    full, half = (
        evaluate(trained, small_dataset(), splits=["valid"], precision=name)["valid"]["model"]["loss"]
        for name in ("fp32", "bf16")
    )
    assert full != half
    assert half == pytest.approx(full, rel=0.02)


def test_models_that_are_asked_different_questions_are_refused(run):
    trained = load_model(run[0])
    other = "causal" if trained.objective.kind == "masked" else "masked"
    against = replace(trained, objective=replace(trained.objective, kind=other))
    with pytest.raises(
        ValueError, match=f"its objective is {other}, .* do not compare: give a {trained.objective.kind}"
    ):
        evaluate(trained, small_dataset(), splits=["valid"], against=against)


def test_the_command_compares_and_prints_by_group(run, tmp_path, capsys):
    assert convert([str(run[0]), str(tmp_path / "shared")]) == 0
    outputs = ["--json", str(tmp_path / "s.json")]
    arguments = [
        str(run[0]),
        str(small_dataset()),
        "--against",
        str(tmp_path / "shared"),
        "--by",
        "residue",
        "length",
    ]
    capsys.readouterr()
    assert main([*arguments, *outputs]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith(f"against: {tmp_path / 'shared'}")
    residues = lines[lines.index("") + 1 :]
    assert residues[0].split()[:4] == ["split", "residue", "residues", "model"]
    assert sum(line.split()[:2] == ["valid", "L"] for line in residues) == 1
    scores = read_scores(tmp_path / "s.json")
    for predictors in scores.values():
        model, against = predictors["model"], predictors["against"]
        assert {key: value for key, value in model.items() if key != "checkpoint"} == {
            key: value for key, value in against.items() if key != "checkpoint"
        }
        assert (model["step"], model["objective"]) == (20, load_model(run[0]).objective.kind)
    with pytest.raises(ValueError, match=r"s\.json: exists already"):
        main([*arguments, *outputs])


def test_the_figure_has_a_panel_of_lengths_and_two_of_residues_for_each_split(tmp_path):
    values = {"asked": 10, "perplexity": 17.0, "accuracy": 0.25}
    parts = {
        "by_length": {"up_to_512": values, "up_to_1024": values},
        "by_residue": {"A": values, "C": values},
    }
    scores = {name: parts for name in ("model", "unigram", "trigram", "4-gram", "against")}
    figure = draw_scores({"valid": scores, "test": scores}, title="a model")
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles == [
        f"{split}: {what}"
        for split in ("valid", "test")
        for what in ("perplexity by length", "perplexity by residue", "accuracy by residue")
    ]
    assert [text.get_text() for text in figure.axes[0].get_xticklabels()] == ["512", "1024"]
    assert [text.get_text() for text in figure.axes[1].get_xticklabels()] == ["A", "C"]
    assert {bar.get_height() for bar in figure.axes[2].patches} == {0.25}
    words = [text.get_text() for text in figure.legends[0].get_texts()]
    assert words == ["model", "against", "floor: unigram", "floor: trigram", "floor: 4-gram"]
    save_figure(figure, tmp_path / "f.svg")
    assert (tmp_path / "f.svg").read_text().startswith("<?xml")


def test_a_table_by_length_names_each_bin():
    values = {"asked": 1234, "perplexity": 17.25, "accuracy": 0.1168}
    scores = {"by_length": {"up_to_512": values, "over_8192": values}}
    lines = format_groups({"valid": {"model": scores, "unigram": scores}}, "length").splitlines()
    assert lines[0].split() == ["split", "length", "residues", "model", "unigram", "model", "accuracy"]
    assert lines[1].split() == ["valid", "up", "to", "512", "1,234", "17.250", "17.250", "11.68%"]
    assert lines[2].split()[:3] == ["valid", "over", "8192"]


def test_no_output_replaces_a_model_that_is_read(run, tmp_path):
    """Also not the `config.json` of a folder, without which its weights are nothing."""
    assert convert([str(run[0]), str(tmp_path / "model")]) == 0
    best = run[0] / "checkpoints" / "best.ckpt"
    argv = [str(run[0]), str(small_dataset()), "--against", str(tmp_path / "model"), "--force"]
    for out in (best, tmp_path / "model" / "config.json", tmp_path / "model" / "model.safetensors"):
        with pytest.raises(ValueError, match="is an input; give another name"):
            main([*argv, "--json", str(out)])


def test_usage_can_be_typed_as_it_stands(capsys):
    """--by and --splits would swallow what stands behind them."""
    with pytest.raises(SystemExit):
        main(["--help"])
    assert capsys.readouterr().out.startswith("usage: protperf evaluate CHECKPOINT DATA [options]")
