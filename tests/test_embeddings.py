"""Embedding files: read here as strangers read them (h5py alone), written here as docs/formats.md says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
from fuzz_hdf5 import hostile_hdf5
from prepared import REPOSITORY

from protperf.formats import FormatError
from protperf.formats.embedding_h5 import H5Writer
from protperf.formats.embeddings import (
    Embedding,
    EmbeddingFile,
    EmbeddingInfo,
    read_embeddings,
)
from protperf.vocab import VOCABULARY

HOSTILE_IDS = [
    "a/b",
    ".",
    "..",
    "A.B/..",
    "x:y",
    "x" * 300,
    "prot\u00e9ine\u2014\U0001f9ec",
    "",
    "0",
    "nul\0id\0",
    "a",
    "a",
]


def info(kind: str = "per_tok", model_dim: int = 4) -> EmbeddingInfo:
    return EmbeddingInfo(kind, model_dim, "best.ckpt", "0" * 64, "masked")


def write(path: Path, kind: str, arrays: list[np.ndarray], ids: list[str] | None = None) -> Path:
    with H5Writer(path, info(kind, arrays[0].shape[-1])) as writer:
        for number, array in enumerate(arrays):
            name = ids[number] if ids else f"p{number}"
            writer.add(number, Embedding(name, f"{name} some protein", len(array), array))
    return path


def random_rows(*lengths: int) -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    return [generator.standard_normal((length, 4), np.float32) for length in lengths]


def test_strangers_read_one_dataset_a_protein_at_the_root(tmp_path: Path):
    arrays = random_rows(3, 1, 70)
    path = write(tmp_path / "e.h5", "per_tok", arrays, ["q/1", "q.1", "q/1"])
    with h5py.File(path) as file:  # as biotrainer does
        found = [(dataset.attrs["original_id"], dataset[:]) for dataset in file.values()]
        attributes = dict(file.attrs)
    assert [name for name, _ in found] == ["q/1", "q.1", "q/1"]
    for (_, array), expected in zip(found, arrays, strict=True):
        assert array.dtype == np.float32
        np.testing.assert_array_equal(array, expected)
    assert attributes["format"] == "protperf-embeddings"
    assert attributes["format_version"] == 2
    assert attributes["num_records"] == 3
    assert attributes["fingerprint"] == VOCABULARY.fingerprint


def test_more_than_ten_proteins_stay_in_order(tmp_path: Path):
    path = write(tmp_path / "e.h5", "mean", [np.full(4, i, np.float32) for i in range(120)])
    ids, arrays = read_embeddings(path)
    assert ids == [f"p{i}" for i in range(120)]
    assert [array[0] for array in arrays] == list(range(120))


def test_every_id_comes_back_exactly(tmp_path: Path):
    path = write(tmp_path / "e.h5", "mean", [np.zeros(4, np.float32)] * len(HOSTILE_IDS), HOSTILE_IDS)
    with EmbeddingFile(path) as file:
        assert [each.id for each in file] == HOSTILE_IDS
        assert [each.header for each in file] == [f"{name} some protein" for name in HOSTILE_IDS]


def test_header_of_any_length_is_kept(tmp_path: Path):
    header = "q1 " + "very long " * 20_000
    with H5Writer(tmp_path / "e.h5", info("mean")) as writer:
        writer.add(0, Embedding("q1", header, 9, np.zeros(4, np.float32)))
    with EmbeddingFile(tmp_path / "e.h5") as file:
        assert file[0].header == header
        assert file[0].num_residues == 9
        assert file.info == info("mean")


def test_equal_input_gives_equal_bytes(tmp_path: Path):
    first, second = (write(tmp_path / name, "per_tok", random_rows(5, 6)) for name in ("a.h5", "b.h5"))
    assert first.read_bytes() == second.read_bytes()


def test_file_appears_only_when_it_is_whole(tmp_path: Path):
    path = write(tmp_path / "e.h5", "mean", [np.zeros(4, np.float32)])
    before = path.read_bytes()

    def fail() -> None:
        with H5Writer(path, info("mean")) as writer:
            writer.add(0, Embedding("q", "q", 1, np.ones(4, np.float32)))
            assert path.read_bytes() == before
            raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        fail()
    assert os.listdir(tmp_path) == ["e.h5"]
    assert path.read_bytes() == before


def test_full_disk_is_an_ordinary_error_and_leaves_nothing(tmp_path: Path):
    script = f"""
import resource, sys
sys.path.insert(0, {str(REPOSITORY / "tests")!r})
from pathlib import Path
from test_embeddings import random_rows, write
rows = random_rows(*[100] * int(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 18, 1 << 18))
try:
    write(Path("e.h5"), "per_tok", rows)
except OSError as error:
    print(error)
"""
    for count in (160, 4000):  # where closing the file fails first, and where a protein does
        done = subprocess.run(
            [sys.executable, "-c", script, str(count)],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert "File too large: 'e.h5'" in done.stdout
        assert os.listdir(tmp_path) == []


def test_foreign_damaged_and_newer_files_are_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"none\.h5: no such file"):
        EmbeddingFile(tmp_path / "none.h5")
    text = tmp_path / "text.h5"
    text.write_text("hello")
    whole = write(tmp_path / "whole.h5", "mean", [np.zeros(4, np.float32)] * 3)
    short = tmp_path / "short.h5"
    short.write_bytes(whole.read_bytes()[:-100])
    foreign = tmp_path / "foreign.h5"
    with h5py.File(foreign, "w") as file:
        file["x"] = [1.0]
    for path in (text, short, foreign):
        with pytest.raises(FormatError, match=path.name) as caught:
            EmbeddingFile(path)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("attribute", "value", "message"),
    [
        ("format_version", 3, "update protperf"),
        ("num_records", 5, "promises 5"),
        ("fingerprint", "0" * 64, "another vocabulary"),
    ],
)
def test_what_the_file_says_of_itself_is_checked(tmp_path: Path, attribute: str, value: object, message: str):
    path = write(tmp_path / "e.h5", "mean", [np.zeros(4, np.float32)] * 3)
    with h5py.File(path, "a") as file:
        file.attrs[attribute] = value
    with pytest.raises(ValueError, match=message):
        EmbeddingFile(path)


def test_entry_of_a_wrong_shape_is_refused(tmp_path: Path):
    path = write(tmp_path / "e.h5", "per_tok", random_rows(5))
    with h5py.File(path, "a") as file:
        file["0000000000"].attrs["num_residues"] = 6
    with EmbeddingFile(path) as file, pytest.raises(FormatError, match=r"'0000000000'.*\(5, 4\).*\(6, 4\)"):
        file[0]


def test_unknown_kind_is_refused():
    with pytest.raises(ValueError, match=r"'chain'; allowed: mean, max"):
        info("chain")


def test_hdf5_holds_nothing_that_lies_elsewhere_or_unpacks(tmp_path: Path):
    refused = {}
    for name, path in hostile_hdf5(tmp_path):
        with EmbeddingFile(path) as file, pytest.raises(FormatError, match="entry '0000000000'") as caught:
            file[0]
        refused[name] = str(caught.value).partition("damaged (")[2]
    assert refused["external"] == refused["soft"] == "a link to elsewhere); embed again"
    assert all(refused[name].startswith("its numbers lie in another file") for name in ("storage", "virtual"))
    assert len(refused) == 7
