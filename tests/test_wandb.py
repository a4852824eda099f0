"""Weights & Biases, the real client: what is in its file, one run for a run folder, no question, no failure of the run."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TextIO

import pytest
import torch
from prepared import SAMPLE, read_fasta
from training import (
    SMALL,
    WINDOW,
    clean_environment,
    command_line,
    prepared,
    protperf,
    scratch_dir,
    small_dataset,
    start_protperf,
)
from wandb_file import WandbFile, read_wandb
from wandb_server import wandb_server

from protperf import __version__
from protperf.formats.metrics_file import read_metrics
from protperf.loggers.versions import commit_of

pytestmark = pytest.mark.slow

Run = tuple["subprocess.Popen[str]", TextIO]


@cache
def dataset_with_ood() -> Path:
    """Prepare short proteins with a split `ood`."""
    sequences = [s for _, s in read_fasta(SAMPLE) if 40 <= len(s) <= 100][:60]
    records = [(f"p{number}", sequence) for number, sequence in enumerate(sequences)]
    table, held_out = scratch_dir() / "each_its_own.tsv", scratch_dir() / "held_out.txt"
    table.write_text("".join(f"{name}\t{name}\n" for name, _ in records))
    held_out.write_text("".join(f"{name}\n" for name, _ in records[:10]))
    options = {"clusters": str(table), "ood_clusters": str(held_out)}
    return prepared("with_ood", records, window=WINDOW, valid=0.15, test=0.1, **options)


def arguments(*options: str, data: Path | None = None, name: str = "w") -> tuple[str, ...]:
    return ("train", f"data.path={data or small_dataset()}", f"name={name}", "logger=wandb", *SMALL, *options)


def train(cwd: Path, *options: str, data: Path | None = None, **environment: str) -> str:
    """Train with W&B; return what the log said."""
    result = protperf(*arguments(*options, data=data), cwd=cwd, **environment)
    assert result.returncode == 0, result.stderr
    assert "runs/w" in result.stdout.splitlines()
    return result.stderr


def only(run_dir: Path) -> WandbFile:
    [found] = read_wandb(run_dir)
    return found


def test_the_file_holds_configuration_data_code_and_metrics_by_optimizer_step(tmp_path: Path):
    data, more = dataset_with_ood(), small_dataset()
    options = ("trainer.max_steps=20", "trainer.validate_every=10", "data.valid_sets=[valid,ood]")
    options += (f"data.more_paths=['{more}']", "logger.project=proteins", "logger.artifacts=best")
    train(tmp_path, *options, data=data, WANDB_DATA_DIR=str(tmp_path / "staged"))
    run_dir = tmp_path / "runs" / "w"
    found = only(run_dir)
    assert (found.name, found.project, found.exit_code) == ("w", "proteins", 0)
    assert found.run_id == (run_dir / "wandb_id").read_text()

    sections = {key: found.config[key] for key in ("model", "objective", "data", "optim", "trainer")}
    assert sections["model"]["model_dim"] == 16
    assert sections["objective"]["kind"] == "masked"
    assert sections["data"]["valid_sets"] == ["valid", "ood"]
    assert sections["optim"]["learning_rate"] == 1e-2
    assert sections["trainer"]["redraw_every"] == 30
    manifests = {str(path): json.loads((path / "manifest.json").read_text()) for path in (data, more)}
    digests = {path: manifest["digest"] for path, manifest in manifests.items()}
    assert found.config["dataset_digests"] == digests
    versions = found.config["versions"]
    assert (versions["protperf"], versions["torch"]) == (__version__, torch.__version__)

    assert found.artifacts
    assert {json.loads(artifact.metadata)["file"] for artifact in found.artifacts} == {"best.ckpt"}

    assert found.x_axes["*"] == "trainer/global_step"
    own = ("loss", "perplexity", "grad_norm", "learning_rate", "tokens_per_second", "peak_memory_gib")
    names = [f"train/{name}" for name in own]
    names += [f"{split}/{name}" for split in ("valid", "ood") for name in ("loss", "perplexity", "accuracy")]
    metrics = read_metrics(run_dir / "metrics.csv")
    for name in names:
        assert found.series(name) == metrics[name], name
        assert list(metrics[name]) == [10, 20]


def test_the_commit_of_a_clone_is_known_and_marked_if_files_differ(tmp_path: Path):
    def git(*words: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        command = ["git", "-C", str(tmp_path), *identity, *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    assert commit_of(tmp_path) is None
    git("init", "-q")
    (tmp_path / "code.py").write_text("1")
    git("add", "code.py")
    git("commit", "-q", "-m", "one")
    git("tag", "v1")
    assert commit_of(tmp_path) == git("rev-parse", "HEAD")
    (tmp_path / "other.py").write_text("untracked")
    assert commit_of(tmp_path) == git("rev-parse", "HEAD")
    (tmp_path / "code.py").write_text("2")
    assert commit_of(tmp_path) == git("rev-parse", "HEAD") + "-dirty"


def test_without_key_or_network_it_is_offline_says_so_in_one_line_and_goes_on_as_the_same_run(tmp_path: Path):
    key = {"WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": "http://127.0.0.1:9"}
    reasons = {10: ({}, "no API key"), 20: (key, "127.0.0.1:9 does not answer")}
    for steps, (environment, reason) in reasons.items():
        log = train(tmp_path, f"trainer.max_steps={steps}", **environment)
        said = [line for line in log.splitlines() if re.search("w(and|&)b", line, re.IGNORECASE)]
        assert len(said) == 1, said
        assert f"W&B is offline: {reason}" in said[0]
        assert "`wandb sync runs/w/wandb/offline-run-*` sends the run later" in said[0]
    run_dir = tmp_path / "runs" / "w"
    files = read_wandb(run_dir)
    assert [file.run_id for file in files] == [(run_dir / "wandb_id").read_text()] * 2
    assert [list(file.series("train/loss")) for file in files] == [[10], [20]]
    assert [file.config["trainer"]["max_steps"] for file in files] == [10, 20]
    assert list(read_metrics(run_dir / "metrics.csv")["train/loss"]) == [10, 20]


def test_it_never_asks_at_a_terminal(tmp_path: Path):
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        command_line(*arguments("trainer.max_steps=2")),
        cwd=tmp_path,
        env=clean_environment(tmp_path),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    shown = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # how Linux says that nobody has the other end open any more
            break
        shown += part
    os.close(ours)
    assert process.wait(timeout=60) == 0, shown
    assert b"choice" not in shown
    assert b"no API key" in shown
    assert only(tmp_path / "runs" / "w").exit_code == 0


def test_runs_of_one_sweep_are_runs_of_their_own(tmp_path: Path):
    sweep = ("optim.learning_rate=1e-2,1e-3", "trainer.max_steps=10", "-m")
    result = protperf(*arguments(*sweep), cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    files = [only(tmp_path / "runs" / "w" / part) for part in ("0", "1")]
    assert [file.config["optim"]["learning_rate"] for file in files] == [1e-2, 1e-3]
    assert files[0].run_id != files[1].run_id
    for file in files:
        assert list(file.series("train/loss")) == [10]
        assert file.exit_code == 0


def test_a_run_that_is_told_to_stop_is_marked_as_preempted(tmp_path: Path):
    with started(tmp_path, "trainer.max_steps=100000", "trainer.log_every=5") as (process, lines):
        wait_for("step 10/", lines)
        process.send_signal(signal.SIGTERM)
        rest = lines.read()
        assert process.wait(timeout=60) == 75, rest
    found = only(tmp_path / "runs" / "w")
    assert found.preempting
    assert found.exit_code == 75


def test_a_service_that_dies_ends_nothing(tmp_path: Path):
    with started(tmp_path, "trainer.max_steps=100", "trainer.log_every=5") as (process, lines):
        wait_for("step 5/", lines)
        os.kill(service_of(process.pid), signal.SIGKILL)
        rest = lines.read()
        assert process.wait(timeout=60) == 0, rest
    warnings = [line for line in rest.splitlines() if "failed" in line]
    assert len(warnings) == 1
    assert re.search(
        r"W&B failed \(Connection\w+: .*\); training and metrics.csv go on without it", warnings[0]
    )
    assert "Traceback" not in rest
    run_dir = tmp_path / "runs" / "w"
    assert list(read_metrics(run_dir / "metrics.csv")["train/loss"]) == list(range(5, 105, 5))
    assert only(run_dir).exit_code is None


def test_with_a_key_every_start_is_online_and_resumes_the_same_run(tmp_path: Path):
    secret = "5ec2e7a1" * 5
    with wandb_server() as server:
        key = {"WANDB_API_KEY": secret, "WANDB_BASE_URL": server.url}
        said = [
            train(tmp_path, f"trainer.max_steps={steps}", "logger.entity=lab", **key) for steps in (10, 20)
        ]
    assert secret not in "".join(said)
    written = [path for path in (tmp_path / "runs").rglob("*") if path.is_file()]
    assert {"config.yaml", "train.log", "best.ckpt", "config.json"} <= {path.name for path in written}
    assert [path for path in written if secret.encode() in path.read_bytes()] == []
    run_id = (tmp_path / "runs" / "w" / "wandb_id").read_text()
    asked = server.asked["RunResumeStatus"]
    assert [(query["name"], query["project"], query["entity"]) for query in asked] == [
        (run_id, "protperf", "lab")
    ] * 2
    metrics = read_metrics(tmp_path / "runs" / "w" / "metrics.csv")["train/loss"]
    sent = {row["trainer/global_step"]: row["train/loss"] for row in server.rows if "train/loss" in row}
    assert sent == metrics
    assert list(sent) == [10, 20]
    assert server.exit_codes == [0, 0]


def test_a_key_that_the_server_refuses_leaves_the_run_offline(tmp_path: Path):
    with wandb_server() as server:
        server.status = 401
        key = {"WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": server.url}
        log = train(tmp_path, "trainer.max_steps=10", **key)
    assert "W&B is offline: " in log
    assert [10] in [list(file.series("train/loss")) for file in read_wandb(tmp_path / "runs" / "w")]


def test_a_server_that_goes_away_delays_the_end_by_no_more_than_asked(tmp_path: Path):
    with wandb_server() as server:
        key = {"WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": server.url}
        options = ("trainer.max_steps=100", "trainer.log_every=5", "logger.finish_seconds=3")
        with started(tmp_path, *options, **key) as (process, lines):
            wait_for("step 5/", lines)
            server.go_away()
            wait_for("step 100/100", lines)
            last_step = time.monotonic()
            lines.read()
            assert process.wait(timeout=60) == 0
            assert time.monotonic() - last_step < 15
    run_dir = tmp_path / "runs" / "w"
    steps = list(range(5, 105, 5))
    assert list(read_metrics(run_dir / "metrics.csv")["train/loss"]) == steps
    assert list(only(run_dir).series("train/loss")) == steps  # on disk, for `wandb sync`


SEND = """
import sys
from pathlib import Path
from protperf.config import LoggerConfig
from protperf.loggers import CheckpointSender, build_loggers, close_loggers

for artifacts in ("none", "best", "all"):
    folder = Path(sys.argv[1], artifacts)
    folder.mkdir()
    config = LoggerConfig(kind="wandb", artifacts=artifacts)
    loggers = build_loggers(config, run_dir=folder, name="w", settings={})
    send = CheckpointSender(loggers)
    for name, content in (("step=1", "one"), ("best", "two"), ("step=2", "three")):
        path = folder / f"{name}.ckpt"
        path.write_text(content)
        send(path, name == "best")
        path.unlink()
    close_loggers(loggers)
"""


def test_checkpoints_are_artifacts_if_asked_for_and_outlive_their_files(tmp_path: Path):
    command = [sys.executable, "-c", SEND, str(tmp_path)]
    subprocess.run(command, env=clean_environment(tmp_path), cwd=tmp_path, check=True, timeout=120)
    one, two, three = (
        ("step=1.ckpt", "one", False),
        ("best.ckpt", "two", True),
        ("step=2.ckpt", "three", False),
    )
    for artifacts, expected in {"none": [], "best": [two], "all": [one, two, three]}.items():
        found = []
        for artifact in [
            artifact for file in read_wandb(tmp_path / artifacts) for artifact in file.artifacts
        ]:
            run_id = (tmp_path / artifacts / "wandb_id").read_text()
            assert (artifact.type, artifact.name) == ("model", f"model-{run_id}")
            [entry] = artifact.manifest.contents
            assert entry.path == "model.ckpt"
            file = json.loads(artifact.metadata)["file"]
            found.append((file, Path(entry.local_path).read_text(), "best" in artifact.aliases))
        assert found == expected


@contextmanager
def started(cwd: Path, *options: str, **environment: str) -> Iterator[Run]:
    """Start a run in a process of its own; yield it and the lines that it logs, as they come."""
    process = start_protperf(
        *arguments(*options),
        cwd=cwd,
        environment=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    with process:
        assert process.stderr is not None
        try:
            yield process, process.stderr
        finally:
            process.kill()


def wait_for(text: str, lines: Iterable[str]) -> None:
    assert any(text in line for line in lines), f"ended without {text!r}"


def service_of(pid: int) -> int:
    """Return the id of the service process that W&B's client started for a process."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            command = (folder / "cmdline").read_text()
        except OSError:  # it ended meanwhile
            continue
        if parent == pid and "wandb-core" in command:
            return int(folder.name)
    raise AssertionError(f"process {pid} has no wandb-core")
