"""docs/transferring.md tells the truth: its blocks run, in order, in one folder."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest
from conftest import REPOSITORY
from wide_models import save_checkpoint, wide_model

from protperf.checkpoint import load_model
from protperf.convert import main
from protperf.formats.fasta import SequenceReader
from protperf.vocab import VOCABULARY

DOCS = (REPOSITORY / "docs" / "transferring.md").read_text()
BLOCKS = re.findall(r"^```bash\n(.*?)^```$", DOCS, flags=re.MULTILINE | re.DOTALL)


def test_the_blocks_run_one_after_the_other(
    tmp_path: Path, sample_path: Path, monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("peft")
    monkeypatch.chdir(tmp_path)
    checkpoint = save_checkpoint(wide_model("softmax", causal=False), tmp_path / "m.ckpt")
    assert main([str(checkpoint), "transformer"]) == 0
    records = [record.tokens for record, _ in zip(SequenceReader([sample_path]), range(12), strict=False)]
    Path("proteins.fasta").write_text(
        "".join(f">{i}\n{VOCABULARY.decode(tokens[:60])}\n" for i, tokens in enumerate(records))
    )
    for block in BLOCKS:
        program, command, *arguments = shlex.split(block.replace("\\\n", " "))
        assert (program, command) == ("protperf", "convert")
        assert main(arguments) == 0
    assert {"performer", "tuned", "performer.json"} < set(os.listdir())
    config = load_model("tuned").model.config
    assert (config.attention, config.num_features, config.softmax_layers) == ("oprf", 64, (1,))
