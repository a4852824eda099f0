"""The sequence reader: what is read, and the outcome of each odd file of the case table."""

from __future__ import annotations

import bz2
import csv
import gzip
import lzma
import os
import warnings
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reading import read, residues, write_file

from protperf.formats import FormatError
from protperf.formats.fasta import Policy, SequenceReader
from protperf.vocab import VOCABULARY

KEEP_ALL = Policy(gaps="drop", unknown="x")


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return write_file


def test_records_keep_header_line_and_exact_id(write):
    name = write(">sp|P1|A_B desc OS=x\nMK\n\n> id/2 \tmore \nTA\n")
    first, second = SequenceReader([name])
    assert (first.id, first.header, first.line, first.path) == ("sp|P1|A_B", "sp|P1|A_B desc OS=x", 1, name)
    assert first.accession == "P1"
    assert (second.id, second.header, second.line) == ("id/2", "id/2 \tmore", 4)
    assert second.accession == "id/2"
    assert first.tokens.dtype == np.uint8
    assert first.tokens.tolist() == [10, 8]  # M and K in ACDEFGHIKLMNPQRSTVWY
    assert first.tokens.flags.writeable


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("last", [True, False])
def test_line_ends_and_a_missing_last_one_do_not_matter(write, end, last):
    text = end.join([">q1 first", "MKTA", "", "yiak", ">q2", "MSDN"]) + (end if last else "")
    records, reader = read(write(text))
    assert records == [("q1", "MKTAYIAK"), ("q2", "MSDN")]
    assert not reader.skipped


def test_white_space_is_dropped_and_lower_case_is_upper_case(write):
    records, _ = read(write("\n   \n>q1\n mk ta\t\n\n \v\f yi \n"))
    assert records == [("q1", "MKTAYI")]


def test_comments_are_dropped_anywhere_and_counted(write):
    records, reader = read(write("; a\n# b\n>q1\nMK\n;c\n#d\nTA\n# e\n>q2\nMS\n"))
    assert records == [("q1", "MKTA"), ("q2", "MS")]
    assert reader.repaired == {"comment_line": 5}
    assert reader.repaired_examples == {"comment_line": "in.fasta:1"}


def test_a_final_stop_is_dropped_and_counted(write):
    records, reader = read(write(">q1\nMKTA*\n>q2\nMS\n*\n\n"))
    assert records == [("q1", "MKTA"), ("q2", "MS")]
    assert reader.repaired == {"final_stop": 2}


@pytest.mark.parametrize("letter", "BOUXZJboujxz")
def test_each_letter_has_its_own_token(write, letter):
    record = next(iter(SequenceReader([write(f">q\nM{letter}K\n")])))
    assert record.tokens.tolist() == [10, VOCABULARY.id_of(letter.upper()), 8]


def test_utf8_is_kept_in_headers_and_other_bytes_are_latin1_and_counted(write):
    name = write(">à\u00a0b ßiegelii, β\nMK\n".encode() + b">q2 caf\xe9\nMK\n")
    reader = SequenceReader([name])
    first, second = reader
    # the no-break space (whose UTF-8 ends in a byte that Latin-1 calls a space) is part of the word
    assert (first.id, first.header) == ("à\u00a0b", "à\u00a0b ßiegelii, β")
    assert second.header == "q2 café"
    assert reader.repaired == {"header_encoding": 1}


def test_byte_order_marks_are_dropped_also_where_files_were_joined(write):
    records, reader = read(write(b"\xef\xbb\xbf>q1\nMK\n\xef\xbb\xbf>q2\nTA\n"))
    assert records == [("q1", "MK"), ("q2", "TA")]
    assert not reader.skipped


def test_the_end_of_a_file_ends_its_record(write):
    reader = SequenceReader([write(">q1\nMK", "a.fa"), write(">q2\nTA\n", "b.fa")])
    assert [(record.id, record.path, record.line) for record in reader] == [
        ("q1", "a.fa", 1),
        ("q2", "b.fa", 1),
    ]


def test_reading_again_counts_anew(write):
    reader = SequenceReader([write(">q1\nMK\n>q2\n-\n")])
    assert [len(list(reader)) for _ in range(2)] == [1, 1]
    assert (reader.records, reader.accepted, reader.residues, dict(reader.skipped)) == (2, 1, 2, {"gap": 1})


NAMES = st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters=" \ufeff"), min_size=1)
DESCRIPTIONS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\n"))
SEQUENCES = st.text("ACDEFGHIKLMNPQRSTVWYBOUXZJacdefghiklmnpqrstvwybouxzj", min_size=1, max_size=200)


@given(
    records=st.lists(st.tuples(NAMES, DESCRIPTIONS, SEQUENCES), min_size=1, max_size=5),
    width=st.integers(1, 80),
    end=st.sampled_from(["\n", "\r\n", "\r"]),
    blank=st.sampled_from(["", "\n", " \t\n\n"]),
    pack=st.sampled_from([bytes, gzip.compress, bz2.compress, lzma.compress]),
    last_end=st.booleans(),
)
def test_any_written_fasta_reads_back(tmp_path_factory, records, width, end, blank, pack, last_end):
    lines = []
    for name, description, sequence in records:
        wrapped = [sequence[i : i + width] for i in range(0, len(sequence), width)]
        lines.append(f">{name} {description}\n" + "\n".join(wrapped) + "\n" + blank)
    text = (blank + "".join(lines)).replace("\n", end)
    text = text if last_end else text.removesuffix(end)
    path = tmp_path_factory.mktemp("any") / "x"
    path.write_bytes(pack(text.encode()))
    got = [(record.id, record.header, residues(record)) for record in SequenceReader([path])]
    white = " \t\n\r\v\f"
    assert got == [(name, f"{name} {words}".strip(white), seq.upper()) for name, words, seq in records]


def simple_fasta(path):
    """What Biopython reads, or None where it refuses the file."""
    from Bio.SeqIO.FastaIO import SimpleFastaParser

    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8") as lines, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return [(title.strip(), seq.upper().removesuffix("*")) for title, seq in SimpleFastaParser(lines)]
    except (ValueError, EOFError, OSError):  # damaged, or no text
        return None


def test_files_read_as_biopython_reads_them(shared_dir):
    """Well-formed files whole; of the others each accepted record is one that Biopython reads."""
    folders = ["data/sequences", "data/fasta_oddities", "data/weights", "data/uniprot_xml", "cases/fasta"]
    paths = [path for folder in folders for path in sorted((shared_dir / folder).iterdir()) if path.is_file()]
    whole = partly = 0
    for path in paths:
        expected = simple_fasta(path)
        if not expected:
            continue
        reader = SequenceReader([path])
        try:
            got = [(record.header, residues(record)) for record in reader]
        except FormatError:
            continue
        if not reader.skipped and not set(reader.repaired) - {"final_stop", "like_nucleotides", "very_long"}:
            assert got == expected, path
            whole += 1
        elif not set(reader.repaired) - {"final_stop", "like_nucleotides", "very_long"}:
            assert not Counter(got) - Counter(expected), path
            partly += 1
    assert whole >= 59, whole
    assert partly >= 10, partly


# records left out by the default policy: (line, column, reason), counted by hand in each file
LEFT_OUT = {
    "c01": [(1, None, "text_before_header")],
    "c10": [(1, None, "empty")],
    "c14": [(3, None, "no_name")],
    "c33": [(2, 4, "gap")],
    "c34": [(2, 17, "gap")],
    "c35": [(4, 6, "inner_stop"), (5, None, "empty")],
    "c37": [(3, 34, "other_character")],
    "c38": [(2, 16, "digit"), (4, 4, "digit")],
    "c48": [(2, 4, "mask_token"), (4, 2, "gap")],
    "c54": [(52, 1, "inner_stop")],
    "c70": [(2, 17, "other_character")],
}
# rows whose tolerant numbers count records that only an explicit flag keeps
KEPT_BY_FLAG = {
    "c33": Policy(gaps="drop"),
    "c34": Policy(gaps="drop"),
    "c35": Policy(unknown="x"),
    "c54": Policy(unknown="x"),
}
# rows where the policy chooses otherwise than the column
OTHER_LENGTHS = {"c34": "23;32"}  # '.' is a gap: both are dropped, none is read as a stop (16 + 7 letters)
STRICT_ACCEPTS = {"c17", "c22"}  # duplicate ids are no fault of a record: prepare and embed keep both
BAD_FILES = {
    "c03": "no sequence",
    "c05": "c05_no_header_at_all.fasta:1: no '>' header; not FASTA",
    "c57": "truncated",
    "c58": "CRC",
    "c63": "zstd -d",
    "c68": "no sequence",
    "c69": "no sequence",
}


def case_rows():
    table = (
        Path(os.environ.get("PROTPERF_SHARED", Path(__file__).parents[2] / "shared"))
        / "cases/fasta/CASES.tsv"
    )
    if not table.exists():
        return [pytest.param(None, id="no-case-table")]
    with open(table, newline="", encoding="utf-8") as lines:
        return [pytest.param(row, id=row["file"]) for row in csv.DictReader(lines, delimiter="\t")]


@pytest.fixture(params=case_rows())
def case(request, shared_dir):
    """One row of the case table with `path` and `key` (c01, ...)."""
    if request.param is None:
        pytest.skip(f"no case table below {shared_dir}")
    row = dict(request.param)
    return {**row, "path": shared_dir / "cases/fasta" / row["file"], "key": row["file"].split("_")[0]}


def test_each_odd_file_has_its_right_outcome(case):
    if case["key"] in BAD_FILES:
        with pytest.raises(FormatError) as error:
            list(SequenceReader([case["path"]], KEEP_ALL))
        assert BAD_FILES[case["key"]] in str(error.value)
        assert "\n" not in str(error.value)
        return
    reader = SequenceReader([case["path"]], KEPT_BY_FLAG.get(case["key"]))
    records = list(reader)
    assert len(records) == int(case["n_records_tolerant"])
    lengths = ";".join(str(record.tokens.size) for record in records)
    assert lengths == OTHER_LENGTHS.get(case["key"], case["residue_lengths"])
    ids = case["ids"].split(";") if case["ids"] else []
    assert all(name in (record.id, record.accession) for name, record in zip(ids, records, strict=True))
    assert reader.records == reader.accepted + sum(reader.skipped.values())


def test_each_odd_file_leaves_out_what_was_counted_by_hand(case):
    reader = SequenceReader([case["path"]])
    if case["key"] in BAD_FILES:
        with pytest.raises(FormatError):
            list(reader)
        return
    list(reader)
    assert [(s.line, s.column, s.reason) for s in reader.skipped_examples] == LEFT_OUT.get(case["key"], [])


def test_each_odd_file_is_judged_strictly_as_its_row_says(case):
    wanted = case["strict_mode"]
    accepted = wanted.startswith("ok") and case["key"] not in BAD_FILES
    if accepted or case["key"] in STRICT_ACCEPTS:
        assert list(SequenceReader([case["path"]], Policy(strict=True)))
        return
    with pytest.raises(FormatError) as error:
        list(SequenceReader([case["path"]], Policy(strict=True)))
    message = str(error.value)
    assert "\n" not in message
    assert message.startswith(str(case["path"]))
    words = wanted.removeprefix("ok or ").removeprefix("error").strip(" :").split()
    if words[0] == "line":
        assert f"{case['file']}:{words[1]}:" in message
    elif case["key"] not in BAD_FILES:
        assert f"record '{words[0]}'".rstrip(":") in message or f"record '{words[0].rstrip(':')}'" in message


def test_dna_letters_among_proteins_give_no_note_and_a_file_of_them_one(write):
    assert read(write(">t\nTGGA\n>q\nMKT\n"))[1].repaired == {}
    reader = read(write(">t\nTGGA\n>q\nACGUN\n"))[1]
    assert reader.repaired == {"like_nucleotides": 1}
    assert reader.accepted == 2


def test_a_sequence_longer_than_any_protein_is_read_and_noted(write):
    records, reader = read(write(">q1\n" + "M" * 100_001 + "\n>q2\n" + "M" * 100_000 + "\n"))
    assert [len(sequence) for _, sequence in records] == [100_001, 100_000]
    assert reader.repaired == {"very_long": 1}
    assert reader.repaired_examples == {"very_long": "in.fasta:1"}


def test_every_skipped_record_is_in_the_table(write, tmp_path):
    name = write("".join(f">q{i}\nM-K\n" for i in range(1, 101)) + ">a\x1b\n\n>ok\nMK\n")
    reader = SequenceReader([name], skipped_path=tmp_path / "out/skipped.tsv")
    assert len(list(reader)) == 1
    assert len(reader.skipped_examples) < 10
    rows = (tmp_path / "out/skipped.tsv").read_text(encoding="utf-8").splitlines()
    assert rows[0] == "file\tline\tid\tcolumn\treason\tfound"
    assert rows[1] == "in.fasta\t2\tq1\t2\tgap\t-"
    assert rows[100] == "in.fasta\t200\tq100\t2\tgap\t-"
    assert rows[101] == "in.fasta\t201\ta\\x1b\t\tempty\t"
    assert len(rows) == 102
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["skipped.tsv"]


def test_no_table_without_rows_or_after_a_failure_or_an_early_stop(write, tmp_path):
    table = tmp_path / "skipped.tsv"
    list(SequenceReader([write(">q\nMK\n")], skipped_path=table))
    assert not table.exists()
    bad = write(gzip.compress(b">q\n-\n" + b">p\nMK\n" * 9)[:-4], "bad.gz")
    with pytest.raises(FormatError):
        list(SequenceReader([bad], skipped_path=table))
    records = iter(SequenceReader([write(">q\n-\n>p\nMK\n")], skipped_path=table))
    next(records)
    records.close()
    assert [path.name for path in tmp_path.iterdir() if "skipped" in path.name] == []
