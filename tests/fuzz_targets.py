"""The four readers of strangers' files, each with whole files to begin from and a way to make hostile ones of them."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import math
import re
import shutil
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from fuzz_edits import Edit, at, dump, edit_bytes, edit_json, edit_text
from fuzz_hdf5 import edit_hdf5, edit_shards, other_shards, whole_dataset, whole_embeddings
from fuzz_structures import check_structures, read_structures, write_structure
from fuzz_whole import check_sequences, check_shards, check_table

from protperf.formats.embedding_merge import merge_embeddings, open_embeddings
from protperf.formats.fasta import Policy, SequenceReader
from protperf.formats.mutations import read_mutant
from protperf.formats.ngrams import read_ngrams
from protperf.formats.shards import ShardSet
from protperf.formats.variants import check_wild_type, read_mutants, read_variants, rebuild_wild_type
from protperf.vocab import VOCABULARY

FASTA = ">sp|P01308|INS_HUMAN Insulin OS=Homo sapiens OX=9606 GN=INS PE=1 SV=1\nMALWMRLLPLLALLALWGPD\nPAAAFVNQHL*\n; a comment\n>q2\n"
FASTA += "MK-TA.YI\n\n>UniRef90_P1 n=3 Tax=x TaxID=1 RepID=A\r\nMK1TA\r\n>gi|1|gb|AAA.1| x\nMK<mask>TA\n>\nMK\n>é café\nmktayi[MASK]\n"
SWISS = """\
ID   ONE_TEST                Reviewed;           6 AA.
AC   P00001; Q00001;
DT   28-NOV-2003, integrated into UniProtKB/Swiss-Prot.
DE   RecName: Full=Test protein;
GN   Name=tst;
OS   Escherichia coli (strain K12).
OX   NCBI_TaxID=83333;
PE   1: Evidence at protein level;
SQ   SEQUENCE   6 AA;  4366 MW;  01ED6F7CDD75D5B6 CRC64;
     MKTAYI
//
"""
XML = """\
<?xml version='1.0' encoding='UTF-8'?>
<uniprot xmlns="http://uniprot.org/uniprot"><entry dataset="Swiss-Prot" created="2003-11-28" modified="2019-12-11" version="8">
<accession>P00001</accession><name>ONE_TEST</name><protein><recommendedName><fullName>Test</fullName></recommendedName></protein>
<organism><name type="scientific">x</name><dbReference type="NCBI Taxonomy" id="9606"/></organism>
<proteinExistence type="evidence at protein level"/><sequence length="6" mass="1" checksum="1" modified="2003-11-28" version="1">MKTAYI</sequence>
</entry></uniprot>
"""
GENBANK = """\
LOCUS       TEST01                    30 bp    DNA     linear   BCT 01-JAN-2020
DEFINITION  Test plasmid.
ACCESSION   TEST01
VERSION     TEST01.1
FEATURES             Location/Qualifiers
     CDS             1..30
                     /gene="abcA"
                     /protein_id="AAA00001.1"
                     /translation="MKTAYIAKQ"
ORIGIN
        1 atgaaaaccg cgtatattgc gaaacagtaa
//
"""
TABLE = 'mutant,mutated_sequence,DMS_score,note\nM1A,AKTAYIAKQR,0.5,a\nK2A:R10W,MATAYIAKQW,-1e3,"b, c"\n\nWT,MKTAYIAKQR,,d\n'
EXPECTED = ["M1A", "K2A:R10W", ""], [0.5, -1e3, math.nan]
SEQUENCES = {
    FASTA: [
        ("sp|P01308|INS_HUMAN", "MALWMRLLPLLALLALWGPDPAAAFVNQHL"),
        ("q2", "MKTAYI"),
        ("UniRef90_P1", "MKXTA"),
        ("gi|1|gb|AAA.1|", "MK<mask>TA"),
    ],
    SWISS: [("P00001", "MKTAYI")],
    XML: [("P00001", "MKTAYI")],
    GENBANK: [("AAA00001.1", "MKTAYIAKQ")],
}
"""What is in the whole files; gaps are dropped and digits read as X."""
MUTANTS = ("A23C:C45D", "M1A", "wt", " R10W : K2A ", "A-3C", "A000000001C", "A23del", "p.Ala23Val")
NPY_WORDS = (
    *(
        b"'<U9'",
        b"'|O'",
        b"'<f8'",
        b"'<i4'",
        b"'>u4'",
        b"'|u1'",
        b"'V4'",
        b"'<i8', (9,)",
        b"[('a', '<u4')]",
        b"'f4,O'",
    ),
    *(b"(9999999999,)", b"(1, 1)", b"()", b"(-1,)", b"(3L,)", b"(3, 0)", b"True", b"{", b"-" * 9000 + b"1"),
)
_DOCTYPE = b"""<!DOCTYPE uniprot [<!ENTITY a "MKTAYIAKQR"> <!ENTITY c "&a;&a;&a;&a;&a;&a;&a;&a;">]>"""
_PACKERS: Sequence[Callable[[bytes], bytes]] = (
    bytes,
    bytes,
    gzip.compress,
    bz2.compress,
    lzma.compress,
    lambda data: gzip.compress(data[: len(data) // 2]) + gzip.compress(data[len(data) // 2 :]) + bytes(9),
)


class Target(NamedTuple):
    """One reader.

    Attributes:
        name: of it.
        write: makes a hostile file in a folder; a number chooses the whole one.
        read: reads it; a `ValueError` of ours, or nothing.
        check: reads whole files in a folder; an `AssertionError` unless they hold what is expected.
    """

    name: str
    write: Callable[[int, Sequence[Edit], Path], None]
    read: Callable[[Path], None]
    check: Callable[[Path], None]


def write_sequences(seed: int, chosen: Sequence[Edit], folder: Path) -> None:
    """Edit the text, pack it, and edit one in two once more."""
    text = (FASTA, FASTA, SWISS, XML, GENBANK)[seed % 5]
    data = edit_text(text, chosen[::2]).encode("utf-8", "surrogatepass")
    if seed & 64:
        data = edit_bytes(
            data, chosen, (b">", b"\n>", b"\r", b"\xef\xbb\xbf", b"<mask>", b"//\n", b"\0", _DOCTYPE, b"&c;")
        )
    pack = _PACKERS[seed // 5 % len(_PACKERS)]
    data = pack(data)
    if pack is not bytes and seed & 128:
        data = edit_bytes(data, chosen, (b"\x1f\x8b\x08", b"BZh9", b"\xfd7zXZ\x00"))
    (folder / "in").write_bytes(data)


def read_sequences(folder: Path) -> None:
    """Read records as commands do, each policy in turn."""
    size = (folder / "in").stat().st_size
    policy = Policy(
        gaps=("refuse", "drop")[size % 2],
        unknown=("refuse", "x")[size // 2 % 2],
        mask_token=size % 3 == 0,
        strict=size % 7 == 0,
    )
    reader = SequenceReader([folder / "in"], policy)
    for record in reader:
        assert record.id
        assert record.accession
        assert record.tokens.size
    assert all(line.isprintable() for line in reader.summary())


def write_mutations(seed: int, chosen: Sequence[Edit], folder: Path) -> None:
    """Edit a table, or one time in four a structure."""
    (write_structure if seed & 768 == 768 else write_table)(seed, chosen, folder)


def read_mutations(folder: Path) -> None:
    """Read what is there."""
    (read_structures if (folder / "in.ent").exists() else read_table)(folder)


def check_mutations(folder: Path) -> None:
    """Compare whole tables and structures with what was written."""
    check_table(folder / "in", TABLE, *EXPECTED)
    check_structures(folder)


def write_table(seed: int, chosen: Sequence[Edit], folder: Path) -> None:
    """Edit a table of mutants, and a name of one."""
    text = edit_text(TABLE.replace(",", ",,\t;"[seed % 4]), chosen)
    data = text.encode("utf-8", "surrogatepass")
    data = (
        edit_bytes(data, chosen, (b'"', b"\r", b"\xff", b"\xef\xbb\xbf", b"\0", b"mutant"))
        if seed & 64
        else data
    )
    data = gzip.compress(data) if seed & 16 else data
    data = edit_bytes(data, chosen, (b"\x1f\x8b\x08",)) if seed & 128 else data
    (folder / "in").write_bytes(data)
    (folder / "name").write_text(
        edit_text(MUTANTS[seed % len(MUTANTS)], chosen), encoding="utf-8", errors="surrogatepass", newline=""
    )


def read_table(folder: Path) -> None:
    """Read a name, and a table with its wild type."""
    offset = (0, 7, -9, 10**9)[(folder / "in").stat().st_size % 4]
    name = (folder / "name").read_bytes().decode("utf-8", "surrogatepass")
    try:
        read_mutant(name, offset=offset)
    except ValueError as error:
        assert type(error) is ValueError  # noqa: PT017
        assert str(error).startswith("mutant '")  # noqa: PT017
    table = read_variants(folder / "in", column="mutant")
    mutants, messages = read_mutants(table, column="mutant", offset=offset)
    assert all(line.startswith(f"{folder}") for line in messages)
    table.numbers("DMS_score")
    if any(mutants):
        rebuild_wild_type(table, mutants, column="mutated_sequence", offset=offset)
        check_wild_type(table, mutants, VOCABULARY.encode("MKTAYIAKQR"), offset=offset)
    table.with_columns({"new": ["1"] * len(table.variants)})


def make_shards(folder: Path) -> Target:
    """Return the target of shards, n-gram counts and embedding files, with whole ones in a folder."""
    dataset, embeddings = whole_dataset(folder / "dataset"), whole_embeddings(folder / "embeddings")

    counts = (dataset / "ngrams.h5").read_bytes()

    def write(seed: int, chosen: Sequence[Edit], place: Path) -> None:
        if seed % 2:
            edit_shards(dataset, seed, chosen, place)
            return
        path = embeddings[seed // 2 % len(embeddings)]
        data = edit_hdf5(path.read_bytes(), chosen) if path.suffix == ".h5" else edit_npz(path, seed, chosen)
        (place / "e").write_bytes(data)
        for other in other_shards(path):
            shutil.copyfile(other, place / "other")

    def read(place: Path) -> None:
        if (place / "e").exists():
            with open_embeddings(place / "e") as file:
                assert all(
                    each.array.shape == file.info.shape(each.num_residues) for _, each in file.numbered()
                )
            if (place / "other").exists():
                merge_embeddings([place / "e", place / "other"], place / "merged")
            return
        from data_prep.check import check_dataset

        steps = [lambda: read_windows(place), lambda: check_dataset(place)]
        if (place / "ngrams.h5").read_bytes() != counts:  # whole ones take longer than all the rest
            steps.append(lambda: read_ngrams(place / "ngrams.h5"))
        failed: list[ValueError] = []
        for step in steps:
            try:
                step()
            except ValueError as error:
                failed.append(error)
        for error in failed:
            raise error

    return Target("shards", write, read, lambda place: check_shards(place, dataset, embeddings))


def read_windows(folder: Path) -> None:
    """Read windows as training does, and what `verify` looks at."""
    windows = ShardSet(folder, "train")
    assert len(windows) < 10_000
    windows.read_many([0, len(windows) - 1])
    windows.verify()


def edit_npz(path: Path, seed: int, chosen: Sequence[Edit]) -> bytes:
    """Edit a NumPy archive: its bytes, or those of a member, with the right checksum."""
    data = path.read_bytes()
    if seed & 128:
        return edit_bytes(data, chosen, (b"PK\1\2", b"PK\3\4", b"PK\5\6"))
    return edit_member(data, seed, chosen, lambda name, part: edit_array(name, part, seed, chosen))


def edit_array(name: str, part: bytes, seed: int, chosen: Sequence[Edit]) -> bytes:
    """Edit an array of NumPy: its bytes, or the words of its header; of what the file says of itself the values."""
    if name == "about.npy" and seed & 1024:
        made = io.BytesIO()
        np.save(
            made, np.array(dump(edit_json(json.loads(np.load(io.BytesIO(part)).item()), chosen)).decode())
        )
        return made.getvalue()
    if not seed & 512:
        return edit_bytes(part, chosen, NPY_WORDS)
    size = int.from_bytes(part[8:10], "little")
    header = part[10 : 10 + size]
    for _, place, value, _ in chosen:
        words = list(re.finditer(rb"'[^']*'|\([^)]*\)|\w+", header)) or [re.match(b"", header)]
        start, end = words[at(place, len(words))].span()
        header = header[:start] + NPY_WORDS[value % len(NPY_WORDS)] + header[end:]
    return part[:8] + len(header).to_bytes(2, "little") + header + part[10 + size :]


def edit_member(
    data: bytes, seed: int, chosen: Sequence[Edit], edit: Callable[[str, bytes], bytes], packed: bool = True
) -> bytes:
    """Return an archive with one member edited."""
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(made, "w") as new:
        names = old.namelist()
        picked = names[(seed * 7 + chosen[0][1]) % len(names)]
        for name in names:
            part = old.read(name)
            pack = packed and name == picked and seed & 64
            new.writestr(
                name,
                edit(name, part) if name == picked else part,
                compress_type=zipfile.ZIP_DEFLATED if pack else zipfile.ZIP_STORED,
            )
    return made.getvalue()


TARGETS: dict[str, Callable[[Path], Target]] = {
    "sequences": lambda folder: Target(
        "sequences",
        write_sequences,
        read_sequences,
        lambda place: check_sequences(place / "in", SEQUENCES, _PACKERS[:-1]),
    ),
    "shards": make_shards,
    "mutations": lambda _: Target("mutations", write_mutations, read_mutations, check_mutations),
}
