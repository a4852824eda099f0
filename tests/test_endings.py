"""How a run ends: on its last step, when it no longer gets better, and with a test of its best checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from prepared import SAMPLE, read_fasta
from training import load_plain, prepared, train_small

from protperf.checkpoint import load_model
from protperf.formats.metrics_file import read_metrics
from protperf.objectives import answer
from protperf.train import Run
from protperf.train.runs import test_best as run_test

WORSENING = (
    "trainer.validate_every=2",
    "trainer.checkpoint_every=100",
    "optim.learning_rate=3",
    "trainer.max_steps=60",
)
"""A run that soon moves too far: its first validations are the best ones."""


def test_a_run_that_no_longer_gets_better_ends_and_stays_ended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    caplog.set_level("INFO")
    run, _ = train_small(tmp_path, *WORSENING, "trainer.early_stop_after=3")
    losses = list(read_metrics(tmp_path / "metrics.csv")["valid/loss"].items())
    best = min(range(len(losses)), key=lambda place: losses[place][1])
    assert len(losses) == best + 1 + 3
    ended = losses[-1][0]
    assert run.trainer.global_step == ended < 60
    assert f"stopping at step {ended}: no better valid/loss than {losses[best][1]:.4f} in 3" in caplog.text
    before = (tmp_path / "metrics.csv").read_bytes()
    _, record = train_small(tmp_path, *WORSENING, "trainer.early_stop_after=3")
    assert record.losses == []
    assert (tmp_path / "metrics.csv").read_bytes() == before
    _, record = train_small(tmp_path, *WORSENING, "trainer.early_stop_after=0")
    assert len(record.losses) == 60 - ended


def test_validations_without_a_better_one_are_counted_across_starts(tmp_path: Path):
    options = (*WORSENING[:-1], "optim.decay_steps=60", "trainer.early_stop_after=4")
    for name, stops in (("whole", (60,)), ("pieces", (4, 6, 60))):
        for steps in stops:
            train_small(tmp_path / name, *options, f"trainer.max_steps={steps}")
    whole, pieces = (
        read_metrics(tmp_path / name / "metrics.csv")["valid/loss"] for name in ("whole", "pieces")
    )
    assert len(whole) < 60 // 2
    assert pieces == whole


def train_and_test(run_dir: Path, *options: str) -> tuple[Run, dict[str, dict[int, float]]]:
    run, _ = train_small(run_dir, *options)
    run_test(run)
    return run, read_metrics(run_dir / "metrics.csv")


def test_the_test_is_that_of_the_best_checkpoint_and_not_of_the_last(tmp_path: Path):
    run, metrics = train_and_test(
        tmp_path, *WORSENING[:-1], "trainer.max_steps=20", "data.test_sets=[test,valid]"
    )
    losses = metrics["valid/loss"]
    best = min(losses, key=lambda step: losses[step])
    assert best < 20
    assert load_plain(tmp_path / "checkpoints" / "best.ckpt")["global_step"] == best
    assert metrics["test_valid/loss"] == {20: pytest.approx(losses[best], rel=1e-6)}
    model = load_model(tmp_path / "checkpoints" / "best.ckpt").model
    with torch.no_grad():
        sums = [answer(model, batch, across=False) for batch in run.data.test_dataloader()[0]]
    nll, asked = (sum(float(getattr(each, name)) for each in sums) for name in ("nll", "asked"))
    assert metrics["test/loss"] == {20: pytest.approx(nll / asked, rel=1e-6)}


def test_a_test_that_is_recorded_is_not_made_again(tmp_path: Path):
    options = ("trainer.max_steps=3",)
    train_and_test(tmp_path, *options)
    before = (tmp_path / "metrics.csv").read_bytes()
    train_and_test(tmp_path, *options)
    assert (tmp_path / "metrics.csv").read_bytes() == before
    _, metrics = train_and_test(tmp_path, "trainer.max_steps=5")
    assert list(metrics["test/loss"]) == [3, 5]


def test_a_dataset_without_a_test_split_is_not_tested(tmp_path: Path):
    records = [record for record in read_fasta(SAMPLE) if len(record[1]) < 100][:60]
    data = prepared("untested", records, window=64, valid=0.2, test=0.0)
    run, _ = train_small(tmp_path, "trainer.max_steps=2", data=data)
    run_test(run)
    assert not any(name.startswith("test") for name in read_metrics(tmp_path / "metrics.csv"))
