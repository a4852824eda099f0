"""The pods of docker/kubernetes/train.yaml, as processes here: they meet, and a stop of one is a stop of all with a checkpoint."""

from __future__ import annotations

import signal
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import REPOSITORY
from slurm import free_ports
from training import SMALL, clean_environment, command_line, small_dataset

from protperf.checkpoint import step_checkpoints, step_name
from protperf.formats.metrics_file import read_metrics

pytestmark = pytest.mark.slow

_, JOB = yaml.safe_load_all((REPOSITORY / "docker" / "kubernetes" / "train.yaml").read_text())
HERE = ("trainer.devices=1", "model=tiny", *SMALL, "trainer.windows_at_once=1", "trainer.max_steps=100000")
"""What is another thing on this machine than on that of the manifest, besides the dataset."""


def start_pod(index: int, folder: Path, port: int, stack: ExitStack) -> subprocess.Popen[str]:
    """Start what the manifest's container does, as the pod of this number."""
    (container,) = JOB["spec"]["template"]["spec"]["containers"]
    environment = {each["name"]: value_of(each, index) for each in container["env"]}
    assert environment.keys() >= {"NODE_RANK", "MASTER_ADDR", "MASTER_PORT"}
    environment |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }  # the service's name is nobody's here
    process = subprocess.Popen(
        command_line(*container["args"], *HERE, f"data.path={small_dataset()}"),
        cwd=folder,
        env=clean_environment(folder, **environment),
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    stack.enter_context(process)
    stack.callback(process.kill)
    return process


def value_of(variable: dict[str, Any], index: int) -> str:
    """Return what Kubernetes makes of a variable in the pod of this number."""
    if "value" in variable:
        return variable["value"]
    assert (
        variable["valueFrom"]["fieldRef"]["fieldPath"]
        == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    )
    return str(index)


def test_a_pod_that_is_told_to_stop_stops_all_of_them_with_a_checkpoint_and_status_75(tmp_path: Path):
    assert JOB["spec"]["completions"] == JOB["spec"]["parallelism"] == 2
    (port,) = free_ports(1)
    metrics = tmp_path / "runs" / "mine" / "metrics.csv"
    with ExitStack() as stack:
        pods = [start_pod(index, tmp_path, port, stack) for index in range(2)]
        deadline = time.monotonic() + 120
        while not metrics.exists() or not read_metrics(metrics).get("train/loss"):
            assert all(pod.poll() is None for pod in pods), [pod.communicate() for pod in pods]
            assert time.monotonic() < deadline
            time.sleep(0.1)
        pods[1].send_signal(signal.SIGTERM)
        said = [pod.communicate(timeout=60)[1] for pod in pods]
    assert [pod.returncode for pod in pods] == [75, 75], said
    (checkpoint,) = step_checkpoints(metrics.parent / "checkpoints")
    assert f"stopped by another rank after step {int(checkpoint.stem.partition('=')[2]):,}" in said[0]
    assert checkpoint.name == step_name(int(checkpoint.stem.partition("=")[2]))
