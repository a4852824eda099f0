"""What the cluster table and the family table say of each record's name: one byte a name, found by the name's hash.

The tables become two sorted arrays in files, which all tasks map into memory together: UniProt's 250 million names are
2 GB of file and no memory of their own. They are made bucket by bucket, so that sorting needs little memory either.
"""

from __future__ import annotations

import gzip
import re
import zlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from data_prep.keys import hash_name, name_point
from data_prep.options import PrepareOptions
from data_prep.splits import OOD, Thresholds
from protperf.formats import FormatError
from protperf.formats.commit import commit_file
from protperf.formats.headers import parse_header
from protperf.formats.streams import BYTE_ORDER_MARK
from protperf.formats.unpacking import GZIP_MAGIC

REPRESENTATIVE = 8
"""Added to the number of the split where the name is that of its cluster's representative."""

ABSENT = 255

_LONGEST_LINE = 1 << 20
_NUM_BUCKETS = 256
_HELD = 1 << 20
_ENTRY = np.dtype([("name", "<u8"), ("line", "<u8"), ("value", "u1")])
_FAMILY = re.compile(rb"\bPF\d{5}\b")


@dataclass(frozen=True)
class NameTable:
    """Values of names.

    Attributes:
        names: hashes, sorted, uint64 `(N,)`.
        values: `number of the split + REPRESENTATIVE`, uint8 `(N,)`.
    """

    names: np.ndarray
    values: np.ndarray

    @classmethod
    def open(cls, folder: Path) -> NameTable:
        """Map a table that `write_table` wrote into memory."""
        paths = (folder / "names.npy", folder / "values.npy")
        names, values = (
            np.load(path, mmap_mode="r" if path.stat().st_size > 128 else None) for path in paths
        )
        return cls(names, values)

    def find(self, names: list[bytes]) -> np.ndarray:
        """Return the value of each name, `ABSENT` where it is not there; uint8 `(N,)`."""
        hashes = np.fromiter(map(hash_name, names), np.uint64, len(names))
        places = np.searchsorted(self.names, hashes)
        places[places == len(self.names)] = 0
        values = np.full(len(names), ABSENT, np.uint8)
        if len(self.names):
            found = self.names[places] == hashes
            values[found] = self.values[places[found]]
        return values


class TableWriter:
    """Collects names and values, in memory or in buckets on the disk, and writes them sorted.

    Args:
        folder: an empty folder for the table.
        path: the source, for the message.
    """

    def __init__(self, folder: Path, path: str) -> None:
        self._folder = folder
        self._path = path
        self._names, self._lines, self._values = array("Q"), array("Q"), bytearray()
        self._spilled = False

    def add(self, name: bytes, line: int, value: int) -> None:
        """Add a name; `line` is its place in the source."""
        self._names.append(hash_name(name))
        self._lines.append(line)
        self._values.append(value)
        if len(self._names) >= _HELD:
            self._spill()

    def finish(self) -> None:
        """Write the table.

        Raises:
            FormatError: a name stands there twice with different values.
        """
        if self._spilled:
            self._spill()
        buckets = [self._bucket(number) for number in range(_NUM_BUCKETS)] if self._spilled else [None]
        with (
            open(self._folder / "names.bin", "wb") as names,
            open(self._folder / "values.bin", "wb") as values,
        ):
            for bucket in buckets:
                entries = self._taken() if bucket is None else np.fromfile(bucket, _ENTRY)
                entries = self._sorted(entries)
                names.write(entries["name"].tobytes())
                values.write(entries["value"].tobytes())
                if bucket is not None:
                    bucket.unlink()
        for name, kind in (("names", "<u8"), ("values", "u1")):
            _as_npy(self._folder / f"{name}.bin", np.dtype(kind))
            commit_file(self._folder / f"{name}.bin.npy", self._folder / f"{name}.npy")
            (self._folder / f"{name}.bin").unlink()

    def _sorted(self, entries: np.ndarray) -> np.ndarray:
        """Return entries sorted by name, each name once."""
        entries = entries[np.argsort(entries["name"], kind="stable")]
        repeated = np.flatnonzero(entries["name"][1:] == entries["name"][:-1])
        clash = repeated[(entries["value"][repeated] ^ entries["value"][repeated + 1]) % REPRESENTATIVE != 0]
        if clash.size:
            line = int(entries["line"][clash[0] + 1])
            raise FormatError(
                f"{self._path}:{line}: this member stands in two clusters; a member belongs to one"
            )
        return np.delete(entries, repeated + 1)

    def _taken(self) -> np.ndarray:
        """Return what is held, `_ENTRY` `(N,)`, and hold nothing."""
        entries = np.empty(len(self._names), _ENTRY)
        entries["name"], entries["line"] = self._names, self._lines
        entries["value"] = np.frombuffer(bytes(self._values), np.uint8)
        self._names, self._lines, self._values = array("Q"), array("Q"), bytearray()
        return entries

    def _spill(self) -> None:
        entries = self._taken()
        numbers = entries["name"] >> np.uint64(56)
        entries = entries[np.argsort(numbers, kind="stable")]
        ends = np.cumsum(np.bincount(numbers.astype(np.intp), minlength=_NUM_BUCKETS))
        for number, part in enumerate(np.split(entries, ends[:-1])):
            with open(self._bucket(number), "ab") as file:
                file.write(part.tobytes())
        self._spilled = True

    def _bucket(self, number: int) -> Path:
        return self._folder / f"bucket-{number:03d}"


def write_tables(folder: Path, options: PrepareOptions) -> Thresholds | None:
    """Read the tables that `options` names and write their names' splits into `folder`.

    Returns:
        The thresholds that the clusters' splits were drawn by; None without a cluster table.

    Raises:
        FormatError: a table is damaged or contradicts itself.
        ValueError: a held-out representative is not in the cluster table, or none of the families in the other.
    """
    held_out = set(_read_families(options)) if options.ood_families else set()
    writer = TableWriter(folder, options.clusters or options.ood_families)
    if not options.clusters:
        for number, accession in enumerate(sorted(held_out), 1):
            writer.add(accession, number, OOD)
        writer.finish()
        return None
    representatives, alone = _held_out_clusters(options, held_out)
    drawn = (name for name in _representatives(options.clusters) if name not in representatives)
    thresholds = Thresholds.of_clusters(options, drawn)
    for number, representative, member in _read_clusters(options.clusters):
        split = (
            OOD
            if representative in representatives
            else thresholds.split_at(name_point(representative, options.split_seed))
        )
        writer.add(member, number, split + REPRESENTATIVE * (member == representative))
    for accession in alone:
        writer.add(accession, 0, OOD + REPRESENTATIVE)
    writer.finish()
    return thresholds


def _representatives(path: str) -> Iterator[bytes]:
    """Yield the representatives, one after the other, as far as their members stand together."""
    last = None
    for _, representative, _ in _read_clusters(path):
        if representative != last:
            yield representative
        last = representative


def _held_out_clusters(options: PrepareOptions, accessions: set[bytes]) -> tuple[set[bytes], set[bytes]]:
    """Return what is held out: representatives of whole clusters, by list or for one member's family; the other accessions."""
    listed = (
        set(line for _, line in _read_lines(options.ood_clusters) if line) if options.ood_clusters else set()
    )
    missing, found, alone = set(listed), set(listed), set(accessions)
    if not (listed or accessions):
        return found, alone
    for _, representative, member in _read_clusters(options.clusters):
        missing.discard(representative)
        names = {member, _accession(member)} & accessions
        if names:
            found.add(representative)
            alone -= names
    if missing:
        raise ValueError(
            f"{options.ood_clusters}: {min(missing).decode(errors='replace')!r} is no representative in {options.clusters}; "
            "name clusters by the first column of that table"
        )
    return found, alone


def _accession(member: bytes) -> bytes:
    """Return the accession in a name such as `sp|P01308|INS_HUMAN`, or the name."""
    if b"|" not in member:
        return member
    text = member.decode("utf-8", "surrogateescape")
    return parse_header(text).accession.encode("utf-8", "surrogateescape")


def _read_families(options: PrepareOptions) -> Iterator[bytes]:
    """Yield the accessions of the held-out families: the first cells of the lines that name one of them."""
    wanted = {name.encode() for name in options.family_names}
    found = False
    for number, line in _read_lines(options.ood_families):
        accession, tab, rest = line.partition(b"\t")
        if line and not tab:
            raise FormatError(
                f"{options.ood_families}:{number}: {line[:60].decode(errors='replace')!r} is not `accession TAB Pfam`"
            )
        if wanted.intersection(_FAMILY.findall(rest)):
            found = True
            yield accession
    if not found:
        raise ValueError(
            f"{options.ood_families}: names none of the families {options.families}; give others with --families"
        )


def _read_clusters(path: str) -> Iterator[tuple[int, bytes, bytes]]:
    """Yield line number, representative and member."""
    for number, line in _read_lines(path):
        cells = line.split(b"\t")
        if len(cells) != 2 or not all(cells):
            raise FormatError(
                f"{path}:{number}: {line[:60].decode(errors='replace')!r} is not `representative TAB member`"
            )
        yield number, cells[0], cells[1]


def _read_lines(path: str) -> Iterator[tuple[int, bytes]]:
    """Iterate over the lines of a plain or gzip file, numbered from 1, without their ends."""
    with open(path, "rb") as file:
        zipped = file.read(2) == GZIP_MAGIC
    try:
        with gzip.open(path, "rb") if zipped else open(path, "rb") as lines:
            for number, line in enumerate(iter(partial(lines.readline, _LONGEST_LINE + 1), b""), 1):
                if len(line) > _LONGEST_LINE:
                    raise FormatError(
                        f"{path}:{number}: a line of more than {_LONGEST_LINE >> 20} MiB, which no table has; give text with one row a line"
                    )
                yield number, line.removeprefix(BYTE_ORDER_MARK if number == 1 else b"").rstrip(b"\r\n")
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise FormatError(f"{path}: damaged gzip file ({error})") from None


def _as_npy(source: Path, kind: np.dtype) -> None:
    """Write an array that lies on the disk once more, with numpy's header, behind the name `.npy`."""
    count = source.stat().st_size // kind.itemsize
    with open(source, "rb") as read, open(f"{source}.npy", "wb") as write:
        np.lib.format.write_array_header_1_0(
            write, {"descr": kind.str, "fortran_order": False, "shape": (count,)}
        )
        while block := read.read(1 << 22):
            write.write(block)
