"""Which split a record belongs to: a keyed hash of its sequence or of its cluster's representative says so.

The split depends on nothing else: not on the order of the records, the files they come in or the number of shards.
"""

from __future__ import annotations

import gzip
import hashlib
from array import array
from collections.abc import Iterator

import numpy as np

from data_prep.options import PrepareOptions
from protperf.formats import FormatError
from protperf.formats.fasta import Record
from protperf.formats.manifest import SPLITS

TRAIN, VALID, TEST, OOD = range(len(SPLITS))
"""Numbers of the splits, in rising priority: a sequence met under two splits goes to the higher one."""

_GZIP_MAGIC = b"\x1f\x8b"


class Splitter:
    """Gives each record its split.

    Attributes:
        outside_clusters: number of records so far that the cluster table does not name; they go by their sequence.
    """

    def __init__(self, options: PrepareOptions) -> None:
        """Read the tables that `options` names.

        Raises:
            FormatError: a table is damaged or contradicts itself.
            ValueError: a held-out representative is not in the cluster table.
        """
        self.outside_clusters = 0
        self._key = f"protperf split {options.split_seed}".encode()
        self._test_end = int(options.test * 2**64)
        self._valid_end = int((options.test + options.valid) * 2**64)
        self._clusters = self._read_tables(options) if options.clusters else None

    def split_of(self, record: Record, sequence: bytes) -> int:
        """Return the number of the record's split; `sequence` is its tokens, one byte each."""
        if self._clusters is not None:
            for name in (record.id, record.accession):
                split = self._clusters.find(_hash_name(_to_bytes(name)))
                if split is not None:
                    return split
            self.outside_clusters += 1
        return self._draw(sequence)

    def _draw(self, data: bytes) -> int:
        """Return the split that the hash of `data` falls into."""
        point = int.from_bytes(hashlib.blake2b(data, digest_size=8, key=self._key).digest(), "big")
        if point < self._test_end:
            return TEST
        return VALID if point < self._valid_end else TRAIN

    def _read_tables(self, options: PrepareOptions) -> ClusterSplits:
        """Return the split of each member of the cluster table."""
        held_out = set(_read_lines(options.ood_clusters)) - {b""} if options.ood_clusters else set()
        names, splits = array("Q"), bytearray()
        missing, representative, split = set(held_out), b"", TRAIN
        for number, line in enumerate(_read_lines(options.clusters), 1):
            cells = line.split(b"\t")
            if len(cells) != 2 or not all(cells):
                raise FormatError(
                    f"{options.clusters}:{number}: {line[:60].decode(errors='replace')!r} is not `representative TAB member`"
                )
            if cells[0] != representative:
                representative = cells[0]
                missing.discard(representative)
                split = OOD if representative in held_out else self._draw(representative)
            names.append(_hash_name(cells[1]))
            splits.append(split)
        if missing:
            raise ValueError(
                f"{options.ood_clusters}: {min(missing).decode(errors='replace')!r} is no representative in {options.clusters}; name clusters by the first column of that table"
            )
        return ClusterSplits(
            np.array(names, np.uint64), np.frombuffer(bytes(splits), np.uint8), options.clusters
        )


class ClusterSplits:
    """The split of each member of a cluster table, 9 bytes a member: UniProt's 250 million fit in memory."""

    def __init__(self, names: np.ndarray, splits: np.ndarray, path: str) -> None:
        """Sort the members.

        Args:
            names: hashes of the members' names, `uint64 (N,)`.
            splits: their splits, `uint8 (N,)`.
            path: the table's path, for the message.

        Raises:
            FormatError: a member stands in two clusters that lie in two splits.
        """
        order = np.argsort(names, kind="stable")
        self._names, self._splits = names[order], splits[order]
        repeated = self._names[1:] == self._names[:-1]
        clash = np.flatnonzero(repeated & (self._splits[1:] != self._splits[:-1]))
        if clash.size:
            line = int(np.sort(order[clash[0] : clash[0] + 2])[1]) + 1
            raise FormatError(f"{path}:{line}: this member stands in two clusters; a member belongs to one")

    def find(self, name: int) -> int | None:
        """Return the split of the member whose name has this hash, None if it is not in the table."""
        place = int(np.searchsorted(self._names, np.uint64(name)))
        if place == len(self._names) or int(self._names[place]) != name:
            return None
        return int(self._splits[place])


def _hash_name(name: bytes) -> int:
    """Return a 64-bit hash of a name."""
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big")


def _to_bytes(name: str) -> bytes:
    """Return the bytes a name had in its file."""
    return name.encode("utf-8", "surrogateescape")


def _read_lines(path: str) -> Iterator[bytes]:
    """Iterate over the lines of a plain or gzip file without their ends."""
    with open(path, "rb") as file:
        zipped = file.read(2) == _GZIP_MAGIC
    opener = gzip.open if zipped else open
    try:
        with opener(path, "rb") as lines:
            for line in lines:
                yield line.rstrip(b"\r\n")
    except (EOFError, gzip.BadGzipFile) as error:
        raise FormatError(f"{path}: damaged gzip file ({error})") from None
