"""A run that stops and goes on is the run that never stopped, bit for bit."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from training import (
    SMALL,
    Recorder,
    assert_same,
    load_plain,
    protperf,
    scratch_dir,
    small_dataset,
    start_protperf,
    train_small,
)

from protperf.checkpoint import step_name, step_of
from protperf.formats.metrics_file import read_metrics
from protperf.optim import learning_rate_factor
from protperf.train.runs import test_best as run_test

MEASURED = ("train/tokens_per_second", "train/mfu", "train/peak_memory_gib")
"""Metrics that a clock or the machine decides."""

NUM_WINDOWS = 45
"""Training windows of the small dataset: with batches of 4, 45 steps of one batch are 4 whole epochs."""


def options(steps: int, *more: str) -> tuple[str, ...]:
    return (f"trainer.max_steps={steps}", "optim.decay_steps=400", "trainer.validate_every=25", *more)


def assert_same_run(pieces: Path, uninterrupted: Path, step: int) -> None:
    """Compare the last checkpoints and the metrics of a run that stopped and went on with an uninterrupted one.

    A stop is reported and validated: the other run has more of both, and perhaps a better best one.
    """
    a, b = (load_plain(run / "checkpoints" / f"step={step:08d}.ckpt") for run in (pieces, uninterrupted))
    for checkpoint in (a, b):
        for name in ("Checkpoints", "EarlyStop"):
            del checkpoint["callbacks"][name]
    for part in ("state_dict", "optimizer_states", "lr_schedulers", "callbacks", "protperf", "global_step"):
        assert_same(a[part], b[part], part)
    pieced, whole = (read_metrics(run / "metrics.csv") for run in (pieces, uninterrupted))
    assert whole
    trained = [{name for name in run if not name.startswith("test/")} for run in (whole, pieced)]
    assert trained[0] == trained[1]
    for name, values in whole.items():
        if name not in pieced:  # a test that only one of them has made
            continue
        assert values.keys() <= pieced[name].keys()
        if name not in MEASURED:
            assert values == {at: pieced[name][at] for at in values}


@cache
def uninterrupted(steps: int, *more: str) -> tuple[Path, Recorder]:
    run_dir = scratch_dir() / f"whole-{steps}-{'-'.join(more)}"
    return run_dir, train_small(run_dir, *options(steps, *more))[1]


def check_resume(tmp_path: Path, stops: list[int], total: int, *more: str, workers: int = 0) -> None:
    """Train to each stop and on to the end; compare every micro-batch and the end with one uninterrupted run."""
    whole_dir, whole = uninterrupted(total, *more)
    losses, rates, inputs, redraws = [], [], [], []
    for stop in (*stops, total):
        _, record = train_small(tmp_path, *options(stop, *more, f"data.num_workers={workers}"))
        losses += record.losses
        rates += record.rates
        inputs += record.inputs
        redraws += record.redraws
    assert losses == whole.losses
    assert rates == whole.rates
    assert inputs == whole.inputs
    assert redraws == whole.redraws
    assert_same_run(tmp_path, whole_dir, total)


@pytest.mark.parametrize(
    ("stops", "at_once", "workers"),
    [
        ([NUM_WINDOWS], 0, 0),  # the last batch of an epoch
        ([33, 67], 3, 2),  # twice in mid-epoch, once off every interval of log, validation and redraw
        ([30, 60], 0, 0),  # on a redraw
    ],
)
def test_stop_and_resume_equals_uninterrupted(stops: list[int], at_once: int, workers: int, tmp_path: Path):
    check_resume(tmp_path, stops, 90, f"trainer.windows_at_once={at_once}", workers=workers)


@pytest.mark.parametrize("attention", ["softmax", "reformer"])
def test_stop_and_resume_causal(attention: str, tmp_path: Path):
    check_resume(tmp_path, [21], 30, "objective=causal", f"model.attention={attention}")


@pytest.mark.slow
def test_stops_after_hundreds_of_steps_and_400_are_one(tmp_path: Path):
    check_resume(tmp_path, [4 * NUM_WINDOWS, 200], 400, workers=2)


def test_a_finished_run_started_again_does_nothing(tmp_path: Path):
    train_small(tmp_path, *options(30))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    _, record = train_small(tmp_path, *options(30))
    assert record.losses == []
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_metrics_file_is_append_only(tmp_path: Path):
    train_small(tmp_path, *options(20))
    first = (tmp_path / "metrics.csv").read_bytes()
    train_small(tmp_path, *options(40))
    second = (tmp_path / "metrics.csv").read_bytes()
    assert second.startswith(first)
    assert len(second) > len(first)
    assert second.count(b"step,metric,value") == 1


@pytest.mark.slow
def test_the_command_line_goes_on_in_the_same_run_folder(tmp_path: Path):
    arguments = ("train", f"data.path={small_dataset()}", "name=one", *SMALL)
    for steps in (20, 45):
        result = protperf(*arguments, *options(steps), cwd=tmp_path)
        assert result.returncode == 0, result.stderr
        assert result.stdout.splitlines() == ["runs/one"]
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["one"]
    whole_dir, _ = uninterrupted(45)
    assert_same_run(tmp_path / "runs" / "one", whole_dir, 45)


def wait_for(path: Path, process: subprocess.Popen[Any]) -> None:
    """Wait until a running process has made a file."""
    deadline = time.monotonic() + 120
    while not path.exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)


def kill_after(run_dir: Path, step: int, arguments: tuple[str, ...], cwd: Path) -> None:
    """Start a run and kill it without warning once it has written its checkpoint at `step`."""
    process = start_protperf(*arguments, cwd=cwd, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for(run_dir / "checkpoints" / step_name(step), process)
    process.send_signal(signal.SIGKILL)
    process.wait()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGINT, 130)]
)
def test_a_run_told_to_stop_saves_the_step_and_goes_on_with_the_next(
    number: int, status: int, tmp_path: Path
):
    more = ("trainer.checkpoint_every=100000", "trainer.validate_every=100000", "data.num_workers=1")
    arguments = ("train", f"data.path={small_dataset()}", "name=stopped", *SMALL, *options(120, *more))
    run_dir = tmp_path / "runs" / "stopped"
    process = start_protperf(*arguments, cwd=tmp_path, stderr=subprocess.PIPE)
    wait_for(run_dir / "metrics.csv", process)
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == status
    (checkpoint,) = (run_dir / "checkpoints").glob("step=*.ckpt")
    reached = step_of(checkpoint)
    assert 10 <= reached < 120
    assert f"stopped by {signal.Signals(number).name} after step {reached}; the same command goes on" in said
    _, record = train_small(run_dir, *options(120, *more))
    whole_dir, whole = uninterrupted(120, *more)
    assert record.losses == whole.losses[reached:]
    assert_same_run(run_dir, whole_dir, 120)


@pytest.mark.slow
def test_a_killed_run_goes_on_from_its_last_checkpoint_to_the_same_end(tmp_path: Path):
    more = ("trainer.checkpoint_every=20",)
    arguments = ("train", f"data.path={small_dataset()}", "name=killed", *SMALL, *options(150, *more))
    run_dir = tmp_path / "runs" / "killed"
    kill_after(run_dir, 40, arguments, tmp_path)
    reached = max(int(path.stem.split("=")[1]) for path in (run_dir / "checkpoints").glob("step=*.ckpt"))
    assert 40 <= reached < 150
    _, record = train_small(run_dir, *options(150, *more))
    whole_dir, whole = uninterrupted(150, *more)
    assert record.losses == whole.losses[reached:]
    assert_same_run(run_dir, whole_dir, 150)
    assert sorted(os.listdir(run_dir / "checkpoints")) == sorted(os.listdir(whole_dir / "checkpoints"))


def test_the_best_checkpoint_stays_the_best_of_all_starts(tmp_path: Path):
    train_small(tmp_path, *options(25))
    last, best = (tmp_path / "checkpoints" / name for name in ("step=00000025.ckpt", "best.ckpt"))
    before = best.read_bytes()
    content = load_plain(last)
    content["state_dict"]["model.embedding.weight"] *= 30  # whoever goes on from here does worse
    torch.save(content, last)
    train_small(tmp_path, *options(50))
    losses = read_metrics(tmp_path / "metrics.csv")["valid/loss"]
    assert losses[50] > losses[25]
    assert best.read_bytes() == before


def test_a_resumed_run_moves_as_its_configuration_says(tmp_path: Path):
    train_small(tmp_path, *options(10))
    changed = (
        "optim.learning_rate=1e-3",
        "optim.decay_steps=20",
        "optim.warmup_steps=5",
        "optim.weight_decay=0",
    )
    run, record = train_small(tmp_path, *options(20), *changed)
    expected = [1e-3 * learning_rate_factor(step, run.task.optim) for step in range(10, 20)]
    assert [float.fromhex(rate) for rate in record.rates] == expected
    assert {group["weight_decay"] for group in run.trainer.optimizers[0].param_groups} == {0.0}


@pytest.mark.parametrize("every", [2, 1000])
def test_weights_that_have_diverged_are_never_saved(every: int, tmp_path: Path):
    steep = ("optim.learning_rate=1e30", "optim.warmup_steps=0", "trainer.log_every=1000")
    with pytest.raises(
        ValueError, match=r"(diverged at|the loss is nan at) step .* lower optim.learning_rate"
    ) as error:
        train_small(tmp_path, *options(4), *steep, f"trainer.checkpoint_every={every}")
    assert "\n" not in str(error.value)
    assert not list(tmp_path.rglob("*.ckpt*"))


@pytest.mark.parametrize("damage", ["cut short", "one bit"])
def test_after_a_damaged_last_checkpoint_the_one_before_is_taken(damage: str, tmp_path: Path, caplog: Any):
    more = ("trainer.checkpoint_every=10",)
    train_small(tmp_path, *options(20, *more))
    last = tmp_path / "checkpoints" / step_name(20)
    content = bytearray(last.read_bytes())
    content[len(content) // 2] ^= 1
    last.write_bytes(content if damage == "one bit" else content[:5000])
    run, record = train_small(tmp_path, *options(40, *more))
    assert "step=00000020.ckpt" in caplog.text
    assert "trying the checkpoint before it" in caplog.text
    assert run.checkpoint == tmp_path / "checkpoints" / step_name(10)
    assert record.losses == uninterrupted(40, *more)[1].losses[10:]


def test_a_damaged_best_checkpoint_is_written_anew_and_keeps_nobody_from_going_on(
    tmp_path: Path, caplog: Any
):
    train_small(tmp_path, *options(25))
    best = tmp_path / "checkpoints" / "best.ckpt"
    best.write_bytes(best.read_bytes()[:5000])
    run, _ = train_small(tmp_path, *options(50))
    assert "best.ckpt: not a checkpoint of `protperf train`, or cut short" in caplog.text
    assert "the next validation writes a new one" in caplog.text
    assert load_plain(best)["global_step"] == 50
    run_test(run)
    assert list(read_metrics(tmp_path / "metrics.csv")["test/loss"]) == [50]


def test_a_damaged_last_checkpoint_costs_no_good_one(tmp_path: Path):
    more = ("trainer.checkpoint_every=10", "trainer.keep_checkpoints=2")
    train_small(tmp_path, *options(40, *more))
    folder = tmp_path / "checkpoints"
    last = folder / step_name(40)
    last.write_bytes(last.read_bytes()[:5000])
    run, _ = train_small(tmp_path, *options(34), "trainer.checkpoint_every=2", "trainer.keep_checkpoints=1")
    assert run.checkpoint == folder / step_name(30)
    assert sorted(path.name for path in folder.glob("step=*")) == [step_name(34), step_name(40)]
    run, _ = train_small(tmp_path, *options(44), "trainer.keep_checkpoints=1", "trainer.checkpoint_every=40")
    assert run.checkpoint == folder / step_name(34)
    assert [path.name for path in folder.glob("step=*")] == [step_name(44)]


@pytest.mark.parametrize("lacking", ["optimizer_states", "callbacks"])
def test_a_checkpoint_that_lacks_what_training_needs_is_passed_over(
    lacking: str, tmp_path: Path, caplog: Any
):
    train_small(tmp_path, *options(20, "trainer.checkpoint_every=10"))
    last = tmp_path / "checkpoints" / step_name(20)
    content = load_plain(last)
    content[lacking] = {}
    if lacking == "optimizer_states":
        del content[lacking]
    torch.save(content, last)
    run, _ = train_small(tmp_path, *options(30, "trainer.checkpoint_every=10"))
    assert run.checkpoint == tmp_path / "checkpoints" / step_name(10)
    assert "trying the checkpoint before it" in caplog.text


def test_a_run_of_which_only_the_best_checkpoint_is_left_goes_on_from_it(tmp_path: Path):
    """As where it was killed after its first validation and before its first checkpoint."""
    train_small(tmp_path, *options(25))
    folder = tmp_path / "checkpoints"
    (folder / step_name(25)).unlink()
    with pytest.raises(ValueError, match="already holds a run"):
        train_small(tmp_path, *options(50), "resume=false")
    run, record = train_small(tmp_path, *options(50))
    assert run.checkpoint == folder / "best.ckpt"
    assert record.losses == uninterrupted(50)[1].losses[25:]


def test_a_foreign_metrics_file_is_refused_before_training(tmp_path: Path):
    (tmp_path / "metrics.csv").write_text("hello\n")
    with pytest.raises(ValueError, match=r"metrics.csv: not a metrics file, nothing is appended to it"):
        train_small(tmp_path, *options(2))
    assert (tmp_path / "metrics.csv").read_text() == "hello\n"


def test_a_best_checkpoint_that_is_gone_is_written_anew(tmp_path: Path):
    train_small(tmp_path, *options(25))
    (tmp_path / "checkpoints" / "best.ckpt").unlink()
    train_small(tmp_path, *options(50), "optim.learning_rate=0")
    assert load_plain(tmp_path / "checkpoints" / "best.ckpt")["global_step"] == 50


def test_a_damaged_only_checkpoint_is_named_in_one_line(tmp_path: Path):
    train_small(tmp_path, *options(20))
    last = tmp_path / "checkpoints" / "step=00000020.ckpt"
    last.write_bytes(last.read_bytes()[:5000])
    with pytest.raises(
        ValueError, match=r"step=00000020.ckpt: not a checkpoint of `protperf train`, or cut short"
    ) as error:
        train_small(tmp_path, *options(40))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("change", ["model.num_layers=1", "model.num_features=4", "objective=causal"])
def test_another_model_does_not_go_on_with_a_run(change: str, tmp_path: Path):
    train_small(tmp_path, *options(10))
    with pytest.raises(ValueError, match="another name") as error:
        train_small(tmp_path, *options(20), change)
    assert "\n" not in str(error.value)


def test_another_seed_does_not_go_on_with_a_run(tmp_path: Path):
    train_small(tmp_path, *options(10))
    with pytest.raises(ValueError, match=r"cannot resume: .* seed 0, this run has 1"):
        train_small(tmp_path, *options(20), "trainer.seed=1")


def test_resume_false_refuses_a_folder_that_holds_a_run(tmp_path: Path):
    train_small(tmp_path, *options(10), "resume=false")
    with pytest.raises(ValueError, match="already holds a run; give another name"):
        train_small(tmp_path, *options(20), "resume=false")
    shutil.rmtree(tmp_path / "checkpoints")
    train_small(tmp_path, *options(10), "resume=false")


def test_the_last_step_is_reported_and_validated(tmp_path: Path):
    train_small(tmp_path, "trainer.max_steps=7", "trainer.validate_every=5", "trainer.log_every=5")
    metrics = read_metrics(tmp_path / "metrics.csv")
    assert list(metrics["valid/loss"]) == list(metrics["train/loss"]) == [5, 7]
    assert list(metrics["train/grad_norm"]) == list(metrics["train/learning_rate"]) == [5, 7]


def test_two_processes_never_train_in_one_folder(tmp_path: Path):
    run_dir = tmp_path / "runs" / "same"
    run_dir.mkdir(parents=True)
    code = (
        "import sys; from pathlib import Path; from protperf.formats.commit import lock_folder\n"
        "lock = lock_folder(Path(sys.argv[1]), busy='')\n"
        "print('locked', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(run_dir / ".lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"locked\n"
        arguments = ("train", f"data.path={small_dataset()}", "name=same", *SMALL, "trainer.max_steps=1")
        result = protperf(*arguments, cwd=tmp_path)
        assert result.returncode == 1
        assert "runs/same: another process trains there; wait for it, or give another name" in result.stderr
        other.communicate(b"")
    assert not (run_dir / "checkpoints").exists()


def test_an_accepted_start_is_recorded_with_what_changed_and_a_refused_one_is_not(tmp_path: Path):
    arguments = ("train", f"data.path={small_dataset()}", "name=r", *SMALL)
    config = tmp_path / "runs" / "r" / "config.yaml"
    first = protperf(*arguments, "trainer.max_steps=2", cwd=tmp_path)
    assert "other settings" not in first.stderr
    kept = config.read_text()
    assert "model_dim: 16" in kept
    for change in ("objective=causal", "trainer.seed=1"):
        refused = protperf(*arguments, "trainer.max_steps=4", change, cwd=tmp_path)
        assert refused.returncode == 1
        assert "cannot resume" in refused.stderr
        assert config.read_text() == kept
    second = protperf(*arguments, "trainer.max_steps=4", "data.batch_size=2", cwd=tmp_path)
    assert (
        "other settings than at the last start: data.batch_size 4 -> 2, optim.decay_steps 2 -> 4, "
        "trainer.max_steps 2 -> 4\n"
    ) in second.stderr
    assert not (tmp_path / "runs" / "r" / ".hydra").exists()
    config.write_bytes(b"{{{: \0")
    third = protperf(*arguments, "trainer.max_steps=5", cwd=tmp_path)
    assert third.returncode == 0
    assert "config.yaml: not a run's configuration" in third.stderr
    assert "model_dim: 16" in config.read_text()
