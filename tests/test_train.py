"""`protperf train`: what one run is made of, for every choice of model and objective."""

from __future__ import annotations

import itertools
import subprocess
from pathlib import Path

import pytest
import torch
from prepared import SAMPLE, read_fasta
from training import (
    SMALL,
    clean_environment,
    command_line,
    load_plain,
    prepared,
    protperf,
    settings_of,
    small_dataset,
    train_small,
)

from protperf.attention.features import FEATURE_MAPS
from protperf.batches import Batch
from protperf.checkpoint import load_model, step_name
from protperf.formats.metrics_file import read_metrics
from protperf.objectives import TokenSums, answer
from protperf.train import build_run

CHOICES = [
    *itertools.product(("masked", "causal"), (*FEATURE_MAPS, "softmax", "reformer"), ("rope",), ("gelu",)),
    ("masked", "linformer", "rope", "gelu"),
    ("masked", "relu", "absolute", "swiglu"),
    ("causal", "softmax", "none", "swiglu"),
]


@pytest.mark.parametrize(("kind", "attention", "positions", "feedforward"), CHOICES)
def test_every_parameter_gets_a_gradient(
    kind: str, attention: str, positions: str, feedforward: str, tmp_path: Path
):
    choice = (
        f"model.attention={attention}",
        f"model.positions={positions}",
        f"model.feedforward={feedforward}",
        "model.num_features=128",
        f"model.qk_norm={attention in ('trig', 'oprf', 'softmax')}",
    )
    run = build_run(settings_of(tmp_path, f"objective={kind}", *choice))
    batch = next(iter(run.data.train_dataloader()))
    run.task.answer(batch).nll.backward()
    for name, parameter in run.task.model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize("setting", ["dropout=0.3", "dropout=0"])
def test_activation_checkpointing_changes_no_bit_of_the_gradient(setting: str, tmp_path: Path):
    gradients = []
    for checkpointing in ("true", "false"):
        options = (f"model.{setting}", f"model.activation_checkpointing={checkpointing}")
        run = build_run(settings_of(tmp_path, *options))
        run.task.model.redraw_projections(1)
        torch.manual_seed(5)
        run.task.answer(next(iter(run.data.train_dataloader()))).nll.backward()
        gradients.append([parameter.grad for parameter in run.task.model.parameters()])
    assert all(a.equal(b) for a, b in zip(*gradients, strict=True))  # type: ignore[union-attr, arg-type]


def test_the_reported_validation_is_what_the_saved_model_gives(tmp_path: Path):
    options = ("trainer.max_steps=20", "trainer.validate_every=10", "data.batch_size=3", "model.dropout=0.2")
    run, _ = train_small(tmp_path, *options)
    model = load_model(tmp_path / "checkpoints" / "step=00000020.ckpt").model
    with torch.no_grad():
        sums = [answer(model, batch, across=False) for batch in run.data.val_dataloader()[0]]
    total = TokenSums(*(sum(each).item() for each in zip(*sums, strict=True)))  # type: ignore[arg-type]
    metrics = read_metrics(tmp_path / "metrics.csv")
    assert metrics["valid/loss"][20] == pytest.approx(float(total.nll / total.asked), rel=1e-6)
    assert metrics["valid/accuracy"][20] == pytest.approx(float(total.correct / total.asked), rel=1e-12)


def test_two_runs_with_one_seed_are_one_and_another_seed_is_another(tmp_path: Path):
    records = [
        train_small(tmp_path / str(number), "trainer.max_steps=5", f"trainer.seed={seed}")[1]
        for number, seed in enumerate((0, 0, 1))
    ]
    assert records[0].losses == records[1].losses
    assert records[0].inputs == records[1].inputs
    assert not set(records[0].losses) & set(records[2].losses)


def test_attending_across_documents_is_a_choice_that_is_kept(tmp_path: Path):
    options = ("trainer.max_steps=2", "data.attend_across_documents=true")
    run, _ = train_small(tmp_path, *options)
    assert load_model(tmp_path).attend_across_documents
    batch = next(iter(run.data.train_dataloader()))
    assert isinstance(batch, Batch)
    apart, together = (answer(run.task.model.eval(), batch, across=across).nll for across in (False, True))
    assert run.task.answer(batch).nll.equal(together)
    assert not apart.equal(together)


def test_training_learns_more_than_nothing(tmp_path: Path):
    _, record = train_small(tmp_path, "trainer.max_steps=60", "model.dropout=0")
    losses = [float.fromhex(loss) for loss in record.losses]
    assert losses[0] == pytest.approx(3.58, abs=0.1)  # ln 36: all tokens look alike at first
    assert sum(losses[-10:]) / 10 < 3.0


@pytest.mark.slow
@pytest.mark.filterwarnings(  # both of torch's own compiler
    "ignore:.*torch.jit.script:DeprecationWarning", "ignore:The .grad attribute of a Tensor:UserWarning"
)
def test_compiled_blocks_train_as_eager_ones_and_leave_the_same_checkpoint(tmp_path: Path):
    options = ("trainer.max_steps=4", "trainer.log_every=1", "trainer.redraw_every=2", "model.dropout=0")
    compiled, eager = (
        train_small(tmp_path / str(choice), *options, f"trainer.compile={choice}")[0]
        for choice in (True, False)
    )
    a, b = (read_metrics(run.settings.run_dir / "metrics.csv") for run in (compiled, eager))
    for name in ("train/loss", "train/grad_norm", "valid/loss", "attention/qk_norm_01"):
        assert a[name] == pytest.approx(b[name], rel=1e-4), name
    names = [
        load_plain(run.settings.checkpoint_dir / step_name(4))["state_dict"].keys()
        for run in (compiled, eager)
    ]
    assert names[0] == names[1]
    assert all(block._compiled_call_impl is not None for block in compiled.task.model.blocks)


@pytest.mark.slow
def test_a_sweep_gives_each_run_its_own_folder(tmp_path: Path):
    arguments = (
        "train",
        "--multirun",
        f"data.path={small_dataset()}",
        "name=sweep",
        *SMALL,
        "trainer.max_steps=2",
    )
    result = protperf(*arguments, "model.feedforward_dim=16,24", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    found = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("step=*.ckpt"))
    assert len(found) == 2, found
    for folder in (Path("."), Path("..", "model")):
        models = [load_model(tmp_path / path.parent / folder).model for path in found]
        assert {model.config.feedforward_dim for model in models} == {16, 24}


@pytest.mark.slow(minutes=2)
def test_a_step_of_performer_36l_at_8192_tokens_fits_into_8_gib(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    records = [record for record in read_fasta(SAMPLE) if len(record[1]) > 300][:80]
    data = prepared("long", records, window=8192, valid=0.2, test=0.0)
    command = command_line(
        *("train", "model=performer_36l", f"data.path={data}", "name=large", "data.batch_size=1"),
        *("data.num_workers=0", "data.valid_windows=1", "trainer.accelerator=cpu", "trainer.max_steps=1"),
    )
    subprocess.run(command, cwd=tmp_path, env=clean_environment(tmp_path), check=True, timeout=900)
    metrics = read_metrics(tmp_path / "runs" / "large" / "metrics.csv")
    peak = metrics["train/peak_memory_gib"][1]
    with capfd.disabled():
        print(f"\nperformer_36l, 8,192 tokens, one training step: peak {peak:.2f} GiB")
    assert peak < 8
    assert metrics["valid/loss"][1] < 5
