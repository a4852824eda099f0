"""`protperf bench training`: real runs beside the bare step; its numbers follow from its rounds."""

from __future__ import annotations

import doctest
import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
from training import PYTHON_PATH, WINDOW, Recorder, settings_of, small_dataset

from protperf.bench import training
from protperf.bench.__main__ import main
from protperf.bench.presets import read_preset
from protperf.bench.training import BARE, BARE_AGAIN, LOOP, first_questions, judge, quoted, rate_of
from protperf.config import DataConfig, ObjectiveConfig
from protperf.data import QuestionDataset, WindowData
from protperf.formats.metrics_file import read_metrics
from protperf.train import build_run

TINY = ["model_dim=16", "num_heads=2", "feedforward_dim=32", "num_features=8"]
SHORT = ["--preset", "tiny", "--layers", "1", "--steps", "4", "--log-every", "2", "--checkpoint-every", "2"]


@pytest.fixture(autouse=True)
def _lean_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", PYTHON_PATH)


def run(folder: Path, *arguments: str) -> dict:
    out = folder / "numbers.json"
    where = ["--data", str(small_dataset()), "--json", str(out), "--plot", str(folder / "figures")]
    assert main(["training", *TINY, *SHORT, *where, *arguments]) == 0
    assert [path.name for path in (folder / "figures").iterdir()] == ["training.png"]
    return json.loads(out.read_text())


def test_examples_in_docstrings_are_true():
    assert doctest.testmod(training).failed == 0


def test_the_loop_is_run_beside_the_bare_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    numbers = run(tmp_path, "--rounds", "1", "--workers", "0", "--devices")
    bare, loop = numbers["results"]
    assert (bare["name"], loop["name"]) == (BARE, LOOP)
    assert loop["of_bare"] == pytest.approx(loop["rounds"][0] / bare["rounds"][0])
    assert loop["seconds"] == pytest.approx(2 * WINDOW / loop["tokens_per_second"])
    assert loop["reached"] == (loop["of_bare"] >= 0.95)
    assert numbers["setting"]["model"]["model_dim"] == 16
    assert numbers["setting"]["length"] == WINDOW
    out = capsys.readouterr().out
    (table,) = [block.splitlines() for block in out.split("\n\n") if block.startswith("training ")]
    assert [line.split("  ")[0] for line in table[1:]] == [BARE, LOOP]


@pytest.mark.slow(minutes=1)
def test_ranks_are_run_beside_one(tmp_path: Path):
    numbers = run(tmp_path, "--rounds", "1", "--batch", "4", "--workers", "1")
    results = {result["name"]: result for result in numbers["results"]}
    assert set(results) == {BARE, LOOP, "1 rank", "2 ranks"}
    one, two = results["1 rank"], results["2 ranks"]
    assert one["times_one"] == 1.0
    assert two["times_one"] == pytest.approx(two["rounds"][0] / one["rounds"][0])
    assert two["tokens_per_second"] == pytest.approx(two["rounds"][0])
    assert (two["bar"], two["threads"], two["ranks"]) == (1.6, 1, 2)
    assert two["reached"] == (two["times_one"] >= 1.6)


def test_without_a_dataset_the_sample_is_prepared_and_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(training, "loop_rate", lambda *arguments, **named: 1000.0)
    assert main(["training", *TINY, *SHORT, "--rounds", "1", "--window", "128", "--devices"]) == 0
    assert "batch 2 of 128 tokens" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_the_loop_is_compared_with_the_bare_steps_around_it():
    samples = {
        BARE: [10.0, 100.0, 20.0],
        LOOP: [18.0, 99.0, 21.0],
        BARE_AGAIN: [30.0, 100.0, 22.0],
        "1 rank": [5.0, 50.0, 6.0],
        "2 ranks": [9.0, 80.0, 9.0],
    }
    bare, loop, one, two = judge(samples, tokens=40, threads=2, ranks=[1, 2])
    assert bare.rounds == (20.0, 100.0, 21.0)
    assert loop.of_bare == pytest.approx(0.99)  # of 0.9, 0.99 and 1
    assert (loop.tokens_per_second, loop.seconds, loop.reached) == (21.0, 40 / 21, True)
    assert (one.times_one, one.bar, one.reached) == (1.0, None, None)
    assert two.times_one == pytest.approx(1.6)  # of 1.8, 1.6 and 1.5
    assert two.bar == 1.6


def test_the_first_interval_does_not_count_and_rates_are_averaged_over_time():
    # 10 steps of 1 s and 10 of 3 s: 20 steps in 4 x 10 s
    assert rate_of({10: 1.0, 20: 60.0, 30: 20.0}, log_every=10) == pytest.approx(2 * 60 / 4)


def test_the_metric_counts_checkpoints_and_the_wait_for_data_but_not_validation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A second is slept in each of them: in steps 3-4 for data, in 5-6 (after step 4's interval is over) for a checkpoint."""
    steps = ("trainer.max_steps=10", "trainer.log_every=2", "trainer.checkpoint_every=4")
    made = build_run(settings_of(tmp_path, *steps, "trainer.validate_every=6", "data.valid_windows=2"))

    def slowly(owner: type, name: str, when: Callable[[], bool]) -> None:
        original = getattr(owner, name)

        def slow(*arguments, **named):
            time.sleep(1.0 if when() else 0.0)
            return original(*arguments, **named)

        monkeypatch.setattr(owner, name, slow)

    slowly(QuestionDataset, "__getitem__", lambda: made.trainer.training and made.trainer.global_step == 2)
    slowly(pl.Trainer, "save_checkpoint", lambda: made.trainer.global_step == 4)
    slowly(type(made.task), "validation_step", lambda: True)
    made.trainer.fit(made.task, made.data)
    rates = read_metrics(tmp_path / "metrics.csv")["train/tokens_per_second"]
    seconds = {step: 2 * 4 * WINDOW / rate for step, rate in rates.items()}
    assert {step for step, each in seconds.items() if each > 1} == {4, 6}


def test_the_bare_step_trains_on_what_training_begins_with(tmp_path: Path):
    config = DataConfig(path=str(small_dataset()), batch_size=4, num_workers=0)
    questions = first_questions(WindowData(config, ObjectiveConfig(), seed=0), 3, torch.device("cpu"))
    recorder = Recorder()
    made = build_run(settings_of(tmp_path, "trainer.max_steps=3", "data.batch_size=4"))
    made.trainer.callbacks.append(recorder)
    made.trainer.fit(made.task, made.data)
    assert [question.batch.inputs.numpy().tobytes() for question in questions] == recorder.inputs


def test_a_run_that_fails_is_told_with_its_last_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(training, "training_arguments", lambda *arguments: ["model.num_layer=3"])
    with pytest.raises(ValueError, match=r"protperf train failed: .*model\.num_layers") as caught:
        main(["training", *TINY, *SHORT, "--data", str(small_dataset()), "--devices"])
    assert "\n" not in str(caught.value)


def test_paths_of_any_name_reach_training():
    config = read_preset("tiny", [], num_layers=None)
    assert quoted(Path("/a b/it's=1")) == r"'/a b/it\'s=1'"
    assert quoted(None) == "null"
    assert quoted(("a b", 1)) == "['a b',1]"
    assert quoted(config.softmax_layers) == "[]"
    assert quoted(config.qk_norm) == "false"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--batch", "3"],
        ["--steps", "15"],
        ["--steps", "10"],
        ["--window", "64", "--data", "somewhere"],
        ["--devices", "0"],
    ],
)
def test_wrong_usage_exits_with_status_2(arguments: list[str]):
    with pytest.raises(SystemExit) as caught:
        main(["training", *arguments])
    assert caught.value.code == 2
