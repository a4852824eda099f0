"""docs/converting.md tells the truth: its commands run, on small models in the place of those it names."""

from __future__ import annotations

import json
import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest
from conftest import REPOSITORY

pytest.importorskip("transformers")

from pretrained_models import BERT_TOKENS, as_fairseq, make_bert, make_esm, make_roberta, save

from protperf.checkpoint import load_model
from protperf.convert.sources import LAYOUTS

DOCS = (REPOSITORY / "docs" / "converting.md").read_text()
PROTEINS = ">a\nMKTAYIAKQR\n>b\nMKV\n"


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    save(make_esm(), Path("esm2_t6_8M_UR50D"), form="safetensors", vocabulary=None)
    save(make_bert(), Path("AntiBERTy_md_smooth"), form="bin", vocabulary=None)
    Path("vocab.txt").write_text("\n".join(BERT_TOKENS))
    as_fairseq(make_roberta(), Path("sapiens"), name="sapiens_vh")
    for name in ("proteins.fasta", "antibodies.fasta"):
        Path(name).write_text(PROTEINS)
    return tmp_path


def test_the_commands_run_as_written(workplace: Path):
    (block,) = re.findall(r"^```bash\n(.*?)^```$", DOCS, flags=re.MULTILINE | re.DOTALL)
    for line in block.splitlines():
        program, command, *arguments = shlex.split(line)
        assert program == "protperf"
        module = import_module(f"protperf.{command}")
        main = module.main if hasattr(module, "main") else import_module(f"protperf.{command}.__main__").main
        assert main(arguments) == 0
    for name in ("esm2", "sapiens_vh", "antiberty"):
        assert load_model(name).model.config.attention == "softmax"
        assert json.loads((workplace / name / "config.json").read_text())["origin"]
    assert "# ESM-2, 8M\n" in Path("esm2", "model_card.md").read_text()
    assert Path("embeddings.h5").is_file()
    assert Path("likelihoods.csv").is_file()


def test_every_layout_is_in_the_table():
    told = set(re.findall(r"`model_type: (\w+)` \|$", DOCS, flags=re.MULTILINE))
    assert told == {name for name in LAYOUTS if name.islower()}
