"""The policy on bad records: what is left out, how it is named, what the flags keep."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reading import read, skipped, write_file

from protperf.formats import FormatError
from protperf.formats.fasta import Policy, SequenceReader
from protperf.formats.records import judge
from protperf.vocab import VOCABULARY

KEEP_ALL = Policy(gaps="drop", unknown="x")


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return write_file


# body after '>q1 x\n': (line, column, reason, found), then what --gaps drop --unknown x reads
BAD_BODIES = [
    ("MK--TA", (2, 3, "gap", "-"), "MKTA"),
    ("MK\nT.A", (3, 2, "gap", "."), "MKTA"),
    ("MK*TA", (2, 3, "inner_stop", "*"), "MKXTA"),
    ("MKTA**", (2, 5, "inner_stop", "*"), "MKTAX"),
    ("MK\n\n;note\n  T7A", (5, 4, "digit", "7"), "MKTXA"),
    ("MK\x00TA", (2, 3, "other_character", "\x00"), "MKXTA"),
    ("MK\x1bTA", (2, 3, "other_character", "\x1b"), "MKXTA"),
    ("MK\u2013TA", (2, 3, "other_character", "\u2013"), "MKXTA"),
    ("MK\u00a0TA", (2, 3, "other_character", "\u00a0"), "MKXTA"),
    ("MK TA,", (2, 6, "other_character", ","), "MKTAX"),
    ("M-K*", (2, 2, "gap", "-"), "MK"),
    ("MK*--", (2, 3, "inner_stop", "*"), "MK"),
]


@pytest.mark.parametrize(("body", "fault", "kept"), BAD_BODIES)
def test_a_bad_record_is_left_out_and_the_flags_keep_it(write, body, fault, kept):
    name = write(f">q1 x\n{body}\n>q2\nMS\n")
    records, reader = read(name)
    assert records == [("q2", "MS")]
    line, column, reason, found = fault
    assert skipped(reader) == [(line, "q1", column, reason, found)]
    assert dict(reader.skipped) == {reason: 1}
    assert reader.repaired.total() == body.count(";")

    assert read(name, KEEP_ALL)[0] == [("q1", kept), ("q2", "MS")]

    with pytest.raises(FormatError, match="--strict") as error:
        read(name, Policy(strict=True))
    assert str(error.value).startswith(f"in.fasta:{line}: record 'q1' has ")
    assert f"at column {column};" in str(error.value)
    assert "\n" not in str(error.value)


# never residues, whatever the flags: a marker's letters, two records run together, nothing at all
ALWAYS_BAD = [
    ("MKT<mask>LL", (2, 4, "mask_token", "<mask>")),
    ("MKT<MA\nSK>LL", (2, 4, "mask_token", "<MA\nSK>")),
    ("MKT<pad>LL", (2, 4, "tag", "<pad>")),
    ("MKT[MASK]LL", (2, 4, "tag", "[MASK]")),
    ("MKT>q3 MS", (2, 4, "header_mark", ">")),
    ("--..", (1, None, "empty", "--..")),
    ("*", (1, None, "empty", "*")),
    ("", (1, None, "empty", "")),
    (" \n\n", (1, None, "empty", "")),
]


@pytest.mark.parametrize(("body", "fault"), ALWAYS_BAD)
def test_some_records_no_flag_keeps(write, body, fault):
    line, column, reason, found = fault
    records, reader = read(write(f">q1\n{body}\n>q2\nMS\n"), KEEP_ALL)
    assert records == [("q2", "MS")]
    assert skipped(reader) == [(line, "q1", column, reason, found)]


@pytest.mark.parametrize("marker", ["<mask>", "<MASK>", "<Mask>", "<ma\nsk>"])
def test_mask_is_one_token_where_the_policy_takes_it(write, marker):
    reader = SequenceReader([write(f">q1\nMKT{marker}L\n")], Policy(mask_token=True))
    (record,) = reader
    assert record.tokens.tolist() == [10, 8, 16, VOCABULARY.mask, 9]
    assert reader.repaired == {"mask_token": 1}
    assert VOCABULARY.decode(record.tokens) == "MKT<mask>L"


def test_a_long_s_is_no_s():
    assert judge("MK<ma\u017fk>".encode(), Policy(mask_token=True)).tokens is None


def test_repairs_are_counted_for_kept_records(write):
    _, reader = read(write(">q1\nM-K..1*\u00e9*\n>q2\nM<mask>\n"), KEEP_ALL)
    assert reader.repaired == {"gap": 3, "digit": 1, "inner_stop": 1, "other_character": 1, "final_stop": 1}
    assert dict(reader.skipped) == {"mask_token": 1}


def test_headers_without_a_name_and_text_before_the_first_are_named(write):
    records, reader = read(write("\nfree text\nmore\n>q1\nMK\n>\nTA\n> \t\nTA\n"))
    assert records == [("q1", "MK")]
    assert skipped(reader) == [
        (2, "", None, "text_before_header", "free text"),
        (6, "", None, "no_name", ">"),
        (8, "", None, "no_name", ">"),
    ]
    messages = [example.message for example in reader.skipped_examples]
    assert messages[0].startswith("in.fasta:2: text before the first '>' header: 'free text'; allowed")
    assert messages[1].startswith("in.fasta:6: header without a name")
    with pytest.raises(FormatError, match=r"^in\.fasta:2: text before the first"):
        read("in.fasta", Policy(strict=True))


def test_the_message_says_place_found_allowed_and_what_to_do(write):
    text = ">x\nMK\n" * 6 + ">A0A024\n" + "M" * 32 + "*K\n"
    _, reader = read(write(text, "proteins.fasta"))
    assert reader.skipped_examples[0].message == (
        "proteins.fasta:14: record 'A0A024' has '*' at column 33; "
        "allowed: letters A-Z (a final '*' is dropped); --unknown x reads it as X"
    )


def test_messages_stay_one_line_whatever_the_text(write):
    _, reader = read(write(">" + "i" * 300 + "\x1b\x85\u2028\nM\x00\x07K\n"))
    message = reader.skipped_examples[0].message
    assert message.isprintable()
    assert len(message) < 250
    assert "'\\x00' at column 2" in message


def test_summary_counts_every_record_and_names_the_first_of_each_reason(write):
    name = write("#c\n>q1\nMK*\n>q2\nM-K\n>q3\nM.K\n>q4\nMK1\n")
    _, reader = read(name)
    assert reader.summary() == [
        "read 4 records: 1 accepted (2 residues), 3 left out",
        "left out, gap: 2 (first: in.fasta:5: record 'q2' has '-' at column 2; "
        "allowed: letters A-Z (a final '*' is dropped); --gaps drop removes '-' and '.')",
        "left out, digit: 1 (first: in.fasta:9: record 'q4' has '1' at column 3; "
        "allowed: letters A-Z (a final '*' is dropped); --unknown x reads it as X)",
        "';' and '#' comment lines dropped: 1 (first: in.fasta:1)",
        "final '*' dropped: 1 (first: in.fasta:2)",
    ]


@pytest.mark.parametrize("choice", [{"gaps": "keep"}, {"unknown": "X"}])
def test_an_unknown_policy_is_refused(choice):
    with pytest.raises(ValueError, match=r"^--(gaps|unknown) .*allowed"):
        Policy(**choice)


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused_in_one_line(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "bytes"
    for body in (content, b">q1\n" + content):
        path.write_bytes(body)
        reader = SequenceReader([path], Policy(mask_token=True, unknown="x"))
        refusal = ""
        try:
            records = list(reader)
        except FormatError as error:
            records, refusal = [], str(error)
        assert "\n" not in refusal
        assert all(record.tokens.size and record.id for record in records)
        assert all((r.tokens < VOCABULARY.num_residues).all() or VOCABULARY.mask in r.tokens for r in records)
        assert refusal or reader.records == len(records) + reader.skipped.total()
        assert all(example.message.isprintable() for example in reader.skipped_examples)


@pytest.mark.parametrize("text", ["A\n", "AB\n", "\n", "AA-"])
def test_an_odd_record_takes_memory_for_its_text(write, text):
    """However short its lines: each worker of `prepare` may hold one of 8 MiB."""
    read(write(">q1\nMK*TA\n"), KEEP_ALL)
    name = write(">q1\n" + text * ((1 << 17) // len(text)) + "1\n")
    tracemalloc.start()
    try:
        read(name, KEEP_ALL)
        assert tracemalloc.get_traced_memory()[1] < 30 << 17
    finally:
        tracemalloc.stop()
