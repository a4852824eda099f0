"""Mutants as tables of measured effects name them (ProteinGym's form): `A23B`, or `A23B:C45D` for several at once.

A letter of the wild type, the number of the residue, a letter of the mutant. The first residue is number 1, or
1 + `offset` where the table counts otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from protperf.formats.records import quoted
from protperf.vocab import VOCABULARY

WILD_TYPE_NAMES = ("WT", "_WT")
"""How a table names the wild type itself, in either case."""

_SUBSTITUTION = re.compile(r"([A-Za-z])(-?[0-9]{1,9})([A-Za-z])", re.ASCII)


class Substitution(NamedTuple):
    """One residue in place of another.

    Attributes:
        place: of the residue in the sequence, from 0.
        wild: token that stands there in the wild type.
        mutant: token that replaces it; may be the same.
    """

    place: int
    wild: int
    mutant: int


Mutant = tuple[Substitution, ...]
"""Substitutions in the order written, at different places; none at all is the wild type."""


def read_mutant(text: str, *, offset: int = 0) -> Mutant:
    """Return the substitutions that a name stands for.

    >>> read_mutant("A23C:C45D", offset=20)
    (Substitution(place=2, wild=0, mutant=1), Substitution(place=24, wild=1, mutant=2))

    Args:
        text: `A23B`, several joined by `:`, or one of `WILD_TYPE_NAMES`.
        offset: number of the first residue, less 1.

    Raises:
        ValueError: it is empty, a stop, an insertion or a deletion, or names a residue twice.
    """
    name = text.strip()
    if name.upper() in WILD_TYPE_NAMES:
        return ()
    mutant = []
    for part in name.split(":"):
        match = _SUBSTITUTION.fullmatch(part.strip())
        if match is None:
            found = f"has {quoted(part)}" if part != text else "is no substitution"
            raise ValueError(f"mutant {quoted(text)} {found}; allowed: A23B, A23B:C45D or WT")
        wild, number, residue = match.groups()
        mutant.append(
            Substitution(int(number) - 1 - offset, *map(int, VOCABULARY.encode(f"{wild}{residue}")))
        )
    if len({each.place for each in mutant}) < len(mutant):
        raise ValueError(f"mutant {quoted(text)} names a residue twice; allowed: each residue once")
    return tuple(mutant)


def name_of(mutant: Mutant, *, offset: int = 0) -> str:
    """Return the name that `read_mutant` reads.

    >>> name_of(read_mutant("A23C:C45D", offset=20), offset=20)
    'A23C:C45D'
    """
    letters = VOCABULARY.tokens
    parts = [f"{letters[each.wild]}{each.place + 1 + offset}{letters[each.mutant]}" for each in mutant]
    return ":".join(parts) or WILD_TYPE_NAMES[0]


def check_mutant(mutant: Mutant, wild_type: np.ndarray, *, offset: int = 0) -> None:
    """Refuse a mutant of another wild type.

    Args:
        mutant: from `read_mutant`.
        wild_type: residue tokens, uint8 `(L,)`.
        offset: as in `read_mutant`, for the message.

    Raises:
        ValueError: a residue is not in the sequence, or is another one than the mutant says.
    """
    for place, wild, _ in mutant:
        if 0 <= place < len(wild_type) and wild_type[place] == wild:
            continue
        name, number = quoted(name_of(mutant, offset=offset)), place + 1 + offset
        if not 0 <= place < len(wild_type):
            first, last = 1 + offset, len(wild_type) + offset
            raise ValueError(
                f"mutant {name} names residue {number}; the wild type has residues {first} to {last}"
            )
        letters = VOCABULARY.tokens
        raise ValueError(
            f"mutant {name} has {letters[wild]} at residue {number}; "
            f"the wild type has {letters[wild_type[place]]} there"
        )


def mutate(wild_type: np.ndarray, mutant: Mutant) -> np.ndarray:
    """Return the mutant's residue tokens `(L,)`; the mutant must have been checked."""
    residues = wild_type.copy()
    for place, _, token in mutant:
        residues[place] = token
    return residues


def undo(residues: np.ndarray, mutant: Mutant, *, offset: int = 0) -> np.ndarray:
    """Return the wild type's residue tokens `(L,)` from a mutant's.

    Raises:
        ValueError: a residue is not in the sequence, or is not the mutant's.
    """
    reverse = tuple(Substitution(place, token, wild) for place, wild, token in mutant)
    try:
        check_mutant(reverse, residues, offset=offset)
    except ValueError:
        name = quoted(name_of(mutant, offset=offset))
        raise ValueError(f"mutant {name} is not what its mutated sequence holds at these residues") from None
    return mutate(residues, reverse)


def fitting_offset(mutants: Sequence[Mutant], wild_type: np.ndarray, *, offset: int) -> int | None:
    """Return the only offset with which all mutants fit the wild type, or None where none or several do.

    Args:
        mutants: read with `offset`.
        wild_type: residue tokens, uint8 `(L,)`.
        offset: as in `read_mutant`.
    """
    named = np.array(sorted({(each.place, each.wild) for mutant in mutants for each in mutant}))
    if not len(named):
        return None
    places, wild = named.T
    fitting = []
    for shift in range(-int(places.min()), len(wild_type) - int(places.max())):
        if (wild_type[places + shift] == wild).all():
            fitting.append(offset - shift)
    return fitting[0] if len(fitting) == 1 else None
