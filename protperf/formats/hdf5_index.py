"""Where the members of an HDF5 group, its attributes and the chunks of an array lie: symbol tables, heaps and B-trees, read.

Each node and each leaf of a tree is visited once, and no more records come than the file has room for. See `hdf5_objects`, which also says
why this is read here.

Source: HDF5 File Format Specification, version 3.0, sections III.A (B-trees), III.B (symbol tables), III.D (local heap), III.G
(fractal heap).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from operator import itemgetter
from typing import NamedTuple

from protperf.formats.hdf5_format import (
    LINK,
    LINK_INFO,
    SYMBOL_TABLE,
    TREE_ATTRIBUTES,
    TREE_LARGE,
    TREE_LINKS,
    UNDEFINED,
    tree_levels,
)
from protperf.formats.hdf5_objects import Message, Source

_LARGE_RECORD = struct.Struct("<QQQ")
_LINK_BYTES = 40
"""That a link takes in a file besides its name, with what it leads to, at least."""


class Link(NamedTuple):
    """A member of a group.

    Attributes:
        name: of it.
        address: of its header; `None` for what lies elsewhere: a soft or an external link.
        order: its number in the order of creation, 0 where that is not kept.
    """

    name: bytes
    address: int | None
    order: int = 0


def read_links(source: Source, messages: list[Message]) -> list[Link]:
    """Return the members of a group: in the order of creation if it is kept, else by name."""
    found: dict[bytes, Link] = {}
    total = 0
    for link in _links_of(source, messages):
        total += _LINK_BYTES + len(link.name)
        if total > source.size:
            raise ValueError("more links than the file has room for")
        if not link.name or link.name in found:
            raise ValueError("a link without a name, or two of one name")
        found[link.name] = link
    return sorted(found.values(), key=itemgetter(2, 0))


def _links_of(source: Source, messages: list[Message]) -> Iterator[Link]:
    for kind, data in messages:
        if kind == SYMBOL_TABLE:
            yield from _old_links(source, *struct.unpack_from("<QQ", data))
        elif kind == LINK:
            yield read_link(data)
        elif kind == LINK_INFO:
            heap, tree = struct.unpack_from("<QQ", data, 10 if data[1] & 1 else 2)
            if heap != UNDEFINED:
                yield from map(read_link, heap_objects(source, heap, tree))


def read_link(data: bytes) -> Link:
    """Return what a link message says."""
    version, flags = data[:2]
    if version != 1:
        raise ValueError("a link of an unknown kind")
    place = 2
    kind = data[place] if flags & 8 else 0
    place += bool(flags & 8)
    (order,) = struct.unpack_from("<Q", data, place) if flags & 4 else (0,)
    place += 8 * bool(flags & 4) + bool(flags & 16)
    width = 1 << (flags & 3)
    size = int.from_bytes(data[place : place + width], "little")
    place += width
    name = data[place : place + size]
    if len(name) < size:
        raise ValueError("a link beyond its place")
    address = None if kind else struct.unpack_from("<Q", data, place + size)[0]
    return Link(name, address, order)


def heap_objects(source: Source, heap: int, tree: int) -> Iterator[bytes]:
    """Yield what a fractal heap holds, found by its tree; each once, and no more than the file has bytes."""
    blocks, total = _Heap(source, heap), 0
    seen: set[bytes] = set()
    for record in _records(source, tree, (TREE_LINKS, TREE_ATTRIBUTES)):
        identity = record[4:] if len(record) == 4 + blocks.identity_bytes else record
        identity = identity[: blocks.identity_bytes]
        if identity in seen:
            raise ValueError("an object of a heap that is named twice")
        seen.add(identity)
        found = blocks.read(identity)
        total += len(found)
        if total > source.size:
            raise ValueError("objects of more bytes than the file has")
        yield found


class _Heap:
    """A fractal heap. Its blocks are read once, and kept."""

    def __init__(self, source: Source, address: int) -> None:
        self._source = source
        head = source.checked(address, 142, b"FRHP\0")
        self.identity_bytes, filters = struct.unpack_from("<HH", head, 5)
        (self._large_tree,) = struct.unpack_from("<Q", head, 22)
        self._width, self._first, self._largest, bits, _, self._root, self._rows = struct.unpack_from(
            "<HQQHHQH", head, 110
        )
        self._offset_end = 1 + (bits + 7) // 8
        if filters or not (1 <= self._width <= 64 and self._first >= 64 and self._rows <= 64 and bits <= 64):
            raise ValueError("a heap of an unknown kind")
        if self._first & (self._first - 1) or self._largest < self._first or self.identity_bytes < 7:
            raise ValueError("a heap of an unknown kind")
        self._row_bytes = self._width * self._first
        self._tables: dict[int, tuple[int, ...]] = {}
        self._blocks: dict[int, bytes] = {}
        self._found: dict[int, tuple[bytes, int]] = {}
        self._kept = 0
        self._large: dict[int, tuple[int, int]] | None = None

    def read(self, identity: bytes) -> bytes:
        """Return an object by its identity in the heap."""
        if identity[0] & 0x30 == 0x10:
            return self._read_large(int.from_bytes(identity[1 : self.identity_bytes], "little"))
        if identity[0] & 0x30:
            raise ValueError("an object within its identity")
        place = int.from_bytes(identity[1 : self._offset_end], "little")
        size = int.from_bytes(identity[self._offset_end : self.identity_bytes], "little")
        number, rest = divmod(
            place, self._first
        )  # blocks begin at its multiples, and are asked for again and again
        if number not in self._found:
            self._found[number] = self._find(place - rest)
        block, start = self._found[number]
        start += rest
        if start + size > len(block):
            raise ValueError("an object beyond its block")
        return block[start : start + size]

    def _find(self, place: int) -> tuple[bytes, int]:
        """Return the block in which a place of the heap lies, and where in it."""
        if not self._rows:
            return self._block(self._root, self._first), place
        address, rows = self._root, self._rows
        while True:
            row = (place // self._row_bytes).bit_length()
            size = self._first << max(0, row - 1)
            start = 0 if row == 0 else self._row_bytes << (row - 1)
            if row >= rows:
                raise ValueError("a place beyond its heap")
            column, place = divmod(place - start, size)
            address = self._table(address, rows)[row * self._width + column]
            if size <= self._largest:
                return self._block(address, size), place
            rows = (size // self._row_bytes).bit_length()

    def _block(self, address: int, size: int) -> bytes:
        block = self._blocks.get(address)
        if block is None:
            self._keep(size)
            block = self._blocks[address] = self._source.at(address, size)
            if not block.startswith(b"FHDB\0"):
                raise ValueError(f"no block of a heap at {address}")
        return block

    def _table(self, address: int, rows: int) -> tuple[int, ...]:
        """Return the addresses in an indirect block."""
        if address not in self._tables:
            head, count = 12 + self._offset_end, rows * self._width
            self._keep(8 * count)
            data = self._source.checked(address, head + 8 * count, b"FHIB\0")
            self._tables[address] = struct.unpack_from(f"<{count}Q", data, head)
        return self._tables[address]

    def _keep(self, size: int) -> None:
        self._kept += size
        if self._kept > self._source.size:
            raise ValueError("blocks of a heap with more bytes than the file has")

    def _read_large(self, number: int) -> bytes:
        """Return an object that is too large for the heap's blocks; they have a tree of their own."""
        if self._large is None:
            records = _records(self._source, self._large_tree, (TREE_LARGE,))
            self._large = {key: (place, size) for place, size, key in map(_LARGE_RECORD.unpack, records)}
        return self._source.at(*self._large[number])


def _records(source: Source, address: int, kinds: tuple[int, ...]) -> Iterator[bytes]:
    """Yield the records of a version 2 B-tree of one of some kinds."""
    head = source.checked(address, 34, b"BTHD\0")
    kind, node_bytes, record_bytes, depth, _, _, root, number, total = struct.unpack_from(
        "<BIHHBBQHQ", head, 5
    )
    if kind not in kinds or not 5 <= record_bytes <= 64 or not 64 <= node_bytes <= 1 << 20 or depth > 8:
        raise ValueError("a tree of an unknown kind")
    if not total:
        return
    levels = tree_levels(0, node_bytes, record_bytes, depth=depth)
    nodes = _Nodes(source)

    def walk(address: int, number: int, depth: int) -> Iterator[bytes]:
        if number * record_bytes > node_bytes:
            raise ValueError("a tree that does not end")
        nodes.add(address, number * record_bytes)
        if not depth:
            data = source.checked(address, 6 + number * record_bytes, b"BTLF\0")
            ends = range(6 + record_bytes, 7 + number * record_bytes, record_bytes)
            yield from (data[end - record_bytes : end] for end in ends)
            return
        count_bytes, total_bytes = levels[0].number_bytes, levels[depth - 1].total_bytes if depth > 1 else 0
        pointer = 8 + count_bytes + total_bytes
        data = source.checked(address, 6 + number * record_bytes + (number + 1) * pointer, b"BTIN\0")
        place = 6 + number * record_bytes
        for n in range(number + 1):
            child = int.from_bytes(data[place : place + 8], "little")
            count = int.from_bytes(data[place + 8 : place + 8 + count_bytes], "little")
            yield from walk(child, count, depth - 1)
            if n < number:
                yield data[6 + n * record_bytes : 6 + (n + 1) * record_bytes]
            place += pointer

    yield from walk(root, number, depth)


class _Nodes:
    """The nodes of a tree that were read, and its leaves: each once, and not more bytes than the file has."""

    def __init__(self, source: Source) -> None:
        self._rest = source.size
        self._seen: set[int] = set()

    def add(self, address: int, size: int = 0) -> None:
        """Add one."""
        self._rest -= size
        if address in self._seen or self._rest < 0:
            raise ValueError("a tree that does not end")
        self._seen.add(address)


def _old_links(source: Source, tree: int, heap: int) -> Iterator[Link]:
    """Yield the members of a group of the first kind."""
    mark, size, _, start = struct.unpack("<4s4xQQQ", source.at(heap, 32))
    if mark != b"HEAP":
        raise ValueError(f"no heap at {heap}")
    names = source.at(start, size)
    for node in old_tree(source, tree, kind=0, key_bytes=8):
        mark, count = struct.unpack("<4sxxH", source.at(node[1], 8))
        if mark != b"SNOD":
            raise ValueError(f"no symbols at {node[1]}")
        data = source.at(node[1] + 8, 40 * count)
        for place in range(0, 40 * count, 40):
            name, address, cached = struct.unpack_from("<QQI", data, place)
            end = names.index(b"\0", name)
            yield Link(names[name:end], None if cached == 2 or address == UNDEFINED else address)


def old_tree(source: Source, address: int, *, kind: int, key_bytes: int) -> Iterator[tuple[bytes, int]]:
    """Yield key and address of the leaves of a version 1 B-tree.

    Args:
        source: the file.
        address: of its root.
        kind: 0 for groups, 1 for chunks.
        key_bytes: of a key.
    """
    waiting, nodes = [(address, -1)], _Nodes(source)
    nodes.add(address)
    while waiting:
        address, expected = waiting.pop(0)
        mark, found, level, count = struct.unpack("<4sBBH", source.at(address, 8))
        if mark != b"TREE" or found != kind or expected not in (-1, level):
            raise ValueError(f"no tree at {address}, or one that does not end")
        step = key_bytes + 8
        data = source.at(address + 24, count * step + key_bytes)
        for place in range(0, count * step, step):
            child = struct.unpack_from("<Q", data, place + key_bytes)[0]
            nodes.add(child, step)
            if level:
                waiting.append((child, level - 1))
            else:
                yield data[place : place + key_bytes], child
