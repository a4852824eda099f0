"""The short how-to pages tell the truth: their blocks run, or stand in pages whose blocks run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import make_checkpoint
from conftest import REPOSITORY
from pages import blocks_of, run_bash

SEQUENCE = "HPETLVKVKDAEDQLGARVGYIELDLNSGKILESFRPEERFPMMS"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with the masked run that the pages name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "demo" / "checkpoints").mkdir(parents=True)
    make_checkpoint(tmp_path / "runs" / "demo" / "checkpoints" / "best.ckpt")
    return tmp_path


def run_page(page: str, folder: Path) -> dict[str, Any]:
    """Run all blocks in order, the Python ones as one program; return its names."""
    names: dict[str, Any] = {}
    for language, block in blocks_of(page):
        if language == "bash":
            run_bash(block, folder)
        else:
            exec(block, names)
    return names


def test_embeddings_become_data_frames(folder: Path):
    pytest.importorskip("pandas")
    names = run_page("docs/pandas.md", folder)
    assert names["vectors"].shape == (3, 16)
    assert names["frame"].index.tolist() == ["P01308", "P00974", "P0DP23"]
    assert np.allclose(names["likeness"], names["likeness"].T)
    assert names["residues"].shape == (110, 16)


def test_mutations_are_scored(folder: Path):
    run_page("docs/mutations.md", folder)
    effects = (folder / "all_effects.csv").read_text().splitlines()
    assert effects[0] == "mutant,protperf_masked-marginals"
    assert len(effects) == 1 + 19 * len(SEQUENCE) == 856
    assert len((folder / "mutant_effects.csv").read_text().splitlines()) == 4
    header = (folder / "both.csv").read_text().splitlines()[0]
    assert header.endswith("protperf_masked-marginals,protperf_wt-marginals")


def test_esm2_is_taken_in(folder: Path):
    pytest.importorskip("transformers")
    from pretrained_models import make_esm, save

    save(make_esm(), Path("esm2_t6_8M_UR50D"), form="safetensors", vocabulary=None)
    run_page("docs/esm2.md", folder)
    assert (folder / "peptides.h5").is_file()
    assert len((folder / "esm2_effects.csv").read_text().splitlines()) == 3


@pytest.mark.parametrize("page", ["docs/index.md", "docs/resuming.md"])
def test_commands_that_are_not_run_here_run_as_a_part_of_other_pages(page: str):
    run = {
        line
        for other in ("README.md", "docs/training.md")
        for _, block in blocks_of(other)
        for line in block.splitlines()
    }
    shown = [line for _, block in blocks_of(page) for line in block.splitlines()]
    assert len(shown) >= 2
    assert set(shown) <= run


def test_a_test_reads_every_page_that_has_blocks():
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    pages = [path.name for path in (REPOSITORY / "docs").glob("*.md") if blocks_of(f"docs/{path.name}")]
    assert len(pages) > 10
    assert not [page for page in pages if page not in tests]
