"""HDF5 written by hand is read by the library as if it had written it itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import h5py
import numpy as np
import pytest

from protperf.formats.hdf5_bytes import SUPERBLOCK_BYTES, PlacedArray, write_datasets, write_root
from protperf.formats.hdf5_checksum import lookup3
from protperf.formats.hdf5_links import LinkWriter


class Bytes:
    """A file in memory."""

    def __init__(self) -> None:
        self.data = bytearray(SUPERBLOCK_BYTES)

    @property
    def size(self) -> int:
        return len(self.data)

    def append(self, data: bytes) -> int:
        start = len(self.data)
        self.data += data
        return start

    def write_at(self, offset: int, data: bytes) -> None:
        self.data[offset : offset + len(data)] = data


def make(path: Path, names: Sequence[str], *, ordered: bool = False, dtype: str = "<f4") -> Path:
    """Write a dataset of two numbers under each name: its place and the negative of that."""
    sink = Bytes()
    addresses = [sink.append(np.array([place, -place], dtype).tobytes()) for place in range(len(names))]
    datasets = (
        PlacedArray(name.encode(), address, (2,), {"text": f"of {name}"})
        for name, address in zip(names, addresses, strict=True)
    )
    links = LinkWriter(sink, ordered=ordered)
    for name, address in write_datasets(sink, datasets, dtype):
        links.add(name, address)
    write_root(sink, links.finish(), {"a": "b", "n": -3, "list": np.arange(5)}, ordered=ordered)
    path.write_bytes(sink.data)
    return path


def hashes_of(names: Sequence[str]) -> np.ndarray:
    return lookup3(np.array(names, "S").view(np.uint8).reshape(len(names), -1))


# edges: one block of the heap (22 links), its first row, one leaf of the tree (185 records), two levels and
# a block of blocks in the heap (24,964 links)
@pytest.mark.parametrize("number", [0, 1, 22, 23, 24, 94, 95, 185, 186, 371, 372, 5000, 26_000])
def test_library_finds_every_dataset_of_a_group_of_any_size(tmp_path: Path, number: int):
    names = [f"{place:010d}" for place in range(number)]
    with h5py.File(make(tmp_path / "a.h5", names)) as file:
        assert list(file) == names
        for place in {*range(min(number, 400)), *range(0, number, 97), *range(max(0, number - 200), number)}:
            dataset = file[names[place]]
            assert dataset[()].tolist() == [place, -place]
            assert dataset.attrs["text"] == f"of {names[place]}"
            assert len(dataset.attrs) == len(list(dataset.attrs)) == 1
        assert len(file.attrs) == len(list(file.attrs)) == 3
        assert "x" not in file
        assert (file.attrs["a"], file.attrs["n"], file.attrs["list"].tolist()) == ("b", -3, [0, 1, 2, 3, 4])


def test_links_in_order_of_creation_keep_it(tmp_path: Path):
    names = [f"{place * 7919 % 1000:03d}" + "x" * (place % 40) for place in range(1000)]
    with h5py.File(make(tmp_path / "a.h5", names, ordered=True)) as file:
        assert list(file) == names
        assert [int(file[name][0]) for name in names] == list(range(1000))


@pytest.mark.parametrize("ordered", [False, True])
def test_names_of_equal_hash_are_both_found(tmp_path: Path, ordered: bool):
    names = [f"{place:010d}" for place in range(300_000)]
    hashes = hashes_of(names)
    order = np.argsort(hashes, kind="stable")
    equal = np.flatnonzero(np.diff(np.sort(hashes)) == 0)
    pairs = [(names[order[place]], names[order[place + 1]]) for place in equal]
    assert len(pairs) >= 3
    found = sorted({name for pair in pairs for name in pair}, reverse=ordered)
    with h5py.File(make(tmp_path / "a.h5", found, ordered=ordered)) as file:
        assert [int(file[name][0]) for name in found] == list(range(len(found)))


def test_half_precision_and_texts_of_any_kind(tmp_path: Path):
    names = ["a", "é—🧬", "b" * 200]
    with h5py.File(make(tmp_path / "a.h5", names, dtype="<f2", ordered=True)) as file:
        assert [file[name].attrs["text"] for name in names] == [f"of {name}" for name in names]
        assert file["a"].dtype == np.float16


def test_library_may_add_to_a_file_and_remove_from_it(tmp_path: Path):
    names = [f"{place:010d}" for place in range(300)]
    with h5py.File(make(tmp_path / "a.h5", names), "a") as file:
        for place in range(300):
            file[f"more{place}"] = [place]
        file[names[5]].attrs["mine"] = 1
        file.attrs["mine"] = "too"
        del file[names[7]]
    with h5py.File(tmp_path / "a.h5") as file:
        assert len(file) == 599
        assert [int(file[f"more{place}"][0]) for place in range(300)] == list(range(300))
        assert [int(file[name][0]) for name in names if name != names[7]] == [n for n in range(300) if n != 7]
        assert (file[names[5]].attrs["mine"], file.attrs["mine"]) == (1, "too")
