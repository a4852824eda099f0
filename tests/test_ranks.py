"""Two ranks on half the batch each are one rank: the same losses, one folder, one file, one log."""

from __future__ import annotations

from pathlib import Path

import pytest
from training import SMALL, assert_same, load_plain, protperf, small_dataset

from protperf.formats.metrics_file import read_metrics

TWO = ("trainer=ddp", "trainer.devices=2")
EXACT = ("model.dropout=0", "trainer.log_every=1", "trainer.validate_every=4")


def run(cwd: Path, name: str, *options: str) -> Path:
    arguments = ("train", f"data.path={small_dataset()}", f"name={name}", *SMALL, *EXACT, *options)
    result = protperf(*arguments, cwd=cwd)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [f"runs/{name}"]
    said = [line for line in result.stderr.splitlines() if "parameters; " in line]
    assert len(said) == 1
    return cwd / "runs" / name


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["masked", "causal"])
def test_two_ranks_on_half_the_batch_are_one_rank(kind: str, tmp_path: Path):
    options = (f"objective={kind}", "trainer.max_steps=8", "trainer.accumulate_batches=2")
    one, two = run(tmp_path, "one", *options), run(tmp_path, "two", *options, *TWO)
    a, b = (read_metrics(path / "metrics.csv") for path in (one, two))
    assert list(b["train/loss"]) == list(range(1, 9))
    for name in ("train/loss", "valid/loss", "valid/perplexity", "valid/accuracy", "train/grad_norm"):
        assert b[name] == pytest.approx(a[name], rel=1e-4 if "norm" in name else 1e-5)
    assert b["train/learning_rate"] == a["train/learning_rate"]
    files = [sorted(str(f.relative_to(path)) for f in path.rglob("*") if f.is_file()) for path in (one, two)]
    assert files[0] == files[1]


@pytest.mark.slow
def test_two_ranks_resume_as_one_did_and_as_they_went_on(tmp_path: Path):
    whole = run(tmp_path, "whole", "trainer.max_steps=12", "optim.decay_steps=12", "model.dropout=0.1", *TWO)
    run(tmp_path, "halves", "trainer.max_steps=6", "optim.decay_steps=12", "model.dropout=0.1", *TWO)
    halves = run(
        tmp_path, "halves", "trainer.max_steps=12", "optim.decay_steps=12", "model.dropout=0.1", *TWO
    )
    a, b = (load_plain(path / "checkpoints" / "step=00000012.ckpt") for path in (whole, halves))
    for part in ("state_dict", "optimizer_states", "callbacks"):
        assert_same(a[part], b[part], part)
    losses = [read_metrics(path / "metrics.csv")["train/loss"] for path in (whole, halves)]
    assert losses[0] == losses[1]
