"""Words of the HDF5 format that the writer and the reader share: numbers of messages, types of values, the room in a tree.

Source: HDF5 File Format Specification, version 3.0. Addresses and lengths take 8 bytes.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

SIGNATURE = b"\x89HDF\r\n\x1a\n"
UNDEFINED = (1 << 64) - 1
"""Address of what is not there."""

DATASPACE, LINK_INFO, DATATYPE, FILL, LINK, EXTERNAL, LAYOUT, GROUP_INFO = 1, 2, 3, 5, 6, 7, 8, 10
FILTERS, ATTRIBUTE, CONTINUATION, SYMBOL_TABLE, ATTRIBUTE_INFO = 11, 12, 16, 17, 21
"""Messages of an object's header (section IV.A.2)."""

COMPACT, CONTIGUOUS, CHUNKED = 0, 1, 2
"""Layouts of an array (section IV.A.2.i)."""

INTEGER, FLOAT, STRING, OPAQUE, VARIABLE = 0, 1, 3, 5, 9
"""Classes of types (section IV.A.2.d), the lower half of a type's first byte; the upper is its version."""

NUMBERS = {
    "<f2": struct.pack("<B3BIHHBBBBI", 0x11, 0x20, 15, 0, 2, 0, 16, 10, 5, 0, 10, 15),
    "<f4": struct.pack("<B3BIHHBBBBI", 0x11, 0x20, 31, 0, 4, 0, 32, 23, 8, 0, 23, 127),
    "<f8": struct.pack("<B3BIHHBBBBI", 0x11, 0x20, 63, 0, 8, 0, 64, 52, 11, 0, 52, 1023),
    **{
        f"{'<' if size > 1 else '|'}{letter}{size}": struct.pack(
            "<B3BIHH", 0x10, sign, 0, 0, size, 0, 8 * size
        )
        for letter, sign in (("u", 0), ("i", 8))
        for size in (1, 2, 4, 8)
    },
}
"""Types of numbers by NumPy's name of them."""

TREE_LINKS, TREE_ATTRIBUTES, TREE_LARGE = 5, 8, 1
"""Kinds of version 2 B-trees (section III.A.2): links and attributes by the hash of their names; objects too large for a heap."""
TREE_NODE_OVERHEAD = 10


class Level(NamedTuple):
    """What a node of some depth holds at most: records with those below it, and the bytes of such numbers."""

    total: int
    total_bytes: int
    number_bytes: int


def tree_levels(number: int, node_bytes: int, record_bytes: int, *, depth: int = 0) -> list[Level]:
    """Return the levels of a version 2 B-tree, leaves first: as many as so many records need, and one more than `depth` at least.

    Args:
        number: of records.
        node_bytes: of a node.
        record_bytes: of a record.
        depth: number of the topmost level that must be there.
    """
    room = node_bytes - TREE_NODE_OVERHEAD
    most = room // record_bytes
    levels = [Level(most, 0, _bytes_of(most))]
    while levels[-1].total < number or len(levels) <= depth:
        below = levels[-1]
        pointer = 8 + levels[0].number_bytes + below.total_bytes
        own = (room - pointer) // (record_bytes + pointer)
        if own < 1:
            raise ValueError("a tree whose nodes hold no record")
        total = (own + 1) * below.total + own
        levels.append(Level(total, _bytes_of(total), levels[0].number_bytes))
    return levels


def _bytes_of(limit: int) -> int:
    """Return the bytes that hold numbers up to a limit."""
    return (limit.bit_length() + 7) // 8
