"""A few seconds of `make fuzz`, with fixed seeds: hostile files end in a result or in one clear line."""

from __future__ import annotations

import os
import pickle
import pickletools
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import fuzz
import pytest
from fuzz import NAMES
from fuzz_checkpoints import edit_pickle
from fuzz_edits import PLACES, Edit, Input, at, edit_bytes, edit_json, edit_text, inputs
from fuzz_hdf5 import place_of
from fuzz_targets import make_shards
from hypothesis import given, seed, settings
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


@pytest.fixture(scope="module")
def drawn() -> list[Input]:
    """The inputs of two children of the run."""
    found: list[Input] = []
    for number in (1, 2):

        @seed(number)
        @settings(max_examples=500, database=None, deadline=None)
        @given(inputs(number))
        def draw(each: Input) -> None:
            found.append(each)

        draw()
    return found


def check_even(counts: Counter[int], things: int) -> None:
    """Each thing is hit as often as the others: within five standard deviations of a binomial."""
    share = sum(counts.values()) / things
    assert share >= 50
    assert all(abs(counts[thing] - share) < 5 * share**0.5 for thing in range(things)), counts


def test_the_numbers_of_an_edit_are_drawn_evenly(drawn: list[Input]):
    edits = [edit for _, chosen in drawn for edit in chosen]
    for index, (end, things) in enumerate(((10, 10), (PLACES, 20), (256, 16), (4, 4))):
        check_even(Counter(edit[index] * things // end for edit in edits), things)
    for things in (5, 6, 8, 11):  # the whole file, how it is packed
        check_even(Counter(kind % things for kind, _ in drawn), things)
    for flag in range(4, 10):
        check_even(Counter(kind >> flag & 1 for kind, _ in drawn), 2)
    assert len(set(map(str, drawn))) == len(drawn)


THINGS = [f"A{number}" for number in range(100, 130)]


def of_bytes(edits: list[Edit]) -> list[int]:
    edited = edit_bytes(bytes(30), [(3, *rest) for _, *rest in edits])
    return [place for place, byte in enumerate(edited) if byte]


def of_json(edits: list[Edit]) -> list[int]:
    edited = edit_json(THINGS, [(5, place, 1, 0) for _, place, *_ in edits])
    return [place for place, each in enumerate(edited) if each == -1]


def of_text(edits: list[Edit]) -> list[int]:
    edited = edit_text(",".join(THINGS), [(2, place, 0, 1) for _, place, *_ in edits])
    return [place for place, each in enumerate(edited.split(",")) if each.islower()]


def of_a_pickle(edits: list[Edit]) -> list[int]:
    edited = edit_pickle(pickle.dumps([*range(30)], 2), [(4, *rest) for _, *rest in edits])
    left = {number for code, number, _ in pickletools.genops(edited + b".") if code.name == "BININT1"}
    return [number for number in range(30) if number not in left]


@pytest.mark.parametrize("places", [of_bytes, of_json, of_text, of_a_pickle])
def test_every_place_of_a_file_is_edited_as_often(
    drawn: list[Input], places: Callable[[list[Edit]], list[int]]
):
    """Also where an input has several edits."""
    check_even(Counter(place for _, chosen in drawn for place in places(chosen)), 30)


def test_an_input_is_the_same_whatever_was_read_before():
    edits = [(5, PLACES // 4, 28, 0), (1, PLACES // 2, 2, 0)]  # [1, 2] for the second, then extended
    assert [edit_json([["a"], ["b"]], edits) for _ in range(2)] == [[["a"], [1, 2, 1, 2]]] * 2


def test_a_place_leads_back_to_its_byte():
    for size in (1, 3, 7236, 147_139, 10**8 + 7):
        for index in {0, size // 3, size // 2, size - 1}:
            assert at(place_of(index, size), size) == index


NO_EDIT = [(4, 0, 0, 0)]
"""Nothing is cut out."""


def test_a_mistake_of_ours_is_no_damaged_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    target = make_shards(tmp_path / "whole")
    place = tmp_path / "place"
    place.mkdir()
    assert fuzz.check_whole(target, tmp_path / "checked") == ""
    assert {fuzz.judge(target, kind, NO_EDIT, place) for kind in range(0, 22, 2)} == {""}

    def broken(*_: object) -> bytes:
        raise AttributeError("a plain mistake")

    monkeypatch.setattr(hdf5_index._Heap, "read", broken)
    monkeypatch.setattr(npz_reading, "_info_of", broken)
    found = [fuzz.judge(target, kind, NO_EDIT, place) for kind in range(0, 22, 2)]  # kept files have no heap
    assert sum("AttributeError" in each for each in found) == 9, found
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
