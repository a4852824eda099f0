"""Several runs on two ranks, started once: each start of two processes costs seconds.

As a program, under torchrun: `ranks.py FILE`, where FILE holds `[[folder, override, ...], ...]`; each rank leaves
`rank-N.json` in each folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from training import PYTHON_PATH, Recorder, clean_environment, scratch_dir, train_small

WORLD_SIZE = 2


def train_on_ranks(cases: list[tuple[Path, tuple[str, ...]]]) -> None:
    """Train each case on two ranks, one after the other, in one pair of processes."""
    path = scratch_dir() / f"cases-{len(list(scratch_dir().iterdir()))}.json"
    path.write_text(json.dumps([[str(run_dir), *overrides] for run_dir, overrides in cases]))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={WORLD_SIZE}", str(Path(__file__)), str(path)]
    environment = clean_environment(scratch_dir(), PYTHONPATH=python_path())
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr


def python_path() -> str:
    """Return a path on which this folder's modules are found too."""
    return os.pathsep.join([PYTHON_PATH, str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])


def told_by(run_dir: Path, rank: int) -> dict[str, Any]:
    """Return what a rank left in a run's folder."""
    return json.loads((run_dir / f"rank-{rank}.json").read_text())


def describe_run(model: torch.nn.Module, recorder: Recorder) -> dict[str, Any]:
    """Return what ranks are compared by."""
    buffers = {name: buffer for name, buffer in model.named_buffers() if buffer.is_floating_point()}
    return {
        "losses": recorder.losses,
        "redraws": recorder.redraws,
        "buffers": {name: hashlib.sha256(b.numpy().tobytes()).hexdigest() for name, b in buffers.items()},
        "buffer_types": sorted({str(buffer.dtype) for buffer in buffers.values()}),
        "parameter_types": sorted({type(parameter).__name__ for parameter in model.parameters()}),
    }


def main() -> None:
    rank = os.environ["RANK"]
    for run_dir, *overrides in json.loads(Path(sys.argv[1]).read_text()):
        run, recorder = train_small(Path(run_dir), *overrides)
        told = describe_run(run.task.model, recorder)
        (Path(run_dir) / f"rank-{rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
