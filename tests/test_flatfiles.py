"""UniProt and GenBank files read as the same records."""

from __future__ import annotations

import gzip

import pytest
from reading import read, residues, skipped, write_file

from protperf.formats import FormatError, flatfiles
from protperf.formats.fasta import SequenceReader


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return write_file


SWISS = """\
ID   ONE_TEST                Reviewed;          {length} AA.
AC   P00001; Q00001;
DT   28-NOV-2003, integrated into UniProtKB/Swiss-Prot.
DT   28-NOV-2003, sequence version 1.
DT   11-DEC-2019, entry version 88.
DE   RecName: Full=Test protein {{ECO:0000255}};
DE   Flags: Fragment;
GN   Name=tst;
OS   Escherichia coli (strain K12).
OC   Bacteria.
OX   NCBI_TaxID=83333;
SQ   SEQUENCE   {length} AA;  4366 MW;  01ED6F7CDD75D5B6 CRC64;
     {sequence}
//
"""
GENPEPT = """\
LOCUS       AAA00001                  12 aa            linear   BCT 01-JAN-2020
DEFINITION  protein one [Escherichia coli].
ACCESSION   AAA00001
VERSION     AAA00001.1
SOURCE      Escherichia coli
  ORGANISM  Escherichia coli
            Bacteria.
FEATURES             Location/Qualifiers
     source          1..12
                     /organism="Escherichia coli"
ORIGIN
        1 mktayiakqr qi
//
"""
GENBANK = """\
LOCUS       TEST01                    60 bp    DNA     linear   BCT 01-JAN-2020
DEFINITION  Test plasmid.
ACCESSION   TEST01
VERSION     TEST01.1
FEATURES             Location/Qualifiers
     CDS             1..30
                     /gene="abcA"
                     /product="protein one"
                     /protein_id="AAA00001.1"
                     /translation="MKTAYIAKQ"
     CDS             31..60
                     /pseudo
                     /locus_tag="t2"
ORIGIN
        1 atgaaaaccg cgtatattgc gaaacagtaa atgaaaaccg cgtatattgc gaaacagtaa
//
"""


def test_swiss_prot_entries_are_read_and_bad_ones_named(write):
    text = SWISS.format(length=6, sequence="MKTAYI") + SWISS.format(length=5, sequence="MK*TA")
    reader = SequenceReader([write(text)])
    (record,) = reader
    assert (record.id, record.line, residues(record)) == ("P00001", 1, "MKTAYI")
    assert record.header == "P00001 Test protein (Fragment) OS=Escherichia coli (strain K12) OX=83333 GN=tst"
    assert reader.skipped_examples[0].message.startswith(
        "in.fasta: entry 2: record 'P00001' has '*' at residue 3; allowed"
    )


def test_genbank_proteins_and_translations_are_read(write):
    (record,) = SequenceReader([write(GENPEPT)])
    assert (record.id, residues(record)) == ("AAA00001.1", "MKTAYIAKQRQI")
    assert record.header == "AAA00001.1 protein one [Escherichia coli] OS=Escherichia coli"

    records, reader = read(write(gzip.compress(GENBANK.encode())))
    assert records == [("AAA00001.1", "MKTAYIAKQ")]
    assert skipped(reader) == [(2, "t2", None, "empty", "")]


@pytest.mark.parametrize("text", [SWISS.format(length=6, sequence="MKTAYI"), GENPEPT, GENBANK])
def test_a_cut_entry_is_refused(write, text):
    lines = text.splitlines(keepends=True)
    for count in range(1, len(lines)):
        with pytest.raises(FormatError) as error:
            read(write("".join(lines[:count])))
        assert str(error.value).startswith("in.fasta: ")
        assert "\n" not in str(error.value)


def test_nucleotides_behind_proteins_are_refused(write):
    with pytest.raises(FormatError, match="entry 2 is nucleotide"):
        read(write(GENPEPT + GENBANK))


def test_flat_file_xml_and_fasta_of_the_same_entries_agree(shared_dir):
    data = shared_dir / "data"
    paths = [
        "uniprot_dat/biopython_multi_ex_8.dat",
        "uniprot_xml/multi_ex_8.xml.gz",
        "uniprot_xml/multi_ex_8.fasta",
    ]
    dat, xml, fasta = [
        [(record.accession, residues(record)) for record in SequenceReader([data / path])] for path in paths
    ]
    assert dat == xml == fasta
    assert len(fasta) == 8


def test_every_uniprot_file_reads_without_a_warning(shared_dir):
    data = shared_dir / "data"
    counts = {
        "emboss_swissprot_100.dat.gz": (100, 37225),
        "emboss_trembl_9.dat": (9, 4117),
        "sp012": (1, 153),
    }
    for path in [*(data / "uniprot_dat").iterdir(), *(data / "uniprot_xml").iterdir()]:
        if path.name.startswith("UniRef"):
            with pytest.raises(FormatError, match="UniRef XML"):
                read(path)
            continue
        _, reader = read(path)
        assert reader.accepted
        assert not reader.skipped
        if path.name in counts:
            assert (reader.accepted, reader.residues) == counts[path.name]


def xml_of(inside: str) -> str:
    return f"<uniprot xmlns='http://uniprot.org/uniprot'><entry><name>x</name>{inside}</entry></uniprot>"


TOO_MANY = {
    "a.dat": SWISS.format(length=6, sequence="MKTAYI").replace("OC   Bacteria.\n", "OC   B.\n" * 1_300),
    "a.gp": GENPEPT.replace("            Bacteria.\n", "ab\n" * 1_300),
    "b.gp": GENPEPT.replace("        1 mkt", "ab\r" * 1_300 + "        1 mkt"),
    "a.xml": xml_of("<a/>" * 1_100),
    "b.xml": xml_of("<a " + " ".join(f"a{number}=''" for number in range(1_100)) + "/>"),
}


@pytest.mark.parametrize("name", TOO_MANY)
def test_an_entry_has_few_lines_and_few_tags(write, monkeypatch, name: str):
    """A parser keeps each, and 32 MiB of the shortest would take a gigabyte."""
    monkeypatch.setattr(flatfiles, "MOST_LINES", 1_000)
    monkeypatch.setattr(flatfiles, "MOST_TAGS", 1_000)
    write(TOO_MANY[name], name)
    with pytest.raises(FormatError, match=r"entry 1 has more than 1,000 lines, tags or attributes, which no"):
        read(name)


def test_an_entry_of_nucleotides_has_few_lines_before_them(write, monkeypatch):
    monkeypatch.setattr(flatfiles, "MOST_KEPT_LINES", 100)
    header = GENBANK.replace("DEFINITION", "COMMENT x\n" * 85 + "DEFINITION", 1)
    assert read(write(header, "a.gb"))[0] == read(write(GENBANK, "b.gb"))[0]
    nucleotides = header.replace("//\n", "        1 atgaaaaccg\n" * 200 + "//\n")
    assert read(write(nucleotides * 3, "a.gb"))[0] == 3 * read("b.gb")[0]
    for before, more in (("DEFINITION", "ab\n"), ("     CDS", '                     /a="b"\n')):
        write(GENBANK.replace(before, more * 100 + before, 1), "a.gb")
        with pytest.raises(
            FormatError, match=r"a\.gb: entry 1 has more than 100 lines before its nucleotides"
        ):
            read("a.gb")
