"""`init_from`: a run that begins with the weights of a trained model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from training import protperf, settings_of, small_dataset, train_small

from protperf.checkpoint import load_model
from protperf.train import build_run

SHAPE = (
    "model.model_dim=32",
    "model.num_heads=2",
    "model.biases=true",
    "model.norm=post",
    "model.dropout=0.1",
)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a short run with exact attention."""
    run_dir = tmp_path_factory.mktemp("teacher")
    train_small(run_dir, "model.attention=softmax", *SHAPE, "trainer.max_steps=2")
    return run_dir


def test_a_run_begins_with_the_weights_and_the_shape_of_a_trained_model(teacher: Path, tmp_path: Path):
    run = build_run(settings_of(tmp_path, f"init_from='{teacher}'"))
    trained = load_model(teacher).model
    assert run.settings.model == trained.config
    for name, value in trained.state_dict().items():
        assert torch.equal(run.task.model.state_dict()[name], value), name


def test_its_attention_may_be_another_with_features_drawn_for_it(teacher: Path, tmp_path: Path):
    swap = ("model.attention=favor", "model.num_features=64", "model.dropout=0")
    run = build_run(settings_of(tmp_path, f"init_from='{teacher}'", *swap))
    trained, own = load_model(teacher).model, run.task.model
    assert (own.config.attention, own.config.dropout, own.config.norm) == ("favor", 0.0, "post")
    weights = own.state_dict()
    assert all(torch.equal(weights[name], value) for name, value in trained.state_dict().items())
    new = weights.keys() - trained.state_dict().keys()
    assert new == {f"blocks.{layer}.attention.projection" for layer in range(own.config.num_layers)}


@pytest.mark.parametrize(("first", "then"), [("masked", "causal"), ("causal", "masked")])
def test_rfa_may_be_asked_in_the_other_direction_with_gates_of_its_own(first: str, then: str, tmp_path: Path):
    rfa = ("model.attention=rfa", "model.num_features=128", *SHAPE)
    train_small(tmp_path / "first", *rfa, f"objective={first}", "trainer.max_steps=1")
    settings = settings_of(tmp_path / "then", f"init_from='{tmp_path / 'first'}'", f"objective={then}")
    own, trained = build_run(settings).task.model.state_dict(), load_model(tmp_path / "first").model
    shared = own.keys() & trained.state_dict().keys()
    assert all(torch.equal(own[name], trained.state_dict()[name]) for name in shared)
    assert any("gate" in name for name in own) == (then == "causal")


def test_a_run_that_goes_on_takes_its_own_checkpoint(teacher: Path, tmp_path: Path):
    begin = f"init_from='{teacher}'"
    whole, _ = train_small(tmp_path / "whole", begin, "trainer.max_steps=4")
    train_small(tmp_path / "halves", begin, "trainer.max_steps=2")
    halves, _ = train_small(tmp_path / "halves", begin, "trainer.max_steps=4")
    weights = halves.task.model.state_dict()
    assert all(torch.equal(weights[name], value) for name, value in whole.task.model.state_dict().items())


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model=tiny", "model=tiny besides init_from=.* which says what the model is; leave model=tiny out"),
        (
            "model.num_layers=3",
            r"its weights were made with model\.num_layers=2, this run has 3; leave the key out",
        ),
        ("model.num_heads=4", r"model\.num_heads=2, this run has 4"),  # which would fit, and answer otherwise
        ("model.attention=reformer", r"has attention 'softmax', this run 'reformer'; .* choose another"),
        ("model.norm=pre", r"model\.norm=post, this run has pre"),
    ],
)
def test_what_does_not_fit_is_named(teacher: Path, tmp_path: Path, override: str, message: str):
    with pytest.raises(ValueError, match=message) as error:
        build_run(settings_of(tmp_path, f"init_from='{teacher}'", override))
    assert "\n" not in str(error.value)


def test_the_command_says_with_what_it_begins(teacher: Path, tmp_path: Path):
    arguments = (f"data.path={small_dataset()}", f"init_from={teacher}", "model.attention=relu")
    small = ("data.num_workers=0", "data.batch_size=2", "trainer.max_steps=1", "trainer.validate_every=1")
    done = protperf("train", "name=swapped", *arguments, *small, "trainer.accelerator=cpu", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"begins with the weights of {teacher / 'checkpoints'}" in done.stderr
    assert "with features of its own" in done.stderr
    assert load_model(tmp_path / "runs" / "swapped").model.config.attention == "relu"
    missing = protperf("train", f"data.path={small_dataset()}", "init_from=nowhere", cwd=tmp_path)
    assert missing.returncode == 1
    assert missing.stderr.strip().splitlines()[-1] == (
        "protperf train: nowhere: no such file or folder; give a .ckpt file, or the folder of a run or a model"
    )
