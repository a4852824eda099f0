"""docs/scoring.md tells the truth: its commands and its Python run, its tables are the methods that there are."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import numpy as np
import pytest
from conftest import REPOSITORY
from test_score import save
from test_scoring import make_model

from protperf.formats.variants import read_mutants, read_variants, rebuild_wild_type
from protperf.inference.mutations import EFFECT_METHODS, effect_tokens
from protperf.inference.scoring import METHODS, passes_of
from protperf.score.__main__ import main

DOCS = (REPOSITORY / "docs" / "scoring.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", DOCS, re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the runs that the document names."""
    monkeypatch.chdir(tmp_path)
    for name, kind in (("demo", "masked"), ("causal", "causal")):
        checkpoint = tmp_path / "runs" / name / "checkpoints" / "best.ckpt"
        checkpoint.parent.mkdir(parents=True)
        save(make_model(kind), checkpoint)
    return tmp_path


def test_commands_run_as_written(folder: Path):
    files, commands = blocks("bash")
    subprocess.run(["bash", "-euc", files], check=True)
    before = set(folder.iterdir())
    for line in commands.splitlines():
        program, command, *argv = shlex.split(line)
        assert (program, command) == ("protperf", "score")
        assert main(argv) == 0
    written = {path.name for path in set(folder.iterdir()) - before}
    assert written == {"likelihoods.csv", "likelihoods.tsv", "assayed.csv", "both.csv", "shifted.tsv"}


def test_python_runs_as_written(folder: Path, capsys: pytest.CaptureFixture[str]):
    high, low = blocks("python")
    exec(high, {})
    *scores, effects = capsys.readouterr().out.splitlines()
    assert [score.partition(" ")[2] for score in scores] == ["(10,)", "(14,)"]
    assert np.isfinite(np.array(effects.strip("[]").split(), float)).sum() == 2
    exec(low, {})
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_costs_are_those_of_the_assay(shared_dir: Path):
    table = read_variants(shared_dir / "data" / "variants" / "BLAT_ECOLX_Jacquier_2013.csv", column="mutant")
    mutants, _ = read_mutants(table, column="mutant", offset=0)
    wild_type = rebuild_wild_type(table, mutants, column="mutated_sequence", offset=0)
    read = [mutant for mutant in mutants if mutant is not None]
    rows = dict(re.findall(r"^\| `([a-z-]+)` \| ([0-9,]+) \|", DOCS, re.MULTILINE))
    assert rows == {name: f"{effect_tokens(wild_type, read, method=name):,}" for name in EFFECT_METHODS}


def test_tables_name_every_method_and_its_model():
    rows = re.findall(r"^\| `([a-z-]+)` \| (masked|causal) \|.*\| ([^|]*) \|$", DOCS, re.MULTILINE)
    rows += re.findall(r"^\| `([a-z-]+)` \| (masked|causal) \| ([^|]*) \|$", DOCS, re.MULTILINE)
    likelihoods, effects = rows[: len(METHODS)], rows[len(METHODS) :]
    assert [row[:2] for row in likelihoods] == list(METHODS.items())
    assert {name: kind for name, kind, _ in effects} == EFFECT_METHODS
    for name, _, passes in likelihoods:
        assert passes_of(300, method=name) == (300 if passes == "L" else int(passes))
