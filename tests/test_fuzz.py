"""A few seconds of `make fuzz`, with fixed seeds: hostile files end in a result or in one clear line."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import fuzz
import pytest
from fuzz import NAMES
from fuzz_targets import make_shards
from prepared import REPOSITORY

from protperf.formats import FormatError, hdf5_index, npz_reading, one_line
from protperf.formats.foreign import as_format_error, foreign_bytes

INPUTS = {"sequences": 1000, "shards": 1000, "checkpoints": 500, "mutations": 500}


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


def test_the_page_has_the_figures_of_the_whole_run():
    page = (REPOSITORY / "docs" / "security.md").read_text()
    rows = re.findall(r"^\| (\w+) \| ([\d,]+) \| \d+ \| (\d+) \| (\d+) \|$", page, flags=re.MULTILINE)
    assert [row[0] for row in rows] == list(NAMES)
    assert sum(int(row[1].replace(",", "")) for row in rows) >= 200_000
    assert all(int(row[2]) < 1024 and row[3] == "0" for row in rows)


NO_EDIT = [(4, 0, 0, 0)]
"""Nothing is cut out."""


def test_a_mistake_of_ours_is_no_damaged_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    target = make_shards(tmp_path / "whole")
    place = tmp_path / "place"
    place.mkdir()
    assert fuzz.check_whole(target, tmp_path / "checked") == ""
    assert {fuzz.judge(target, kind, NO_EDIT, place) for kind in range(0, 12, 2)} == {""}

    def broken(*_: object) -> bytes:
        raise AttributeError("a plain mistake")

    monkeypatch.setattr(hdf5_index._Heap, "read", broken)
    monkeypatch.setattr(npz_reading, "_info_of", broken)
    found = [fuzz.judge(target, kind, NO_EDIT, place) for kind in range(0, 12, 2)]  # kept files have no heap
    assert sum("AttributeError" in each for each in found) == 4, found
    assert "AttributeError" in fuzz.check_whole(target, tmp_path / "again")


def test_a_mistake_of_ours_is_seen_behind_a_line(tmp_path: Path):
    def raised(mistake: object) -> FormatError:
        with pytest.raises(FormatError) as caught, as_format_error("a file"), foreign_bytes():
            one_line(mistake) if mistake is None else bytes.fromhex(mistake)  # type: ignore[arg-type]
        return caught.value

    assert isinstance(fuzz.own_mistake(raised(None)), TypeError)  # in a line of protperf
    assert fuzz.own_mistake(raised("x")) is None  # of a library


def test_a_reader_that_refuses_whole_files_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    target = make_shards(tmp_path / "whole")

    def refuse(*_: object) -> None:
        raise FormatError(f"{tmp_path}: damaged")

    monkeypatch.setattr(hdf5_index._Heap, "__init__", refuse)
    assert "whole files: FormatError" in fuzz.check_whole(target, tmp_path / "checked")
