"""What the tests of training share: small real datasets, small configurations, runs in this process and in others."""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytorch_lightning as pl
import torch
from hydra import compose, initialize_config_module
from prepared import SAMPLE, read_fasta, write_fasta
from warm import WarmProcess

from data_prep.options import PrepareOptions
from data_prep.prepare import prepare
from protperf.train import Run, Settings, build_run, read_settings

WINDOW = 64
LEAN = Path(__file__).parent / "lean"
"""On the path of training processes: they start sooner."""
PYTHON_PATH = os.pathsep.join([str(LEAN), str(LEAN.parents[1])])
"""Of training processes: they run this folder's protperf, whichever is installed."""

SMALL = (
    "model.num_layers=2",
    "model.num_heads=2",
    "model.model_dim=16",
    "model.feedforward_dim=32",
    "model.num_features=8",
    "model.dropout=0.1",
    "data.batch_size=4",
    "data.num_workers=0",
    "optim.learning_rate=1e-2",
    "optim.warmup_steps=10",
    "trainer.accelerator=cpu",
    "trainer.validate_every=1000",
    "trainer.checkpoint_every=1000",
    "trainer.log_every=10",
    "trainer.redraw_every=30",
)
"""Overrides of a model that trains hundreds of steps in seconds, with all that makes exactness hard switched on."""


@cache
def scratch_dir() -> Path:
    """Return a folder that is removed at the end of the process."""
    path = Path(tempfile.mkdtemp(prefix="protperf-tests-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


@cache
def small_dataset() -> Path:
    """Prepare 60 short proteins of the sample, in a few dozen windows of `WINDOW`."""
    records = [record for record in read_fasta(SAMPLE) if 40 <= len(record[1]) <= 100][:60]
    return prepared("small", records, window=WINDOW, valid=0.15, test=0.1)


def prepared(name: str, records: list[tuple[str, str]], **options: Any) -> Path:
    """Prepare records through the real `data_prep`."""
    out = scratch_dir() / name
    prepare([write_fasta(scratch_dir() / f"{name}.fasta", records)], out, PrepareOptions(**options))
    return out


def settings_of(run_dir: Path, *overrides: str, data: Path | None = None) -> Settings:
    """Compose the shipped configuration with `SMALL` and `overrides` through Hydra."""
    where = (f"run_dir='{run_dir}'", f"data.path='{data or small_dataset()}'")
    with initialize_config_module("protperf.conf", version_base="1.3"):
        return read_settings(compose("train", [*where, *SMALL, *overrides]), overrides)


class Recorder(pl.Callback):
    """Writes down what every micro-batch saw and did, exactly."""

    def __init__(self) -> None:
        self.losses: list[str] = []
        self.rates: list[str] = []
        self.inputs: list[bytes] = []
        self.redraws: list[int] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.redraws.append(int(pl_module.model.redraws))
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"].hex())

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.losses.append(outputs["loss"].item().hex())
        self.inputs.append(batch.inputs.numpy().tobytes())


def train_small(run_dir: Path, *overrides: str, data: Path | None = None) -> tuple[Run, Recorder]:
    """Start or go on with a run in this process, as `protperf train` does."""
    run_dir.mkdir(parents=True, exist_ok=True)
    run = build_run(settings_of(run_dir, *overrides, data=data))
    recorder = Recorder()
    run.trainer.callbacks.append(recorder)
    run.trainer.fit(run.task, run.data, ckpt_path=run.checkpoint)
    return run, recorder


def load_plain(path: Path) -> dict[str, Any]:
    """Open a checkpoint as anybody would: nothing in it may need code."""
    return torch.load(path, weights_only=True)


def protperf(*arguments: str | Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the real command line in a process of its own, without a terminal, a key or a home."""
    pipe = subprocess.PIPE
    process = start_protperf(*arguments, cwd=cwd, environment=environment, stdout=pipe, stderr=pipe)
    with process:
        try:
            out, error = process.communicate(timeout=300)
        finally:
            process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, out, error)


def status_of(words: list[str], cwd: Path) -> int:
    """Run the real command line; return its exit status, and say what it said on stderr."""
    result = protperf(*words, cwd=cwd)
    sys.stderr.write(result.stderr)
    return result.returncode


def start_protperf(
    *arguments: str | Path,
    cwd: Path,
    environment: Mapping[str, str] = MappingProxyType({}),
    **streams: Any,
) -> subprocess.Popen[str]:
    """Start the real command line in a process of its own, without a terminal, a key or a home.

    It forks from a process that is warm, but where `environment` says what Python reads before it could.
    """
    is_warm = sys.platform == "linux" and not {"PYTHONPATH", "OMP_NUM_THREADS"} & environment.keys()
    return (WarmProcess if is_warm else subprocess.Popen)(
        command_line(*arguments),
        cwd=cwd,
        env=clean_environment(cwd, **environment),
        text=True,
        **{"stdin": subprocess.DEVNULL, **streams},
    )


def command_line(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "protperf", *map(str, arguments)]


def clean_environment(home: Path, **environment: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB", "PROTPERF"))}
    own = {"HOME": str(home), "OMP_NUM_THREADS": "1", "PYTHONPATH": PYTHON_PATH}
    return {**kept, **own, **environment}


def assert_same(one: Any, other: Any, place: str = "") -> None:
    """Compare two trees of plain values and tensors bit for bit."""
    assert type(one) is type(other), place
    if isinstance(one, dict):
        assert one.keys() == other.keys(), place
        for key in one:
            assert_same(one[key], other[key], f"{place}/{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), place
        for number, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_same(a, b, f"{place}/{number}")
    elif isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype, place
        assert torch.equal(one, other), place
    else:
        assert one == other, place
