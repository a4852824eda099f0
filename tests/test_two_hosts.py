"""torchrun on two hosts: one run on both, which is the run of one host, also after a host was lost."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import IO

import pytest
from hosts import PORT, Host, two_hosts
from test_resume import assert_same_run
from training import SMALL, clean_environment, command_line, protperf, scratch_dir, small_dataset

from protperf.checkpoint import step_checkpoints, step_name, step_of
from protperf.formats.metrics_file import read_metrics

pytestmark = pytest.mark.slow

STEPS = 80
OPTIONS = (
    "trainer=ddp",
    "logger=none",
    f"trainer.max_steps={STEPS}",
    "trainer.log_every=1",
    "trainer.validate_every=100000",
    "trainer.checkpoint_every=20",
)


@pytest.fixture
def both() -> Iterator[tuple[Host, Host]]:
    """Two hosts joined by a cable."""
    with two_hosts() as hosts:
        yield hosts


def arguments(name: str) -> list[str]:
    return ["train", f"data.path={small_dataset()}", f"name={name}", *SMALL, *OPTIONS]


@cache
def on_one_host() -> Path:
    """A run of two ranks on one host."""
    folder = scratch_dir() / "on-one-host"
    folder.mkdir()
    result = protperf(*arguments("whole"), "trainer.devices=2", cwd=folder)
    assert result.returncode == 0, result.stderr
    return folder / "runs" / "whole"


def torchrun(folder: Path, log: IO[str], *options: str, host: Host | None = None) -> subprocess.Popen[bytes]:
    """Start torchrun with the run called mine, on a host or here."""
    program = [sys.executable, "-m", "torch.distributed.run", *options]
    command = [*program, *command_line(*arguments("mine"))[1:]]
    return subprocess.Popen(
        host.command(*command) if host else command,
        cwd=folder,
        env=clean_environment(folder, **(host.variables() if host else {})),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
    )


def join(both: tuple[Host, Host], host: Host, folder: Path, log: IO[str]) -> subprocess.Popen[bytes]:
    """Start torchrun on one of the hosts; the first one holds the list of those that have come."""
    is_first = host == both[0]
    return torchrun(
        folder,
        log,
        *("--nnodes=2", "--nproc-per-node=1", "--max-restarts=3", "--rdzv-backend=c10d", "--rdzv-id=mine"),
        f"--rdzv-endpoint={both[0].address}:{PORT}",
        f"--rdzv-conf=is_host={int(is_first)},keep_alive_interval=1",
        f"--local-addr={host.address}",
        host=host,
    )


def check_end(folder: Path, processes: list[subprocess.Popen[bytes]], logs: list[IO[str]]) -> None:
    """Wait for the end; check that it is that of one host."""
    try:
        statuses = [process.wait(120) for process in processes]
    finally:
        said = "\n\n".join(Path(log.name).read_text() for log in logs)
    assert statuses == [0] * len(processes), said
    assert [path.name for path in (folder / "runs").iterdir()] == ["mine"]
    run_dir = folder / "runs" / "mine"
    assert_same_run(run_dir, on_one_host(), STEPS)
    assert list(read_metrics(run_dir / "metrics.csv")["train/loss"]) == list(range(1, STEPS + 1))


def wait_for(condition, *processes: subprocess.Popen[bytes], log: IO[str], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert all(process.poll() is None for process in processes), Path(log.name).read_text()
        assert time.monotonic() < end, Path(log.name).read_text()
        time.sleep(0.02)


@pytest.fixture
def logs(tmp_path: Path) -> Iterator[list[IO[str]]]:
    """Files for what processes say."""
    with ExitStack() as stack:
        yield [stack.enter_context(open(tmp_path / name, "w")) for name in ("a.log", "b.log")]


def test_two_hosts_are_one_and_a_lost_one_that_comes_back_costs_the_steps_since_the_last_checkpoint(
    both: tuple[Host, Host], tmp_path: Path, logs: list[IO[str]]
):
    first = join(both, both[0], tmp_path, logs[0])
    lost = join(both, both[1], tmp_path, logs[1])
    checkpoint = tmp_path / "runs" / "mine" / "checkpoints" / step_name(40)
    wait_for(checkpoint.exists, first, lost, log=logs[0])
    both[1].kill()
    lost.wait()
    back = join(both, both[1], tmp_path, logs[1])
    check_end(tmp_path, [first, back], logs)
    said = (tmp_path / "a.log").read_text()
    assert said.count("first start") == said.count("going on from runs/mine/checkpoints/step=") == 1


def test_one_rank_told_to_stop_stops_all_with_a_checkpoint(tmp_path: Path, logs: list[IO[str]]):
    one_host = ("--standalone", "--nproc-per-node=2", "--max-restarts=0")
    process = torchrun(tmp_path, logs[0], *one_host)
    metrics = tmp_path / "runs" / "mine" / "metrics.csv"
    wait_for(metrics.exists, process, log=logs[0])
    ranks = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True)
    pid = max(map(int, ranks.stdout.split()))
    subprocess.run(["kill", f"-{signal.SIGTERM.value}", str(pid)], check=True)
    assert process.wait(60) == 1  # torchrun's own status, whatever its processes' is
    (reached,) = map(step_of, step_checkpoints(metrics.parent / "checkpoints"))
    assert 0 < reached < STEPS
    again = torchrun(tmp_path, logs[0], *one_host)
    check_end(tmp_path, [again], logs)
    assert f"step={reached:08d}.ckpt" in (tmp_path / "a.log").read_text()
