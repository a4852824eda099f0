"""The batch script that users copy, on a real SLURM: whatever stops a job, the run that goes on is the run that never stopped."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
import slurm
from omegaconf import OmegaConf
from programs import skip
from test_resume import assert_same_run
from training import SMALL, clean_environment, load_plain, protperf, scratch_dir, small_dataset

from protperf.checkpoint import step_checkpoints, step_name, step_of
from protperf.formats.metrics_file import read_metrics

pytestmark = pytest.mark.slow(minutes=0.5)

REPOSITORY = Path(__file__).resolve().parents[1]
SCRIPT = REPOSITORY / "docker" / "slurm" / "train.sbatch"
STEPS = 240
ARGUMENTS = (
    f"trainer.max_steps={STEPS}",
    "trainer.log_every=1",
    "trainer.validate_every=100000",
    "trainer.checkpoint_every=100000",
    "data.num_workers=1",
    "logger=wandb",
)
"""Nothing is saved but by a stop; each step's loss is in metrics.csv."""

ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")


@pytest.fixture(scope="module")
def slurm_variables(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The variables that lead to a SLURM of two nodes."""
    with slurm.start_or_skip(tmp_path_factory.mktemp("slurm"), nodes=2, kill_wait=20) as environment:
        yield environment


class Job:
    """A job of the batch script in the queue."""

    def __init__(
        self,
        folder: Path,
        variables: dict[str, str],
        *options: str,
        name: str = "",
        program: str = f"{sys.executable} -m protperf",
    ) -> None:
        self.environment = clean_environment(
            folder,
            **variables,
            PROTPERF=program,
            MASTER_ADDR="127.0.0.1",  # the names of the nodes are nobody's
            MASTER_PORT=str(slurm.free_ports(1)[0]),
        )
        self.folder = folder
        limits = ("--gpus-per-node=0", "--cpus-per-task=1", "--time=30", *options)
        arguments = (
            f"data.path={small_dataset()}",
            *SMALL,
            *ARGUMENTS,
            *([f"++name={name}"] if name else []),
        )
        said = self.ask("sbatch", "--parsable", *limits, str(SCRIPT), *arguments)
        self.number = said.strip()
        self.run_dir = folder / "runs" / (name or f"protperf-{self.number}")

    def ask(self, *command: str) -> str:
        """Return what a SLURM command prints."""
        done = subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, (command, done.stderr)
        return done.stdout

    def field(self, name: str) -> str:
        """Return one of the values that SLURM knows of the job."""
        words = self.ask("scontrol", "show", "job", self.number).split()
        return next(word.partition("=")[2] for word in words if word.startswith(f"{name}="))

    def log(self) -> str:
        """Return what the job has said in all its starts."""
        path = self.folder / f"protperf-{self.number}.out"
        return path.read_text() if path.exists() else ""

    def wait_for_end(self) -> None:
        """Wait until the job has come to its end, whichever."""
        deadline = time.monotonic() + 120
        while (now := self.field("JobState")) not in ENDED:
            assert time.monotonic() < deadline, (now, self.log())
            time.sleep(0.2)

    def start_again(self) -> None:
        """Wait for the next start of a requeued job, without the two minutes for which SLURM holds it."""
        deadline = time.monotonic() + 60
        while (now := self.field("JobState")) != "RUNNING":
            assert time.monotonic() < deadline, (now, self.log())
            assert now not in ENDED, (now, self.log())
            if now == "PENDING" and self.field("Reason") == "BeginTime":
                # a node takes a job anew only some seconds after it was told that the one before is revoked
                time.sleep(3)
                self.ask("scontrol", "update", f"jobid={self.number}", "StartTime=now")
            time.sleep(0.2)

    def wait_for_step(self, step: int) -> None:
        """Wait until the run has reported a step."""
        deadline = time.monotonic() + 120
        path = self.run_dir / "metrics.csv"
        while not path.exists() or max(read_metrics(path).get("train/loss", {0: 0.0})) < step:
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.1)

    def stop(self, *command: str, restarts: int) -> int:
        """Have the job stopped and wait for its next start; return the step that its checkpoint is of."""
        self.ask(*command, self.number)
        deadline = time.monotonic() + 60
        while int(self.field("Restarts")) < restarts:
            assert time.monotonic() < deadline, self.log()
            assert self.field("JobState") not in ENDED, self.log()
            time.sleep(0.2)
        self.start_again()
        return max(map(step_of, step_checkpoints(self.run_dir / "checkpoints")))


@cache
def uninterrupted() -> Path:
    """A run of two ranks that Lightning starts, without SLURM."""
    folder = scratch_dir() / "without-slurm"
    folder.mkdir()
    two = ("trainer=ddp", "trainer.devices=2", "name=whole")
    result = protperf("train", f"data.path={small_dataset()}", *SMALL, *ARGUMENTS, *two, cwd=folder)
    assert result.returncode == 0, result.stderr
    return folder / "runs" / "whole"


def check_run(job: Job, stops: list[int]) -> None:
    """Check that a job ended with the run that nothing stopped, in one folder and one W&B run."""
    job.wait_for_end()
    assert job.field("JobState") == "COMPLETED", job.log()
    assert stops == sorted(set(stops))
    assert all(0 < step < STEPS for step in stops), stops
    assert int(job.field("Restarts")) == len(stops)
    log = job.log()
    for step in stops:
        assert f"going on from runs/{job.run_dir.name}/checkpoints/step={step:08d}.ckpt" in log
    assert log.count("first start") == 1
    assert os.listdir(job.folder / "runs") == [job.run_dir.name]
    assert_same_run(job.run_dir, uninterrupted(), STEPS)
    assert list(read_metrics(job.run_dir / "metrics.csv")["train/loss"]) == list(range(1, STEPS + 1))
    run_id = (job.run_dir / "wandb_id").read_text()
    offline = [path.name for path in (job.run_dir / "wandb").glob("offline-run-*")]
    assert len(offline) == len(stops) + 1
    assert all(name.endswith(f"-{run_id}") for name in offline)


def test_a_job_on_two_nodes_told_to_stop_and_then_taken_away_goes_on_as_if_nothing_had_been(
    slurm_variables: dict[str, str], tmp_path: Path
):
    """By the signal that SLURM sends before the time limit, and by pre-emption's SIGTERM."""
    job = Job(tmp_path, slurm_variables, "--nodes=2", "--ntasks-per-node=1")
    job.wait_for_step(31)
    stops = [job.stop("scancel", "--signal=USR1", restarts=1)]
    job.wait_for_step(stops[0] + 20)
    stops.append(job.stop("scontrol", "requeue", restarts=2))
    check_run(job, stops)
    assert job.log().count("queued again") == 1
    assert job.run_dir.name == f"protperf-{job.number}"


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ("exit 75", 75, "no new checkpoint in runs/mine/checkpoints: not queued again"),
        ('exit "$SLURM_PROCID"', 1, ""),
        ("kill -KILL $$", 137, ""),
    ],
)
def test_a_job_that_got_nowhere_is_not_queued_again(
    body: str, status: int, said: str, slurm_variables: dict[str, str], tmp_path: Path
):
    (tmp_path / "program.sh").write_text(f"{body}\n")
    (tmp_path / "runs" / "mine" / "checkpoints").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "checkpoints" / "step=00000007.ckpt").touch()
    job = Job(
        tmp_path, slurm_variables, "--ntasks-per-node=2", name="mine", program=f"bash {tmp_path}/program.sh"
    )
    job.wait_for_end()
    assert job.field("JobState") == "FAILED"
    assert job.field("ExitCode") == f"{status}:0"
    assert job.field("Restarts") == "0"
    assert said in job.log()


def test_a_folder_that_only_hydra_could_name_is_refused_at_once(tmp_path: Path):
    variables = {"PATH": os.environ["PATH"], "SLURM_JOB_NAME": "protperf", "SLURM_JOB_ID": "1"}
    command = ["bash", str(SCRIPT), "name=mine", "+run_dir=runs/${name}"]
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("train.sbatch: the run's folder is runs/${name}: write it out; ")


def test_a_sweep_trains_each_run_in_a_job_of_its_own(slurm_variables: dict[str, str], tmp_path: Path):
    if find_spec("hydra_plugins.hydra_submitit_launcher") is None:
        skip("sweeps on SLURM need `pip install 'protperf[cluster]'`")
    result = protperf(
        *(
            "train",
            "--multirun",
            "hydra/launcher=submitit_slurm",
            "name=sweep",
            f"data.path={small_dataset()}",
        ),
        *(*SMALL, "trainer=ddp", "trainer.max_steps=12", "model.feedforward_dim=16,-1"),
        *("hydra.launcher.tasks_per_node=2", "hydra.launcher.cpus_per_task=1", "hydra.launcher.mem_gb=2"),
        *("hydra.launcher.timeout_min=10", "hydra.launcher.array_parallelism=1"),
        cwd=tmp_path,
        MASTER_ADDR="127.0.0.1",
        PYTHONPATH=str(REPOSITORY),
        **slurm_variables,
    )
    said = result.stderr.splitlines()
    assert result.returncode == 1, said
    assert said[-1].startswith("protperf train: ModelConfig.feedforward_dim is -1; allowed: "), said[-3:]
    folder = tmp_path / "runs" / "sweep" / "0"
    config = OmegaConf.load(folder / "config.yaml")
    assert config.model.feedforward_dim == 16
    assert (config.trainer.devices, config.trainer.num_nodes, config.trainer.strategy) == (2, 1, "ddp")
    weight = load_plain(folder / "checkpoints" / step_name(12))["state_dict"]
    assert 16 in {size for value in weight.values() for size in value.shape}
    assert not list((tmp_path / "runs" / "sweep" / "1").rglob("*.ckpt"))
