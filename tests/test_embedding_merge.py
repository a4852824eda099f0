"""Shards of strangers that cannot be merged: one line that names the file, whatever they claim."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from embedding_outputs import describe

from protperf.formats import FormatError
from protperf.formats.embedding_merge import WRITERS, check_shards, merge_embeddings, open_embeddings
from protperf.formats.embeddings import Embedding, sequence_key

VECTOR = np.ones(4, np.float32)
KEYS = [sequence_key(residues) for residues in ("MK", "MA", "MT")]


def shards(folder: Path, name: str, keys: str = "number") -> list[Path]:
    """Write two shards, with the records 0 and 1 and the record 2."""
    paths = []
    for shard, numbers in enumerate([(0, 1), (2,)]):
        path = folder / f"{name}{shard}"
        with WRITERS[name](path, describe(keys=keys, shard=shard, num_shards=2)) as writer:
            for number in numbers:
                key = KEYS[number] if keys == "sequence" else ""
                writer.add(number, Embedding(f"p{number}", f"p{number} x", 2, VECTOR, key))
        paths.append(path)
    return paths


def refused(paths: list[Path], message: str) -> None:
    with pytest.raises(FormatError, match=message) as caught:
        merge_embeddings(paths, paths[0].parent / "out")
    assert "\n" not in str(caught.value)
    assert not (paths[0].parent / "out").exists()


def rewrite(path: Path, others: dict[str, Any]) -> None:
    with np.load(path) as file:
        arrays = {each: file[each] for each in file.files}
    with open(path, "wb") as out:
        np.savez(out, **(arrays | others))


def set_lengths(file: h5py.File, lengths: np.ndarray) -> None:
    del file.attrs["num_residues"]
    file.attrs["num_residues"] = lengths


def set_numbers(file: h5py.File, *numbers: str) -> None:
    for key, number in zip(list(file), numbers, strict=True):
        del file[key].attrs["number"]
        file[key].attrs["number"] = number


def move_key(file: h5py.File, name: bytes) -> None:
    file.id.links.move(sorted(file)[0].encode(), file.id, name)


NUMBERED: dict[str, tuple[Callable[[h5py.File], None], str]] = {
    "negative": (
        lambda file: set_lengths(file, np.array([2, -5], np.int32)),
        "entry '0000000001' is damaged .its num_residues is -5",
    ),
    "none": (lambda file: set_lengths(file, np.array([2, 0])), "its num_residues is 0; allowed: 1 to"),
    "no width": (lambda file: file.attrs.modify("model_dim", 0), "embeddings of model_dim 0; allowed: 1 to"),
    "huge": (
        lambda file: set_lengths(file, np.array([2, 5_000_000_000], np.uint64)),
        "its num_residues is 5000000000",
    ),
    "twenty nines": (lambda file: move_key(file, b"9" * 20), "has the number 9{20} after 1"),
    "eleven digits": (lambda file: move_key(file, b"1" + b"0" * 10), "has the number 10000000000 after 1"),
    "the same twice": (lambda file: move_key(file, b"1"), "h50: a protein has the number 1 after 1"),
    "attribute": (
        lambda file: file.attrs.create("more", np.uint64(2**63)),
        "its attribute 'more' cannot be merged",
    ),
    "words": (
        lambda file: file.attrs.create("more", "x" * 60_001),
        "its attribute 'more' cannot be merged .it is neither",
    ),
}
BY_SEQUENCE: dict[str, tuple[Callable[[h5py.File], None], str]] = {
    "no UTF-8": (lambda file: move_key(file, b"\xff\xfe\xff"), "its key is not that of a sequence"),
    "long key": (lambda file: move_key(file, b"k" * 300), "its key is not that of a sequence"),
    "falling": (lambda file: set_numbers(file, "0000000004", "0000000003"), "has the number 3 after 4"),
    "header": (
        lambda file: file[next(iter(file))].attrs.create("header", np.void(b"a\0" + b"b" * 64_000)),
        "h50: record 0 cannot be merged .h5 cannot hold its id or header",
    ),
    "bytes": (
        lambda file: file[next(iter(file))].attrs.create("header", np.void(b"a\0\xff" + b"b" * 59_998)),
        "h50: record 0 cannot be merged .h5 cannot hold its id or header",
    ),
}


@pytest.mark.parametrize(
    ("keys", "kind"),
    [*(("number", each) for each in NUMBERED), *(("sequence", each) for each in BY_SEQUENCE)],
)
def test_what_a_shard_in_hdf5_claims_is_checked(tmp_path: Path, keys: str, kind: str):
    paths = shards(tmp_path, "h5", keys)
    assert merge_embeddings(paths, tmp_path / "whole") == 3
    edit, message = (NUMBERED if keys == "number" else BY_SEQUENCE)[kind]
    for path in paths if "'more'" in message else paths[:1]:
        with h5py.File(path, "a") as file:
            edit(file)
    refused(paths, message)


def test_what_a_shard_in_numpys_format_claims_is_checked(tmp_path: Path):
    paths = shards(tmp_path, "npz")
    assert merge_embeddings(paths, tmp_path / "whole") == 3
    for others, message in (
        ({"num_residues": np.array([2, 5_000_000_000], np.uint64)}, "its num_residues is 5000000000"),
        ({"ids": np.array(["p", "\ud800"])}, "npz0: record 1 cannot be merged .npz cannot hold its id"),
    ):
        shards(tmp_path, "npz")
        rewrite(paths[0], others)
        refused(paths, message)
    shards(tmp_path, "npz")
    with zipfile.ZipFile(paths[1], "a") as file:  # the same number by another key
        members = {each: file.read(each) for each in file.namelist()}
    members["2.npy"] = members["0000000002.npy"]
    with zipfile.ZipFile(paths[1], "w") as file:
        for each, data in members.items():
            file.writestr(each, data)
    rewrite(
        paths[1],
        {
            **saying(paths[1], num_records=2),
            "num_residues": np.array([2, 2]),
            "ids": np.array(["a", "b"]),
            "headers": np.array(["a", "b"]),
        },
    )
    refused(paths, "npz1: a protein has the number 2 after 2")


def saying(path: Path, **others: Any) -> dict[str, Any]:
    with np.load(path) as file:
        return {"about": np.array(json.dumps(json.loads(str(file["about"])) | others))}


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"model_dim": 10**30}, r"no readable embedding file \(embeddings of model_dim 10{30}"),
        ({"layer": 10**30}, r"no readable embedding file \(embeddings of layer 10{30}"),
        ({"num_shards": 10**400}, r"no readable embedding file \(embeddings of num_shards 10"),
        ({"num_shards": (1 << 31) - 1}, "its num_shards is 2, that of .* is 2147483647"),
        ({"more": 1 << 63}, "its attribute 'more' cannot be merged"),
        ({"more": [[]]}, "its attribute 'more' cannot be merged"),
        ({"more": "\ud800"}, "its attribute 'more' cannot be merged"),
    ],
)
def test_what_a_shard_says_of_itself_is_checked(tmp_path: Path, others: dict[str, Any], message: str):
    paths = shards(tmp_path, "npz")
    rewrite(paths[0], saying(paths[0], **others))
    if "more" in others:
        rewrite(paths[1], saying(paths[1], **others))
    refused(paths, message)


def test_very_many_missing_shards_are_counted_not_listed(tmp_path: Path):
    paths = shards(tmp_path, "npz")
    for path in paths:
        rewrite(path, saying(path, num_shards=(1 << 31) - 1))
    files = [open_embeddings(path) for path in paths]
    with pytest.raises(
        ValueError, match=r"2,147,483,645 of 2147483647 shards are missing: 3, 4, 5, 6, 7, \.\.\.;"
    ):
        check_shards(files)
    for file in files:
        file.close()
