"""Sequence files by their first bytes: compressed, damaged, foreign, and stdin."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import lzma
import os
import subprocess
import sys
import threading
import zlib
from pathlib import Path

import isal.isal_zlib
import numpy as np
import pytest
from reading import read, write_file

from protperf.formats import FormatError, streams
from protperf.formats.fasta import SequenceReader
from protperf.formats.streams import open_stream
from protperf.formats.variants import read_variants

Q1 = "MKTAYIAKQRQISFVKSHFSRQLEERLGLIEV"


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return write_file


TEXT = "".join(f">q{i} x\n{Q1}\n" for i in range(1, 2001)).encode()
PACKERS = {"gzip": gzip.compress, "bzip2": bz2.compress, "xz": lzma.compress}


@pytest.mark.parametrize("pack", PACKERS)
def test_compressed_files_are_known_by_their_bytes_with_all_members(write, pack):
    content = PACKERS[pack](TEXT) + PACKERS[pack](b"") + PACKERS[pack](b">last\nMS")
    records, _ = read(write(content, "named.txt"))
    assert len(records) == 2001
    assert records[0] == ("q1", Q1)
    assert records[-1] == ("last", "MS")


def test_zero_padding_after_a_gzip_member_is_allowed(write):
    assert read(write(gzip.compress(b">q\nMK\n") + bytes(512)))[0] == [("q", "MK")]


@pytest.mark.parametrize("pack", PACKERS)
@pytest.mark.parametrize("share", [0.3, 0.9, 0.999])
def test_truncated_files_are_refused(write, pack, share):
    whole = PACKERS[pack](TEXT)
    with pytest.raises(FormatError, match=rf"^in.fasta: the {pack} data are truncated"):
        read(write(whole[: int(len(whole) * share)]))


@pytest.mark.parametrize("pack", PACKERS)
def test_a_changed_byte_is_noticed(write, pack):
    damaged = bytearray(PACKERS[pack](TEXT))
    damaged[len(damaged) // 2] ^= 0x55
    with pytest.raises(FormatError, match=rf"^in.fasta: (damaged {pack}|the {pack} data are truncated)"):
        read(write(bytes(damaged)))


def test_a_wrong_checksum_is_noticed(write):
    damaged = bytearray(gzip.compress(TEXT))
    damaged[-8] ^= 1
    with pytest.raises(FormatError, match="CRC"):
        read(write(bytes(damaged)))


@pytest.mark.parametrize("pack", PACKERS)
def test_bytes_after_the_compressed_data_are_noticed(write, pack):
    with pytest.raises(FormatError, match=f"^in.fasta: (damaged|the) {pack}"):
        read(write(PACKERS[pack](TEXT) + b">q2\nMKTAYIAKQR\n"))


REFUSED = {
    "zstd": (b"\x28\xb5\x2f\xfd\x24\x29", "zstd -d in.fasta"),
    "zip": (b"PK\x03\x04\x14\x00", "unzip in.fasta"),
    "nul": (b"abc\x00def\n>q1\nMK\n", "binary data (a NUL byte at offset 3)"),
    "hdf5": (b"\x89HDF\r\n\x1a\n\x00\x00>q", "binary data (a NUL byte at offset 8)"),
    "utf16": (">q1\nMK\n".encode("utf-16"), "UTF-16"),
    "twice": (gzip.compress(gzip.compress(b">q\nMK\n")), "compressed twice"),
    "html": ("<!DOCTYPE html>\n<html><body>404</body></html>", "HTML page"),
    "xml": ("<?xml version='1.0'?>\n<blast></blast>", "<blast>"),
    "uniref": ("<?xml version='1.0'?>\n<UniRef90 xmlns='x'></UniRef90>", "UniRef XML"),
    "embl": ("ID   X56734; SV 1; linear; mRNA; STD; PLN; 1859 BP.\n", "EMBL nucleotide"),
    "bare": ("\nMKTA\nMSDN\n", "in.fasta:2: no '>' header; not FASTA (found 'MKTA')"),
    "empty": ("", "no sequence"),
    "blank": ("\n  \n", "no sequence"),
    "comments": ("# a\n; b\n", "no sequence"),
    "gzip of nothing": (gzip.compress(b""), "no sequence"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_no_sequence_file_is_refused_in_one_line(write, kind):
    content, expected = REFUSED[kind]
    with pytest.raises(FormatError) as error:
        read(write(content))
    assert expected in str(error.value)
    assert str(error.value).startswith("in.fasta")
    assert "\n" not in str(error.value)


def test_one_empty_file_among_good_ones_is_refused(write):
    with pytest.raises(FormatError, match=r"^b\.fa: no sequence"):
        list(SequenceReader([write(">q\nMK\n", "a.fa"), write("", "b.fa")]))


def test_paths_are_checked_before_reading(write, tmp_path):
    good = write(">q\nMK\n")
    for paths, expected in [
        ([good, "none.fa"], "none.fa: no such file"),
        ([good, tmp_path], "is a folder"),
        (["-", "-"], "more than once"),
        ([], "no input"),
    ]:
        with pytest.raises(ValueError, match=expected):
            SequenceReader(paths)


READ_STDIN = """
import sys
from protperf.formats.fasta import SequenceReader
reader = SequenceReader(["-"], progress=True)
for record in reader:
    sys.stdout.buffer.write(f"{record.path} {record.header} {record.tokens.size}\\n".encode())
print(*reader.summary(), sep="\\n")
assert "Bio" not in sys.modules and "tqdm" not in sys.modules
"""


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_stdin_is_read_plain_and_compressed_under_lang_c(pack):
    environment = {**os.environ, "LANG": "C", "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    done = subprocess.run(
        [sys.executable, "-c", READ_STDIN],
        input=pack(">q1 β-lactamase\nMK\nTA\n".encode()),
        capture_output=True,
        env=environment,
        check=True,
        timeout=60,
    )
    assert done.stdout.decode().splitlines() == [
        "<stdin> q1 β-lactamase 4",
        "read 1 records: 1 accepted (4 residues), 0 left out",
    ]
    assert done.stderr == b""


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_counts_stored_bytes_on_a_terminal_only(write, monkeypatch, capsys):
    name = write(gzip.compress(TEXT))
    stored = []
    with open_stream(name, stored.append) as stream:
        stream.text().read()
    assert sum(stored) == Path(name).stat().st_size

    list(SequenceReader([name], progress=True))
    assert capsys.readouterr().err == ""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    list(SequenceReader([name], progress=True))
    assert "100%" in terminal.getvalue()


@pytest.mark.parametrize("inflater", ["isal", "zlib"])
@pytest.mark.parametrize("ahead", [False, True])
def test_both_inflaters_read_members_and_refuse_damage(
    inflater: str, ahead: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    chosen = isal.isal_zlib if inflater == "isal" else zlib
    monkeypatch.setattr(streams, "_inflater", chosen.decompressobj)
    monkeypatch.setattr(streams, "_inflate_error", chosen.error)
    text = b">a\n" + np.random.default_rng(0).choice(list(b"ACDEFGHIK\n"), 1 << 20).astype("u1").tobytes()
    packed = gzip.compress(text[:5000]) + gzip.compress(b"") + gzip.compress(text[5000:])
    path, digest, sizes = tmp_path / "a", hashlib.sha256(), []

    def read(content: bytes) -> bytes:
        path.write_bytes(content)
        with open_stream(path, sizes.append, ahead=ahead, digest=digest) as stream:
            return b"".join(stream.pieces())

    assert read(packed) == text
    assert digest.hexdigest() == hashlib.sha256(packed).hexdigest()
    assert sum(sizes) == len(packed)
    for cut in (len(packed) - 1, len(packed) // 2, 40):
        with pytest.raises(FormatError, match="truncated"):
            read(packed[:cut])
    for place in (len(packed) - 6, len(packed) - 2):  # in the CRC, in the length
        with pytest.raises(FormatError, match="damaged gzip data or a wrong checksum"):
            read(packed[:place] + bytes([packed[place] ^ 1]) + packed[place + 1 :])


@pytest.mark.parametrize("inflater", ["isal", "zlib"])
def test_what_unpacks_to_a_thousand_times_its_size_comes_in_small_pieces(
    inflater: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    chosen = isal.isal_zlib if inflater == "isal" else zlib
    monkeypatch.setattr(streams, "_inflater", chosen.decompressobj)
    for length in (streams.OUTPUT_LIMIT, streams.OUTPUT_LIMIT + 1, 50_000_000):
        (tmp_path / "a.gz").write_bytes(gzip.compress(b">a\n" + b"M" * (length - 3)))
        with open_stream(tmp_path / "a.gz", lambda size: None) as stream:
            sizes = [len(piece) for piece in stream.pieces()]
        assert sum(sizes) == length
        assert (
            max(sizes) <= 2 * streams.OUTPUT_LIMIT
        )  # the first piece is joined with what told the kind of the file


def test_reading_ahead_ends_with_its_reader(tmp_path: Path):
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(b">a\n" + b"MKV\n" * 10_000_000, 1))
    with open_stream(path, lambda size: None, ahead=True) as stream:
        next(stream.pieces())
        assert "protperf-reading" in {thread.name for thread in threading.enumerate()}
    assert "protperf-reading" not in {thread.name for thread in threading.enumerate()}


def test_stdin_that_is_closed_is_one_line(monkeypatch):
    """As `<&-` leaves it."""
    monkeypatch.setattr(sys, "stdin", None)
    for reading in (lambda: list(SequenceReader(["-"])), lambda: read_variants("-", column="mutant")):
        with pytest.raises(ValueError, match=r"^<stdin>: is closed; give a file"):
            reading()
