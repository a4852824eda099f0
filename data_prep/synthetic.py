"""FASTA that is like UniProtKB/TrEMBL to whoever has to read it: for measurements and tests, at any size, without a download.

Residues are drawn by TrEMBL's composition, lengths are lognormal, headers have the form and about the share of TrEMBL's,
some sequences were there before, a few hold X or are called fragments. None is a protein.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from itertools import chain, product
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.report import TREMBL_PERCENT
from protperf.formats.commit import commit_file, temporary_path

MEAN_LENGTH = 351
"""Residues: those of TrEMBL 2023_04 over its entries."""

DUPLICATE_SHARE = 0.15
FRAGMENT_SHARE = 0.1
GENE_SHARE = 0.8
"""Records with a name of a gene."""
X_SHARE = 0.005
"""Records with a run of X, of 1 to `MAX_X`."""
MAX_X = 20

WRAP = 60

_LENGTH_SIGMA = 0.65
_SHORTEST, _LONGEST = 16, 35_000
_BLOCK_RECORDS = 4096
_POOL_RECORDS = 16 * _BLOCK_RECORDS
_GZIP_LEVEL = 6
_NUM_SPECIES = 4000
_SPECIES_RUN = 3
"""Records in a row of one species, about."""

_ALNUM, _ALPHA = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ", b"ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_DIGIT = _ALNUM[:10]
_ACCESSION = (_ALNUM, _ALNUM, _DIGIT, _ALPHA, _ALNUM, _ALNUM, _DIGIT)
"""What may stand in each place behind `A0A`."""
_NUM_ACCESSIONS = math.prod(map(len, _ACCESSION))
_ACCESSION_STRIDE = 2_654_435_761
"""A prime, so that numbers times it, modulo `_NUM_ACCESSIONS`, are all different."""

_SYLLABLES = tuple(map("".join, product("bcdfglmnprstvxz", "aeiou")))
_NAMES = (
    "Uncharacterized protein",
    "ABC transporter permease",
    "ABC transporter ATP-binding protein",
    "DUF{} domain-containing protein",
    "Transcriptional regulator, {} family",
    "Response regulator",
    "Histidine kinase",
    "Methyltransferase domain-containing protein",
    "Acyl-CoA dehydrogenase",
    "Integrase",
    "MFS transporter",
    "Cytochrome c oxidase subunit {}",
    "30S ribosomal protein S{}",
    "50S ribosomal protein L{}",
    "DNA-directed RNA polymerase subunit beta",
    "Glycosyltransferase",
    "Aminotransferase class {}",
    "TonB-dependent receptor",
    "Zinc finger protein {}",
    "Protein kinase domain-containing protein",
    "Peptidase S{}",
)


@dataclass(frozen=True)
class Written:
    """What `write_fasta` wrote.

    Attributes:
        records: number of records.
        duplicates: those of them whose sequence was written before.
        residues: in all of them.
        text_bytes: size of the text, not compressed.
    """

    records: int
    duplicates: int
    residues: int
    text_bytes: int


def write_fasta(path: Path, num_bytes: int, *, seed: int = 0) -> Written:
    """Write TrEMBL-like FASTA of `num_bytes` of text, to the end of a record; gzip if the name ends in `.gz`.

    Equal sizes and seeds give equal text; memory does not grow with the size.

    Raises:
        ValueError: no size.
        OSError: the file cannot be written.
    """
    if num_bytes < 1:
        raise ValueError(f"{path}: a file of {num_bytes} bytes; at least 1")
    generator = np.random.default_rng(seed)
    headers, sequences = _Headers(generator), _Sequences(generator)
    temporary = temporary_path(path)
    compressor: Any = zlib.compressobj(_GZIP_LEVEL, wbits=31) if path.suffix == ".gz" else None
    records = duplicates = residues = size = 0
    try:
        with open(temporary, "wb") as file:
            while size < num_bytes:
                heads, (bodies, repeated) = headers.make(_BLOCK_RECORDS), sequences.draw(_BLOCK_RECORDS)
                sizes = np.fromiter(map(len, bodies), np.int64, _BLOCK_RECORDS)
                ends = np.cumsum(sizes + np.fromiter(map(len, heads), np.int64, _BLOCK_RECORDS))
                count = min(int(np.searchsorted(ends, num_bytes - size)) + 1, _BLOCK_RECORDS)
                text = b"".join(chain.from_iterable(zip(heads[:count], bodies[:count], strict=True)))
                file.write(compressor.compress(text) if compressor else text)
                records, size = records + count, size + len(text)
                residues += int((sizes - -(-sizes // (WRAP + 1)))[:count].sum())
                duplicates += int(repeated[:count].sum())
            if compressor:
                file.write(compressor.flush())
        commit_file(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return Written(records, duplicates, residues, size)


class _Sequences:
    """Draws wrapped sequences, and repeats some of those drawn before."""

    def __init__(self, generator: np.random.Generator) -> None:
        self._generator = generator
        self._letters = _letter_table()
        self._pool: list[bytes] = []

    def draw(self, count: int) -> tuple[list[bytes], np.ndarray]:
        """Return sequences in lines, and which of them were there before, bool `(count,)`."""
        repeated = self._generator.random(count) < DUPLICATE_SHARE
        repeated[0] &= bool(self._pool)
        fresh = iter(self._wrapped(count - int(repeated.sum())))
        places = self._generator.random(count) * (len(self._pool) + np.arange(count))
        bodies: list[bytes] = []
        for again, place in zip(repeated.tolist(), places.astype(np.int64).tolist(), strict=True):
            earlier = self._pool if place < len(self._pool) else bodies
            bodies.append(
                earlier[place - len(self._pool) if earlier is bodies else place] if again else next(fresh)
            )
        self._remember(bodies)
        return bodies, repeated

    def _wrapped(self, count: int) -> list[bytes]:
        """Return new sequences, `WRAP` residues a line."""
        mean = math.log(MEAN_LENGTH) - _LENGTH_SIGMA**2 / 2
        lengths = self._generator.lognormal(mean, _LENGTH_SIGMA, count).astype(np.int64)
        lengths = np.clip(lengths, _SHORTEST, _LONGEST)
        residues = self._letters[self._generator.integers(0, len(self._letters), lengths.sum(), np.uint16)]
        self._put_x(residues, lengths)
        num_lines = -(-lengths // WRAP)
        sizes = lengths + num_lines
        ends, last_lines = np.cumsum(sizes), np.cumsum(num_lines)
        lines = np.arange(1, last_lines[-1] + 1) - np.repeat(last_lines - num_lines, num_lines)
        line_ends = np.repeat(ends - sizes, num_lines) + lines * (WRAP + 1)
        line_ends[last_lines - 1] = ends
        is_residue = np.ones(ends[-1], bool)
        is_residue[line_ends - 1] = False
        text = np.full(ends[-1], ord("\n"), np.uint8)
        text[is_residue] = residues
        whole = text.tobytes()
        return [whole[end - size : end] for end, size in zip(ends.tolist(), sizes.tolist(), strict=True)]

    def _put_x(self, residues: np.ndarray, lengths: np.ndarray) -> None:
        """Write runs of X into some sequences of `residues`, uint8, one behind the other."""
        chosen = np.flatnonzero(self._generator.random(len(lengths)) < X_SHARE)
        runs = np.minimum(self._generator.integers(1, MAX_X + 1, len(chosen)), lengths[chosen])
        starts = (np.cumsum(lengths) - lengths)[chosen]
        starts += (self._generator.random(len(chosen)) * (lengths[chosen] - runs)).astype(np.int64)
        for start, run in zip(starts.tolist(), runs.tolist(), strict=True):
            residues[start : start + run] = ord("X")

    def _remember(self, bodies: list[bytes]) -> None:
        """Keep sequences to be repeated; once the pool is full, in the places of others."""
        room = max(0, _POOL_RECORDS - len(self._pool))
        self._pool += bodies[:room]
        others = bodies[room:]
        places = self._generator.integers(0, len(self._pool), len(others))
        for place, body in zip(places.tolist(), others, strict=True):
            self._pool[place] = body


class _Headers:
    """Makes headers; no accession comes twice."""

    def __init__(self, generator: np.random.Generator) -> None:
        self._generator = generator
        self._made = 0
        self._species = [_make_species(generator) for _ in range(_NUM_SPECIES)]

    def make(self, count: int) -> list[bytes]:
        """Return header lines."""
        generator = self._generator
        accessions = self._accessions(count)
        species = generator.integers(0, _NUM_SPECIES, count)
        kept = np.where(generator.random(count) < 1 / _SPECIES_RUN, np.arange(count), 0)
        owners = species[np.maximum.accumulate(kept)].tolist()
        names = generator.choice(len(_NAMES), count, p=_name_shares()).tolist()
        numbers = generator.integers(1, 10_000, (count, 2)).tolist()
        with_gene = (generator.random(count) < GENE_SHARE).tolist()
        fragments = (generator.random(count) < FRAGMENT_SHARE).tolist()
        levels = generator.choice([1, 2, 3, 4], count, p=[0.002, 0.008, 0.34, 0.65]).tolist()
        lines = []
        for accession, owner, name, (first, second), fragment, level, named in zip(
            accessions, owners, names, numbers, fragments, levels, with_gene, strict=True
        ):
            mnemonic, organism, tag = self._species[owner]
            title = _NAMES[name].format(first) + " (Fragment)" * fragment
            gene = f" GN={tag}_{second:05d}" * named
            lines.append(
                f">tr|{accession}|{accession}_{mnemonic} {title} {organism}{gene} PE={level} SV=1\n".encode()
            )
        return lines

    def _accessions(self, count: int) -> list[str]:
        """Return accessions of ten letters."""
        rest = (np.arange(self._made, self._made + count) * _ACCESSION_STRIDE) % _NUM_ACCESSIONS
        self._made += count
        columns = []
        for allowed in _ACCESSION:
            columns.append(np.frombuffer(allowed, np.uint8)[rest % len(allowed)])
            rest //= len(allowed)
        joined = np.stack(columns, 1).tobytes().decode()
        size = len(_ACCESSION)
        return ["A0A" + joined[start : start + size] for start in range(0, len(joined), size)]


def _letter_table() -> np.ndarray:
    """Return 65,536 letters with TrEMBL's composition, uint8: one drawn evenly is a residue."""
    shares = np.array(list(TREMBL_PERCENT.values()))
    edges = np.round(np.cumsum(shares) / shares.sum() * (1 << 16)).astype(np.int64)
    letters = np.frombuffer("".join(TREMBL_PERCENT).encode(), np.uint8)
    return np.repeat(letters, np.diff(edges, prepend=0))


def _name_shares() -> np.ndarray:
    """Return how often each name is drawn: the first one in a fourth of all records."""
    shares = np.full(len(_NAMES), 0.75 / (len(_NAMES) - 1))
    shares[0] = 0.25
    return shares


def _make_species(generator: np.random.Generator) -> tuple[str, str, str]:
    """Return the mnemonic of a made-up species, its `OS=` and `OX=`, and how names of its genes begin."""
    draws = generator.random(16)
    syllables = [_SYLLABLES[place] for place in (draws[:6] * len(_SYLLABLES)).astype(int)]
    genus, name = (
        "".join(part[: 2 + int(2 * draw)])
        for part, draw in ((syllables[:3], draws[6]), (syllables[3:], draws[7]))
    )
    strain = f" (strain {genus[:3].upper()} {100 + int(9900 * draws[8])})" * int(draws[9] < 0.4)
    organism = f"OS={genus.capitalize()} {name}{strain} OX={1000 + int(3e6 * draws[10])}"
    mnemonic = (genus[:3] + name[:2]).upper() if draws[11] < 0.5 else "9BACT"
    tag = "".join(chr(_ALPHA[place]) for place in (draws[12:15] * len(_ALPHA)).astype(int))
    return mnemonic, organism, f"{tag}{10 + int(90 * draws[15])}"
