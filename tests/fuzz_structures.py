"""A small structure as PDB and as mmCIF, hostile ones of it, and what the reader makes of the whole ones."""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from fuzz_edits import Edit, edit_bytes, edit_text

from protperf.formats.structures import read_structure

RESIDUES = "MGTK"
POSITIONS = [(1.5, 2.5, -3.5), (4, 5, 6), (np.nan,) * 3, (-10.25, 20, 30)]
"""Of C-beta, C-alpha of glycine; the third residue is not seen."""
_ATOMS = [
    *(("CA", "MET", 1, (1, 2, -3), 1), ("CB", "MET", 1, (1.5, 2.5, -3.5), 1)),
    ("CA", "GLY", 2, (4, 5, 6), 1),
    *(("CA", "LYS", 4, (-10, 20, 30), 1), ("CB", "LYS", 4, (0, 0, 0), 0.25)),
    ("CB", "LYS", 4, (-10.25, 20, 30), 0.75),
]
PDB = "".join(
    [
        "HEADER    TEST\nREMARK 465     THR A   3\nMODEL        1\n",
        *(
            f"ATOM  {index:5}  {name:<3} {residue} A{place:4}    {x:8.3f}{y:8.3f}{z:8.3f}{occupancy:6.2f}  0.00           C\n"
            for index, (name, residue, place, (x, y, z), occupancy) in enumerate(_ATOMS, 1)
        ),
        "TER       7      LYS A   4\nHETATM    8  CA  MSE B   1       0.000   0.000   0.000  1.00  0.00           C\nENDMDL\nEND\n",
    ]
)
MMCIF = "".join(
    [
        "# a comment\ndata_TEST\nloop_\n_entity_poly_seq.entity_id\n_entity_poly_seq.num\n_entity_poly_seq.mon_id\n",
        *(f"1 {place} {name}\n" for place, name in enumerate(("MET", "GLY", "THR", "LYS"), 1)),
        "#\n_struct.title 'a \"title\" of it'\n_struct.text\n;several\nlines\n;\nloop_\n",
        *(
            f"_atom_site.{column}\n"
            for column in (
                *(
                    "group_PDB",
                    "type_symbol",
                    "label_atom_id",
                    "label_comp_id",
                    "label_asym_id",
                    "label_entity_id",
                ),
                *(
                    "label_seq_id",
                    "Cartn_x",
                    "Cartn_y",
                    "Cartn_z",
                    "occupancy",
                    "auth_asym_id",
                    "pdbx_PDB_model_num",
                ),
            )
        ),
        *(
            f"ATOM C {name} {residue} A 1 {place} {x} {y} {z} {occupancy} A 1\n"
            for name, residue, place, (x, y, z), occupancy in _ATOMS
        ),
    ]
)
_WORDS = (
    b"ATOM  ",
    b"TER",
    b"ENDMDL",
    b"REMARK 465",
    b"    1e39",
    b"     nan",
    b"data_",
    b"loop_\n",
    b"\n;",
    b"'",
    b"#",
    b"\n",
)


def write_structure(seed: int, chosen: Sequence[Edit], folder: Path) -> None:
    """Edit the text, or its bytes so that columns stay."""
    text = (PDB, MMCIF)[seed % 2]
    data = edit_text(text, chosen).encode("utf-8", "surrogatepass") if seed & 64 else text.encode()
    data = edit_bytes(data, chosen, _WORDS) if seed & 32 or not seed & 64 else data
    data = gzip.compress(data) if seed & 16 else data
    (folder / "in.ent").write_bytes(data)


def read_structures(folder: Path) -> None:
    """Read the first chain, and one by its name."""
    for name in ("in.ent", "in.ent:A"):
        found = read_structure(folder / name)
        assert found.positions.shape == (len(found.residues), 3)
        assert not np.isinf(found.positions).any()


def check_structures(folder: Path) -> None:
    """Compare residues and positions with what was written."""
    for text in (PDB, MMCIF):
        (folder / "in.ent").write_text(text)
        found = read_structure(folder / "in.ent")
        assert (found.name, found.residues, found.num_modified) == ("in A", RESIDUES, 0)
        np.testing.assert_array_equal(found.positions, np.array(POSITIONS, np.float32))
