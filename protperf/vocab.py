"""The vocabulary: 36 tokens, one byte each, and the table that turns residues into them.

The 20 standard amino acids come first (alphabetical by one-letter code), then the letters UniProt also uses
(B, O, U, X, Z) and J (leucine or isoleucine), so that every letter A-Z has its own token and no residue is ever
mapped to another in silence. Lower case encodes as upper case.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np

STANDARD_RESIDUES = "ACDEFGHIKLMNPQRSTVWY"
OTHER_RESIDUES = "BOUXZJ"
SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<mask>", "<unk>")
RESERVED_TOKENS = tuple(f"<reserved{i}>" for i in range(1, 6))

PADDING_DOCUMENT = -1
"""The document number of padding, which neither sees nor is seen (see `protperf.attention`)."""

INVALID = 255
"""What `Vocabulary.table` holds for a byte that is no residue letter."""


@dataclass(frozen=True)
class Vocabulary:
    """An immutable list of tokens; a token's id is its place in the list.

    Attributes:
        tokens: residue letters first, then special and reserved tokens.
    """

    tokens: tuple[str, ...] = (*STANDARD_RESIDUES, *OTHER_RESIDUES, *SPECIAL_TOKENS, *RESERVED_TOKENS)

    def __len__(self) -> int:
        """Return the number of tokens."""
        return len(self.tokens)

    def id_of(self, token: str) -> int:
        """Return the id of `token`; a `ValueError` names an unknown one."""
        try:
            return self.tokens.index(token)
        except ValueError:
            raise ValueError(
                f"no token {token!r} in the vocabulary; allowed: {' '.join(self.tokens)}"
            ) from None

    @cached_property
    def pad(self) -> int:
        """Id of `<pad>`, which fills a window up and is never seen by attention."""
        return self.id_of("<pad>")

    @cached_property
    def bos(self) -> int:
        """Id of `<bos>`, the first token of every protein."""
        return self.id_of("<bos>")

    @cached_property
    def eos(self) -> int:
        """Id of `<eos>`, the last token of every protein."""
        return self.id_of("<eos>")

    @cached_property
    def mask(self) -> int:
        """Id of `<mask>`, shown in place of a residue that is asked."""
        return self.id_of("<mask>")

    @cached_property
    def num_residues(self) -> int:
        """Number of residue tokens; their ids are `0 .. num_residues - 1`."""
        return sum(not token.startswith("<") for token in self.tokens)

    @cached_property
    def num_standard(self) -> int:
        """Number of standard amino acids; their ids are `0 .. num_standard - 1`."""
        return len(STANDARD_RESIDUES)

    @cached_property
    def fingerprint(self) -> str:
        """Hex SHA-256 of the ordered tokens, written wherever token ids are stored."""
        return hashlib.sha256("\n".join(self.tokens).encode()).hexdigest()

    @cached_property
    def table(self) -> np.ndarray:
        """Token id for each byte, `uint8 (256,)`; `INVALID` where the byte is no residue letter."""
        table = np.full(256, INVALID, np.uint8)
        for token_id, letter in enumerate(self.tokens[: self.num_residues]):
            table[[ord(letter), ord(letter.lower())]] = token_id
        table.flags.writeable = False
        return table

    def encode(self, residues: str | bytes) -> np.ndarray:
        """Return the token ids of `residues`, `uint8 (L,)`, without `<bos>` and `<eos>`.

        Raises:
            ValueError: a character is no residue letter; the message names it and its place (from 1).

        >>> VOCABULARY.encode("MKt").tolist()
        [10, 8, 16]
        """
        data = residues.encode("utf-8", "surrogatepass") if isinstance(residues, str) else residues
        tokens = self.table[np.frombuffer(data, np.uint8)]
        invalid = np.flatnonzero(tokens == INVALID)
        if invalid.size:
            place = int(invalid[0])
            found = residues[place] if isinstance(residues, str) else chr(residues[place])
            raise ValueError(f"{found!r} at residue {place + 1} is no residue; allowed: letters A-Z")
        return tokens

    def decode(self, tokens: np.ndarray) -> str:
        """Return the tokens as text: residues as letters, others by name.

        >>> VOCABULARY.decode(np.array([27, 10, 8, 28]))
        '<bos>MK<eos>'
        """
        return "".join(self.tokens[int(token)] for token in tokens)


VOCABULARY = Vocabulary()
"""The vocabulary of every protperf dataset, model and embedding file."""


def check_fingerprint(found: str, place: str) -> None:
    """Refuse what was made with another vocabulary.

    Args:
        found: the fingerprint stored in a shard, checkpoint or embedding file.
        place: the file's name, for the message.

    Raises:
        ValueError: the fingerprints differ.
    """
    if found != VOCABULARY.fingerprint:
        raise ValueError(
            f"{place}: made with another vocabulary (fingerprint {found[:12]!r}, this protperf has "
            f"{VOCABULARY.fingerprint[:12]}); token ids would not mean the same: prepare or train it again"
        )
