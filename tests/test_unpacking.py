"""What unpacks to very much: refused in one line, within a bound of memory."""

from __future__ import annotations

import gzip
import lzma
import os
import subprocess
import sys
import zlib
from itertools import chain
from pathlib import Path

import pytest
from prepared import REPOSITORY
from reading import read, repeated

from protperf.formats import FormatError
from protperf.formats.fasta import SequenceReader
from protperf.formats.streams import HEAD_SIZE, SequenceStream
from protperf.formats.structures import read_structure
from protperf.formats.variants import read_variants

MIB = 1 << 20


@pytest.mark.parametrize("text", [b"MODEL        1\n", b"data_x\nloop_\n_atom_site.id\n"])
def test_a_packed_structure_has_a_bound(tmp_path: Path, text: bytes):
    path = tmp_path / "a.cif.gz"
    path.write_bytes(repeated(text, b"\n", 144))
    with pytest.raises(FormatError, match=r"a\.cif\.gz: [\d,]+ bytes of gzip unpack to more than 128 MiB"):
        read_structure(path)


def test_a_table_has_a_bound_of_cells(tmp_path: Path):
    path = tmp_path / "t.csv"
    for text, found in (
        (b"mutant\n" + b"\n" * (5 * MIB), "5,242,881 rows and 0 separators"),
        (b"mutant\r\n" + b"\r\n" * (5 * MIB), "5,242,881 rows and 0 separators"),
        (b"mutant\n" + b"\r" * (5 * MIB), "5,242,881 rows and 0 separators"),
        (b"mutant" + b"," * (17 * MIB) + b"\n", "1 rows and 17,825,792 separators"),
    ):
        path.write_bytes(text)
        with pytest.raises(FormatError, match=rf"t\.csv: {found} are more than can be read at once"):
            read_variants(path, column="mutant")


def test_xz_data_may_not_ask_for_gigabytes(tmp_path: Path):
    data = bytearray(lzma.compress(b">a\nMK\n", filters=[{"id": lzma.FILTER_LZMA2, "dict_size": 1 << 20}]))
    start, size = (
        12,
        (data[12] + 1) * 4,
    )  # the header of the first block, and in it the size of the dictionary
    place = data.index(b"\x21\x01", start) + 2
    data[place] = 40  # 4 GiB
    data[start + size - 4 : start + size] = zlib.crc32(data[start : start + size - 4]).to_bytes(4, "little")
    (tmp_path / "a.xz").write_bytes(data)
    with pytest.raises(
        FormatError, match=r"a\.xz: its xz data ask for more than 128 MiB to be unpacked; unpack it first"
    ):
        read(tmp_path / "a.xz")


ENTRY = "<uniprot xmlns='http://uniprot.org/uniprot'><entry dataset='{a}'>{b}<sequence>MK{b}TA</sequence></entry></uniprot>"


@pytest.mark.parametrize(
    "declared",
    [
        '<!ENTITY a "MKTAYIAKQR">',
        '<!ENTITY b "MKTAYIAKQR"><!ENTITY a "&b;&b;">',
        "<!ENTITY a SYSTEM '/etc/passwd'>",
        "<!ENTITY % p SYSTEM 'http://127.0.0.1/x.dtd'>%p;",
        "<!ATTLIST entry name CDATA 'MKTAYIAKQR'>",
    ],
)
def test_xml_declares_nothing_that_unfolds(tmp_path: Path, declared: str):
    """Neither entities nor default values, nor files; wherever the declaration stands."""
    declaration = f"<!DOCTYPE uniprot [{declared}]>"
    for start in ("", "<!-- <uniprot -->".ljust(1 << 17)):
        (tmp_path / "a.xml").write_text(start + declaration + ENTRY.format(a="&a;", b="&a;"))
        with pytest.raises(FormatError, match=r"a\.xml: XML with a DOCTYPE, which UniProt's has not"):
            list(SequenceReader([tmp_path / "a.xml"]))


@pytest.mark.parametrize("size", [1, 3, 9, 100])
def test_a_declaration_is_found_however_the_text_is_cut(size: int):
    head = b"<uniprot>".ljust(HEAD_SIZE)
    for before in range(10):
        text = b" " * before + b"<!DOCTYPE x>" + b" " * 20
        pieces = (text[start : start + size] for start in range(0, len(text), size))
        with pytest.raises(FormatError, match="a DOCTYPE"):
            list(SequenceStream(chain([head], pieces), "a.xml").pieces())
    text = b"<!DOCTYP x>E" * 9
    pieces = (text[start : start + size] for start in range(0, len(text), size))
    assert b"".join(SequenceStream(chain([head], pieces), "a.xml").pieces()) == head + text


@pytest.mark.slow
def test_a_megabyte_that_unpacks_to_a_gigabyte_takes_a_bounded_memory(tmp_path: Path):
    files = {
        "sequence.fasta": repeated(b">a\n", b"M", 1024),
        "lines.fasta": gzip.compress(b">a\n" + b"M\n" * (4 * MIB - 10)),
        "gaps.fasta": gzip.compress(b">a\n" + b"M-" * (MIB // 4)),
        "headers.fasta": gzip.compress(b">a\n" * (MIB // 16)),
        "comments.fasta": gzip.compress(b">a\nMK\n" + b";\n" * (MIB // 4)),
        "swiss.dat": repeated(b"ID   ONE_TEST                Reviewed;           6 AA.\n", b"C", 1024),
        "entry.xml": repeated(b"<uniprot xmlns='http://uniprot.org/uniprot'><entry><name>", b"x", 1024),
        "table.csv": repeated(b"mutant\n", b"M", 272),
        "rows.csv": repeated(b"mutant\n", b"\n", 64),
    }
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
        assert len(data) < 4 * MIB
    script = """
import sys
from pathlib import Path
from protperf.formats.fasta import Policy, SequenceReader
from protperf.formats.sizes import peak_memory_bytes
from protperf.formats.variants import read_variants
for path in sorted(Path().iterdir()):
    try:
        if path.suffix == ".csv":
            read_variants(path, column="mutant")
        else:
            print(sum(1 for _ in SequenceReader([path], Policy(gaps="drop"))), "records")
    except ValueError as error:
        print(error)
print(peak_memory_bytes())
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    *lines, peak = done.stdout.splitlines()
    files_in_order = sorted(files)
    assert len(lines) == len(files), done.stdout + done.stderr
    assert sum("entry 1 has more than 32 MiB of text" in line for line in lines) == 2, lines
    assert lines[files_in_order.index("sequence.fasta")] == "0 records"
    assert int(peak) < 1 << 30
