"""docs/tutorial.md tells the truth: every command runs as written, in order, in one empty folder.

The file of proteins is a shorter one, as a reader's own may be; the page's begins with the same.
"""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import pytest
from conftest import REPOSITORY, SAMPLE
from pages import blocks_of, read_page, run_bash
from training import protperf

from protperf.formats.scores import read_scores

PAGE = "docs/tutorial.md"
NUM_PROTEINS = 800


def shorten(path: Path) -> None:
    """Keep the first proteins of the sample, which the page has just copied."""
    assert path.read_bytes() == SAMPLE.read_bytes()
    records = gzip.decompress(path.read_bytes()).split(b"\n>")[:NUM_PROTEINS]
    path.write_bytes(gzip.compress(b"\n>".join(records) + b"\n"))


@pytest.mark.slow(minutes=0.7)
def test_a_file_of_proteins_becomes_a_map(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def run(words: list[str]) -> int:
        return protperf(*words, cwd=tmp_path).returncode

    monkeypatch.chdir(tmp_path)
    for number, (language, block) in enumerate(blocks_of(PAGE)):
        if language == "bash":
            run_bash(block, tmp_path, run)
            if not number:
                shorten(tmp_path / "my_proteins.fasta.gz")
        else:
            exec(block, {})
    for name in ("curve.png", "map.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    alike = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert len(alike) == 6
    assert float(alike[0][0]) == pytest.approx(1)
    scores = read_scores(tmp_path / "scores.json")["valid"]
    assert scores["model"]["perplexity"] < scores["unigram"]["perplexity"]


def test_the_figures_are_there():
    figures = re.findall(r"!\[[^]]+\]\(([^)]+)\)", read_page(PAGE))
    assert len(figures) == 2
    for figure in figures:
        assert (REPOSITORY / "docs" / figure).is_file()
