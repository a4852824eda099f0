"""`protperf evaluate`: the model is asked what the floors are asked, and sums do not depend on batching."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from prepared import random_records, read_proteins
from training import WINDOW, prepared, protperf, small_dataset, train_small

from protperf.checkpoint import load_model
from protperf.evaluate import Score, add_scores, evaluate, format_table
from protperf.formats.shards import ShardSet
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
        assert scores == pytest.approx(large[name], rel=1e-5)


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


def test_scores_add_up():
    assert add_scores([Score(1.5, 3, 1), Score(0.5, 2, 0)]) == Score(2.0, 5, 1)


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
    assert set(json.loads((tmp_path / "scores.json").read_text())) == {"valid", "test"}


def test_other_data_than_the_model_was_trained_on_is_said(run, capsys):
    from protperf.evaluate import main

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
        (["nowhere", "DATA"], "nowhere: no such file or folder; give a .ckpt file or the folder of a run"),
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
def test_mistakes_end_with_one_line(run, tmp_path, arguments, said):
    (tmp_path / "taken.json").touch()
    places = {"RUN": str(run[0]), "DATA": str(small_dataset())}
    done = protperf("evaluate", *(places.get(word, word) for word in arguments), cwd=tmp_path)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert said in done.stderr


def test_a_dataset_without_held_out_proteins_is_said_to_have_none(run, tmp_path):
    whole = prepared(f"whole-{tmp_path.name}", random_records([30] * 8), window=WINDOW, valid=0.0, test=0.0)
    done = protperf("evaluate", run[0], whole, cwd=tmp_path)
    assert done.returncode == 1
    assert "holds no split but 'train'; prepare it with --valid or --test above 0" in done.stderr


@pytest.mark.parametrize("wrong", [["--max-windows", "-1"], ["--toks-per-batch", "0"]])
def test_wrong_usage_exits_with_status_2(wrong, tmp_path):
    assert protperf("evaluate", "run", "data", *wrong, cwd=tmp_path).returncode == 2


def test_asked_places_of_the_floor_are_those_of_the_model(run):
    trained = load_model(run[0])
    shards = ShardSet(small_dataset(), "valid")
    results = evaluate(trained, small_dataset(), splits=["valid"])["valid"]
    assert len({scores["asked"] for scores in results.values()}) == 1
    assert results["model"]["asked"] < np.prod((len(shards), shards.window))
