"""What the tests of the sequence reader share: write a small file, read it, look at what was left out."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np

from protperf.formats.fasta import SequenceReader
from protperf.vocab import VOCABULARY

LETTERS = np.frombuffer("".join(VOCABULARY.tokens[: VOCABULARY.num_residues]).encode(), np.uint8)


def write_file(content, name="in.fasta"):
    """Write a file in the working folder and return its name, so that messages are short and exact."""
    Path(name).write_bytes(content.encode() if isinstance(content, str) else content)
    return name


def residues(record):
    """Return a record's residues as text."""
    return LETTERS[record.tokens].tobytes().decode()


def read(path, policy=None):
    """Return (id, residues) of each accepted record, and the reader."""
    reader = SequenceReader([path], policy)
    return [(record.id, residues(record)) for record in reader], reader


def skipped(reader):
    """Return what the reader says of the records it left out."""
    return [(s.line, s.id, s.column, s.reason, s.found) for s in reader.skipped_examples]


def repeated(first: bytes, byte: bytes, mebibytes: int) -> bytes:
    """Return gzip members that unpack to so much, in a few milliseconds."""
    return gzip.compress(first) + gzip.compress(byte * (16 << 20)) * (mebibytes // 16)
