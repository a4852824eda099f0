"""A protein longer than a model takes is left out, named and listed, and the others are done as if it were not there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from training import small_dataset
from wide_models import save_checkpoint, wide_model

from protperf.embed.__main__ import main as embed
from protperf.formats.manifest import check_lengths, read_manifest
from protperf.generate import main as generate
from protperf.inference.generation import generate as generate_proteins
from protperf.score.__main__ import main as score

HEADER = "file\tline\tid\tcolumn\treason\tfound\n"


@pytest.fixture
def model(tmp_path: Path) -> str:
    network = wide_model("linformer", causal=False, linformer_length=42, linformer_rank=4)
    assert network.max_residues == 40
    return str(save_checkpoint(network, tmp_path / "m.ckpt"))


def fasta(path: Path, end: str = "") -> str:
    """Write three proteins, the second of one residue too many."""
    lengths = {"fits": 40 - bool(end), "long": 41, "short": 3}
    path.write_text("".join(f">{name}\n{'A' * length}{end}\n" for name, length in lengths.items()))
    return str(path)


def listed(path: Path, found: str, source: str) -> None:
    assert (
        path.parent / f"{path.name}.skipped.tsv"
    ).read_text() == f"{HEADER}{source}\t3\tlong\t\ttoo_long_for_model\t{found}\n"


def test_embed(tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]):
    source, out = fasta(tmp_path / "a.fasta"), tmp_path / "e.h5"
    assert embed([model, source, str(out)]) == 3
    assert "2 proteins written, 1 left out" in capsys.readouterr().out
    listed(out, "41 residues", source)
    assert embed([model, source, str(tmp_path / "w.h5"), "--long", "window", "--window", "40"]) == 0
    with pytest.raises(ValueError, match="--window 41: this model takes at most 40 residues"):
        embed([model, source, str(tmp_path / "x.h5"), "--long", "window", "--window", "41"])


def test_score(tmp_path: Path, model: str):
    source, out = fasta(tmp_path / "a.fasta"), tmp_path / "s.tsv"
    assert score([model, source, str(out)]) == 3
    assert [row.split("\t")[0] for row in out.read_text().splitlines()] == ["id", "fits", "short"]
    listed(out, "41 residues", source)


def test_fill(tmp_path: Path, model: str):
    source, out = fasta(tmp_path / "a.fasta", end="<mask>"), tmp_path / "f.fasta"
    assert generate([model, "--fill", source, str(out)]) == 3
    assert out.read_text().count(">") == 2
    listed(out, "42 residues", source)


def test_generation_asks_for_no_more_than_the_model_takes():
    network = wide_model("relu", positions="learned", max_positions=30)
    with pytest.raises(ValueError, match="max_length is 29; allowed: at most 28"):
        next(iter(generate_proteins(network, 1, max_length=29)))


def test_a_dataset_that_may_hold_a_longer_protein_is_refused():
    manifest = read_manifest(Path(small_dataset()))
    splits = {"train": replace(manifest.splits["train"], length_histogram={"54": 3})}  # 54 to 63 residues
    manifest = replace(manifest, splits=splits)
    for most, across, fits in (
        (None, True, True),
        (100, True, True),
        (65, False, True),
        (64, False, False),
        (99, True, False),
    ):
        if fits:
            check_lengths(manifest, "shards", window=100, across=across, most=most)
            continue
        with pytest.raises(
            ValueError, match=f"windows of 100 tokens may hold a document of .*takes {most} at most"
        ):
            check_lengths(manifest, "shards", window=100, across=across, most=most)
