"""What the tests of `protperf prepare` share: FASTA in, and a reader of datasets that knows nothing of protperf."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import h5py
import numpy as np
from Bio.SeqIO.FastaIO import SimpleFastaParser

REPOSITORY = Path(__file__).resolve().parents[1]
SAMPLE = REPOSITORY / "data_prep" / "sample" / "uniprot_sample.fasta.gz"
RESIDUES = "ACDEFGHIKLMNPQRSTVWYBOUXZJ"


def read_fasta(path: Path) -> list[tuple[str, str]]:
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt") as file:
        return [(header, sequence.upper()) for header, sequence in SimpleFastaParser(file)]


def write_fasta(path: Path, records: list[tuple[str, str]]) -> str:
    path.write_text("".join(f">{header}\n{sequence}\n" for header, sequence in records))
    return str(path)


def random_records(lengths: list[int], seed: int = 0) -> list[tuple[str, str]]:
    generator = np.random.default_rng(seed)
    return [(f"p{i}", "".join(generator.choice(list(RESIDUES), length))) for i, length in enumerate(lengths)]


def read_streams(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Read each shard's tokens by name with h5py alone, as docs/formats.md says."""
    for shard in json.loads((folder / "manifest.json").read_text())["shards"]:
        with h5py.File(folder / shard["file"]) as file:
            names = file.attrs["vocabulary"].split()
            yield shard["split"], [names[token] for token in file["tokens"][:].ravel()]


def read_proteins(folder: Path) -> dict[str, list[str]]:
    """Return the proteins of each split; checks that `<bos>`, `<eos>` and `<pad>` stand where they must."""
    proteins: dict[str, list[str]] = {}
    for split, tokens in read_streams(folder):
        end = len(tokens) - tokens[::-1].index("<eos>")
        assert set(tokens[end:]) <= {"<pad>"}
        body = "".join(tokens[:end])
        assert body.startswith("<bos>")
        found = body.removeprefix("<bos>").removesuffix("<eos>").split("<eos><bos>")
        assert not any("<" in protein for protein in found)
        proteins.setdefault(split, []).extend(found)
    return proteins


def all_proteins(folder: Path) -> Counter[str]:
    return Counter(protein for proteins in read_proteins(folder).values() for protein in proteins)


def split_by_sequence(folder: Path) -> dict[str, str]:
    return {protein: split for split, proteins in read_proteins(folder).items() for protein in proteins}


def shard_bytes(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("*.h5")}
