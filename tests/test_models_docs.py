"""docs/models.md tells the truth: its blocks run, in order, in one folder."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
from conftest import REPOSITORY
from training import small_dataset, train_small

from protperf.checkpoint import load_model
from protperf.train import runs

DOCS = (REPOSITORY / "docs" / "models.md").read_text()
BLOCKS = re.findall(r"^```(bash|python)\n(.*?)^```$", DOCS, flags=re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    run, _ = train_small(folder / "runs" / "demo", "trainer.max_steps=4", "trainer.validate_every=4")
    runs.share_best(run)
    (folder / "shards").symlink_to(small_dataset())
    return folder


def test_the_blocks_run_one_after_the_other(workplace: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("transformers")
    monkeypatch.chdir(workplace)
    torch.manual_seed(0)
    for language, block in BLOCKS:
        if language == "python":
            exec(block, {})
            continue
        program, command, *arguments = shlex.split(block)
        assert program == "protperf"
        assert import_module(f"protperf.{command}").main(arguments) == 0
    assert sorted(os.listdir()) == ["my_model", "runs", "scores.json", "scores.png", "shards", "tuned"]
    card = Path("my_model", "model_card.md").read_text()
    assert "# My first model\n" in card
    assert "| valid | unigram |" in card
    before, after = (load_model(name).model.embedding.weight for name in ("my_model", "tuned"))
    assert not before.equal(after)


def test_transformers_alone_says_what_the_page_quotes(workplace: Path):
    pytest.importorskip("transformers")
    quoted = re.search(r"(?<=\n\n)```\n(.*?)^```$", DOCS, flags=re.MULTILINE | re.DOTALL)[1].splitlines()
    code = """
import sys
from transformers import AutoModel, AutoTokenizer
for opener in AutoModel, AutoTokenizer:
    try:
        opener.from_pretrained(sys.argv[1])
    except ValueError as error:
        print(error)
"""
    folder = workplace / "runs" / "demo" / "model"
    done = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True)
    assert all(line in done.stdout for line in quoted), done.stdout + done.stderr
    assert len(quoted) == 2
