"""The batch scripts that users copy, on a real SLURM: datasets and embeddings are those of the bare commands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import slurm
from checkpoints import make_checkpoint
from conftest import REPOSITORY
from prepared import SAMPLE, random_records, shard_bytes, write_fasta
from training import clean_environment

from data_prep.options import PrepareOptions
from data_prep.prepare import prepare
from protperf.embed.__main__ import main as embed
from protperf.formats.embeddings import read_embeddings

pytestmark = pytest.mark.slow

SCRIPTS = REPOSITORY / "docker" / "slurm"
PAGE = (REPOSITORY / "docs" / "docker.md").read_text()


@pytest.fixture(scope="module")
def slurm_variables(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The variables that lead to a SLURM of two nodes, where jobs start as they come."""
    with slurm.start_or_skip(tmp_path_factory.mktemp("slurm"), nodes=2) as environment:
        yield environment


def submit(folder: Path, variables: dict[str, str], *words: str, **more: str) -> set[str]:
    """Submit a job or an array and wait for its end; return the exit codes as SLURM writes them."""
    environment = clean_environment(folder, **variables, PROTPERF=f"{sys.executable} -m protperf", **more)

    def ask(*command: str) -> str:
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, (command, done.stderr)
        return done.stdout

    number = ask("sbatch", "--parsable", "--time=5", *words).strip()
    deadline = time.monotonic() + 120
    while ask("squeue", "--noheader", "--jobs", number):
        assert time.monotonic() < deadline, logs(folder)
        time.sleep(0.2)
    return set(re.findall(r" ExitCode=(\S+)", ask("scontrol", "show", "job", number)))


def merging_line(out: str) -> str:
    """Return what docs/docker.md submits behind the array, as the shell of somebody who has set PROTPERF gives it to sbatch."""
    (written,) = re.findall(r'--wrap (".* --merge proteins\.h5.*")', PAGE)
    variables = {"PATH": os.environ["PATH"], "PROTPERF": f"{sys.executable} -m protperf"}
    line = subprocess.run(
        ["bash", "-c", f"printf %s {written}"], env=variables, capture_output=True, text=True, check=True
    ).stdout
    assert line.startswith(f"srun {sys.executable} ")
    return line.replace("proteins.h5", out)


def logs(folder: Path) -> str:
    return "\n".join(path.read_text() for path in sorted(folder.glob("*.out")))


def test_a_dataset_made_in_a_job_is_the_one_made_without(slurm_variables: dict[str, str], tmp_path: Path):
    options = ("--cpus-per-task=2", "--mem=1G", str(SCRIPTS / "prepare.sbatch"))
    words = (*options, str(SAMPLE), "out", "--window", "256", "--memory", "1G")
    assert submit(tmp_path, slurm_variables, *words) == {"0:0"}, logs(tmp_path)
    prepare([str(SAMPLE)], tmp_path / "whole", PrepareOptions(window=256))
    assert shard_bytes(tmp_path / "out") == shard_bytes(tmp_path / "whole")


def test_an_array_embeds_each_protein_once_and_what_waits_for_it_is_not_held_up_by_records_left_out(
    slurm_variables: dict[str, str], tmp_path: Path
):
    model = make_checkpoint(tmp_path / "model.ckpt")
    write_fasta(tmp_path / "a.fasta", [*random_records([30, 50, 40, 20]), ("bad", "MK*K")])
    options = ("--array=1-2", "--gpus-per-node=0", "--cpus-per-task=1", str(SCRIPTS / "embed_array.sbatch"))
    words = (*options, model.name, "a.fasta", "a.h5")
    assert submit(tmp_path, slurm_variables, *words) == {"0:0"}, logs(tmp_path)
    assert logs(tmp_path).count("is written; the records that it left out are listed beside it") == 2
    assert submit(tmp_path, slurm_variables, "--wrap", merging_line("a.h5")) == {"0:0"}, logs(tmp_path)
    assert embed([str(model), str(tmp_path / "a.fasta"), str(tmp_path / "whole.h5")]) == 3
    (ids, rows), (expected_ids, expected) = (
        read_embeddings(tmp_path / name) for name in ("a.h5", "whole.h5")
    )
    assert ids == expected_ids == ["p0", "p1", "p2", "p3"]
    np.testing.assert_allclose(rows, expected, rtol=1e-4, atol=1e-5)


def test_parts_of_an_unknown_whole_are_refused(slurm_variables: dict[str, str], tmp_path: Path):
    options = ("--array=3,5", "--gpus-per-node=0", "--cpus-per-task=1", str(SCRIPTS / "embed_array.sbatch"))
    assert submit(tmp_path, slurm_variables, *options, "model.ckpt", "a.fasta", "a.h5") == {"2:0"}
    assert logs(tmp_path).count("of how many parts are these? PARTS=N sbatch") == 2


def test_srun_may_be_another_one_as_for_containers(slurm_variables: dict[str, str], tmp_path: Path):
    """Here one that labels lines; pyxis needs options of srun."""
    model = make_checkpoint(tmp_path / "model.ckpt")
    write_fasta(tmp_path / "a.fasta", random_records([30, 50]))
    options = ("--array=2", "--gpus-per-node=0", "--cpus-per-task=1", str(SCRIPTS / "embed_array.sbatch"))
    words = (*options, model.name, "a.fasta", "a.h5")
    codes = submit(tmp_path, slurm_variables, *words, PARTS="2", SRUN="srun --label")
    assert codes == {"0:0"}, logs(tmp_path)
    assert (tmp_path / "a.shard-2-of-2.h5").exists()
    assert "\n0: " in logs(tmp_path)
