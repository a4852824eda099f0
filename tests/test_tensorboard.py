"""TensorBoard's files, read back by TensorBoard."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from training import settings_of, train_small

from protperf.formats.metrics_file import read_metrics
from protperf.loggers import TensorBoard, close_loggers
from protperf.train import build_run


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    tags = events.Tags()["scalars"]
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in tags}


def as_float32(value: float) -> float:
    return pytest.approx(value, rel=1e-6)  # TensorBoard keeps single precision


def test_tensorboard_shows_what_metrics_csv_holds_over_all_starts(tmp_path: Path):
    for steps in (20, 40):
        run, _ = train_small(tmp_path, "logger=tensorboard", f"trainer.max_steps={steps}")
        close_loggers(run.trainer.loggers)
    assert len(list((tmp_path / "tensorboard").glob("events.*"))) == 2
    metrics = read_metrics(tmp_path / "metrics.csv")
    shown = scalars(tmp_path / "tensorboard")
    assert shown.keys() == metrics.keys()
    assert list(metrics["train/loss"]) == [10, 20, 30, 40]
    for name, values in metrics.items():
        assert shown[name] == [(step, as_float32(value)) for step, value in values.items()], name


def test_steps_that_are_trained_again_show_their_later_values(tmp_path: Path):
    for first, offset in ((10, 0.0), (30, 100.0)):
        logger = TensorBoard(tmp_path, settings={"model": {"num_layers": 2}})
        for step in range(first, 51, 10):
            logger.log_metrics({"loss": step + offset}, step=step)
        logger.close()
    assert scalars(tmp_path / "tensorboard")["loss"] == [(10, 10), (20, 20), (30, 130), (40, 140), (50, 150)]


def test_nothing_is_lost_that_was_reported_before_a_kill(tmp_path: Path):
    logger = TensorBoard(tmp_path, settings={})
    logger.log_metrics({"loss": 3.0}, step=1)
    assert scalars(tmp_path / "tensorboard")["loss"] == [(1, 3.0)]
    logger.close()


def test_without_the_package_one_line_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("protperf.loggers.tensorboard.find_spec", lambda name: None)
    for kind in ("tensorboard", "both"):
        with pytest.raises(ValueError, match=r"pip install 'protperf\[tensorboard\]'"):
            build_run(settings_of(tmp_path, f"logger={kind}"))
    monkeypatch.setattr("protperf.loggers.tensorboard.find_spec", importlib.util.find_spec)
    build_run(settings_of(tmp_path, "logger=tensorboard"))
