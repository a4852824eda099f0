"""A manifest names windows that are there, in its own folder, and what is written can be read."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from fuzz_hdf5 import whole_dataset
from hostile import edit_manifest
from prepared import write_fasta

from data_prep.options import PrepareOptions
from data_prep.prepare import prepare
from protperf.formats import FormatError
from protperf.formats.manifest import InputEntry, check_fits, read_manifest, write_manifest
from protperf.formats.shards import ShardSet


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("window", 2**60),
        ("window", 0),
        ("window", "16"),
        ("shards.0.windows", 2**60),
        ("shards.0.windows", 4),
        ("shards.0.windows", -1),
        ("shards.1.windows", True),
        ("shards.0.offset", -1),
        ("shards.0.offset", 2**63),
        ("shards.0.bytes", None),
        ("shards.0.file", "../secret"),
        ("shards.0.file", "/etc/passwd"),
        ("shards.0.file", ".."),
        ("shards.0.file", "a\0b"),
        ("shards.0.split", ["train"]),
        ("ngrams.file", "../ngrams.h5"),
        ("splits.train.length_histogram", {"many": 1}),
        ("splits.train", []),
    ],
)
def test_a_manifest_names_windows_that_are_there_in_its_own_folder(tmp_path: Path, path: str, value: Any):
    whole_dataset(tmp_path / "d")
    edit_manifest(tmp_path / "d", path, value)
    with pytest.raises(
        FormatError, match=r"manifest\.json: (damaged manifest|names a file outside)"
    ) as caught:
        read_manifest(tmp_path / "d")
    assert str(caught.value).startswith(str(tmp_path))


def test_a_shard_shorter_than_its_windows_is_refused_whatever_the_manifest_says(tmp_path: Path):
    folder = whole_dataset(tmp_path / "d")
    edit_manifest(folder, "shards.0.bytes", 2**62)
    edit_manifest(folder, "shards.0.windows", 2**57)
    with pytest.raises(FormatError, match=r"train-00000-of-00002\.h5: \d+ bytes, the manifest says"):
        ShardSet(folder, "train")


def with_inputs(folder: Path, count: int) -> list[InputEntry]:
    """Write the manifest of a dataset once more, with so many inputs; return these."""
    inputs = [
        InputEntry(f"{number:0240d}.fasta", "sequences", 10**6, f"{number:064d}") for number in range(count)
    ]
    write_manifest(folder, dataclasses.replace(read_manifest(folder), inputs=inputs))
    return inputs


@pytest.mark.slow
def test_what_is_written_is_read_and_what_is_too_large_is_refused_before_the_work(tmp_path: Path):
    folder = whole_dataset(tmp_path / "d")
    inputs = with_inputs(folder, 30_000)
    assert read_manifest(folder).inputs == inputs
    check_fits(inputs, 1000)
    message = (
        r"^45,000 inputs and \d shards: their manifest takes [\d.]+ MiB, at most 16 MiB are read; join files"
    )
    with pytest.raises(ValueError, match=message):
        with_inputs(folder, 45_000)
    assert read_manifest(folder).inputs == inputs
    long = write_fasta(tmp_path / f"{'a' * 240}.fasta", [("p", "MK")])
    with pytest.raises(ValueError, match=message):
        prepare([long] * 45_000, tmp_path / "out", PrepareOptions())
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match=r"1,000,000 shards: .*larger shards \(--shard-windows\)"):
        check_fits([], 10**6)
