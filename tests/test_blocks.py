"""The block parser: it reads what a loop over the lines reads and what Biopython reads, wherever the text is cut."""

from __future__ import annotations

import gzip
import io
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from Bio.SeqIO.FastaIO import SimpleFastaParser
from hypothesis import example, given, settings
from hypothesis import strategies as st
from prepared import RESIDUES, SAMPLE

from protperf.formats import FormatError
from protperf.formats.blocks import Block, BlockParser
from protperf.formats.counts import Counts, settle
from protperf.formats.cutting import LONGEST_RECORD, LongRecord, count_lines, cut_records
from protperf.formats.lines import raw_records
from protperf.formats.records import Policy, Record, Skipped
from protperf.vocab import VOCABULARY

POLICIES = [Policy(), Policy(gaps="drop", unknown="x"), Policy(mask_token=True)]

Reading = tuple[list[tuple[object, ...]], list[Skipped], dict[str, object]]


def found(items: list[Record | Skipped], counts: Counts) -> Reading:
    records = [
        (item.id, item.header, VOCABULARY.decode(item.tokens), item.line)
        for item in items
        if isinstance(item, Record)
    ]
    state = {name: value for name, value in vars(counts).items() if not name.startswith("skipped")}
    return records, [item for item in items if isinstance(item, Skipped)], state


def read_lines(text: bytes, policy: Policy) -> Reading:
    """The slow twin: one line at a time."""
    counts = Counts()
    lines = io.TextIOWrapper(io.BytesIO(text), encoding="latin-1", newline=None)
    items = [
        raw if isinstance(raw, Skipped) else settle(raw, policy, counts)
        for raw in raw_records(lines, "x", counts.repair)
    ]
    return found(items, counts)


def pieces_of(text: bytes, size: int) -> Iterator[bytes]:
    return (text[start : start + size] for start in range(0, len(text), size))


def parse(
    text: bytes, policy: Policy, *, block_size: int, piece_size: int, longest: int = LONGEST_RECORD
) -> Iterator[tuple[Block, Counts]]:
    counts = Counts()
    parser = BlockParser("x", policy, counts)
    for block in cut_records(pieces_of(text, piece_size), block_size, longest=longest):
        yield parser.parse(block), counts


def read_blocks(
    text: bytes, policy: Policy, *, block_size: int, piece_size: int, longest: int = LONGEST_RECORD
) -> Reading:
    items: list[Record | Skipped] = []
    counts = Counts()
    parsed = parse(text, policy, block_size=block_size, piece_size=piece_size, longest=longest)
    for block, so_far in parsed:
        counts = so_far
        items += [*block.skipped, *block.records()]
    return found(items, counts)


ODD = st.sampled_from(
    [
        b"*",
        b"-",
        b".",
        b"1",
        b">",
        b";",
        b"#",
        b"\0",
        b"\xc3\xa9",
        b"\xff",
        b"<mask>",
        b" ",
        b"\t",
        b"\v",
        b"?",
    ]
)
LETTERS = st.text(RESIDUES + RESIDUES.lower(), max_size=90).map(str.encode)
LINE_END = st.sampled_from([b"\n"] * 4 + [b"\r\n", b"\r", b"\n\n", b"\n \n"])


@st.composite
def bodies(draw: st.DrawFn) -> bytes:
    letters = draw(LETTERS)
    width = draw(st.integers(1, 70))
    parts = []
    for start in range(0, len(letters), width):
        parts += [letters[start : start + width], draw(LINE_END)]
        if draw(st.integers(0, 15)) == 0:
            parts.append(draw(ODD))
        if draw(st.integers(0, 30)) == 0:
            parts += [
                draw(st.sampled_from([b";", b"#", b"\xef\xbb\xbf>", b"\xef\xbb\xbf"])),
                b"more",
                draw(LINE_END),
            ]
    return b"".join(parts)


HEADERS = st.one_of(
    st.text("ab|>; #=\t", max_size=12).map(str.encode),
    st.sampled_from(
        [b"", b" ", b"id d\xc3\xa9j\xc3\xa0", b"id \xff", b"tr|A0A1|X_Y n OS=o OX=1", b"a\x1cb", b"i"]
    ),
)


@st.composite
def texts(draw: st.DrawFn) -> bytes:
    lead = draw(st.sampled_from([b""] * 6 + [b"\n", b"; c\n", b"free text\n", b" \r\n\n", b"# c\rMK\r"]))
    records = draw(st.lists(st.tuples(HEADERS, LINE_END, bodies()), min_size=1, max_size=12))
    text = lead + b"".join(b">" + header + end + body for header, end, body in records)
    return text.rstrip(b"\r\n") if draw(st.booleans()) else text


@settings(max_examples=400, deadline=None)
@given(
    text=texts(), policy=st.sampled_from(POLICIES), extra=st.integers(0, 200), piece_size=st.integers(1, 300)
)
@example(text=b">a\rMK\r\r>b\rTA", policy=POLICIES[0], extra=0, piece_size=1)
@example(text=b"junk\n" * 40 + b">a\nMK\n>b\nTA\n", policy=POLICIES[0], extra=0, piece_size=7)
def test_blocks_of_any_size_read_what_a_loop_over_lines_reads(
    text: bytes, policy: Policy, extra: int, piece_size: int
):
    expected = read_lines(text, policy)
    for block_size in {1, 64, 64 + extra, len(text) + 1}:
        records, skipped, counts = read_blocks(text, policy, block_size=block_size, piece_size=piece_size)
        assert records == expected[0]
        assert sorted(skipped, key=lambda one: one.line) == sorted(expected[1], key=lambda one: one.line)
        assert counts == expected[2]


@settings(max_examples=200, deadline=None)
@given(
    text=texts(),
    policy=st.sampled_from(POLICIES),
    longest=st.integers(64, 200),
    block_size=st.integers(1, 64),
    piece_size=st.integers(1, 300),
)
@example(
    text=b"x\n>a\r\n" + b"M\r" * 40 + b"\n>b\r\nTA",
    policy=POLICIES[0],
    longest=64,
    block_size=9,
    piece_size=1,
)
def test_a_record_that_is_too_long_is_as_one_without_residues_in_its_place(
    text: bytes, policy: Policy, longest: int, block_size: int, piece_size: int
):
    shorter, sizes = b"", {}
    for part in re.split(rb"(?<=[\r\n])(?=>)", text):
        if part.startswith(b">") and len(part) > longest:
            sizes[count_lines(shorter) + 1] = len(part)
            header = re.split(rb"[\r\n]", part)[0]
            part = header + re.sub(rb"[^\r\n]", b"", part.removeprefix(header))
        shorter += part
    expected = read_lines(shorter, policy)
    records, skipped, counts = read_blocks(
        text, policy, block_size=block_size, piece_size=piece_size, longest=longest
    )
    assert records == expected[0]
    assert counts == expected[2]
    left_out = [(one.line, one.id) for one in expected[1]]
    assert sorted((one.line, one.id) for one in skipped) == sorted(left_out)
    long = {one.line: one.found for one in skipped if one.reason == "too_much_text"}
    assert long == {line: f"{size:,} bytes of text" for line, size in sizes.items()}


@settings(max_examples=200, deadline=None)
@given(
    text=texts(), size=st.integers(1, 400), piece_sizes=st.tuples(st.integers(1, 50), st.integers(1, 1000))
)
def test_cuts_lie_before_headers_and_depend_on_the_text_alone(
    text: bytes, size: int, piece_sizes: tuple[int, int]
):
    one, other = (
        [block for block in cut_records(pieces_of(text, piece), size) if not isinstance(block, LongRecord)]
        for piece in piece_sizes
    )
    assert one == other
    assert b"".join(one) == text
    assert all(block.startswith(b">") for block in one[1:])
    for block in one[:-1]:
        starts = block.replace(b"\r", b"\n").count(b"\n>") + block.startswith(b">")
        assert len(block) <= size or starts == 1  # longer only where one record is
    assert sum(map(count_lines, one)) == sum(
        line.endswith("\n") for line in io.StringIO(text.decode("latin-1"), newline=None)
    )


@settings(max_examples=100, deadline=None)
@given(
    records=st.lists(st.text(RESIDUES, min_size=1, max_size=300), min_size=1, max_size=20),
    width=st.integers(1, 100),
    end=st.sampled_from(["\n", "\r\n"]),
    blank=st.booleans(),
    block_size=st.integers(64, 2000),
)
def test_any_wrapping_reads_as_biopython_does(
    records: list[str], width: int, end: str, blank: bool, block_size: int
):
    lines = []
    for number, sequence in enumerate(records):
        lines.append(f">p{number} some protein > or another")
        lines += [sequence[start : start + width] for start in range(0, len(sequence), width)]
        lines += [""] * blank
    text = end.join(lines) + end
    expected = list(SimpleFastaParser(io.StringIO(text)))
    got = read_blocks(text.encode(), Policy(), block_size=block_size, piece_size=333)
    assert [(header, sequence) for _, header, sequence, _ in got[0]] == expected
    assert got[1] == []


def real_files() -> list[str]:
    return [
        "sequences/mmseqs_db_20k.fasta.gz",
        "sequences/mmseqs_query_500.fasta",
        "sequences/yeast_UP000002311_559292.fasta.gz",
        "sequences/uniref90_10k.fasta.gz",
        "sequences/uniref50_esm_some15.fasta",
        "sequences/titin_human_34350.fasta",
        "sequences/titin_twice_68700.fasta.gz",
    ]


def assert_equals_biopython(path: Path, *, block_size: int) -> None:
    content = path.read_bytes()
    text = gzip.decompress(content) if content.startswith(b"\x1f\x8b") else content
    records = (
        (header, sequence.upper())
        for header, sequence in SimpleFastaParser(io.StringIO(text.decode("latin-1")))
    )
    number = 0
    for block, _ in parse(text, Policy(), block_size=block_size, piece_size=1 << 17):
        assert block.skipped == []
        for record in block.records():
            header, sequence = next(records)
            assert record.header == header.strip()
            assert VOCABULARY.decode(record.tokens) == sequence
            number += 1
    assert number > 0
    assert next(records, None) is None


@pytest.mark.parametrize("block_size", [1000, 1 << 20])
def test_sample_is_read_as_biopython_reads_it(block_size: int):
    assert_equals_biopython(SAMPLE, block_size=block_size)


@pytest.mark.slow
@pytest.mark.parametrize("name", real_files())
def test_real_proteins_are_read_as_biopython_reads_them(shared_dir: Path, name: str):
    assert_equals_biopython(shared_dir / "data" / name, block_size=1 << 20)


def test_every_odd_file_is_read_as_a_loop_over_lines_reads_it(shared_dir: Path):
    paths = [*(shared_dir / "cases" / "fasta").iterdir(), *(shared_dir / "data" / "fasta_oddities").iterdir()]
    compared = 0
    for path in paths:
        text = path.read_bytes()
        if path.suffix == ".tsv" or text[:2] in (b"\x1f\x8b", b"BZ", b"\xfd7", b"\x28\xb5"):
            continue
        for policy in POLICIES:
            if path.name == "c05_no_header_at_all.fasta":
                with pytest.raises(FormatError, match="x:1: no '>' header"):
                    read_blocks(text, policy, block_size=64, piece_size=50)
                continue
            expected = read_lines(text, policy)
            for block_size in (64, 1000, 1 << 20):
                records, skipped, counts = read_blocks(text, policy, block_size=block_size, piece_size=977)
                assert records == expected[0]
                assert sorted(skipped, key=lambda one: one.line) == expected[1]
                assert counts == expected[2]
            compared += 1
    assert compared > 100


def test_a_record_longer_than_a_block_is_read_whole():
    text = b">a\n" + b"MKV" * 1000 + b"\n>b\nMK\n"
    records, _, _ = read_blocks(text, Policy(), block_size=100, piece_size=64)
    assert [len(record[2]) for record in records] == [3000, 2]
