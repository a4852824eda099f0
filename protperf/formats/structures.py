"""One chain of a protein structure: its sequence and where its residues' C-beta atoms are.

PDB and mmCIF, plain or gzip, known by what is in them. Of several models (NMR) the first counts, of alternate places of an
atom the one with the highest occupancy. The sequence is that of the molecule: residues that the file says were there but not
seen have their letter and no position, so that separations along the chain are the molecule's. mmCIF says so in
`_entity_poly_seq`, PDB in REMARK 465. Modified residues read as what they were made from (MSE is M), others as X. Water, ions and
ligands are left out.

Axis letters: `L` length in residues.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from protperf.formats import FormatError
from protperf.formats.foreign import foreign_bytes
from protperf.formats.unpacking import unpacked

SUFFIXES = (".pdb", ".ent", ".cif", ".mmcif")
LEAST_RESIDUES = 2

LARGEST_TEXT = 128 << 20
"""Bytes that a packed structure may unpack to."""
_MOST_WORDS = 1 << 24
"""Words and lines of a file: 21 words are an atom of mmCIF, and 400,000 atoms a very large complex."""
_MOST_ATOMS = 1 << 20
"""C-alpha and C-beta atoms and residues that are listed; a capsid of HIV has 627,000."""
_COUNTED_TOGETHER = 1 << 20
_LARGEST_FLOAT = float(np.finfo(np.float32).max)

_MISSING = re.compile(r"REMARK 465 +(?:1 +)?([A-Z0-9]{1,3}) (\w) +(-?\d+)([A-Za-z]?)")
_ATOMS = ("CA", "CB")
_UNKNOWN = {".", "?"}
_SITE, _LISTED = "_atom_site.", "_entity_poly_seq."
_COLUMNS = {
    *(f"{_SITE}Cartn_{axis}" for axis in "xyz"),
    *(f"{_SITE}label_{key}" for key in ("atom_id", "asym_id", "entity_id", "seq_id", "comp_id")),
    *(
        f"{_SITE}{key}"
        for key in ("auth_asym_id", "auth_seq_id", "type_symbol", "occupancy", "pdbx_PDB_model_num")
    ),
    *(f"{_LISTED}{key}" for key in ("entity_id", "num", "mon_id")),
}
"""All that is kept of an mmCIF file."""


class Residue(NamedTuple):
    """A residue of a chain.

    Attributes:
        place: its number and insertion code.
        name: of three letters.
    """

    place: tuple[int, str]
    name: str


@dataclass(frozen=True)
class ChainStructure:
    """One chain.

    Attributes:
        name: of the file and the chain, such as `1ubi A`.
        residues: one letter each.
        positions: of C-beta, or C-alpha where there is none (glycine), in Angstrom, float32 `(L, 3)`; NaN where not seen.
        num_modified: residues that are none of the 20 by their own name.
    """

    name: str
    residues: str
    positions: np.ndarray
    num_modified: int

    @property
    def num_missing(self) -> int:
        """Number of residues that the structure does not show."""
        return int(np.isnan(self.positions[:, 0]).sum())


def find_structures(paths: Sequence[Path]) -> list[Path]:
    """Return structure files: those given, and all that lie in given folders, by name.

    Raises:
        ValueError: nothing there, or a folder without any.
    """
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = sorted(each for each in path.iterdir() if _stem(each) != each.name)
            if not inside:
                raise ValueError(f"{path}: holds no structure ({', '.join(SUFFIXES)}, also with .gz)")
            found += inside
        elif path.exists() or _split(path)[0].exists():
            found.append(path)
        else:
            raise ValueError(
                f"{path}: no such file or folder; give PDB or mmCIF files (FILE:CHAIN names a chain), or a folder of them"
            )
    return found


def passed_over(folder: Path) -> list[str]:
    """Return the names in a folder that `find_structures` does not take, by name."""
    return sorted(each.name for each in folder.iterdir() if _stem(each) == each.name)


def read_structure(path: Path) -> ChainStructure:
    """Read a chain of a structure file: `FILE:CHAIN`, or the first chain of a protein in `FILE`.

    Raises:
        ValueError: the file cannot be read.
        FormatError: it is damaged, no structure, or holds no such chain.
    """
    file, wanted = (path, "") if path.exists() else _split(path)
    data = _read_data(file)
    try:
        atoms, listed = _read_mmcif(data) if _is_mmcif(data) else _read_pdb(data)
    except (KeyError, IndexError, ValueError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else " ".join(str(error).split())
        raise FormatError(
            f"{file}: cannot be read as PDB or mmCIF ({reason}); is it damaged, or something else?"
        ) from error
    chains = list(dict.fromkeys(atom.chain for atom in atoms))
    for chain in [wanted] if wanted else chains:
        seen = _best_atoms([atom for atom in atoms if atom.chain == chain])
        if len(seen) >= LEAST_RESIDUES:
            return _assemble(f"{_stem(file)} {chain}".strip(), seen, listed.get(chain, []))
    what = f"chain {wanted!r} holds no protein" if wanted else "holds no chain of a protein"
    raise FormatError(f"{file}: {what}; chains with C-alpha atoms in it: {', '.join(chains) or 'none'}")


class _Atom(NamedTuple):
    """A C-alpha or C-beta atom of a polymer, in one of its alternate places."""

    chain: str
    residue: Residue
    name: str
    occupancy: float
    position: tuple[float, float, float]


def _is_mmcif(data: bytes) -> bool:
    """Return whether the first line that is neither blank nor a comment begins an mmCIF file."""
    starts = (line.lstrip() for line in _lines_of(data))
    return next((start for start in starts if start and start[0] != "#"), "").startswith("data_")


def _columns_of(data: bytes) -> dict[str, list[str]]:
    """Return those columns of an mmCIF file that are read here; the rest takes no memory."""
    from Bio.PDB.MMCIF2Dict import MMCIF2Dict

    class Nowhere(list[str]):
        def append(self, value: str) -> None:
            pass

    class Columns(MMCIF2Dict):
        def __setitem__(self, key: str, value: Any) -> None:
            if key in _COLUMNS:
                super().__setitem__(key, value)

        def __missing__(self, key: str) -> Any:
            return nowhere

    nowhere = Nowhere()
    with foreign_bytes():
        return dict(Columns(_lines_of(data)))


def _read_mmcif(data: bytes) -> tuple[list[_Atom], dict[str, list[Residue]]]:
    """Return the atoms of the first model, and the residues that each chain is said to have."""
    table = _columns_of(data)
    sites = {key.removeprefix(_SITE): table[key] for key in table if key.startswith(_SITE)}
    count = len(sites["label_atom_id"])
    models = sites.get("pdbx_PDB_model_num", ["1"] * count)
    chains = sites.get("auth_asym_id", sites["label_asym_id"])
    entities = sites.get("label_entity_id", ["?"] * count)
    names, elements = sites["label_atom_id"], sites.get("type_symbol", ["C"] * count)
    numbers = sites["label_seq_id"]  # only polymers have one
    if not set(numbers) - _UNKNOWN:
        numbers = sites["auth_seq_id"]
    atoms, entity_of = [], {}
    for i in range(count):
        if (
            names[i] in _ATOMS
            and elements[i] == "C"
            and models[i] == models[0]
            and numbers[i] not in _UNKNOWN
        ):
            position = _position(*(sites[f"Cartn_{axis}"][i] for axis in "xyz"))
            residue = Residue((int(numbers[i]), ""), sites["label_comp_id"][i])
            atoms.append(_Atom(chains[i], residue, names[i], float(sites["occupancy"][i]), position))
            entity_of[chains[i]] = entities[i]
            _check_number(len(atoms))
    listed: dict[str, list[Residue]] = {}
    columns = [table.get(f"{_LISTED}{key}", []) for key in ("entity_id", "num", "mon_id")]
    _check_number(len(columns[0]))
    for entity, number, name in zip(*columns, strict=True):
        listed.setdefault(entity, []).append(Residue((int(number), ""), name))
    return atoms, {chain: listed.get(entity, []) for chain, entity in entity_of.items()}


def _read_pdb(data: bytes) -> tuple[list[_Atom], dict[str, list[Residue]]]:
    """Return the atoms of the first model, and the residues of each chain that REMARK 465 says are missing."""
    atoms: list[_Atom] = []
    missing: dict[str, list[Residue]] = {}
    ended: set[str] = set()  # what follows TER is no part of the chain
    num_missing = 0
    for line in _lines_of(data):
        record = line[:6].rstrip()
        if record == "ENDMDL":
            break
        if record == "TER" and atoms:
            ended.add(line[21:22].strip() or atoms[-1].chain)
        if found := _MISSING.fullmatch(line.rstrip()):
            name, chain, number, code = found.groups()
            missing.setdefault(chain, []).append(Residue((int(number), code), name))
            num_missing += 1
            _check_number(num_missing)
        if record not in ("ATOM", "HETATM") or line[12:16] not in (" CA ", " CB "):
            continue
        chain = line[21].strip()
        if chain in ended or line[76:78].strip() not in ("", "C"):
            continue
        residue = Residue((int(line[22:26]), line[26].strip()), line[17:20].strip())
        position = _position(line[30:38], line[38:46], line[46:54])
        atoms.append(_Atom(chain, residue, line[12:16].strip(), float(line[54:60].strip() or 1), position))
        _check_number(len(atoms))
    return atoms, missing


def _position(*coordinates: str) -> tuple[float, float, float]:
    """Return a place in Angstrom."""
    x, y, z = map(float, coordinates)
    if not all(abs(value) <= _LARGEST_FLOAT for value in (x, y, z)):  # nor is nan
        raise ValueError(f"an atom at {', '.join(map(str.strip, coordinates))}")
    return x, y, z


def _check_number(found: int) -> None:
    if found > _MOST_ATOMS:
        raise ValueError(
            f"more than {_MOST_ATOMS:,} atoms or residues of its chains; take out chains that are not needed"
        )


def _best_atoms(atoms: Sequence[_Atom]) -> dict[Residue, dict[str, _Atom]]:
    """Return the residues that have a C-alpha atom, in order, each with its atoms of the highest occupancy.

    Where two kinds of residue share a place, the one whose C-alpha has the higher occupancy stays.
    """
    best: dict[tuple[int, str], _Atom] = {}
    for atom in atoms:
        if atom.name == "CA":
            now = best.setdefault(atom.residue.place, atom)
            if atom.occupancy > now.occupancy:
                best[atom.residue.place] = atom
    residues = {atom.residue: {"CA": atom} for atom in best.values()}
    for atom in atoms:
        if atom.name == "CB" and atom.residue in residues:
            now = residues[atom.residue].setdefault("CB", atom)
            if atom.occupancy > now.occupancy:
                residues[atom.residue]["CB"] = atom
    return residues


def _assemble(name: str, seen: dict[Residue, dict[str, _Atom]], listed: Sequence[Residue]) -> ChainStructure:
    """Put the residues that are seen and those that are only listed in their order along the chain.

    Where numbers do not rise along the chain, they do not tell where missing residues belong: they are left out.
    """
    from Bio.Data.PDBData import protein_letters_3to1, protein_letters_3to1_extended

    places = [residue.place for residue in seen]
    names = {residue.place: residue.name for residue in listed} if places == sorted(places) else {}
    names |= {residue.place: residue.name for residue in seen}
    order = sorted(names) if places == sorted(places) else places
    positions = np.full((len(order), 3), np.nan, np.float32)
    row_of = {place: row for row, place in enumerate(order)}
    for residue, atoms in seen.items():
        positions[row_of[residue.place]] = atoms.get("CB", atoms["CA"]).position
    return ChainStructure(
        name,
        "".join(protein_letters_3to1_extended.get(names[place].ljust(3), "X") for place in order),
        positions,
        num_modified=sum(names[place] not in protein_letters_3to1 for place in order),
    )


def _read_data(path: Path) -> bytes:
    """Return the text of a file, its lines and words counted before anything is made of them."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
    data = unpacked(data, str(path), most=LARGEST_TEXT)
    if _count_words(data) > _MOST_WORDS:
        raise FormatError(
            f"{path}: has more than {_MOST_WORDS:,} words and lines; take out what is not needed"
        )
    return data


def _count_words(data: bytes) -> int:
    """Return the number of words and of lines, blank ones too."""
    found = data.count(b"\n") + data.count(b"\r")
    for start in range(0, len(data), _COUNTED_TOGETHER):
        white = np.frombuffer(data[start : start + _COUNTED_TOGETHER + 1], np.uint8) <= ord(" ")
        found += np.count_nonzero(white[1:] & ~white[:-1])
    return found


def _lines_of(data: bytes) -> Iterator[str]:
    """Return the lines one after the other; a text, or a list of all of them, takes many times the room."""
    return io.TextIOWrapper(io.BytesIO(data), encoding="latin-1")


def _split(path: Path) -> tuple[Path, str]:
    """Return the file and the chain of `FILE:CHAIN`; without a colon the chain is empty."""
    file, colon, chain = path.name.rpartition(":")
    return (path.with_name(file), chain) if colon and file else (path, "")


def _stem(path: Path) -> str:
    """Return the file's name without a suffix of structures; the whole name, if it has none.

    >>> _stem(Path("structures/1ubi.pdb.gz"))
    '1ubi'
    """
    name = path.name.removesuffix(".gz")
    return next((name.removesuffix(suffix) for suffix in SUFFIXES if name.endswith(suffix)), path.name)
