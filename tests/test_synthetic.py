"""Generated FASTA: read back by Biopython with the numbers promised, the same from the same seed."""

from __future__ import annotations

import gzip
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from Bio.SeqIO.FastaIO import SimpleFastaParser

from data_prep.synthetic import DUPLICATE_SHARE, FRAGMENT_SHARE, GENE_SHARE, MEAN_LENGTH, write_fasta
from protperf.formats.headers import WHITE_SPACE

SIZE = 3_000_000
HEADER = re.compile(
    r"tr\|(A0A[0-9A-Z]{2}\d[A-Z][0-9A-Z]{2}\d)\|\1_[0-9A-Z]{2,5} \S.* OS=[A-Z].* OX=\d+( GN=\S+)? PE=[1-4] SV=1"
)
# UniProtKB/TrEMBL 2023_04, https://www.ebi.ac.uk/uniprot/TrEMBLstats, "Amino acid composition", in percent
PUBLISHED = "L9.85 A9.03 G7.27 V6.86 S6.82 E6.24 R5.84 T5.55 I5.53 D5.47 P4.99 K4.93 F3.88 Q3.80 N3.79 Y2.88 M2.33 H2.22 W1.30 C1.29"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory):
    path = tmp_path_factory.mktemp("synthetic") / "a.fasta"
    return path, write_fasta(path, SIZE, seed=3)


@pytest.fixture(scope="module")
def records(written) -> list[tuple[str, str]]:
    with open(written[0]) as file:
        return list(SimpleFastaParser(file))


def is_near(count: int, expected: float, trials: int) -> bool:
    """Return whether a count of chances of `expected` each lies within 4 standard deviations."""
    return abs(count - expected * trials) <= 4 * (trials * expected * (1 - expected)) ** 0.5


def test_biopython_reads_what_was_promised(written, records):
    path, told = written
    assert told.records == len(records)
    assert told.residues == sum(len(sequence) for _, sequence in records)
    assert told.duplicates == len(records) - len({sequence for _, sequence in records})
    assert told.text_bytes == path.stat().st_size


def test_the_size_is_reached_by_the_last_record(written):
    path, told = written
    text = path.read_bytes()
    assert text.rindex(b">") < SIZE <= len(text) == told.text_bytes
    assert text.endswith(b"\n")


def test_lines_are_wrapped_as_uniprot_wraps_them(written):
    for record in written[0].read_text().split(">")[1:]:
        *full, last = record.splitlines()[1:]
        assert all(len(line) == 60 for line in full)
        assert 0 < len(last) <= 60


def test_headers_are_like_trembls_and_accessions_unique(written, records):
    found = [HEADER.fullmatch(header) for header, _ in records]
    assert all(found)
    assert len({match[1] for match in found if match}) == len(records)
    assert all(header == header.strip(WHITE_SPACE) and header.isascii() for header, _ in records)
    share = sum(len(header) + 2 for header, _ in records) / written[1].text_bytes
    assert 0.22 < share < 0.27  # of TrEMBL's text 24 %
    assert is_near(sum(" GN=" in header for header, _ in records), GENE_SHARE, len(records))
    assert is_near(sum("(Fragment)" in header for header, _ in records), FRAGMENT_SHARE, len(records))


def test_composition_and_lengths_are_trembls(records):
    sequences = sorted({sequence for _, sequence in records})  # each once: repeated ones are not independent
    counts = Counter("".join(sequences))
    percent = {entry[0]: float(entry[1:]) for entry in PUBLISHED.split()}
    total = sum(counts[letter] for letter in percent)
    assert set(counts) == {*percent, "X"}
    assert 0 < counts["X"] < 0.001 * total
    for letter, share in percent.items():
        assert is_near(counts[letter], share / sum(percent.values()), total), letter
    lengths = np.array([len(sequence) for sequence in sequences])
    assert abs(lengths.mean() - MEAN_LENGTH) < 4 * lengths.std() / len(lengths) ** 0.5
    assert np.median(lengths) < 0.9 * lengths.mean()


def test_some_sequences_were_there_before(written):
    told = written[1]
    assert is_near(told.duplicates, DUPLICATE_SHARE, told.records)


def test_equal_seeds_give_equal_bytes_and_others_do_not(tmp_path: Path, written):
    again, other = tmp_path / "again.fasta", tmp_path / "other.fasta"
    assert write_fasta(again, SIZE, seed=3) == written[1]
    write_fasta(other, SIZE, seed=4)
    assert again.read_bytes() == written[0].read_bytes() != other.read_bytes()


def test_gzip_holds_the_same_text_at_about_trembls_bits_a_residue(tmp_path: Path, written):
    path, told = tmp_path / "a.fasta.gz", written[1]
    assert write_fasta(path, SIZE, seed=3) == told
    assert gzip.decompress(path.read_bytes()) == written[0].read_bytes()
    assert 5.3 < 8 * path.stat().st_size / told.residues < 6.0
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def test_one_byte_is_one_record_and_none_an_error(tmp_path: Path):
    assert write_fasta(tmp_path / "one.fasta", 1).records == 1
    with pytest.raises(ValueError, match=r"zero\.fasta: a file of 0 bytes"):
        write_fasta(tmp_path / "zero.fasta", 0)
    assert not (tmp_path / "zero.fasta").exists()
