"""Names of mutants and tables of variants: read exactly, written back byte for byte, mistakes named by row."""

from __future__ import annotations

import csv
import gzip
import io
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protperf.formats import FormatError, variants
from protperf.formats.mutations import check_mutant, fitting_offset, mutate, name_of, read_mutant, undo
from protperf.formats.variants import check_wild_type, read_mutants, read_variants, rebuild_wild_type
from protperf.vocab import VOCABULARY

WILD_TYPE = VOCABULARY.encode("MKTAYIAKQR")
LETTERS = "ACDEFGHIKLMNPQRSTVWYBOUXZJ"


def text_of(tokens: np.ndarray) -> str:
    return VOCABULARY.decode(tokens)


def test_a_name_counts_from_one_and_an_offset_is_added():
    assert read_mutant("M1A:R10W") == ((0, 10, 0), (9, 14, 18))
    assert read_mutant("H24Y", offset=23) == ((0, 6, 19),)
    assert read_mutant("A-3C", offset=-5) == ((1, 0, 1),)
    assert read_mutant(" m1a ") == read_mutant("M1A")
    assert read_mutant("A4A") == ((3, 0, 0),)
    assert read_mutant("X5B") == ((4, 23, 20),)


@pytest.mark.parametrize("text", ["WT", "wt", "_wt", " WT "])
def test_the_wild_type_has_no_substitutions(text: str):
    assert read_mutant(text) == ()


@pytest.mark.parametrize(
    "text",
    ["", " ", "A23", "23B", "A23*", "A23del", "A23BC", "A2.3B", "p.Ala23Val", "A23B,C45D", "A23B:", "wild"],
)
def test_what_is_no_substitution_is_refused_in_one_line(text: str):
    with pytest.raises(ValueError, match=r"allowed: A23B, A23B:C45D or WT") as caught:
        read_mutant(text)
    assert "\n" not in str(caught.value)
    assert f"'{text}'" in str(caught.value)


def test_a_residue_named_twice_is_refused():
    with pytest.raises(ValueError, match="'A2C:A2D' names a residue twice"):
        read_mutant("A2C:A2D")


@given(
    st.lists(
        st.tuples(st.sampled_from(LETTERS), st.integers(-99, 99999), st.sampled_from(LETTERS)),
        min_size=1,
        unique_by=lambda part: part[1],
    ),
    st.integers(-500, 500),
)
def test_a_name_survives_reading(parts: list[tuple[str, int, str]], offset: int):
    name = ":".join(f"{wild}{number}{mutant}" for wild, number, mutant in parts)
    assert name_of(read_mutant(name, offset=offset), offset=offset) == name


def test_mutating_replaces_and_undoing_restores():
    mutant = read_mutant("K2C:Q9W")
    mutated = mutate(WILD_TYPE, mutant)
    assert text_of(mutated) == "MCTAYIAKWR"
    assert text_of(WILD_TYPE) == "MKTAYIAKQR"
    assert text_of(undo(mutated, mutant)) == "MKTAYIAKQR"
    with pytest.raises(ValueError, match="'K2C:Q9W' is not what its mutated sequence holds"):
        undo(WILD_TYPE, mutant)


@pytest.mark.parametrize(
    ("name", "offset", "message"),
    [
        ("A2C", 0, "'A2C' has A at residue 2; the wild type has K there"),
        ("A25C", 23, "'A25C' has A at residue 25; the wild type has K there"),
        ("R11C", 0, "'R11C' names residue 11; the wild type has residues 1 to 10"),
        ("M0C", 0, "'M0C' names residue 0; the wild type has residues 1 to 10"),
        ("M23C", 23, "'M23C' names residue 23; the wild type has residues 24 to 33"),
    ],
)
def test_another_wild_type_is_named(name: str, offset: int, message: str):
    with pytest.raises(ValueError, match=message):
        check_mutant(read_mutant(name, offset=offset), WILD_TYPE, offset=offset)


def test_an_offset_is_proposed_only_where_one_alone_fits():
    shifted = [read_mutant(name) for name in ("M24A", "K25A", "Q32A:R33A")]
    assert fitting_offset(shifted, WILD_TYPE, offset=0) == 23
    assert fitting_offset([read_mutant("K20C")], WILD_TYPE, offset=0) is None  # K stands at 2 and 8
    assert fitting_offset([read_mutant("W20C")], WILD_TYPE, offset=0) is None
    assert fitting_offset([read_mutant("WT")], WILD_TYPE, offset=0) is None


TABLES = {
    "plain": b"mutant,x\nM1A,1\nK2A,2\n",
    "no end": b"mutant,x\nM1A,1\nK2A,2",
    "crlf": b"mutant,x\r\nM1A,1\r\nK2A,2\r\n",
    "cr": b"mutant,x\rM1A,1\rK2A,2\r",
    "byte order mark": b"\xef\xbb\xbfmutant,x\nM1A,1\nK2A,2\n",
    "tabs": b"mutant\tx\nM1A\t1\nK2A\t2\n",
    "semicolons": b"mutant;x\nM1A;1\nK2A;2\n",
    "one column": b"mutant\nM1A\nK2A\n",
    "quotes": b'"mutant",x\n"M1A","1, ""one"""\nK2A,"two\nlines"\n',
    "blank lines": b"mutant,x\n\nM1A,1\n  \nK2A,2\n\n\n",
    "latin-1": b"mutant,x\nM1A,\xe9\nK2A,2\n",
    "unicode line ends": "mutant,x\nM1A,a\u2028b\x0bc\nK2A,2\n".encode(),
}


@pytest.mark.parametrize("name", TABLES)
def test_a_table_comes_back_byte_for_byte_with_its_new_column(tmp_path: Path, name: str):
    path = tmp_path / "t.csv"
    path.write_bytes(TABLES[name])
    table = read_variants(path, column="mutant")
    assert table.cells("mutant") == ["M1A", "K2A"]
    written = table.with_columns({"score": ["0.25", "-3"]})
    separator = table.separator.encode()
    without = written
    for cell in (b"score", b"0.25", b"-3"):
        assert without.count(separator + cell) == 1
        without = without.replace(separator + cell, b"")
    assert without == TABLES[name]
    path.write_bytes(written)
    again = read_variants(path, column="mutant")
    assert again.columns == (*table.columns, "score")
    assert again.numbers("score") == [0.25, -3]


def test_a_table_may_be_compressed_and_a_cell_very_long(tmp_path: Path):
    path = tmp_path / "t.csv.gz"
    path.write_bytes(gzip.compress(b"mutant,mutated_sequence\nM1A," + b"A" * 200_000 + b"\n"))
    assert len(read_variants(path, column="mutant").cells("mutated_sequence")[0]) == 200_000


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", r"t\.csv: is empty"),
        (b"\n\n", r"t\.csv: is empty"),
        (b"variant,x\nM1A,1\n", r"t\.csv: no column 'mutant'; there are: 'variant', 'x'; --mutation-column"),
        (b"mutant,x\nM1A,1\nK2A\n", r"t\.csv:3: 1 cells; the header has 2"),
        (b"mutant,x\n\nM1A,1,2\n", r"t\.csv:3: 3 cells; the header has 2"),
        (b'mutant,x\nM1A,"1\n', r"t\.csv:2: .*RFC 4180"),
        ("mutant,x\n".encode("utf-16"), r"t\.csv: is no text"),
        (gzip.compress(b"mutant,x\n" * 99, mtime=0)[:-9], r"t\.csv: damaged gzip file"),
    ],
)
def test_what_is_no_table_is_refused_in_one_line(tmp_path: Path, data: bytes, message: str):
    path = tmp_path / "t.csv"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=message) as caught:
        read_variants(path, column="mutant")
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, FormatError) == ("no column" not in message)


def test_a_table_takes_little_more_memory_than_its_text(tmp_path: Path):
    path = tmp_path / "t.csv"
    path.write_bytes(b"mutant,sequence\n" + (b"M1A," + b"M" * 100_000 + b"\n") * 20)
    tracemalloc.start()
    try:
        assert len(read_variants(path, column="mutant").rows) == 20
        assert tracemalloc.get_traced_memory()[1] < 5 * path.stat().st_size
    finally:
        tracemalloc.stop()


def test_cells_and_lines_have_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The first line too, and also where it shows only in bytes or behind a quote."""
    path = tmp_path / "t.csv"
    monkeypatch.setattr(variants, "_LONGEST_CELL", 1000)
    for text in ("mutant\n" + "M" * 1001, 'mutant\n"' + "M\n" * 501 + '"', "mutant\n" + "\U0001f9ec" * 1001):
        path.write_text(text)
        with pytest.raises(FormatError, match=r"t\.csv:2: field larger than field limit \(1000\)"):
            read_variants(path, column="mutant")
    monkeypatch.setattr(variants, "_LONGEST_LINE", 2000)
    for text in ("mutant," * 300, "mutant,b\n" + "b," * 1001):
        path.write_text(text)
        with pytest.raises(FormatError, match=r"t\.csv: a line has more than 0 MiB"):
            read_variants(path, column="mutant")
    csv.field_size_limit(1 << 17)  # the default, for the tests that follow


@pytest.mark.parametrize("end", ["\n", "\r", "\r\n"])
def test_lines_end_where_they_end_however_the_text_is_read(tmp_path: Path, end: str):
    """The text is decoded 8 KiB at a time."""
    path = tmp_path / "t.csv"
    for before in range(8170, 8200):
        rows = ["\ufeffmutant", "M" * before, "\u00e9" * 9, '"a' + end + '"', "b"]
        data = end.join(rows).encode() + b"\xff" + end.encode()
        path.write_bytes(data)
        table = read_variants(path, column="mutant")
        assert [row.cells[0] for row in table.rows] == [rows[1], rows[2], "a" + end, "b\udcff"]
        assert (
            "".join(row.text + row.end for row in (table.header, *table.rows)).encode(
                "utf-8", "surrogateescape"
            )
            == data
        )


def test_a_table_that_is_not_there_is_named(tmp_path: Path):
    with pytest.raises(ValueError, match=r"no\.csv: cannot be read: No such file"):
        read_variants(tmp_path / "no.csv", column="mutant")
    with pytest.raises(ValueError, match="cannot be read: Is a directory"):
        read_variants(tmp_path, column="mutant")


def table_of(tmp_path: Path, *rows: str) -> Path:
    path = tmp_path / "t.csv"
    path.write_text("\n".join(rows) + "\n")
    return path


def test_columns_are_found_by_exact_names(tmp_path: Path):
    table = read_variants(table_of(tmp_path, "mutant,x,x,score", "M1A,1,2,0.5"), column="mutant")
    with pytest.raises(ValueError, match="more than one column 'x'"):
        table.cells("x")
    with pytest.raises(ValueError, match="no column 'Score'; there are: 'mutant', 'x', 'x', 'score'"):
        table.cells("Score")
    with pytest.raises(ValueError, match="has a column 'score' already"):
        table.with_columns({"score": ["1"]})


def test_missing_numbers_are_told_from_wrong_ones(tmp_path: Path):
    table = read_variants(
        table_of(tmp_path, "mutant,x,y", "M1A,1.5,1", "K2A,,2", "K2C,NaN,3", "K2D,-2e-3,high"),
        column="mutant",
    )
    np.testing.assert_array_equal(table.numbers("x"), [1.5, np.nan, np.nan, -0.002])
    with pytest.raises(ValueError, match=r"t\.csv:5: 'high' in column 'y' is no number"):
        table.numbers("y")


def test_rows_without_a_mutant_are_named(tmp_path: Path):
    table = read_variants(table_of(tmp_path, "mutant,x", "M1A,1", "K2*,2", "", ",3", "WT,4"), column="mutant")
    mutants, messages = read_mutants(table, column="mutant", offset=0)
    assert mutants == [read_mutant("M1A"), None, None, ()]
    assert [message.split(": ")[0].rsplit(":")[-1] for message in messages] == ["3", "5"]


def test_a_wrong_wild_type_names_row_mutant_and_remedy(tmp_path: Path):
    table = read_variants(table_of(tmp_path, "mutant", "M24A", "K25A", "R33C"), column="mutant")
    mutants, _ = read_mutants(table, column="mutant", offset=0)
    with pytest.raises(ValueError, match=r"t\.csv:2: mutant 'M24A' names residue 24.*fit with --offset 23"):
        check_wild_type(table, mutants, WILD_TYPE, offset=0)
    check_wild_type(table, read_mutants(table, column="mutant", offset=23)[0], WILD_TYPE, offset=23)
    table = read_variants(table_of(tmp_path, "mutant", "M1A", "K2A", "W3C"), column="mutant")
    mutants, _ = read_mutants(table, column="mutant", offset=0)
    with pytest.raises(
        ValueError, match=r"t\.csv:4: mutant 'W3C' has W at residue 3; the wild type has T there"
    ):
        check_wild_type(table, mutants, WILD_TYPE, offset=0)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["M1A,AKTAYIAKQR", "K2A,MATAYIAKQR", "M1C:K2D,CDTAYIAKQR", "WT,mktayiakqr"], None),
        (["WT,MKTAYIAKQR", "K2*,whatever-it-is", "K2A,MATAYIAKQR"], None),
        (["M1A,CKTAYIAKQR"], r"t\.csv:2: mutant 'M1A' is not what its mutated sequence holds"),
        (
            ["M1A,AKTAYIAKQR", "K2A,MATAYIAKQ"],
            r"t\.csv:3: .*sequence of 9 residues; the wild type has 10 .*line 2",
        ),
        (
            ["M1A,AKTAYIAKQR", "K2A,MATAWIAKQR"],
            r"t\.csv:3: .*'K2A' has W at residue 5 of its sequence; .* give Y",
        ),
        (["M1A,AKTAYIAKQR", "W2A,MATAYIAKQR"], r"t\.csv:3: .*'W2A' has W at residue 2; the wild type has K"),
        (["M1A,AKTAYIAKQR", "K2A,"], r"t\.csv:3: no sequence in column 'mutated_sequence'"),
        (["M1A,AKT-YIAKQR"], r"t\.csv:2: '-' at residue 4"),
        (["K2*,MKTAYIAKQR"], r"t\.csv: no row with a mutant"),
    ],
)
def test_the_wild_type_is_rebuilt_from_one_row_and_checked_on_all(
    tmp_path: Path, rows: list[str], message: str | None
):
    table = read_variants(table_of(tmp_path, "mutant,mutated_sequence", *rows), column="mutant")
    mutants, _ = read_mutants(table, column="mutant", offset=0)
    if message is None:
        found = rebuild_wild_type(table, mutants, column="mutated_sequence", offset=0)
        assert text_of(found) == "MKTAYIAKQR"
        return
    with pytest.raises(ValueError, match=message) as caught:
        rebuild_wild_type(table, mutants, column="mutated_sequence", offset=0)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["BLAT_ECOLX_Jacquier_2013.csv", "B2L11_HUMAN_Dutta_2010_binding-Mcl-1.csv"])
def test_real_tables_rebuild_the_wild_type_that_their_names_say(shared_dir: Path, name: str):
    path = shared_dir / "data" / "variants" / name
    table = read_variants(path, column="mutant")
    mutants, messages = read_mutants(table, column="mutant", offset=0)
    wild_type = text_of(rebuild_wild_type(table, mutants, column="mutated_sequence", offset=0))
    assert messages == []
    rows = list(csv.DictReader(io.StringIO(path.read_text())))
    assert len(rows) == len(mutants)
    for row in rows:
        place = int(row["mutant"][1:-1])
        assert wild_type[place - 1] == row["mutant"][0]
        assert wild_type[: place - 1] + row["mutant"][-1] + wild_type[place:] == row["mutated_sequence"]
