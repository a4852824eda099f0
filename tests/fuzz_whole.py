"""What the readers make of the whole files that hostile ones begin from: expected values were put in, or counted by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from fuzz_hdf5 import WINDOWS, WINDOWS_TEXT, other_shards

from protperf.formats.embedding_merge import merge_embeddings, open_embeddings
from protperf.formats.fasta import Policy, SequenceReader
from protperf.formats.ngrams import read_ngrams
from protperf.formats.shards import ShardSet
from protperf.formats.variants import read_mutants, read_variants
from protperf.vocab import VOCABULARY

Records = Sequence[tuple[str, str]]


def check_sequences(
    path: Path, texts: dict[str, Records], packers: Sequence[Callable[[bytes], bytes]]
) -> None:
    """Compare the ids and residues of texts, packed in several ways, with what is expected."""
    policy = Policy(gaps="drop", unknown="x", mask_token=True)
    for text, expected in texts.items():
        for pack in packers:
            path.write_bytes(pack(text.encode()))
            found = [(each.id, VOCABULARY.decode(each.tokens)) for each in SequenceReader([path], policy)]
            assert found == list(expected), found


def check_table(path: Path, text: str, mutants: list[str], scores: list[float]) -> None:
    """Compare the mutants and the scores of a table with what is expected."""
    path.write_text(text)
    table = read_variants(path, column="mutant")
    found, messages = read_mutants(table, column="mutant", offset=0)
    assert not messages, messages
    letters = VOCABULARY.tokens
    named = [
        ":".join(f"{letters[each.wild]}{each.place + 1}{letters[each.mutant]}" for each in some or ())
        for some in found
    ]
    assert named == mutants, named
    np.testing.assert_array_equal(table.numbers("DMS_score"), scores)


def check_shards(place: Path, dataset: Path, embeddings: Sequence[Path]) -> None:
    """Compare windows, counts and proteins with what `fuzz_hdf5` wrote, and those of version 1 with what was written then.

    Shards are also merged, in a folder that is empty.
    """
    windows = ShardSet(dataset, "train")
    np.testing.assert_array_equal(windows.read_many(range(len(windows))), np.concatenate([WINDOWS] * 2))
    windows.verify()
    orders = read_ngrams(dataset / "ngrams.h5").orders
    tokens = [WINDOWS_TEXT.count(letter) * 2 for letter in VOCABULARY.tokens[: VOCABULARY.num_residues]]
    assert orders[1][: VOCABULARY.num_residues].tolist() == tokens
    m, k, t = (VOCABULARY.tokens.index(letter) for letter in "MKT")
    assert orders[3][m, k, t] == 2
    merged = []
    for index, path in enumerate(embeddings):
        if others := other_shards(path):
            merged.append(place / f"{index}{path.suffix}")
            assert merge_embeddings([path, *others], merged[-1]) == 6
    for path in [*embeddings, *merged]:
        with open_embeddings(path) as file:
            found = list(file.numbered())
            assert len(found) == len(file) == file.attributes["num_records"]
            for number, each in found:
                check_protein(file.info, number, each, old=path.name.startswith("embeddings_v1"))


def check_protein(info: Any, number: int, each: Any, *, old: bool) -> None:
    """Compare a protein with that which was written under its number."""
    if old:
        names, lengths = ("sp|P01308|INS_HUMAN", "a/b", "nul\0id"), (4, 1, 2)
        expected = [names[number], f"{names[number]} OS=Homo sapiens", lengths[number]]
        array = np.arange(each.num_residues * 3).reshape(-1, 3) + 10 * number
        array = array if info.kind == "per_tok" else array.mean(0)
    else:
        name = "nul\0id" if number == 1 and "nul\0id" in each.id else f"p{number}"
        expected = [name, f"{name} a protein", number % 5 + 1]
        array = np.full(info.shape(number % 5 + 1), number)
    assert [each.id, each.header, each.num_residues] == expected
    np.testing.assert_array_equal(each.array, array)
