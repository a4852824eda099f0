"""docs/embedding.md tells the truth: its blocks run, in order, after the README's tour."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from checkpoints import make_checkpoint
from conftest import REPOSITORY
from prepared import random_records, write_fasta

from protperf.embed.__main__ import main

TEXT = (REPOSITORY / "docs" / "embedding.md").read_text()
BLOCKS = re.findall(r"^```(bash|python)\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)


def test_the_blocks_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "demo" / "checkpoints").mkdir(parents=True)
    make_checkpoint(tmp_path / "runs" / "demo" / "checkpoints" / "best.ckpt")
    write_fasta(tmp_path / "some.fasta", random_records([30, 50]))
    assert len(BLOCKS) >= 3
    embed = [str(tmp_path / name) for name in ("runs/demo", "some.fasta", "some.h5")]
    assert main([*embed, "--include", "mean", "per_tok"]) == 0  # as in the README
    for language, block in BLOCKS:
        if language == "python":
            exec(block, {})
        for line in block.splitlines() if language == "bash" else ():
            program, command, *arguments = shlex.split(line)
            assert (program, command) == ("protperf", "embed")
            assert main(arguments) == 0, line
    assert (tmp_path / "parts.h5").exists()
    assert len(list(tmp_path.glob("all.*.h5"))) == 3 * 3 + 1
