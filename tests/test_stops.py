"""A run that is told to stop, anywhere, goes on as if it had not been."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
from training import Recorder, assert_same, load_plain, scratch_dir, settings_of, small_dataset, train_small

from protperf.checkpoint import step_name
from protperf.checkpoint.stopping import STOP_SIGNALS, TRY_AGAIN, StopRequest
from protperf.formats.metrics_file import read_metrics
from protperf.train import build_run
from protperf.train.runs import test_best as run_test

OPTIONS = (
    *("trainer.validate_every=6", "trainer.checkpoint_every=4", "trainer.log_every=1"),
    *("trainer.windows_at_once=3", "trainer.redraw_every=5", "trainer.max_steps=14", "data.batch_size=4"),
    "data.valid_sets=[valid,test]",
)
"""Step 12 is validated and saved, 6 only validated, 4 and 8 only saved; 14 is the last."""
STEPS = 14


class Stopper(pl.Callback):
    """Sends this process a signal at a hook of a step."""

    def __init__(self, hook: str, *, step: int, number: int = signal.SIGTERM) -> None:
        self._hook, self._step, self._number = hook, step, number
        self.is_sent = False

    def _at(self, hook: str, trainer: pl.Trainer) -> None:
        if hook == self._hook and trainer.global_step == self._step and not self.is_sent:
            self.is_sent = True
            os.kill(os.getpid(), self._number)

    def on_train_batch_start(self, trainer: Any, *rest: Any) -> None:
        self._at("train batch", trainer)

    def on_before_optimizer_step(self, trainer: Any, *rest: Any) -> None:
        self._at("optimizer", trainer)

    def on_validation_start(self, trainer: Any, *rest: Any) -> None:
        self._at("validation", trainer)

    def on_validation_batch_start(
        self, trainer: Any, module: Any, batch: Any, index: int, loader: int = 0
    ) -> None:
        self._at(f"validation batch {loader}", trainer)

    def on_test_batch_start(self, trainer: Any, *rest: Any) -> None:
        self._at("test batch", trainer)


def start(run_dir: Path, stopper: Stopper | None = None, *more: str) -> tuple[int, Recorder]:
    """Start a run in this process, with real signals; return its exit status too."""
    run_dir.mkdir(parents=True, exist_ok=True)
    with StopRequest() as stop:
        run = build_run(settings_of(run_dir, *OPTIONS, *more), stop)
        recorder = Recorder()
        run.trainer.callbacks.insert(0, recorder)
        if stopper:
            run.trainer.callbacks.insert(0, stopper)
        try:
            run.trainer.fit(run.task, run.data, ckpt_path=run.checkpoint)
        except SystemExit as end:
            return int(str(end.code)), recorder
    return 0, recorder


@pytest.fixture(scope="module")
def whole() -> tuple[Path, Recorder]:
    """The run that never stopped."""
    run_dir = scratch_dir() / "never-stopped"
    return run_dir, start(run_dir)[1]


def assert_goes_on(run_dir: Path, first: Recorder, whole: tuple[Path, Recorder]) -> None:
    """Start a stopped run again; compare every batch, every metric and the end with the run that never stopped."""
    status, second = start(run_dir)
    whole_dir, record = whole
    assert status == 0
    assert first.losses + second.losses == record.losses
    assert first.inputs + second.inputs == record.inputs
    a, b = (load_plain(path / "checkpoints" / step_name(STEPS)) for path in (run_dir, whole_dir))
    for part in ("state_dict", "optimizer_states", "lr_schedulers", "callbacks"):
        assert_same(a[part], b[part], part)
    best = [load_plain(path / "checkpoints" / "best.ckpt")["state_dict"] for path in (run_dir, whole_dir)]
    assert_same(best[0], best[1])
    found, expected = (read_metrics(path / "metrics.csv") for path in (run_dir, whole_dir))
    measured = {"train/tokens_per_second", "train/peak_memory_gib", "train/mfu"}
    assert found.keys() == expected.keys()
    for name in expected.keys() - measured:
        assert found[name] == expected[name], name


@pytest.mark.parametrize(
    ("hook", "step", "saved"),
    [
        ("train batch", 2, 3),
        ("optimizer", 5, 6),  # step 6 is to be validated: the next start owes that
        ("validation", 6, 6),
        ("validation batch 1", 6, 6),  # in the second set
        ("validation batch 0", 12, 12),
        ("optimizer", 11, 12),
        ("train batch", 12, 13),
    ],
)
def test_a_stop_saves_the_step_and_the_next_start_makes_what_is_left(
    hook: str, step: int, saved: int, whole: tuple[Path, Recorder], tmp_path: Path
):
    status, first = start(tmp_path, Stopper(hook, step=step))
    assert status == TRY_AGAIN
    assert (tmp_path / "checkpoints" / step_name(saved)).is_file()
    assert_goes_on(tmp_path, first, whole)


def test_a_second_stop_before_an_owed_validation_is_over_loses_nothing(
    whole: tuple[Path, Recorder], tmp_path: Path
):
    status, first = start(tmp_path, Stopper("optimizer", step=5))
    assert status == TRY_AGAIN
    status, nothing = start(tmp_path, Stopper("validation batch 1", step=6))
    assert status == TRY_AGAIN
    assert not nothing.losses
    assert "valid/loss" not in read_metrics(tmp_path / "metrics.csv")
    assert_goes_on(tmp_path, first, whole)


@pytest.mark.parametrize("hook", ["validation", "validation batch 1"])
def test_the_last_validation_is_finished_whatever_is_asked(
    hook: str, whole: tuple[Path, Recorder], tmp_path: Path
):
    status, record = start(tmp_path, Stopper(hook, step=STEPS))
    assert status == 0
    assert record.losses == whole[1].losses
    assert (
        read_metrics(tmp_path / "metrics.csv")["valid/loss"]
        == read_metrics(whole[0] / "metrics.csv")["valid/loss"]
    )


@pytest.mark.parametrize(("number", "status"), [(signal.SIGUSR1, 75), (signal.SIGINT, 130)])
def test_each_signal_has_its_exit_status(number: int, status: int, tmp_path: Path):
    found, record = start(tmp_path, Stopper("train batch", step=1, number=number))
    assert found == status
    assert len(record.losses) == 2


def test_handlers_are_given_back():
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    with StopRequest() as stop:
        assert not stop.agreed()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stop.agreed()
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before


def test_lightning_handles_no_signal_of_its_own(tmp_path: Path):
    class Watch(pl.Callback):
        def on_train_batch_start(self, *rest: Any) -> None:
            self.handlers = [signal.getsignal(number) for number in STOP_SIGNALS]

    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    run = build_run(settings_of(tmp_path, "trainer.max_steps=1", data=small_dataset()))
    watch = Watch()
    run.trainer.callbacks.append(watch)
    run.trainer.fit(run.task, run.data)
    assert watch.handlers == before


def test_a_stop_in_the_test_is_tried_again(tmp_path: Path):
    with StopRequest() as stop:
        run = build_run(settings_of(tmp_path, "trainer.max_steps=3"), stop)
        run.trainer.callbacks.insert(0, Stopper("test batch", step=3))
        run.trainer.fit(run.task, run.data)
        with pytest.raises(SystemExit) as end:
            run_test(run)
    assert end.value.code == TRY_AGAIN
    assert "test/loss" not in read_metrics(tmp_path / "metrics.csv")
    run, _ = train_small(tmp_path, "trainer.max_steps=3")
    run_test(run)
    assert list(read_metrics(tmp_path / "metrics.csv")["test/loss"]) == [3]
