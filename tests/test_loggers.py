"""Metrics reach the run's own file always, and Weights & Biases without a key, a network or a question."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest
from training import SMALL, clean_environment, protperf, small_dataset

from protperf.formats.metrics_file import append_metrics, read_metrics
from protperf.loggers import MetricsFile, has_wandb_key, reaches_wandb


def test_metrics_file_keeps_what_earlier_starts_wrote(tmp_path: Path):
    for step, value in ((1, 0.1), (2, 1 / 3), (2, float("inf"))):
        MetricsFile(tmp_path).log_metrics({"loss": value, "x/y": -value}, step=step)
    text = (tmp_path / "metrics.csv").read_text()
    assert text.splitlines()[0] == "step,metric,value"
    assert len(text.splitlines()) == 1 + 6
    assert read_metrics(tmp_path / "metrics.csv")["loss"] == {1: 0.1, 2: float("inf")}


def test_values_come_back_exactly(tmp_path: Path):
    values = {"a": 0.1 + 0.2, "b": 1e-300, "c": 123456789.123456789}
    append_metrics(tmp_path / "m.csv", 7, values)
    assert {name: series[7] for name, series in read_metrics(tmp_path / "m.csv").items()} == values


@pytest.mark.parametrize(
    "rest", ["2", "2,lo", "2,loss", "2,loss,", "2,loss,1", "2,loss,17.25", "2,loss,17.25\r"]
)
def test_a_line_that_a_killed_run_left_unfinished_does_not_count(rest: str, tmp_path: Path):
    path = tmp_path / "m.csv"
    append_metrics(path, 1, {"loss": 3.0})
    whole = path.read_text()
    path.write_text(whole + rest, newline="")
    assert read_metrics(path)["loss"] == {1: 3.0}
    append_metrics(path, 2, {"loss": 2.5})
    assert path.read_text() == whole + "2,loss,2.5\n"


def test_a_damaged_line_is_named(tmp_path: Path):
    path = tmp_path / "m.csv"
    append_metrics(path, 1, {"loss": 3.0})
    path.write_text(path.read_text() + "two,loss,2.5\n3,loss,1.0\n")
    with pytest.raises(ValueError, match=r"m.csv:3: 'two,loss,2.5' is not a line of a metrics file"):
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
    for name in ("WANDB_API_KEY", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    if content is not None:
        (tmp_path / "netrc").write_text(content)
        (tmp_path / "netrc").chmod(0o600)
    assert has_wandb_key() == expected
    monkeypatch.setenv("WANDB_API_KEY", "x")
    assert has_wandb_key()


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


@pytest.mark.slow
def test_wandb_without_key_or_without_network_is_offline_and_goes_on_as_the_same_run(tmp_path: Path):
    arguments = ("train", f"data.path={small_dataset()}", "name=w", "logger=wandb", *SMALL)
    no_way_out = {
        name: "http://127.0.0.1:9" for name in ("http_proxy", "https_proxy", "HTTPS_PROXY", "HTTP_PROXY")
    }
    keys: tuple[dict[str, str], ...] = (
        {},
        {"WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": "http://127.0.0.1:9"},
    )
    for steps, key in zip((10, 20), keys, strict=True):
        result = protperf(*arguments, f"trainer.max_steps={steps}", cwd=tmp_path, **no_way_out, **key)
        assert result.returncode == 0, result.stderr
    run_dir = tmp_path / "runs" / "w"
    run_id = (run_dir / "wandb_id").read_text()
    offline = [path.name for path in (run_dir / "wandb").glob("offline-run-*")]
    assert len(offline) == 2
    assert all(name.endswith(f"-{run_id}") for name in offline)
    assert list(read_metrics(run_dir / "metrics.csv")["train/loss"]) == [10, 20]
