"""Metrics reach the run's own file always; what may fail beside it ends nothing."""

from __future__ import annotations

import contextlib
import logging
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from training import clean_environment, small_dataset

from protperf.formats import FormatError, metrics_file
from protperf.formats.metrics_file import append_metrics, read_metrics
from protperf.loggers import MetricsFile, has_wandb_key, reaches_wandb, wandb_run
from protperf.loggers.guarded import GuardedLogger
from protperf.loggers.wandb_run import first_stop


def test_metrics_file_keeps_what_earlier_starts_wrote(tmp_path: Path):
    for step, value in ((1, 0.1), (2, 1 / 3), (2, float("inf"))):
        MetricsFile(tmp_path).log_metrics({"loss": value, "x/y": -value}, step=step)
    text = (tmp_path / "metrics.csv").read_text()
    assert text.splitlines()[0] == "step,metric,value"
    assert len(text.splitlines()) == 1 + 6
    assert read_metrics(tmp_path / "metrics.csv")["loss"] == {1: 0.1, 2: float("inf")}


def test_values_come_back_exactly(tmp_path: Path):
    values = {"a": 0.1 + 0.2, "b": 1e-300, "c": 123456789.123456789}
    append_metrics(tmp_path / "m.csv", [(7, values)])
    assert {name: series[7] for name, series in read_metrics(tmp_path / "m.csv").items()} == values


@pytest.mark.parametrize(
    "rest", ["2", "2,lo", "2,loss", "2,loss,", "2,loss,1", "2,loss,17.25", "2,loss,17.25\r"]
)
def test_a_line_that_a_killed_run_left_unfinished_does_not_count(rest: str, tmp_path: Path):
    path = tmp_path / "m.csv"
    append_metrics(path, [(1, {"loss": 3.0})])
    whole = path.read_text()
    path.write_text(whole + rest, newline="")
    assert read_metrics(path)["loss"] == {1: 3.0}
    append_metrics(path, [(2, {"loss": 2.5})])
    assert path.read_text() == whole + "2,loss,2.5\n"


def test_a_damaged_line_is_named(tmp_path: Path):
    path = tmp_path / "m.csv"
    append_metrics(path, [(1, {"loss": 3.0})])
    path.write_text(path.read_text() + "two,loss,2.5\n3,loss,1.0\n")
    with pytest.raises(ValueError, match=r"m.csv:3: 'two,loss,2.5' is not a line of a metrics file"):
        read_metrics(path)


def test_an_overlong_line_is_no_line_whatever_its_end(tmp_path: Path):
    path = tmp_path / "m.csv"
    append_metrics(path, [(1, {"loss": 3.0})])
    path.write_text(path.read_text() + "x" * 4096 + "2,loss,2.5\n")
    with pytest.raises(FormatError, match=r"m\.csv:3: '?x+.* is not a line of a metrics file"):
        read_metrics(path)


def test_a_metrics_file_has_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "m.csv"
    append_metrics(path, [(2**63 - 1, {"loss": 3.0})])
    read_metrics(path)
    lines = path.read_text()
    path.write_text(f"{lines}{2**64},loss,2.5\n")  # beyond what a figure can show
    with pytest.raises(ValueError, match=r"m\.csv:3: '18446744073709551616,loss,2\.5' is not a line"):
        read_metrics(path)
    for name, most, rest in (
        ("MOST_LINES", 2, "1,loss,2.5\n"),
        ("_MOST_NAMES", 1, "1,accuracy,0.5\n"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(metrics_file, name, most)
            path.write_text(lines)
            assert read_metrics(path) == {"loss": {2**63 - 1: 3.0}}
            path.write_text(lines + rest)
            with pytest.raises(FormatError, match=r"m\.csv: more than .* lines or .* metrics; give a"):
                read_metrics(path)


@pytest.mark.parametrize("text", ["", "a,b\n", "loss\n1\n"])
def test_another_file_is_refused(text: str, tmp_path: Path):
    (tmp_path / "m.csv").write_text(text)
    with pytest.raises(ValueError, match=r"m.csv:1: not a metrics file"):
        read_metrics(tmp_path / "m.csv")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, False),
        ("machine api.wandb.ai login user password abc\n", True),
        ("machine example.org login user password abc\n", False),
        ("no netrc at all {\n", False),
    ],
)
def test_a_key_is_looked_for_in_netrc(
    content: str | None, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    if content is not None:
        (tmp_path / "netrc").write_text(content)
        (tmp_path / "netrc").chmod(0o600)
    assert has_wandb_key() == expected
    monkeypatch.setenv("WANDB_API_KEY", "x")
    assert has_wandb_key()


@pytest.mark.parametrize("content", [b"", b"a/b c?", b"\0\0", b"x" * 100])
def test_an_id_that_is_none_is_replaced_and_a_good_one_kept(content: bytes, tmp_path: Path):
    (tmp_path / "wandb_id").write_bytes(content)
    new = wandb_run._run_id(tmp_path)
    assert wandb_run._ID.fullmatch(new)
    (tmp_path / "wandb_id").write_text(f"{new}\n")
    assert wandb_run._run_id(tmp_path) == new


def test_a_server_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{port}")
        assert reaches_wandb()
    assert not reaches_wandb()


def test_without_being_asked_for_wandb_is_never_imported(tmp_path: Path):
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from pathlib import Path\n"
        "from training import train_small\n"
        "train_small(Path(sys.argv[2]), 'trainer.max_steps=2', data=Path(sys.argv[3]))\n"
        "print('wandb' in sys.modules)"
    )
    arguments = [str(Path(__file__).parent), str(tmp_path / "run"), str(small_dataset())]
    result = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=clean_environment(tmp_path),
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.split()[-1] == "False"
    assert not list(tmp_path.rglob("*wandb*"))


class Broken(GuardedLogger):
    """Fails at everything."""

    def __init__(self) -> None:
        super().__init__("The service")

    def _log(self, metrics: dict[str, float], step: int) -> None:
        raise ConnectionError("reset\nby peer")

    def _log_images(self, key: str, images: list[np.ndarray], step: int) -> None:
        raise RuntimeError

    def _close(self) -> None:
        raise OSError("gone")


def test_a_service_that_fails_is_warned_of_once_and_ends_nothing(caplog: pytest.LogCaptureFixture):
    logger = Broken()
    for step in range(3):
        logger.log_metrics({"loss": 1.0}, step=step)
        logger.log_image("maps", [], step)
    logger.close()
    [warning] = caplog.messages
    assert warning == (
        "The service failed (ConnectionError: reset by peer); training and metrics.csv go on without it"
    )


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 1 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a small tmpfs")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def fill(disk: Path) -> Path:
    """Take all that is free on a disk, by a file."""
    path = disk / "filler"
    with open(path, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(512))
    return path


def test_reports_that_a_full_disk_refuses_wait_and_are_written_when_there_is_room(
    small_disk: Path, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO)
    logger = MetricsFile(small_disk)
    expected = {step: step + 0.5 for step in range(1, 1001)}
    for step, value in expected.items():
        if step == 400:
            filler = fill(small_disk)
        if step == 800:
            assert max(read_metrics(logger.path)["loss"]) < 799
            filler.unlink()
        logger.log_metrics({"loss": value}, step=step)
    logger.finalize("success")
    assert read_metrics(logger.path) == {"loss": expected}
    assert logger.path.read_text() == "step,metric,value\n" + "".join(
        f"{step},loss,{value}\n" for step, value in expected.items()
    )
    assert len(caplog.messages) == 2
    assert "metrics.csv: No space left on device; reports wait in memory" in caplog.messages[0]
    assert "metrics.csv: written again, with the" in caplog.messages[1]


def test_reports_that_can_never_be_written_are_counted(small_disk: Path, caplog: pytest.LogCaptureFixture):
    fill(small_disk)
    logger = MetricsFile(small_disk)
    for step in range(5):
        logger.log_metrics({"loss": 1.0, "accuracy": 0.5}, step=step)
    logger.finalize("failed")
    assert not logger.path.exists()
    assert len(caplog.messages) == 2
    assert caplog.messages[1].endswith("metrics.csv: 5 reports could not be written")


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, ("api.wandb.ai", 443)),
        ({"WANDB_BASE_URL": "http://wandb.lab:8080"}, ("wandb.lab", 8080)),
        ({"https_proxy": "http://proxy.lab:3128"}, ("proxy.lab", 3128)),
        ({"https_proxy": "proxy.lab:3128"}, ("proxy.lab", 3128)),
        ({"https_proxy": "http://proxy.lab:3128", "no_proxy": "wandb.ai"}, ("api.wandb.ai", 443)),
        ({"http_proxy": "http://proxy.lab:3128"}, ("api.wandb.ai", 443)),
    ],
)
def test_where_only_a_proxy_leads_out_the_proxy_is_what_must_answer(
    environment: dict[str, str], expected: tuple[str, int], monkeypatch: pytest.MonkeyPatch
):
    for name in ("http_proxy", "https_proxy", "no_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.delenv("WANDB_BASE_URL", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert first_stop() == expected
