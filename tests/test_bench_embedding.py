"""`protperf bench embedding`: it runs the real command, and its tables say what was measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from prepared import random_records, write_fasta

from protperf.bench.__main__ import main
from protperf.bench.embedding import BARE, EMBED, SINGLE

SMALL = ["model_dim=16", "num_heads=2", "feedforward_dim=32", "num_features=16"]


@pytest.mark.slow
def test_the_command_is_measured_beside_bare_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    fasta = write_fasta(tmp_path / "a.fasta", random_records([40, 300, 90]))
    options = ["--fasta", fasta, "--rounds", "1", "--long", "1", "--longest", "300", "600"]
    argv = ["embedding", "--preset", "tiny", "--layers", "1", *SMALL, *options]
    assert main([*argv, "--json", str(tmp_path / "n.json"), "--plot", str(tmp_path / "figures")]) == 0
    text = capsys.readouterr().out
    assert "of bare passes, %" in text
    assert "times softmax's memory" in text
    numbers = json.loads((tmp_path / "n.json").read_text())
    assert list(numbers["rates"]) == [EMBED, BARE, SINGLE]
    assert all(len(rates) == 1 and min(rates) > 0 for rates in numbers["rates"].values())
    assert set(numbers["long"]) == {"relu", "softmax"}
    assert numbers["longest"]["600"]["memory"] > 1e8
    assert (tmp_path / "figures" / "embedding.png").exists()


def test_a_fasta_that_cannot_be_read_ends_it_in_one_line(tmp_path: Path):
    with pytest.raises(ValueError, match=r"no\.fasta: no such file"):
        main(["embedding", "--preset", "tiny", "--fasta", str(tmp_path / "no.fasta")])
