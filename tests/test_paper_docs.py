"""docs/paper.md tells the truth: its tables are those of the JSON files beside it, its commands are understood."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from conftest import REPOSITORY
from pages import indented_blocks

from protperf.bench.arguments import parse
from protperf.bench.paper.arguments import EXPERIMENTS
from protperf.bench.paper.page import fill

PAGE = (REPOSITORY / "docs" / "paper.md").read_text()
RESULTS = sorted((REPOSITORY / "docs" / "paper").glob("*.json"))


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_tables_are_those_of_the_numbers(path: Path):
    numbers = json.loads(path.read_text())
    assert numbers["experiment"] == path.stem
    assert fill(PAGE, numbers, place="docs/paper.md") == PAGE


def test_rows_of_a_table_have_a_cell_for_each_column():
    for table in re.findall(r"(?:^\|.*\n)+", PAGE, flags=re.MULTILINE):
        cells = [len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()]
        assert len(set(cells)) == 1, table


def test_there_is_a_command_and_a_place_for_each_experiment():
    asked = [parse(shlex.split(block)[2:]).experiment for block in indented_blocks(PAGE)]
    assert asked == list(EXPERIMENTS)
    assert re.findall(r"^<!-- (\w+) -->$", PAGE, flags=re.MULTILINE) == list(EXPERIMENTS)
