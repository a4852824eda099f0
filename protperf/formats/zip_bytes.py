"""The bytes of a ZIP archive that grows at its end, without time stamps; archives and members of any size.

Source: PKWARE APPNOTE 6.3.10, sections 4.3.7 (local header), 4.3.12 (central directory) and 4.5.3 (ZIP64).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import NamedTuple

from protperf.formats.hdf5_bytes import Sink

STORED, DEFLATED = 0, 8
_LIMIT = 0xFFFFFFFF
_MOST_MEMBERS = 0xFFFF
_NO_DATE = 0x21
"""The first of January 1980, the earliest there is."""
_NEEDED = 45
_UNIX, _MODE = 3 << 8, 0o100644 << 16


class Member(NamedTuple):
    """A member of an archive.

    Attributes:
        name: in ASCII.
        checksum: CRC-32 of its data.
        packed: bytes it takes.
        size: bytes of its data.
        address: where its local header starts.
        method: `STORED` or `DEFLATED`.
        wide: whether the local header has room for sizes over 4 GiB, whatever they are.
    """

    name: str
    checksum: int
    packed: int
    size: int
    address: int
    method: int = STORED
    wide: bool = False


def local_header(member: Member) -> bytes:
    """Return what stands before a member's data."""
    large = member.wide or max(member.packed, member.size) >= _LIMIT
    extra = struct.pack("<HHQQ", 1, 16, member.size, member.packed) if large else b""
    return b"PK\3\4" + _described(member, large=large, extra=extra) + member.name.encode() + extra


def append_directory(sink: Sink, members: Iterable[Member]) -> None:
    """Append the list of all members, which ends an archive."""
    start, number = sink.size, 0
    for member in members:
        large = max(member.packed, member.size) >= _LIMIT
        far = member.address >= _LIMIT
        sizes = (member.size, member.packed) * large + (member.address,) * far
        extra = struct.pack(f"<HH{len(sizes)}Q", 1, 8 * len(sizes), *sizes) if sizes else b""
        rest = struct.pack("<HHHII", 0, 0, 0, _MODE, _LIMIT if far else member.address)
        made_by = struct.pack("<H", _UNIX | _NEEDED)
        described = _described(member, large=large, extra=extra)
        sink.append(b"PK\1\2" + made_by + described + rest + member.name.encode() + extra)
        number += 1
    size = sink.size - start
    if number >= _MOST_MEMBERS or max(start, size) >= _LIMIT:
        place = sink.size
        record = struct.pack("<QHHIIQQQQ", 44, _UNIX | _NEEDED, _NEEDED, 0, 0, number, number, size, start)
        sink.append(b"PK\6\6" + record + b"PK\6\7" + struct.pack("<IQI", 0, place, 1))
    few = min(number, _MOST_MEMBERS)
    sink.append(b"PK\5\6" + struct.pack("<HHHHIIH", 0, 0, few, few, min(size, _LIMIT), min(start, _LIMIT), 0))


def _described(member: Member, *, large: bool, extra: bytes) -> bytes:
    """Return what both headers say of a member, from the version needed to the length of the extra field."""
    sizes = (_LIMIT, _LIMIT) if large else (member.packed, member.size)
    numbers = (_NEEDED, 0, member.method, 0, _NO_DATE, member.checksum, *sizes, len(member.name), len(extra))
    return struct.pack("<HHHHHIIIHH", *numbers)
