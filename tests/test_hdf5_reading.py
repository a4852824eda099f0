"""HDF5 files read without HDF5's library: as the library reads them, or refused."""

from __future__ import annotations

import errno
import gc
import os
import shutil
import subprocess
import zlib
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from embedding_outputs import describe, make, write

from protperf.formats import FormatError
from protperf.formats.embedding_merge import WRITERS, open_embeddings
from protperf.formats.embeddings import EmbeddingFile, EmbeddingInfo, read_embeddings
from protperf.formats.hdf5_checksum import lookup3, lookup3_of
from protperf.formats.hdf5_reading import Hdf5File

LIBRARIES = [
    ("earliest", "v110"),
    ("earliest", "latest"),
    ("v110", "v110"),
    ("v112", "latest"),
    ("latest", "latest"),
]


def opened(path: Path) -> Hdf5File:
    return Hdf5File(path, unreadable="no file of ours", remedy="write it again")


def assert_same(path: Path) -> None:
    """Compare names, attributes and arrays with what h5py says of a file."""
    with h5py.File(path) as expected, opened(path) as file:
        assert file.names() == list(expected)
        assert same(file.attributes(), expected.attrs)
        for name in file.names():
            dataset, other = file.dataset(name), expected[name]
            assert (dataset.shape, np.dtype(dataset.dtype), dataset.chunks or None) == (
                other.shape,
                other.dtype,
                other.chunks,
            )
            assert same(file.attributes(dataset), other.attrs)
            array = np.empty(other.shape, other.dtype)
            file.fill(dataset, array)
            np.testing.assert_array_equal(array, other[()])


def same(found: dict[str, Any], expected: h5py.AttributeManager) -> bool:
    plain = {
        name: value.tobytes() if isinstance(value, np.void) else value for name, value in expected.items()
    }
    return found.keys() == plain.keys() and all(np.array_equal(found[name], plain[name]) for name in plain)


@pytest.mark.parametrize("libver", LIBRARIES, ids="-".join)
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("number", [0, 3, 40, 3000])
def test_members_and_attributes_are_those_that_the_library_finds(
    tmp_path: Path, libver: tuple[str, str], ordered: bool, number: int
):
    path = tmp_path / "a.h5"
    generator = np.random.default_rng(number)
    names = [f"{place}_{generator.integers(1 << 40):x}" for place in generator.permutation(number)]
    with h5py.File(path, "w", libver=libver, track_order=ordered) as file:
        for place, name in enumerate(names):
            file.create_dataset(name, data=np.arange(place % 4 + 1, dtype=np.float32))
        for place, name in enumerate(names[:3]):
            file[name].attrs.update({"text": "é" * place, "bytes": np.void(b"a\0b"), "number": -place})
        for place in range(min(number, 30)):  # more than a header holds
            file.attrs[f"a{place}"] = "x" * place
        file.attrs["numbers"] = np.int64(7)
        numbers = np.empty((), object)
        numbers[()] = np.arange(5, dtype=np.uint32)
        file.attrs.create("list", numbers, shape=(), dtype=h5py.vlen_dtype(np.uint32))
        file.attrs["long"] = "y" * 100_000
        for name in names[1::3]:
            del file[name]
    assert_same(path)


@pytest.mark.parametrize("dtype", ["<f4", "<f2", "<f8", "<i8", "<u4", "|u1", "|i1"])
@pytest.mark.parametrize(
    "stored",
    [
        {},
        {"chunks": (4, 3)},
        {"chunks": (4, 3), "compression": "gzip"},
        {"chunks": (64, 8), "maxshape": (None, None)},
        {"chunks": (4, 3), "shuffle": True},
        {"compression": "gzip", "shuffle": True},
    ],
    ids=str,
)
def test_arrays_are_those_that_were_written(tmp_path: Path, dtype: str, stored: dict[str, Any]):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        for number, shape in enumerate([(10, 7), (1, 1), (4, 3), (400, 3)]):
            part = {} if number == 1 else stored
            file.create_dataset(
                f"d{number}", data=np.arange(np.prod(shape)).reshape(shape).astype(dtype), **part
            )
    assert_same(path)


REFUSED: dict[str, Any] = {
    "text": {"data": "hello"},
    "texts": {"data": ["a", "b"], "dtype": h5py.string_dtype()},
    "a pair": {"data": np.zeros(2, [("a", "i4"), ("b", "f4")])},
    "big-endian": {"data": np.zeros(2, ">f4")},
    "true and false": {"data": np.zeros(2, bool)},
    "lists": {"data": np.array([np.arange(2), np.arange(3)], object), "dtype": h5py.vlen_dtype(int)},
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_types_are_refused(tmp_path: Path, name: str):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", **REFUSED[name])
    with opened(tmp_path / "a.h5") as file, pytest.raises(FormatError, match="entry 'x' is damaged"):
        file.dataset("x")


@pytest.mark.parametrize(
    "filters", [{"fletcher32": True}, {"compression": "lzf"}, {"scaleoffset": 2}], ids=str
)
def test_other_filters_are_refused(tmp_path: Path, filters: dict[str, Any]):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", data=np.arange(100), chunks=(10,), **filters)
    with opened(tmp_path / "a.h5") as file, pytest.raises(FormatError, match="packed by filters"):
        file.fill(file.dataset("x"), np.empty(100, np.int64))


def test_a_chunk_unpacks_to_its_own_size_and_all_are_there(tmp_path: Path):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("x", (1000,), np.int64, chunks=(100,), compression="gzip")[:500] = 1
    with opened(path) as file, pytest.raises(FormatError, match="5 of 10 chunks are there"):
        file.fill(file.dataset("x"), np.empty(1000, np.int64))
    with h5py.File(path, "r+") as file:
        file["x"].id.write_direct_chunk((0,), zlib.compress(bytes(10_000_000)))
    with (
        opened(path) as file,
        pytest.raises(FormatError, match=r"the chunk at \[0\] unpacks to another size than 800 bytes"),
    ):
        file.fill(file.dataset("x"), np.empty(1000, np.int64))


def test_a_group_that_holds_itself_is_no_dataset(tmp_path: Path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["loop"] = file["/"]
    with opened(tmp_path / "a.h5") as file:
        assert file.names() == ["loop"]
        with pytest.raises(FormatError, match=r"entry 'loop' is damaged \(no dataset"):
            file.dataset("loop")


def test_a_changed_bit_behind_a_checksum_is_noticed(tmp_path: Path):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w", libver="latest") as file:
        file.create_dataset("x", data=np.zeros(2, np.float32))
    whole = path.read_bytes()
    place = whole.index(b"OHDR") + 30
    path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
    with pytest.raises(
        FormatError, match=r"a\.h5: no file of ours \(a wrong checksum at \d+\); write it again"
    ):
        opened(path)


def test_both_forms_of_the_hash_are_the_published_one():
    """Values from the comments of lookup3.c (Bob Jenkins, 2006, public domain); between them the forms check each other."""
    for text, expected in ((b"", 0xDEADBEEF), (b"Four score and seven years ago", 0x17770551)):
        rows = np.frombuffer(text, np.uint8).reshape(1, len(text))
        assert [lookup3_of(text), *lookup3(np.repeat(rows, 3, 0)).tolist()] == [expected] * 4
    generator = np.random.default_rng(0)
    for length in range(41):
        rows = generator.integers(256, size=(5, length), dtype=np.uint8)
        assert lookup3(rows).tolist() == [lookup3_of(row.tobytes()) for row in rows]


def write_h5(path: Path, info: EmbeddingInfo, number: int) -> None:
    with WRITERS["h5"](path, info) as writer:
        for place in range(number):
            writer.add(place, make(place, info)._replace(key=f"{place:064x}_5"))


def foreign_attributes(file: h5py.File) -> dict[str, Any]:
    return {
        "true": True,
        "numbers": np.arange(3),
        "matrix": np.ones((2, 2)),
        "texts": ["a", "b"],
        "nothing": h5py.Empty("f4"),
        "complex": 1 + 2j,
        "pair": np.zeros((), [("a", "i4"), ("b", "f4")]),
        "big-endian": np.array(1, ">i4"),
        "half": np.float16(0.5),
        "reference": file.ref,
        "bytes": np.bytes_(b"abc"),
        "large": np.zeros(8000, np.uint8),
    }


@pytest.mark.parametrize("libver", ["earliest", "latest"])
@pytest.mark.parametrize("keys", ["number", "sequence"])
def test_attributes_of_others_are_passed_over(tmp_path: Path, libver: str, keys: str):
    path = tmp_path / "e.h5"
    write_h5(path, describe(keys=keys), 3)
    before = read_embeddings(path)
    with h5py.File(path, "r+", libver=libver) as file:
        for owner in (file, *file.values()):
            for name, value in foreign_attributes(file).items():
                owner.attrs[name] = value
    ids, arrays = read_embeddings(path)
    assert ids == before[0]
    np.testing.assert_array_equal(arrays, before[1])
    with opened(path) as file, pytest.raises(FormatError, match=r"attribute 'texts' has values in the shape"):
        file.attributes(names=["texts"])
    with open_embeddings(path) as whole:
        assert {"true", "numbers", "half"}.isdisjoint(whole.attributes)
        assert len(list(whole.numbered())) == 3


@pytest.mark.parametrize("libver", ["earliest", "latest"])
@pytest.mark.parametrize("kind", ["mean", "per_tok"])
def test_what_h5py_copies_is_read(tmp_path: Path, libver: str, kind: str):
    write(tmp_path / "e.h5", "h5", describe(kind), range(5))
    with h5py.File(tmp_path / "e.h5") as old, h5py.File(tmp_path / "copy.h5", "w", libver=libver) as new:
        for name, value in old.attrs.items():
            new.attrs[name] = value
        for name in old:
            old.copy(name, new)
        assert len(new.attrs) == len(old.attrs) > 10
        assert [len(each.attrs) for each in new.values()] == [len(list(each.attrs)) for each in old.values()]
    with EmbeddingFile(tmp_path / "e.h5") as old, EmbeddingFile(tmp_path / "copy.h5") as new:
        assert new.info == old.info
        for found, expected in zip(new, old, strict=True):
            assert found[:3] == expected[:3]
            np.testing.assert_array_equal(found.array, expected.array)


def test_a_list_too_large_for_a_header_is_read(tmp_path: Path):
    with h5py.File(tmp_path / "a.h5", "w", libver="latest") as file:
        file.attrs.update({"num_residues": np.arange(50_000, dtype=np.uint32), "other": np.ones(30_000)})
    with opened(tmp_path / "a.h5") as file:
        np.testing.assert_array_equal(file.attributes()["num_residues"], np.arange(50_000))


@pytest.mark.parametrize(
    "stored",
    [
        {"compression": "gzip"},
        {"compression": "gzip", "shuffle": True},
        {"chunks": True, "shuffle": True},
        {"maxshape": (None, None)},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_embeddings_are_read_however_h5py_stores_them(tmp_path: Path, stored: dict[str, Any], dtype: str):
    path = tmp_path / "e.h5"
    write(path, "h5", describe("per_tok", dtype=dtype), range(3))
    before = read_embeddings(path)[1]
    with h5py.File(path, "r+") as file:
        for name in list(file):
            data, about = file[name][()], dict(file[name].attrs)
            del file[name]
            file.create_dataset(name, data=data, **stored).attrs.update(about)
    for found, expected in zip(read_embeddings(path)[1], before, strict=True):
        np.testing.assert_array_equal(found, expected)


def test_a_chunk_with_an_index_of_later_versions_says_how_to_write_it(tmp_path: Path):
    with h5py.File(tmp_path / "a.h5", "w", libver="latest") as file:
        file.create_dataset("x", data=np.zeros((4, 4), np.float32), compression="gzip")
    with opened(tmp_path / "a.h5") as file, pytest.raises(FormatError, match="libver='earliest'"):
        file.dataset("x")


def compact() -> h5py.h5p.PropDCID:
    found = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    found.set_layout(h5py.h5d.COMPACT)
    return found


STORED_OTHERWISE: dict[str, tuple[str, dict[str, Any]]] = {
    "lzf": ("earliest", {"compression": "lzf"}),
    "checksums": ("earliest", {"fletcher32": True}),
    "an index of HDF5 1.10": ("latest", {"chunks": (2, 2)}),
    "in the header": ("earliest", {"dcpl": compact()}),
}


@pytest.mark.parametrize("name", STORED_OTHERWISE)
def test_what_is_stored_otherwise_is_no_damage(tmp_path: Path, name: str):
    """The line says what undoes it, which is done where the program is there."""
    path, (libver, stored) = tmp_path / "e.h5", STORED_OTHERWISE[name]
    write(path, "h5", describe("per_tok"), range(3))
    before = read_embeddings(path)[1]
    with h5py.File(path, "r+", libver=libver) as file:
        for key in list(file):
            data, about = file[key][()], dict(file[key].attrs)
            del file[key]
            file.create_dataset(key, data=data, **stored).attrs.update(about)
    remedy = "h5py writes a file" if name == "lzf" else "`h5repack -f NONE -l CONTI OLD NEW` writes a file"
    with pytest.raises(FormatError, match=r"entry '0000000000' ") as caught:
        read_embeddings(path)
    assert remedy in str(caught.value)
    assert "damaged" not in str(caught.value)
    assert "embed again" not in str(caught.value)
    if name != "lzf" and shutil.which("h5repack"):
        new = tmp_path / "new.h5"
        subprocess.run(["h5repack", "-f", "NONE", "-l", "CONTI", path, new], check=True, timeout=60)
        for found, expected in zip(read_embeddings(new)[1], before, strict=True):
            np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"original_id": 5}, r"entry '0000000000' is damaged \(its original_id is no text\); embed again"),
        (
            {"original_id": ["a"]},
            r"damaged \(attribute 'original_id' has values in the shape \(1,\)\); embed",
        ),
        ({"original_id": True}, r"attribute 'original_id' has values of a type that is not read here"),
        ({"original_id": None}, r"damaged \(its original_id is missing\)"),
    ],
)
def test_a_line_names_what_is_wrong_and_once_what_to_do(tmp_path: Path, change: dict[str, Any], message: str):
    path = tmp_path / "e.h5"
    write_h5(path, describe(keys="sequence"), 2)
    with h5py.File(path, "r+") as file:
        name = next(iter(file))
        for key, value in change.items():
            del file[name].attrs[key]
            if value is not None:
                file[name].attrs[key] = value
    with (
        EmbeddingFile(path) as found,
        pytest.raises(FormatError, match=message.replace("0000000000", name)) as caught,
    ):
        list(found.numbered())
    assert str(caught.value).count("embed again") == 1


@pytest.mark.parametrize("value", [np.arange(2), 3, "three", np.ones(3)], ids=str)
def test_lengths_are_as_many_integers_as_proteins(tmp_path: Path, value: Any):
    write(tmp_path / "e.h5", "h5", describe("mean"), range(3))
    with h5py.File(tmp_path / "e.h5", "r+") as file:
        file.attrs["num_residues"] = value
    with pytest.raises(FormatError, match=r"its num_residues is no list of 3 integers; embed again"):
        EmbeddingFile(tmp_path / "e.h5")
    with h5py.File(tmp_path / "e.h5", "r+") as file:
        del file.attrs["num_residues"]
    with (
        EmbeddingFile(tmp_path / "e.h5") as found,
        pytest.raises(FormatError, match="nothing says its num_residues"),
    ):
        found[0]


def test_a_file_that_nobody_closes_is_closed(tmp_path: Path):
    write(tmp_path / "e.h5", "h5", describe("mean"), range(3))
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        EmbeddingFile(tmp_path / "e.h5")
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
    with EmbeddingFile(tmp_path / "e.h5") as file:
        file[0]
    with pytest.raises(ValueError, match=r"e\.h5: is closed"):
        file[0]


@pytest.mark.parametrize("at_once", [True, False])
def test_a_failing_disk_is_no_damaged_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: bool):
    write(tmp_path / "e.h5", "h5", describe("mean"), range(3))

    def fail(*_: object) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with EmbeddingFile(tmp_path / "e.h5") as file:
        monkeypatch.setattr(os, "pread", fail)
        with pytest.raises(OSError, match="Input/output error"):
            EmbeddingFile(tmp_path / "e.h5") if at_once else file[0]
