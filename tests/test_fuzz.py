"""A few seconds of `make fuzz`, with fixed seeds: hostile files end in a result or in one clear line."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from fuzz import NAMES
from prepared import REPOSITORY

INPUTS = {"sequences": 2000, "shards": 1500, "checkpoints": 800, "mutations": 1000}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_hostile_files_end_in_a_result_or_in_one_clear_line(name: str):
    """Seeds are those of the first children of `make fuzz`, so that a longer run begins with what CI has seen."""
    command = [sys.executable, "tests/fuzz.py", "--inputs", str(INPUTS[name]), "--target", name]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    header, figures = done.stdout.splitlines()
    assert header.split()[:2] == ["reader", "inputs"]
    assert figures.split()[0] == name
    assert int(figures.split()[1].replace(",", "")) == INPUTS[name]
