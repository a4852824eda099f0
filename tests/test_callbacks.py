"""Around the steps: seeds that are a function of the step, projections redrawn between steps, honest reports."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from training import Recorder, settings_of, train_small

from protperf.callbacks import Redraw, StepSeeds
from protperf.config import ModelConfig
from protperf.formats.metrics_file import read_metrics
from protperf.model import ProteinModel
from protperf.train import build_run

TINY = ModelConfig(
    attention="relu", num_layers=2, num_heads=2, model_dim=8, feedforward_dim=8, num_features=4
)


def projections_of(model: ProteinModel) -> list[torch.Tensor]:
    return [block.attention.projection.clone() for block in model.blocks]


def test_over_2500_steps_at_1000_there_are_exactly_two_redraws():
    model = ProteinModel(TINY, causal=False)
    redraw = Redraw(model, every=1000)
    drawn = [projections_of(model)]
    for batch in range(2500 * 3):  # three batches of gradients make one step
        trainer: Any = SimpleNamespace(global_step=batch // 3)
        redraw.on_train_batch_start(trainer, None, None, batch)
        now = projections_of(model)
        if not all(a.equal(b) for a, b in zip(now, drawn[-1], strict=True)):
            assert batch % 3000 == 0  # a whole number of thousands of steps, never inside a step
            drawn.append(now)
    assert len(drawn) == 1 + 2
    assert int(model.redraws) == 2


def test_redraws_are_a_function_of_seed_layer_and_number_alone():
    straight, jumping = (ProteinModel(TINY, causal=False) for _ in range(2))
    for number in (1, 2, 3):
        straight.redraw_projections(number)
    torch.rand(17)
    jumping.redraw_projections(3)
    for one, other in zip(projections_of(straight), projections_of(jumping), strict=True):
        assert one.equal(other)
    other_seed = ProteinModel(ModelConfig(**{**vars(TINY), "projection_seed": 1}), causal=False)
    other_seed.redraw_projections(3)
    seen = [*projections_of(straight), *projections_of(other_seed)]
    straight.redraw_projections(2)
    seen += projections_of(straight)
    assert all(not a.equal(b) for i, a in enumerate(seen) for b in seen[:i])


def test_zero_never_redraws():
    model = ProteinModel(TINY, causal=False)
    before = projections_of(model)
    Redraw(model, every=0).on_train_batch_start(SimpleNamespace(global_step=10**6), None, None, 0)  # type: ignore[arg-type]
    assert all(a.equal(b) for a, b in zip(before, projections_of(model), strict=True))


class Watch(pl.Callback):
    """Notes the redraw that each validation and each training batch computed with."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int, int]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
        self.seen.append(("train", trainer.global_step, int(pl_module.model.redraws)))

    def on_validation_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
        self.seen.append(("valid", trainer.global_step, int(pl_module.model.redraws)))


def test_no_redraw_in_validation_and_none_before_its_step(tmp_path: Path):
    settings = settings_of(
        tmp_path,
        "trainer.max_steps=8",
        "trainer.redraw_every=3",
        "trainer.validate_every=1",
        "trainer.windows_at_once=2",
        "data.valid_windows=1",
    )
    run = build_run(settings)
    watch = Watch()
    run.trainer.callbacks.append(watch)
    run.trainer.fit(run.task, run.data)
    trained = [redraws for kind, _, redraws in watch.seen if kind == "train"]
    assert trained == [0] * 3 + [1] * 3 + [2] * 2
    for before, after in zip(watch.seen, watch.seen[1:], strict=False):
        if after[0] == "valid":
            assert after[1:] == before[1:]  # validated with what the step was made with
    assert sum(kind == "valid" for kind, _, _ in watch.seen) == 8


def dropped(position: int, *, seed: int = 0, rank: int = 0, before: int = 0) -> torch.Tensor:
    torch.rand(before)
    seeds = StepSeeds(lambda: position, seed=seed)
    seeds.on_train_batch_start(SimpleNamespace(global_rank=rank), None, None, 0)  # type: ignore[arg-type]
    return torch.nn.functional.dropout(torch.ones(64), 0.5)


def test_dropout_is_a_function_of_seed_position_and_rank_and_not_of_history():
    assert dropped(40).equal(dropped(40, before=100))
    others = [
        dropped(40),
        dropped(44),
        dropped(40, seed=1),
        dropped(40, rank=1),
        dropped(0),
        dropped(0, seed=40),
    ]
    assert all(not a.equal(b) for i, a in enumerate(others) for b in others[:i])


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, dict[int, float]], Recorder]:
    run_dir = tmp_path_factory.mktemp("reported")
    options = ("trainer.max_steps=25", "trainer.validate_every=10", "trainer.gradient_clip=1e-3")
    _, recorder = train_small(run_dir, *options, "data.valid_sets=[valid,test]")
    return read_metrics(run_dir / "metrics.csv"), recorder


def test_metrics_come_at_whole_intervals_and_after_the_last_step(
    reported: tuple[dict[str, dict[int, float]], Recorder],
):
    metrics, _ = reported
    names = {
        f"{split}/{name}"
        for split in ("train", "valid", "test")
        for name in ("loss", "perplexity", "accuracy")
    }
    extra = {
        f"train/{name}"
        for name in (
            *("grad_norm", "weight_norm", "learning_rate"),
            *("tokens", "tokens_per_second", "mfu", "peak_memory_gib"),
        )
    }
    norms = {f"attention/qk_norm_{layer:02d}" for layer in range(2)}
    assert metrics.keys() == names | extra | norms
    assert all(list(series) == [10, 20, 25] for series in metrics.values())


def test_perplexity_is_the_exponential_of_the_loss_and_accuracy_a_share(
    reported: tuple[dict[str, dict[int, float]], Recorder],
):
    metrics, _ = reported
    for split in ("train", "valid", "test"):
        for step, loss in metrics[f"{split}/loss"].items():
            assert metrics[f"{split}/perplexity"][step] == pytest.approx(math.exp(loss))
            assert 0 <= metrics[f"{split}/accuracy"][step] <= 1


def test_training_loss_is_that_of_the_interval(reported: tuple[dict[str, dict[int, float]], Recorder]):
    metrics, recorder = reported
    losses = [float.fromhex(loss) for loss in recorder.losses]
    assert min(losses[10:20]) < metrics["train/loss"][20] < max(losses[10:20])
    assert metrics["train/loss"][20] == pytest.approx(
        sum(losses[10:20]) / 10, rel=0.02
    )  # batches ask about as much


def test_gradient_norm_is_measured_before_clipping(reported: tuple[dict[str, dict[int, float]], Recorder]):
    metrics, _ = reported
    assert all(value > 0.1 for value in metrics["train/grad_norm"].values())


def test_speed_and_memory_are_positive(reported: tuple[dict[str, dict[int, float]], Recorder]):
    metrics, _ = reported
    assert all(value > 0 for value in metrics["train/tokens_per_second"].values())
    assert all(0.05 < value < 64 for value in metrics["train/peak_memory_gib"].values())


@pytest.mark.parametrize("attention", ["relu", "oprf"])
def test_no_pass_through_the_model_holds_more_windows_than_may_be_computed_at_once(
    attention: str, tmp_path: Path
):
    options = (
        "trainer.max_steps=4",
        "trainer.redraw_every=2",
        "trainer.validate_every=2",
        "data.batch_size=8",
    )
    run = build_run(
        settings_of(tmp_path, *options, "trainer.windows_at_once=2", f"model.attention={attention}")
    )
    seen: set[int] = set()
    run.task.model.register_forward_pre_hook(lambda module, arguments: seen.add(len(arguments[0])))
    run.trainer.fit(run.task, run.data)
    assert max(seen) == 2


def test_a_loss_that_is_no_number_stops_training_with_what_to_do(tmp_path: Path):
    steep = (
        "optim.learning_rate=1e30",
        "optim.warmup_steps=0",
        "trainer.max_steps=20",
        "trainer.log_every=5",
    )
    with pytest.raises(ValueError, match=r"the loss is .* at step 5: .* lower optim.learning_rate") as error:
        train_small(tmp_path, *steep)
    assert "\n" not in str(error.value)
