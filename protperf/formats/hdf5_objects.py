"""What describes the objects of an HDF5 file, out of its bytes: object headers and their messages, texts, types, attributes.

Read here and not by HDF5's own library, which ends the process, or never ends, on some hostile files. Only what our files
hold is known: whatever else is asked of a file is an error. Every offset and size is compared with the file before it is followed, and what is
read once is not read again, so that work and memory follow the size of the file.

Source: HDF5 File Format Specification, version 3.0, sections II (superblock) and IV (object headers, messages). Addresses and
lengths take 8 bytes.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from protperf.formats.hdf5_checksum import lookup3_of
from protperf.formats.hdf5_format import (
    ATTRIBUTE,
    ATTRIBUTE_INFO,
    CONTINUATION,
    DATASPACE,
    DATATYPE,
    EXTERNAL,
    FILTERS,
    FLOAT,
    INTEGER,
    LAYOUT,
    LINK,
    LINK_INFO,
    NUMBERS,
    OPAQUE,
    SIGNATURE,
    STRING,
    SYMBOL_TABLE,
    VARIABLE,
)

_LARGEST_HEADER = 1 << 24
_SHARED = 2
_ONCE = {DATASPACE, LINK_INFO, DATATYPE, LAYOUT, FILTERS, SYMBOL_TABLE, ATTRIBUTE_INFO}
"""Kinds of messages that a header has one of."""
_READ = {*_ONCE, LINK, ATTRIBUTE}
"""Kinds of messages that say something here."""
_NAMES = {bytes((data[0] & 15,)) + data[1:]: name for name, data in NUMBERS.items()}
"""NumPy's names of numbers by their types without the version of these."""


class UnknownError(ValueError):
    """Values of a type or shape that is not read here, which is no damage: what is not asked for may have it."""


class Source:
    """The bytes of a file.

    Args:
        descriptor: open for reading.

    Attributes:
        size: of the file.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.size = os.fstat(descriptor).st_size
        self.collection = lru_cache(maxsize=8)(self._collection)

    def at(self, offset: int, size: int) -> bytes:
        """Return bytes, all that are asked for.

        Raises:
            ValueError: they are not in the file.
        """
        if not 0 <= offset <= offset + size <= self.size:
            raise ValueError(f"{size:,} bytes at {offset} are not in a file of {self.size:,}")
        data = os.pread(self._descriptor, size, offset)
        while len(data) < size and (part := os.pread(self._descriptor, size - len(data), offset + len(data))):
            data += part  # one call reads 2 GiB at most
        if len(data) < size:
            raise ValueError("the file is cut short")
        return data

    def checked(self, offset: int, size: int, mark: bytes) -> bytes:
        """Return bytes that begin with a mark and have a checksum behind them."""
        data = self.at(offset, size + 4)
        if not data.startswith(mark):
            raise ValueError(f"no {mark.decode('latin-1')} at {offset}")
        if lookup3_of(data[:size]) != struct.unpack_from("<I", data, size)[0]:
            raise ValueError(f"a wrong checksum at {offset}")
        return data[:size]

    def text(self, reference: bytes, item_bytes: int = 1) -> bytes:
        """Return a value of variable length: its items, of so many bytes each."""
        length, address, number = struct.unpack("<IQI", reference)
        if not length:
            return b""
        found = self.collection(address)
        if number not in found:
            raise ValueError(f"no value {number} in the collection at {address}")
        start, size = found[number]
        if length * item_bytes > size:
            raise ValueError(f"a value of {length:,} items has {size:,} bytes")
        return self.at(start, length * item_bytes)

    def _collection(self, address: int) -> dict[int, tuple[int, int]]:
        """Return place and size of each object of a global heap collection."""
        mark, version, size = struct.unpack("<4sB3xQ", self.at(address, 16))
        if (mark, version) != (b"GCOL", 1):
            raise ValueError(f"no collection at {address}")
        data, place = self.at(address, size), 16
        found: dict[int, tuple[int, int]] = {}
        while place + 16 <= size:
            number, length = struct.unpack_from("<H6xQ", data, place)
            if not number:
                break
            if place + 16 + length > size:
                raise ValueError(f"an object beyond its collection at {address}")
            found[number] = address + place + 16, length
            place += 16 + length + -length % 8
        return found


class Message(NamedTuple):
    """One message of an object header."""

    kind: int
    data: bytes


def root_of(source: Source) -> int:
    """Return the address of the root group's header."""
    head = source.at(0, 72)
    version = head[8]
    if not head.startswith(SIGNATURE) or version not in (0, 2, 3):
        raise ValueError("it does not begin as an HDF5 file that is read here")
    if version == 0:
        sizes, (base, _, end) = head[13:15], struct.unpack_from("<3Q", head, 24)
        (root,) = struct.unpack_from("<Q", head, 64)
    else:
        sizes, (base, _, end, root) = head[9:11], struct.unpack_from("<4Q", head, 12)
        source.checked(0, 44, SIGNATURE)
    if sizes != b"\x08\x08" or base or end > source.size:
        raise ValueError("it is cut short, or begins elsewhere")
    return root


def read_header(source: Source, address: int) -> list[Message]:
    """Return the messages of an object."""
    read = _read_header_2 if source.at(address, 4) == b"OHDR" else _read_header_1
    messages: list[Message] = []
    once: set[int] = set()
    for message in read(source, address):
        if message.kind == EXTERNAL:
            raise ValueError("its numbers lie in another file")
        if message.kind in _ONCE and message.kind in once:
            raise ValueError(f"a header with two messages of kind {message.kind}")
        once.add(message.kind)
        if message.kind in _READ:
            messages.append(message)
    return messages


def _read_header_1(source: Source, address: int) -> Iterator[Message]:
    version, number, size = struct.unpack("<BxHxxxxI", source.at(address, 12))
    if version != 1:
        raise ValueError(f"no object at {address}")
    waiting, seen = [(address + 16, size)], _Seen()
    while waiting:
        start, size = waiting.pop(0)
        seen.add(start, size)
        data, place = source.at(start, size), 0
        while place + 8 <= size and number:
            kind, length, flags = struct.unpack_from("<HHB", data, place)
            yield from _message(kind, data[place + 8 : place + 8 + length], length, flags, waiting)
            place, number = place + 8 + length, number - 1


def _read_header_2(source: Source, address: int) -> Iterator[Message]:
    flags = source.at(address, 6)[5]
    place = 6 + 16 * bool(flags & 0x20) + 4 * bool(flags & 0x10)
    width = 1 << (flags & 3)
    size = int.from_bytes(source.at(address + place, width), "little")
    start, seen = place + width, _Seen()
    seen.add(address, size)
    blocks = [source.checked(address, start + size, b"OHDR\2")[start:]]
    head = 6 if flags & 4 else 4
    while blocks:
        waiting: list[tuple[int, int]] = []
        data, place = blocks.pop(0), 0
        while place + head <= len(data):
            kind, length, shared = struct.unpack_from("<BHB", data, place)
            yield from _message(kind, data[place + head : place + head + length], length, shared, waiting)
            place += head + length
        for offset, size in waiting:
            seen.add(offset, size)
            blocks.append(source.checked(offset, size - 4, b"OCHK")[4:])


def _message(
    kind: int, data: bytes, length: int, flags: int, waiting: list[tuple[int, int]]
) -> Iterator[Message]:
    if len(data) < length:
        raise ValueError("a message beyond its header")
    if kind == CONTINUATION:
        waiting.append(struct.unpack_from("<QQ", data))
    elif flags & _SHARED and kind in (DATASPACE, DATATYPE, LAYOUT, FILTERS, ATTRIBUTE):
        raise ValueError("a message that stands elsewhere")
    else:
        yield Message(kind, data)


class _Seen:
    """The parts of a header that were read: each once, and not too many bytes."""

    def __init__(self) -> None:
        self._places: set[int] = set()
        self._total = 0

    def add(self, place: int, size: int) -> None:
        """Add a part."""
        self._total += size
        if place in self._places or not 0 <= self._total <= _LARGEST_HEADER:
            raise ValueError("a header that does not end")
        self._places.add(place)


def read_shape(data: bytes) -> tuple[int, ...]:
    """Return the shape of a dataspace, `()` of a scalar; what is empty has none."""
    version, rank, _, kind = data[:4]
    if version not in (1, 2) or rank > 8 or (version == 2 and kind > 1):
        raise UnknownError("no value, or a shape of an unknown kind")
    return struct.unpack_from(f"<{rank}Q", data, 8 if version == 1 else 4)


class Kind(NamedTuple):
    """A type of values.

    Attributes:
        size: bytes of one.
        dtype: NumPy's name of numbers; of those in a value of variable length too; empty for texts and bytes.
        variable: whether values lie elsewhere, each of a length of its own.
        opaque: whether they are bytes and no text.
    """

    size: int
    dtype: str
    variable: bool = False
    opaque: bool = False


def read_kind(data: bytes) -> Kind:
    """Return a type: little-endian integers and floating-point numbers as NumPy has them, texts, bytes."""
    family, bits, size = data[0] & 15, data[1], struct.unpack_from("<I", data, 4)[0]
    if family in (INTEGER, FLOAT):
        dtype = _NAMES.get(bytes((family,)) + data[1 : 12 if family == INTEGER else 20])
        if dtype:
            return Kind(size, dtype)
    if family in (STRING, OPAQUE) and size:
        return Kind(size, "", opaque=family == OPAQUE)
    if family == VARIABLE and size == 16:
        if bits & 15 == 1:
            return Kind(16, "", variable=True)
        base = read_kind(data[8:])
        if base.dtype and not base.variable:
            return Kind(16, base.dtype, variable=True)
    raise UnknownError("values of a type that is not read here")


class Attribute(NamedTuple):
    """An attribute, its value unread.

    Attributes:
        name: of it.
        kind: its type; empty where that stands elsewhere.
        shape: its dataspace.
        value: what follows.
    """

    name: str
    kind: bytes
    shape: bytes
    value: bytes


def read_attribute(data: bytes) -> Attribute:
    """Return the parts of an attribute's message."""
    version, flags, *sizes = struct.unpack_from("<BBHHH", data)
    if version not in (1, 2, 3):
        raise ValueError("an attribute of an unknown kind")
    place, parts = 9 if version == 3 else 8, []
    for size in sizes:
        parts.append(data[place : place + size])
        place += size + (-size % 8 if version == 1 else 0)
    name = parts[0].rstrip(b"\0").decode("utf-8", "surrogateescape")
    stands_elsewhere = version > 1 and flags
    return Attribute(name, b"" if stands_elsewhere else parts[1], parts[2], data[place:])


def value_of(source: Source, attribute: Attribute) -> Any:
    """Return the value of an attribute: a text, bytes, a number, or numbers `(N,)`, an array or one value of variable length.

    Raises:
        UnknownError: it is something else.
        ValueError: it is damaged.
    """
    if not attribute.kind:
        raise UnknownError("a type that stands elsewhere")
    kind, shape = read_kind(attribute.kind), read_shape(attribute.shape)
    if len(shape) > 1 or (shape and (kind.variable or not kind.dtype)):
        raise UnknownError(f"values in the shape {shape}")
    data = attribute.value[: math.prod(shape) * kind.size]
    if len(data) < math.prod(shape) * kind.size:
        raise ValueError("a value beyond its message")
    if shape:
        return np.frombuffer(data, kind.dtype)
    if kind.variable and kind.dtype:
        dtype = np.dtype(kind.dtype)
        return np.frombuffer(source.text(data, dtype.itemsize), dtype)
    if kind.dtype:
        return np.frombuffer(data, kind.dtype)[0].item()
    if kind.opaque:
        return data
    text = source.text(data) if kind.variable else data.rstrip(b"\0")
    return text.decode("utf-8", "surrogateescape")
