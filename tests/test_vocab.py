"""The vocabulary: 36 tokens, every letter its own, nothing mapped to another in silence."""

from __future__ import annotations

import hashlib
import string

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protperf.vocab import INVALID, PADDING_DOCUMENT, VOCABULARY, check_fingerprint

TOKENS = [
    *("A", "C", "D", "E", "F", "G", "H", "I", "K", "L", "M", "N", "P", "Q", "R", "S", "T", "V", "W", "Y"),
    *("B", "O", "U", "X", "Z", "J"),
    *("<pad>", "<bos>", "<eos>", "<mask>", "<unk>"),
    *("<reserved1>", "<reserved2>", "<reserved3>", "<reserved4>", "<reserved5>"),
]
"""Written by hand: an id that moves would change the meaning of every dataset and checkpoint."""


def test_the_36_tokens_stand_where_they_always_stood():
    assert list(VOCABULARY.tokens) == TOKENS
    assert len(VOCABULARY) == len(set(TOKENS)) == 36
    assert (VOCABULARY.pad, VOCABULARY.bos, VOCABULARY.eos, VOCABULARY.mask) == (26, 27, 28, 29)
    assert (VOCABULARY.num_standard, VOCABULARY.num_residues) == (20, 26)
    assert PADDING_DOCUMENT == -1


def test_fingerprint_is_the_hash_of_the_ordered_tokens():
    expected = hashlib.sha256("\n".join(TOKENS).encode()).hexdigest()
    assert VOCABULARY.fingerprint == expected
    assert expected == "247b8b17b512b861980fce4fc94919c54c94a5cbeb53aed57a8dd2c1ac0a6c95"


def test_every_letter_has_its_own_residue_token():
    ids = VOCABULARY.encode(string.ascii_uppercase)
    assert len(set(ids.tolist())) == 26
    assert ids.max() < VOCABULARY.num_residues
    assert [TOKENS[i] for i in ids] == list(string.ascii_uppercase)


@given(st.text(string.ascii_letters))
def test_encoding_and_decoding_give_the_upper_case_back(residues: str):
    ids = VOCABULARY.encode(residues)
    assert ids.dtype == np.uint8
    assert VOCABULARY.decode(ids) == residues.upper()
    np.testing.assert_array_equal(ids, VOCABULARY.encode(residues.lower().encode()))


@pytest.mark.parametrize("byte", sorted(set(range(256)) - set(string.ascii_letters.encode())))
def test_no_other_byte_is_a_residue(byte: int):
    assert VOCABULARY.table[byte] == INVALID == 255
    with pytest.raises(ValueError, match="at residue 3 ") as error:
        VOCABULARY.encode(b"MK" + bytes([byte]) + b"*")
    assert repr(chr(byte)) in str(error.value)


def test_the_place_of_a_character_outside_latin_1_is_counted_in_characters():
    with pytest.raises(ValueError, match="'Å' at residue 3 is no residue"):
        VOCABULARY.encode("MKÅ")


def test_special_tokens_are_found_by_name_and_unknown_ones_are_named():
    assert [VOCABULARY.id_of(token) for token in TOKENS] == list(range(36))
    with pytest.raises(
        ValueError, match=r"no token '<cls>' in the vocabulary; allowed: A C D .* <reserved5>"
    ):
        VOCABULARY.id_of("<cls>")


def test_tokens_and_table_cannot_be_changed():
    with pytest.raises(AttributeError):
        VOCABULARY.tokens = ("A",)  # type: ignore[misc]
    with pytest.raises(ValueError, match="read-only"):
        VOCABULARY.table[0] = 1


def test_another_fingerprint_is_refused_by_place_and_remedy():
    check_fingerprint(hashlib.sha256("\n".join(TOKENS).encode()).hexdigest(), "x.h5")
    other = hashlib.sha256("\n".join(TOKENS[::-1]).encode()).hexdigest()
    with pytest.raises(ValueError, match=f"^x.h5: made with another vocabulary .*{other[:12]}.* again$"):
        check_fingerprint(other, "x.h5")
