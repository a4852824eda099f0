"""The vocabulary of a source on ours: which row of its tables each of our tokens has.

Axis letters: `V` vocabulary.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from protperf.formats import FormatError
from protperf.vocab import STANDARD_RESIDUES, VOCABULARY

NEVER = -1e4
"""What is added to the score of a token that the source does not have: its chance is zero, and the score finite in float16."""

_SPECIAL = {
    "<pad>": ("<pad>", "[PAD]"),
    "<bos>": ("<cls>", "[CLS]", "<s>", "<bos>"),
    "<eos>": ("<eos>", "[SEP]", "</s>", "<sep>"),
    "<mask>": ("<mask>", "[MASK]"),
    "<unk>": ("<unk>", "[UNK]"),
}
"""Our name of a token -> those of other programs."""

_NEEDED = (*STANDARD_RESIDUES, *_SPECIAL)
_PIECE = re.compile(r"(##|[\u2581\u0120])?[A-Z]{2,}|(##|[\u2581\u0120])[A-Z]")
"""A token of several residues, or one that is a residue within a word alone."""

ESM_ALPHABET = (
    "<cls>",
    "<pad>",
    "<eos>",
    "<unk>",
    *"LAGVSERTIDPKQNFYMHWCXBUZO",
    ".",
    "-",
    "<null_1>",
    "<mask>",
)
"""The vocabulary of ESM-1b and ESM-2 (Rives et al. 2021, and the code released with it)."""


@dataclass(frozen=True)
class TokenMap:
    """Which row of a source's tables belongs to which of our tokens.

    Attributes:
        rows: for each of our tokens its row; that of the source's unknown token where the source lacks it.
        lacking: our tokens that the source does not have.
        left_out: the source's tokens that we do not have.
        num_rows: of the source's tables.
        padding: row of its padding token, and `mask` that of its mask.
    """

    rows: tuple[int, ...]
    lacking: tuple[str, ...]
    left_out: tuple[str, ...]
    num_rows: int
    padding: int
    mask: int

    def pick(self, table: Tensor) -> Tensor:
        """Return the rows of our tokens, `(V, ...)`, of a table with a row for each of the source's."""
        return table[torch.tensor(self.rows)]

    def pick_bias(self, bias: Tensor) -> Tensor:
        """Return the bias of our tokens' scores, `(V,)`: those that the source lacks are never predicted."""
        absent = torch.tensor([token in self.lacking for token in VOCABULARY.tokens])
        return self.pick(bias).masked_fill(absent, NEVER)


def map_tokens(vocabulary: Sequence[str], *, num_rows: int, place: str) -> TokenMap:
    """Match the tokens of a source with ours by name.

    Args:
        vocabulary: the source's tokens in the order of their numbers.
        num_rows: of its embedding; rows without a token are nobody's.
        place: the file's name, for messages.

    Raises:
        FormatError: it cannot be the vocabulary of these weights, or of single residues.
    """
    _check_vocabulary(vocabulary, num_rows=num_rows, place=place)
    found = {token: _row_of(token, vocabulary, place=place) for token in VOCABULARY.tokens}
    missing = [token for token in _NEEDED if found[token] < 0]
    if missing:
        raise FormatError(
            f"{place}: the vocabulary has no {' '.join(missing)}; needed: the 20 standard amino acids, and tokens for padding, "
            "start, end, mask and unknown"
        )
    rows = set(found.values())
    names = [*vocabulary, *(f"(row {row})" for row in range(len(vocabulary), num_rows))]
    return TokenMap(
        rows=tuple(found["<unk>"] if row < 0 else row for row in found.values()),
        lacking=tuple(token for token, row in found.items() if row < 0),
        left_out=tuple(token for row, token in enumerate(names) if row not in rows),
        num_rows=num_rows,
        padding=found["<pad>"],
        mask=found["<mask>"],
    )


def _check_vocabulary(vocabulary: Sequence[str], *, num_rows: int, place: str) -> None:
    """Refuse a vocabulary that is not of these weights, or would cut a protein into other pieces than residues."""
    if len(vocabulary) > num_rows:
        raise FormatError(
            f"{place}: {len(vocabulary)} tokens, the embedding has {num_rows} rows; give the vocabulary of these weights"
        )
    if len(set(vocabulary)) < len(vocabulary):
        twice = next(token for token, count in Counter(vocabulary).items() if count > 1)
        raise FormatError(f"{place}: token {twice!r} is in the vocabulary twice; each may stand there once")
    several = next((token for token in vocabulary if _PIECE.fullmatch(token)), None)
    if several is not None:
        raise FormatError(
            f"{place}: token {several!r} is a piece of a protein; allowed: vocabularies of single residues, such as 'A'"
        )


def _row_of(token: str, vocabulary: Sequence[str], *, place: str) -> int:
    """Return the row of one of our tokens, -1 where the source lacks it."""
    rows = [vocabulary.index(name) for name in _SPECIAL.get(token, (token,)) if name in vocabulary]
    if len(rows) > 1:
        names = " and ".join(repr(vocabulary[row]) for row in rows)
        raise FormatError(f"{place}: the vocabulary has {names}; allowed: one name for {token}")
    return rows[0] if rows else -1
