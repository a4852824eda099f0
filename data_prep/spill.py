"""First half of the sort: records go to files by the first byte of their key, so that each file fits in memory.

The key is a keyed 128-bit hash of the sequence. Sorting by it shuffles the proteins in an order that depends only on the
seed and on the sequences, and puts equal sequences side by side.
"""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path

from protperf.formats.manifest import SPLITS

NUM_BUCKETS = 256
BUFFER_BYTES = 256 << 20

_HEADER = struct.Struct("<16sBI")

SpilledRecord = tuple[bytes, bytes, int]
"""Key (16 bytes), sequence (token ids, one byte each), number of the split."""


def order_key(sequence: bytes, seed: int) -> bytes:
    """Return the 16-byte sort key of a sequence."""
    return hashlib.blake2b(sequence, digest_size=16, key=f"protperf order {seed}".encode()).digest()


class Spill:
    """Records on disk in `NUM_BUCKETS` files by key.

    Attributes:
        num_tokens: tokens by split, `<bos>` and `<eos>` included, duplicates included.
    """

    def __init__(self, folder: Path, *, buffer_bytes: int = BUFFER_BYTES) -> None:
        """Start with empty buckets.

        Args:
            folder: an empty folder for the bucket files.
            buffer_bytes: bytes held in memory over all buckets before they are written.
        """
        self.num_tokens = [0] * len(SPLITS)
        self._folder = folder
        self._limit = buffer_bytes
        self._buffers = [bytearray() for _ in range(NUM_BUCKETS)]
        self._buffered = 0

    def add(self, key: bytes, sequence: bytes, split: int) -> None:
        """Put one record into its bucket."""
        self._buffers[key[0]] += _HEADER.pack(key, split, len(sequence)) + sequence
        self._buffered += _HEADER.size + len(sequence)
        self.num_tokens[split] += len(sequence) + 2
        if self._buffered >= self._limit:
            self.flush()

    def flush(self) -> None:
        """Append the buffers to the bucket files."""
        for number, buffer in enumerate(self._buffers):
            if buffer:
                with open(self._path(number), "ab", buffering=0) as file:
                    file.write(buffer)
                self._buffers[number] = bytearray()
        self._buffered = 0

    def take(self, number: int) -> list[SpilledRecord]:
        """Return the records of a bucket, sorted by key and then by sequence, and remove its file."""
        try:
            data = self._path(number).read_bytes()
        except FileNotFoundError:
            return []
        records, place = [], 0
        while place < len(data):
            key, split, length = _HEADER.unpack_from(data, place)
            place += _HEADER.size + length
            records.append((key, data[place - length : place], split))
        records.sort()
        self._path(number).unlink()
        return records

    def _path(self, number: int) -> Path:
        return self._folder / f"bucket-{number:03d}"
