"""Two ranks are one rank: the same global batches, losses, weights and projections, whatever they share and how."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import told_by, train_on_ranks
from training import (
    SMALL,
    assert_same,
    clean_environment,
    load_plain,
    protperf,
    scratch_dir,
    small_dataset,
    train_small,
)

from protperf.attention import ATTENTIONS
from protperf.checkpoint import step_name
from protperf.formats.metrics_file import read_metrics

EXACT = ("model.dropout=0", "trainer.log_every=1", "trainer.validate_every=4", "trainer.redraw_every=5")
STEPS = 12
CASES = {
    "masked": ("data.valid_windows=5",),
    "causal": ("objective=causal", "trainer.windows_at_once=1", "model.attention=favor"),
    "oprf": ("model.attention=oprf", "model.qk_norm=true", "model.activation_checkpointing=true"),
    "bf16": ("trainer.precision=bf16-mixed", "trainer.deterministic=true"),
}
"""What is trained on one rank, on two that hold the model each, and on two that hold a half of it each."""
STRATEGIES = ("ddp", "fsdp")

pytestmark = pytest.mark.slow


def steps(number: int) -> tuple[str, ...]:
    return (f"trainer.max_steps={number}", f"optim.decay_steps={STEPS}", *EXACT)


@cache
def one_rank(case: str) -> Path:
    run_dir = scratch_dir() / f"one-{case}"
    train_small(run_dir, *steps(STEPS), *CASES[case])
    return run_dir


@cache
def two_ranks() -> dict[tuple[str, str], Path]:
    """Train all that these tests compare in one pair of processes."""
    runs = {(s, c): scratch_dir() / f"{s}-{c}" for s, c in itertools.product(STRATEGIES, CASES)}
    todo = [(path, (*steps(STEPS), *CASES[case], f"trainer={s}")) for (s, case), path in runs.items()]
    for strategy in STRATEGIES:
        other = "fsdp" if strategy == "ddp" else "ddp"
        dropout = ("model.dropout=0.1", f"trainer={strategy}")
        for name, options in (
            ("whole", [(STEPS, dropout)]),
            ("halves", [(7, dropout), (STEPS, dropout)]),
            ("changes", [(4, (f"trainer={strategy}",)), (8, (f"trainer={other}",))]),
        ):
            path = scratch_dir() / f"{strategy}-{name}"
            runs[strategy, name] = path
            todo += [(path, (*steps(number), *more)) for number, more in options]
    for attention in ATTENTIONS:  # DDP refuses a parameter without a gradient
        choice = (
            f"model.attention={attention}",
            f"model.qk_norm={attention != 'rfa'}",
            "model.num_features=128",
        )
        path = runs["ddp", f"each {attention}"] = scratch_dir() / f"each-{attention}"
        todo.append((path, ("trainer.max_steps=2", "trainer.log_every=1", "trainer=ddp", *choice)))
    train_on_ranks(todo)
    return runs


def assert_same_metrics(run_dir: Path, expected_dir: Path, *, rel: float) -> None:
    found, expected = (read_metrics(path / "metrics.csv") for path in (run_dir, expected_dir))
    assert list(expected["train/loss"]) == list(range(1, STEPS + 1))
    assert list(expected["valid/loss"]) == [4, 8, 12]
    compared = ["train/loss", "train/learning_rate", "valid/loss", "valid/perplexity"]
    if rel < 1e-4:  # below rounding, the best-scored of nearly equal tokens may be another one
        compared.append("valid/accuracy")
    for name in compared:
        assert found[name] == pytest.approx(expected[name], rel=rel), name
    for name in ("train/grad_norm", "train/weight_norm"):
        assert found[name] == pytest.approx(expected[name], rel=10 * rel), name


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_ranks_on_half_the_batch_each_are_one_rank(strategy: str, case: str):
    run_dir = two_ranks()[strategy, case]
    rel = 2e-3 if case == "bf16" else 1e-5  # products in bfloat16 round differently for other batch shapes
    assert_same_metrics(run_dir, one_rank(case), rel=rel)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_projections_stay_float32_and_the_same_on_every_rank_across_redraws(strategy: str, case: str):
    told = [told_by(two_ranks()[strategy, case], rank) for rank in range(2)]
    assert told[0]["redraws"] == told[1]["redraws"]
    assert set(told[0]["redraws"]) == {0, 1, 2}
    assert told[0]["buffers"] == told[1]["buffers"]
    assert any("projection" in name for name in told[0]["buffers"])
    assert told[0]["buffer_types"] == ["torch.float32"]
    alone = load_plain(one_rank(case) / "checkpoints" / step_name(STEPS))["state_dict"]
    there = load_plain(two_ranks()[strategy, case] / "checkpoints" / step_name(STEPS))["state_dict"]
    for name, value in alone.items():
        if name.endswith(("projection", "redraws")):
            assert torch.equal(value, there[name]), name


@pytest.mark.parametrize("case", CASES)
def test_sharded_training_shards_every_parameter(case: str):
    assert told_by(two_ranks()["fsdp", case], 0)["parameter_types"] == ["DTensor"]
    assert told_by(two_ranks()["ddp", case], 0)["parameter_types"] == ["Parameter"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_ranks_that_stop_and_go_on_are_two_that_never_stopped(strategy: str):
    whole, halves = (two_ranks()[strategy, name] for name in ("whole", "halves"))
    a, b = (load_plain(path / "checkpoints" / step_name(STEPS)) for path in (whole, halves))
    for part in ("state_dict", "optimizer_states", "lr_schedulers"):
        assert_same(a[part], b[part], part)
    for rank in range(2):
        assert told_by(whole, rank)["losses"][7:] == told_by(halves, rank)["losses"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_run_changes_its_strategy_and_its_ranks_and_stays_the_run_it_was(strategy: str):
    """From one strategy on two ranks to the other, and on to one rank."""
    run_dir = two_ranks()[strategy, "changes"]
    train_small(run_dir, *steps(STEPS))
    whole = scratch_dir() / "never-changed"
    if not whole.exists():
        train_small(whole, *steps(STEPS))
    assert_same_metrics(run_dir, whole, rel=1e-5)
    positions = [
        load_plain(path / "checkpoints" / step_name(STEPS))["callbacks"]["Position"]["samples"]
        for path in (run_dir, whole)
    ]
    assert positions == [STEPS * 4] * 2


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_optimizer_state_on_disk_is_the_same_whatever_strategy_wrote_it(strategy: str):
    def moments(run_dir: Path) -> dict[int, Any]:
        (state,) = load_plain(run_dir / "checkpoints" / step_name(STEPS))["optimizer_states"]
        assert sorted(number for group in state["param_groups"] for number in group["params"]) == sorted(
            state["state"]
        )
        return state["state"]

    alone, there = moments(one_rank("masked")), moments(two_ranks()[strategy, "masked"])
    assert alone.keys() == there.keys()
    for number, values in alone.items():
        assert values["exp_avg"].shape == there[number]["exp_avg"].shape
        torch.testing.assert_close(values["exp_avg"], there[number]["exp_avg"], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_every_attention_trains_on_two_ranks_which_refuse_parameters_without_gradients(attention: str):
    losses = read_metrics(two_ranks()["ddp", f"each {attention}"] / "metrics.csv")["train/loss"]
    assert list(losses) == [1, 2]


SLOW_END = """
import os, runpy, sys, time
import protperf.train.runs, protperf.loggers as loggers
from protperf.train import __main__ as command
def close(each):
    if "LOCAL_RANK" not in os.environ or os.environ["LOCAL_RANK"] == "0":
        time.sleep(9)
        print("closed", flush=True)
command.close_loggers = close
command.main()
"""


def test_a_first_rank_that_ends_slowly_is_not_killed_for_the_others_have_ended(tmp_path: Path):
    (tmp_path / "slow.py").write_text(SLOW_END)
    options = (
        "trainer=ddp",
        "trainer.devices=2",
        "trainer.max_steps=100000",
        "trainer.checkpoint_every=100000",
    )
    process = subprocess.Popen(
        [sys.executable, "slow.py", f"data.path={small_dataset()}", "name=slow", *SMALL, *options],
        cwd=tmp_path,
        env=clean_environment(tmp_path),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    metrics = tmp_path / "runs" / "slow" / "metrics.csv"
    deadline = time.monotonic() + 120
    while not metrics.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    said, errors = process.communicate(timeout=120)
    assert process.returncode == 75, errors
    assert "closed" in said


def test_the_command_line_starts_its_ranks_and_makes_one_folder_one_config_and_one_log(tmp_path: Path):
    options = ("trainer=ddp", "trainer.devices=2", *steps(STEPS), "trainer.windows_at_once=1")
    result = protperf("train", f"data.path={small_dataset()}", "name=two", *SMALL, *options, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["runs/two"]
    assert sum("parameters; " in line for line in result.stderr.splitlines()) == 1
    run_dir = tmp_path / "runs" / "two"
    files = sorted(str(path.relative_to(run_dir)) for path in run_dir.rglob("*") if path.is_file())
    assert files == [
        ".lock",
        *("checkpoints/best.ckpt", f"checkpoints/{step_name(STEPS)}"),
        *("config.yaml", "metrics.csv"),
        *(f"model/{name}" for name in ("config.json", "model.safetensors", "model_card.md")),
        "train.log",
    ]
    assert "test/loss" in read_metrics(run_dir / "metrics.csv")  # the best checkpoint, by both ranks
    assert (run_dir / "train.log").read_text().count("testing ") == 1


@pytest.mark.parametrize(("size", "instead"), [(3, 4), (1, 2)])
def test_a_batch_that_ranks_cannot_share_evenly_is_refused_with_one_that_they_can(
    size: int, instead: int, tmp_path: Path
):
    with pytest.raises(ValueError, match=rf"batch_size is {size} .* 2 ranks .* data.batch_size={instead}$"):
        train_small(tmp_path, "trainer=ddp", "trainer.devices=2", f"data.batch_size={size}")
