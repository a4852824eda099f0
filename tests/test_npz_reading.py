"""Members of a NumPy archive claim what is there."""

from __future__ import annotations

import struct
import tracemalloc
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from embedding_outputs import describe, write

from protperf.formats import FormatError, npz_reading
from protperf.formats.embedding_npz import NpzFile


def test_numbers_of_an_archive_claim_what_is_there(tmp_path: Path):
    path = tmp_path / "e"
    write(path, "npz", describe("per_tok"), range(3))
    whole = path.read_bytes()
    with zipfile.ZipFile(path) as file:
        members = {name: file.read(name) for name in file.namelist()}
    huge = (
        b"\x93NUMPY\1\0\x76\0"
        + b"{'descr': '<U9', 'fortran_order': False, 'shape': (1099511627776,), }".ljust(117)
        + b"\n"
    )
    for name in ("ids.npy", "headers.npy", "num_residues.npy", "about.npy"):
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as made:
            for each, data in members.items():
                made.writestr(each, huge if each == name else data)
        with pytest.raises(FormatError, match=r"e: no readable embedding file|e: holds"):
            NpzFile(path)
    path.write_bytes(whole)
    with NpzFile(path) as file:
        assert all(isinstance(each.array, np.ndarray) and each.array.flags.writeable for each in file)


def rewrite(path: Path, others: dict[str, np.ndarray], method: int = zipfile.ZIP_DEFLATED) -> None:
    """Write an archive again, with some arrays replaced."""
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files} | others
    with zipfile.ZipFile(path, "w", method) as made:
        for name, array in arrays.items():
            with made.open(f"{name}.npy", "w") as member:
                np.save(member, array)


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_members_are_packed_by_deflate_alone(tmp_path: Path, method: int):
    path = tmp_path / "e"
    write(path, "npz", describe("per_tok"), range(3))
    rewrite(path, {}, method)
    with pytest.raises(FormatError, match=f"packed by method {method}"):
        NpzFile(path)


def test_an_archive_that_numpy_writes_again_is_read(tmp_path: Path):
    """With integers as NumPy chooses them, and arrays column by column."""
    path = tmp_path / "e"
    write(path, "npz", describe("per_tok"), range(3))
    with NpzFile(path) as file:
        before = list(file)
    columns = {f"{number:010d}": np.asfortranarray(each.array) for number, each in enumerate(before)}
    lengths = np.array([each.num_residues for each in before])
    rewrite(path, {"num_residues": lengths, **columns})
    with NpzFile(path) as file:
        for found, expected in zip(file, before, strict=True):
            assert found[:3] == expected[:3]
            assert found.array.flags.c_contiguous
            np.testing.assert_array_equal(found.array, expected.array)
    rewrite(path, {"num_residues": -lengths})
    with pytest.raises(FormatError, match=r"num_residues\.npy has the number -"):
        NpzFile(path)


def test_texts_are_of_bounded_length(tmp_path: Path):
    path = tmp_path / "e"
    write(path, "npz", describe("mean"), range(3))
    rewrite(path, {"ids": np.array(["a" * ((1 << 20) + 1), "b", "c"])})
    with pytest.raises(FormatError, match=r"ids\.npy is an array"):
        NpzFile(path)


def test_letters_of_texts_follow_the_size_of_the_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "e"
    write(path, "npz", describe("mean"), range(3))
    rewrite(path, {"ids": np.array(["a" * (1 << 16)] * 3)})
    with NpzFile(path) as file:
        assert len(file[0].id) == 1 << 16
    monkeypatch.setattr(npz_reading, "_LETTERS_ALWAYS", 1000)
    assert 4 * path.stat().st_size < 3 << 16
    with pytest.raises(FormatError, match=r"ids\.npy unpacks to more than [0-9,]+ letters"):
        NpzFile(path)


def claim_less(path: Path, name: str, more: bytes, *, summed: int) -> None:
    """Let a member unpack to more than it claims, by its size and a checksum that goes so many bytes on."""
    with zipfile.ZipFile(path) as file:
        members = {each: file.read(each) for each in file.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as made:
        for each, data in members.items():
            made.writestr(each, data + more if each == name else data)
    whole, found = path.read_bytes(), members[name]
    true = struct.pack("<I", zlib.crc32(found + more)), struct.pack("<I", len(found + more))
    claimed = struct.pack("<I", zlib.crc32(found + more[:summed])), struct.pack("<I", len(found))
    for before, after in zip(true, claimed, strict=True):
        assert whole.count(before) == 2
        whole = whole.replace(before, after)
    path.write_bytes(whole)


@pytest.mark.parametrize("name", ["about", "ids", "headers", "num_residues", "0000000001"])
@pytest.mark.parametrize(
    ("summed", "fault"), [(0, "Bad CRC-32"), (1, "unpacks to more bytes than it claims")]
)
def test_no_member_unpacks_to_more_than_it_claims(tmp_path: Path, name: str, summed: int, fault: str):
    path = tmp_path / "e"
    write(path, "npz", describe("per_tok"), range(3))
    claim_less(path, f"{name}.npy", bytes(32 << 20), summed=summed)
    assert path.stat().st_size < 1 << 17
    tracemalloc.start()
    try:
        with (
            pytest.raises(FormatError, match=fault),
            NpzFile(path) as file,
        ):
            list(file)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "header", ["-" * 9000 + "1", "{'descr': '<u4', 'fortran_order': False, 'shape': (3L,), }", "(" * 9000]
)
def test_a_header_that_is_none_of_ours_is_one_line(tmp_path: Path, header: str):
    path = tmp_path / "e"
    write(path, "npz", describe("mean"), range(3))
    with zipfile.ZipFile(path) as file:
        members = {each: file.read(each) for each in file.namelist()}
    text = header.encode() + b"\n"
    members["num_residues.npy"] = b"\x93NUMPY\1\0" + struct.pack("<H", len(text)) + text + bytes(12)
    with zipfile.ZipFile(path, "w") as made:
        for each, data in members.items():
            made.writestr(each, data)
    with pytest.raises(FormatError, match=r"e: no readable embedding file \("):
        NpzFile(path)


@pytest.mark.parametrize("order", "<>")
def test_letters_are_those_of_unicode(tmp_path: Path, order: str):
    path = tmp_path / "e"
    write(path, "npz", describe("mean"), range(3))
    codes = np.full(3, 0x10FFFF, f"{order}u4")
    rewrite(path, {"ids": codes.view(f"{order}U1")})
    with NpzFile(path) as file:
        assert file[0].id == "\U0010ffff"
    codes[1] += 1
    with zipfile.ZipFile(path) as file:
        members = {each: file.read(each) for each in file.namelist()}
    members["ids.npy"] = members["ids.npy"][:-12] + codes.tobytes()
    with zipfile.ZipFile(path, "w") as made:
        for each, data in members.items():
            made.writestr(each, data)
    with pytest.raises(FormatError, match=r"ids\.npy holds the letter 1114112"):
        NpzFile(path)
