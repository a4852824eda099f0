"""The links of a large HDF5 group: a fractal heap that holds them, and a B-tree that finds them by the hash of their name.

Source: HDF5 File Format Specification, version 3.0, sections III.G (fractal heap) and III.A.2 (version 2 B-tree). The sizes of
blocks are those that HDF5's own library chooses for groups; nodes of the tree are larger, and full.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator, Sequence
from itertools import count, islice, pairwise

import numpy as np

from protperf.formats.hdf5_bytes import Sink
from protperf.formats.hdf5_checksum import lookup3, with_checksums
from protperf.formats.hdf5_format import TREE_LINKS, UNDEFINED, Level, tree_levels

_WIDTH, _FIRST_BLOCK, _LARGEST_BLOCK = 4, 512, 1 << 16
_BLOCK_HEADER = 17
_HEAP_BITS = 32
_HEAP_HEADER_BYTES = 146
_ID_BYTES = 7
_NODE_BYTES, _RECORD_BYTES = 2048, 4 + _ID_BYTES
_PREFIX = 16
"""Letters of a name that decide between equal hashes: all of a running number, and 64 bits of a digest."""
_TOGETHER = 1024


class LinkWriter:
    """Append links to a file and, at the end, what finds them.

    Args:
        sink: the file.
        ordered: whether links keep their number in the order of creation.
    """

    def __init__(self, sink: Sink, *, ordered: bool) -> None:
        self._sink = sink
        self._ordered = ordered
        self._heap = sink.append(bytes(_HEAP_HEADER_BYTES))
        self._blocks = _blocks(None, 0)
        self._addresses: dict[int, int] = {}
        self._start, self._size = next(self._blocks)
        self._links: list[bytes] = []
        self._end = self._start + _BLOCK_HEADER
        self._names: list[bytes] = []
        self._hashes, self._offsets, self._lengths = array("I"), array("I"), array("H")
        self._prefixes = bytearray()

    def add(self, name: bytes, address: int) -> None:
        """Append a link."""
        order = struct.pack("<Q", len(self._offsets)) if self._ordered else b""
        link = bytes((1, 4 * self._ordered)) + order + bytes((len(name),)) + name + struct.pack("<Q", address)
        while self._end + len(link) > self._start + self._size:
            self._finish_block()
            self._start, self._size = next(self._blocks)
            self._end = self._start + _BLOCK_HEADER
        self._offsets.append(self._end)
        self._lengths.append(len(link))
        self._links.append(link)
        self._end += len(link)
        self._names.append(name)
        if len(self._names) == _TOGETHER:
            self._hash_names()

    def finish(self) -> tuple[int, int, int]:
        """Append the rest; return the addresses of the heap and of the tree, and the number of links."""
        number = len(self._offsets)
        if not number:
            return UNDEFINED, UNDEFINED, 0
        self._hash_names()
        self._finish_block()
        self._write_heap_header()
        return self._heap, write_tree(self._sink, self._records()), number

    def _finish_block(self) -> None:
        head = b"FHDB\0" + struct.pack("<QI", self._heap, self._start)
        data = (head + b"".join(self._links)).ljust(self._size, b"\0")
        self._addresses[self._start] = self._sink.append(data)
        self._links = []

    def _hash_names(self) -> None:
        lengths = np.array([len(name) for name in self._names])
        hashes = np.empty(len(self._names), np.uint32)
        for length in np.unique(lengths):
            places = np.flatnonzero(lengths == length)
            joined = b"".join(self._names[place] for place in places)
            hashes[places] = lookup3(np.frombuffer(joined, np.uint8).reshape(-1, length))
        self._hashes.frombytes(hashes.tobytes())
        self._prefixes += b"".join(name[:_PREFIX].ljust(_PREFIX, b"\0") for name in self._names)
        self._names = []

    def _write_heap_header(self) -> None:
        used = self._start + self._size
        rows = 0 if used == _FIRST_BLOCK else next(n for n in count(1) if _row_start(n) >= used)
        root = self._write_indirect(0, rows, used) if rows else self._addresses[0]
        managed = _row_start(rows) if rows else _FIRST_BLOCK
        allocated = sum(size for _, size in islice(_blocks(None, 0), len(self._addresses)))
        free = allocated - sum(self._lengths) - _BLOCK_HEADER * len(self._addresses)
        head = b"FRHP" + struct.pack("<BHHBI", 0, _ID_BYTES, 0, 0, 4096)
        head += struct.pack("<4Q", 0, UNDEFINED, free, UNDEFINED)
        head += struct.pack("<8Q", managed, allocated, used, len(self._offsets), 0, 0, 0, 0)
        head += struct.pack("<HQQHHQH", _WIDTH, _FIRST_BLOCK, _LARGEST_BLOCK, _HEAP_BITS, 1, root, rows)
        self._sink.write_at(self._heap, with_checksums([head])[0])

    def _write_indirect(self, start: int, rows: int, used: int) -> int:
        """Append the indirect block at a place of the heap, those below it first; return its address."""
        entries, place = [], start
        for row in range(rows):
            for _ in range(_WIDTH):
                size = _row_size(row)
                if place >= used:
                    entries.append(UNDEFINED)
                elif size <= _LARGEST_BLOCK:
                    entries.append(self._addresses[place])
                else:
                    entries.append(self._write_indirect(place, _rows_within(size), used))
                place += size
        data = b"FHIB\0" + struct.pack(f"<QI{len(entries)}Q", self._heap, start, *entries)
        return self._sink.append(with_checksums([data])[0])

    def _records(self) -> np.ndarray:
        """Return hash and heap id of each link, uint8 `(N, 11)`, by hash and then by name."""
        hashes = np.frombuffer(self._hashes, np.uint32)
        records = np.zeros((len(hashes), _RECORD_BYTES), np.uint8)
        records[:, :4] = hashes.astype("<u4").view(np.uint8).reshape(-1, 4)
        records[:, 5:9] = np.frombuffer(self._offsets, np.uint32).astype("<u4").view(np.uint8).reshape(-1, 4)
        records[:, 9:] = np.frombuffer(self._lengths, np.uint16).astype("<u2").view(np.uint8).reshape(-1, 2)
        return records[np.lexsort((np.frombuffer(self._prefixes, f"S{_PREFIX}"), hashes))]


def write_tree(sink: Sink, records: np.ndarray) -> int:
    """Append a version 2 B-tree of sorted records, uint8 `(N, 11)`, N at least 1; return its address."""
    levels = tree_levels(len(records), _NODE_BYTES, _RECORD_BYTES)
    leaves = iter(_write_leaves(sink, records, [part for part in _leaf_ranges(0, len(records), levels)]))

    def write(start: int, end: int, depth: int) -> tuple[int, int]:
        """Append the nodes of some records; return the address and the own records of the topmost."""
        if depth == 0:
            return next(leaves)
        parts = _children(start, end, levels[depth - 1].total)
        below = [(*write(*part, depth - 1), part[1] - part[0]) for part in parts]
        own = b"".join(records[end].tobytes() for _, end in parts[:-1])
        pointers = b""
        for address, number, total in below:
            pointers += struct.pack("<Q", address) + number.to_bytes(levels[0].number_bytes, "little")
            pointers += total.to_bytes(levels[depth - 1].total_bytes, "little") if depth > 1 else b""
        node = with_checksums([b"BTIN" + bytes((0, TREE_LINKS)) + own + pointers])[0]
        return sink.append(node.ljust(_NODE_BYTES, b"\0")), len(parts) - 1

    root, number = write(0, len(records), len(levels) - 1)
    head = b"BTHD" + struct.pack(
        "<BBIHHBB", 0, TREE_LINKS, _NODE_BYTES, _RECORD_BYTES, len(levels) - 1, 100, 40
    )
    return sink.append(with_checksums([head + struct.pack("<QHQ", root, number, len(records))])[0])


def _children(start: int, end: int, most: int) -> list[tuple[int, int]]:
    """Cut records into as few children as hold them, of equal size, with one record between any two."""
    number = -(-(end - start + 1) // (most + 1))
    edges = [start + (end - start + 1) * place // number for place in range(number + 1)]
    return [(left, right - 1) for left, right in pairwise(edges)]


def _leaf_ranges(start: int, end: int, levels: Sequence[Level]) -> Iterator[tuple[int, int]]:
    if len(levels) == 1:
        yield start, end
        return
    for left, right in _children(start, end, levels[-2].total):
        yield from _leaf_ranges(left, right, levels[:-1])


def _write_leaves(
    sink: Sink, records: np.ndarray, ranges: Sequence[tuple[int, int]]
) -> Iterator[tuple[int, int]]:
    """Append the leaves; yield the address and the number of records of each."""
    for first in range(0, len(ranges), _TOGETHER):
        some = ranges[first : first + _TOGETHER]
        nodes = [b"BTLF" + bytes((0, TREE_LINKS)) + records[start:end].tobytes() for start, end in some]
        for (start, end), node in zip(some, with_checksums(nodes), strict=True):
            yield sink.append(node.ljust(_NODE_BYTES, b"\0")), end - start


def _row_size(row: int) -> int:
    """Return the size of the blocks in a row of the heap."""
    return _FIRST_BLOCK << max(0, row - 1)


def _row_start(row: int) -> int:
    """Return where a row begins, in bytes of the heap."""
    return 0 if row == 0 else _WIDTH * _FIRST_BLOCK << (row - 1)


def _rows_within(size: int) -> int:
    """Return the rows of an indirect block that stands for so many bytes."""
    return (size // (_WIDTH * _FIRST_BLOCK)).bit_length()


def _blocks(rows: int | None, start: int) -> Iterator[tuple[int, int]]:
    """Yield place and size of all direct blocks of an indirect block, the root (without end) by default."""
    for row in count() if rows is None else range(rows):
        for _ in range(_WIDTH):
            size = _row_size(row)
            if size <= _LARGEST_BLOCK:
                yield start, size
            else:
                yield from _blocks(_rows_within(size), start)
            start += size
