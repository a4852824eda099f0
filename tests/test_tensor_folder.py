"""A folder of PyTorch files: what scripts for esm-extract expect, under safe names, with exact labels."""

from __future__ import annotations

import csv
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from embedding_outputs import DIM, HOSTILE_IDS, content, describe, make, write

from protperf.formats import FormatError
from protperf.formats.embeddings import Embedding
from protperf.tensor_folder import INDEX, TensorFolder, check_replaceable, file_name


def load(path: Path) -> dict:
    return torch.load(path, weights_only=True)


def table_of(folder: Path) -> list[dict[str, str]]:
    with open(folder / INDEX, newline="") as file:
        return list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))


def test_a_file_is_the_dict_of_esm_extract(tmp_path: Path):
    """Its keys and shapes: facebookresearch/esm, scripts/extract.py."""
    wanted = [
        ("per_tok", 0),
        ("per_tok", 6),
        ("mean", 0),
        ("mean", 6),
        ("bos", 6),
        ("contacts", 6),
        ("logits", 6),
    ]
    infos = [describe(kind, layer=layer) for kind, layer in wanted]
    generator = np.random.default_rng(0)
    arrays = [generator.standard_normal(info.shape(5), np.float32) for info in infos]
    with TensorFolder(tmp_path / "out", infos) as folder:
        folder.add(0, [Embedding("sp|P1|A_HUMAN", "sp|P1|A_HUMAN x", 5, array) for array in arrays])
    found = load(tmp_path / "out" / "sp|P1|A_HUMAN.pt")
    assert found["label"] == "sp|P1|A_HUMAN"
    assert sorted(found) == [
        "bos_representations",
        "contacts",
        "label",
        "logits",
        "mean_representations",
        "representations",
    ]
    assert list(found["representations"]) == [0, 6]
    assert found["representations"][6].shape == (5, DIM)
    assert found["mean_representations"][0].shape == found["bos_representations"][6].shape == (DIM,)
    assert (found["contacts"].shape, found["logits"].shape) == ((5, 5), (5, 36))
    assert found["representations"][0].dtype == torch.float32
    np.testing.assert_array_equal(found["representations"][6].numpy(), arrays[1])
    np.testing.assert_array_equal(found["contacts"].numpy(), arrays[5])


def test_every_id_comes_back_exactly_from_a_safe_and_unique_name(tmp_path: Path):
    number = 2 * len(HOSTILE_IDS)
    write(tmp_path / "out", "pt", describe(dtype="float16"), range(number))
    rows = table_of(tmp_path / "out")
    assert [int(row["number"]) for row in rows] == list(range(number))
    names = [row["file"] for row in rows]
    assert len({name.lower() for name in names}) == number
    assert sorted(os.listdir(tmp_path / "out")) == sorted([*names, INDEX])
    for name, place in zip(names, range(number), strict=True):
        assert name == os.path.basename(name)
        assert name[0] not in ".-"
        assert len(name.encode()) <= 255
        expected = make(place, describe())
        found = load(tmp_path / "out" / name)
        assert found["label"] == expected.id
        assert torch.equal(found["mean_representations"][-1], torch.from_numpy(expected.array).half())


@pytest.mark.parametrize(
    ("label", "seen", "expected"),
    [
        ("P12345.2", set(), "P12345.2.pt"),
        ("tr|A0A024|X_MOUSE", set(), "tr|A0A024|X_MOUSE.pt"),
        ("P1", {"p1.pt"}, "P1~0000000009.pt"),
        ("a/b", set(), "a_b~0000000009.pt"),
        ("..", set(), "_~0000000009.pt"),
        ("-rf", set(), "rf~0000000009.pt"),
        ("é", set(), "_~0000000009.pt"),
        ("x" * 201, set(), f"{'x' * 200}~0000000009.pt"),
    ],
)
def test_name_of_a_file(label: str, seen: set[str], expected: str):
    assert file_name(label, 9, seen) == expected


@pytest.mark.parametrize("name", ["", "..", ".", "../a.pt", "/tmp/a.pt", "a\0b"])
def test_what_an_interruption_left_names_files_of_its_folder_alone(tmp_path: Path, name: str):
    protein = Embedding("protein", "protein", 5, np.zeros(DIM, np.float32))

    def begin() -> None:
        with TensorFolder(tmp_path / "out", [describe()]) as folder:
            folder.add(0, [protein])
            folder.commit()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        begin()
    (table,) = (
        path for path in (tmp_path / ".out.partial").iterdir() if b"num_residues" in path.read_bytes()
    )
    whole = b"protein.pt\tprotein\tprotein\t"
    changed = f"{name}\tprotein\tprotein{' ' * (len('protein.pt') - len(name))}\t".encode()
    table.write_bytes(table.read_bytes().replace(whole, changed))
    with pytest.raises(FormatError, match=r"names a file outside its folder, '.*'; --force starts out anew$"):
        begin()


def test_only_a_folder_written_here_is_ever_replaced(tmp_path: Path):
    mine = tmp_path / "mine"
    mine.mkdir()
    check_replaceable(mine)
    (mine / "thesis.txt").write_text("dear")
    with pytest.raises(ValueError, match=r"mine: is a folder that holds other things; give a new one"):
        write(mine, "pt", describe(), range(3))
    with pytest.raises(ValueError, match=r"thesis\.txt: is a file; --format pt writes a folder"):
        write(mine / "thesis.txt", "pt", describe(), range(3))
    assert content(mine) == {"thesis.txt": b"dear"}
    write(tmp_path / "out", "pt", describe(), range(5))
    write(tmp_path / "out", "pt", describe(), range(2))
    assert len(table_of(tmp_path / "out")) == 2
    assert sorted(os.listdir(tmp_path)) == ["mine", "out"]


def test_an_interrupted_folder_may_be_begun_anew(tmp_path: Path):
    def fail(number: int) -> None:
        if number == 5:
            raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        write(tmp_path / "out", "pt", describe(), range(9), before_each=fail)
    assert os.listdir(tmp_path) == [".out.partial"]
    assert write(tmp_path / "out", "pt", describe(), range(2), anew=True) == 0
    assert os.listdir(tmp_path) == ["out"]
    assert len(table_of(tmp_path / "out")) == 2
