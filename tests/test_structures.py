"""Chains of structures: real ones against a table of contacts made apart, odd ones written by hand."""

from __future__ import annotations

import csv
import gzip
import re
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from protperf.formats import FormatError, structures
from protperf.formats.structures import find_structures, read_structure
from protperf.inference.contacts import contacts_of, pairs_of


def pdb_line(
    name: str,
    residue: str,
    place: str,
    x: float,
    *,
    record: str = "ATOM",
    alternate: str = " ",
    occupancy: float = 1.0,
    element: str = "C",
    chain: str = "A",
) -> str:
    """Write an atom at (x, 0, 0) in the columns of the PDB format; `place` is a number and perhaps a code."""
    number, code = (place[:-1], place[-1]) if place[-1].isalpha() else (place, " ")
    return (
        f"{record:<6}    1 {name:<4}{alternate}{residue:>3} {chain}{number:>4}{code}   "
        f"{x:8.3f}{0:8.3f}{0:8.3f}{occupancy:6.2f}{10:6.2f}          {element:>2}\n"
    )


ODD = "".join(
    [
        "HEADER    MADE BY HAND\n",
        "REMARK 465 MISSING RESIDUES\n",
        "REMARK 465   M RES C SSSEQI\n",
        "REMARK 465     MET A    -1\n",
        "REMARK 465     TRP A     4\n",
        "REMARK 465     LYS B     1\n",
        "MODEL        1\n",
        pdb_line(" CA ", "GLY", "1", 0),  # no C-beta
        pdb_line(" CA ", "MSE", "2", 10, record="HETATM"),
        pdb_line(" CB ", "MSE", "2", 11, record="HETATM"),
        pdb_line(" CA ", "SER", "2A", 20),
        pdb_line(" CB ", "SER", "2A", 21, alternate="A", occupancy=0.4),
        pdb_line(" CB ", "SER", "2A", 22, alternate="B", occupancy=0.6),
        pdb_line(" CA ", "PRO", "3", 30, alternate="A", occupancy=0.3),
        pdb_line(" CB ", "PRO", "3", 31, alternate="A", occupancy=0.3),
        pdb_line(" CA ", "ALA", "3", 32, alternate="B", occupancy=0.7),
        pdb_line(" CB ", "ALA", "3", 33, alternate="B", occupancy=0.7),
        pdb_line(" CA ", "DAL", "5", 50),
        "TER\n",
        pdb_line(" CA ", "LIG", "6", 60, record="HETATM"),
        pdb_line("CA  ", " CA", "7", 70, record="HETATM", element="CA"),
        pdb_line(" O  ", "HOH", "8", 80, record="HETATM", element="O"),
        pdb_line(" CA ", "GLU", "1", 90, chain="B"),
        pdb_line(" CA ", "ASP", "2", 95, chain="B"),
        "ENDMDL\nMODEL        2\n",
        pdb_line(" CA ", "TYR", "1", 1),
        "ENDMDL\n",
    ]
)

MMCIF = """data_HAND
loop_
_entity_poly_seq.entity_id
_entity_poly_seq.num
_entity_poly_seq.mon_id
1 1 MET
1 2 GLY
1 3 MSE
1 4 SER
2 1 DA
loop_
_atom_site.group_PDB
_atom_site.id
_atom_site.type_symbol
_atom_site.label_atom_id
_atom_site.label_alt_id
_atom_site.label_comp_id
_atom_site.label_asym_id
_atom_site.label_entity_id
_atom_site.label_seq_id
_atom_site.Cartn_x
_atom_site.Cartn_y
_atom_site.Cartn_z
_atom_site.occupancy
_atom_site.auth_seq_id
_atom_site.auth_asym_id
_atom_site.pdbx_PDB_model_num
ATOM   1 C  CA . GLY A 1 2 0.0 0 0 1.0 107 X 1
HETATM 2 C  CA . MSE A 1 3 10.0 0 0 1.0 108 X 1
HETATM 3 C  CB . MSE A 1 3 11.0 0 0 1.0 108 X 1
HETATM 4 CA CA . CA  B 3 . 70.0 0 0 1.0 201 X 1
HETATM 5 O  O  . HOH C 4 . 80.0 0 0 1.0 301 X 1
ATOM   6 C  CA . GLY A 1 2 5.0 0 0 1.0 107 X 2
"""


def written(path: Path, text: str) -> Path:
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def test_contacts_of_real_structures_are_those_of_the_table(shared_dir: Path):
    """The table was made apart, in the numbering of the residues that are seen, with X for modified ones."""
    folder = shared_dir / "data" / "structures"
    with gzip.open(folder / "contacts_cb8_sep6.tsv.gz", "rt") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    assert len(rows) == 8
    for row in rows:
        structure = read_structure(folder / row["file"])
        assert structure.name == f"{row['pdb']} {row['chain']}"
        seen = ~np.isnan(structure.positions[:, 0])
        letters = "".join(np.array(list(structure.residues))[seen])
        assert re.fullmatch(row["sequence"].replace("X", "M"), letters)
        contacts = contacts_of(structure.positions[seen]) == 1
        i, j = (places[contacts] for places in pairs_of(int(row["L"])))
        expected = {tuple(map(int, pair.split("-"))) for pair in row["contacts_0based"].split()}
        assert set(zip(i.tolist(), j.tolist(), strict=True)) == expected
        assert len(i) == int(row["n_contacts"])
        assert (j - i >= 24).sum() == int(row["n_long_range_sep24"])
    [fragment] = [row for row in rows if row["pdb"] == "4cup"]
    structure = read_structure(folder / fragment["file"])  # its entity has two residues that are not seen
    assert (len(structure.residues), structure.num_missing) == (117, 2)


@pytest.mark.parametrize("name", ["odd.pdb", "odd.pdb.gz", "odd.ent", "misnamed.cif"])
def test_odd_records_of_pdb_are_read_as_said(tmp_path: Path, name: str):
    structure = read_structure(written(tmp_path / name, ODD))
    assert structure.residues == "MGMSAWX"  # MSE is M, what has no letter X
    positions = [np.nan, 0, 11, 22, 33, np.nan, 50]
    np.testing.assert_array_equal(structure.positions[:, 0], np.array(positions, np.float32))
    assert structure.num_missing == 2
    assert structure.num_modified == 2
    assert structure.name == f"{name.removesuffix('.gz')[:-4]} A"


def test_a_chain_may_be_named(tmp_path: Path):
    path = written(tmp_path / "odd.pdb", ODD)
    [found] = find_structures([Path(f"{path}:B")])
    structure = read_structure(found)
    assert (structure.name, structure.residues) == ("odd B", "ED")


def test_odd_records_of_mmcif_are_read_as_said(tmp_path: Path):
    structure = read_structure(written(tmp_path / "hand.cif.gz", MMCIF))
    assert structure.name == "hand X"
    assert structure.residues == "MGMS"
    np.testing.assert_array_equal(structure.positions[:, 0], np.array([np.nan, 0, 11, np.nan], np.float32))


def test_missing_residues_without_a_place_are_left_out(tmp_path: Path):
    """Where numbers fall along the chain, nobody can tell where number 2 belongs."""
    lines = [pdb_line(" CA ", "GLY", number, x) for number, x in (("5", 0), ("1", 4), ("3", 8))]
    text = "REMARK 465     TRP A     2\n" + "".join(lines)
    structure = read_structure(written(tmp_path / "falling.pdb", text))
    assert structure.residues == "GGG"
    np.testing.assert_array_equal(structure.positions[:, 0], [0, 4, 8])


def test_a_folder_gives_its_structures_by_name(tmp_path: Path):
    for name in ("b.pdb", "a.cif.gz", "notes.txt", "contacts.tsv.gz"):
        written(tmp_path / name, "")
    assert [path.name for path in find_structures([tmp_path])] == ["a.cif.gz", "b.pdb"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.fasta", b">a\nMKV\n", "holds no chain of a protein; chains with C-alpha atoms in it: none"),
        ("a.pdb.gz", gzip.compress(ODD.encode(), mtime=0)[:200], "damaged gzip file"),
        ("a.cif", b"data_x\n_entry.id x\n", "cannot be read as PDB or mmCIF \\(no 'label_atom_id'\\)"),
        ("a.pdb", ODD.replace("  11.000", "  11,000").encode(), "cannot be read as PDB or mmCIF"),
        ("a.pdb", pdb_line(" CA ", "GLY", "1", 0).encode(), "in it: A"),
        ("a.pdb", ODD.replace("  11.000", "    1e39").encode(), r"\(an atom at 1e39, 0.000, 0.000\)"),
        ("a.pdb", ODD.replace("  11.000", "     nan").encode(), r"\(an atom at nan, 0.000, 0.000\)"),
        ("a.cif", MMCIF.replace(" 11.0 0 ", " -inf 0 ").encode(), r"\(an atom at -inf, 0, 0\)"),
        ("a.cif", b"data_x\nloop_\nA\n", r"cannot be read as PDB or mmCIF \(.*zero\)"),
    ],
)
def test_what_is_no_structure_is_refused_in_one_line(tmp_path: Path, name: str, content: bytes, message: str):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(FormatError, match=message) as error:
        read_structure(path)
    assert "\n" not in str(error.value)
    assert str(error.value).startswith(f"{path}: ")


def test_what_is_not_there_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="no such file or folder"):
        find_structures([tmp_path / "none.pdb"])
    with pytest.raises(ValueError, match="holds no structure"):
        find_structures([tmp_path])
    path = written(tmp_path / "odd.pdb", ODD)
    with pytest.raises(FormatError, match=r"chain 'C' holds no protein; .* in it: A, B"):
        read_structure(Path(f"{path}:C"))


@pytest.mark.parametrize(
    ("start", "line"),
    [
        ("", "\n"),
        ("", "#\n"),
        ("", "ab\n"),
        ("data_x\nloop_\n_audit.a\n", "ab\n"),
        ("data_x\n_audit.a\n;", "a" * 99 + "\n"),
    ],
)
def test_what_is_passed_over_takes_no_memory(tmp_path: Path, start: str, line: str):
    written(tmp_path / "ready.cif", MMCIF)
    read_structure(tmp_path / "ready.cif")
    path = written(tmp_path / "a.cif", start + line * ((1 << 18) // len(line)))
    tracemalloc.start()
    try:
        with pytest.raises(FormatError):
            read_structure(path)
        assert tracemalloc.get_traced_memory()[1] < 5 << 18
    finally:
        tracemalloc.stop()


def test_lines_words_and_atoms_have_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = written(tmp_path / "a.cif", MMCIF)
    monkeypatch.setattr(structures, "_MOST_WORDS", 170)
    read_structure(path)
    for more in ("\n" * 20, "\r" * 20, "# a b c\n" * 10):
        with pytest.raises(FormatError, match=r"a\.cif: has more than 170 words and lines"):
            read_structure(written(tmp_path / "a.cif", MMCIF + more))
    monkeypatch.undo()
    monkeypatch.setattr(structures, "_MOST_ATOMS", 4)
    listed = "REMARK 465     TRP A     4\n" * 5
    atoms = "".join(pdb_line(" CA ", "GLY", str(number), 0) for number in range(5))
    for text in (MMCIF, listed, atoms):
        with pytest.raises(FormatError, match="more than 4 atoms or residues"):
            read_structure(written(tmp_path / "a.cif", text))
