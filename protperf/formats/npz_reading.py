"""Members of a NumPy archive from anywhere: what one claims is compared with what is there before memory is taken for it.

`place` in these functions is the beginning of a message: the file, and what is wrong with it. All that `zipfile` and NumPy say of
foreign bytes becomes such a line.

Axis letters: `N` texts, `W` letters that each has room for.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

import numpy as np

from protperf.formats import FormatError
from protperf.formats.foreign import foreign_bytes
from protperf.formats.unpacking import LARGEST

LONGEST_TEXT = 1 << 20
"""Letters of a text, of which none is known that has a thousandth."""
_TOGETHER_BYTES = 1 << 22


def read_numbers(
    archive: zipfile.ZipFile, name: str, place: str, *, shape: tuple[int, ...], kinds: str
) -> np.ndarray:
    """Return an array of numbers.

    Args:
        archive: open.
        name: of the member.
        place: for messages.
        shape: that it must have.
        kinds: NumPy's letters of the allowed kinds of numbers.

    Raises:
        FormatError: damaged, or it is another array.
        OSError: the system cannot read it.
    """
    with _opened(archive, name, place) as (info, member):
        if info.compress_type != zipfile.ZIP_STORED and info.file_size > LARGEST:
            raise FormatError(f"{place} ({name} unpacks to more than {LARGEST >> 20} MiB)")
        found, dtype = _header_of(info, member, place)
        if found != shape or dtype.kind not in kinds:
            raise FormatError(f"{place} ({name} is an array {found} of {dtype})")
        with foreign_bytes(place):
            return np.frombuffer(bytearray(member.read()), dtype).reshape(shape)


def shape_of(archive: zipfile.ZipFile, name: str, place: str) -> tuple[int, ...]:
    """Return the shape that an array has; errors as `read_numbers`."""
    with _opened(archive, name, place) as (info, member):
        return _header_of(info, member, place)[0]


def read_texts(archive: zipfile.ZipFile, name: str, place: str, *, count: int) -> list[str]:
    """Return an array of texts `(N,)`, a few at a time: NumPy gives each the room of the longest.

    Args:
        archive: open.
        name: of the member.
        place: for messages.
        count: N, that it must have.

    Raises:
        FormatError: damaged, or it is another array.
        OSError: the system cannot read it.
    """
    with _opened(archive, name, place) as (info, member):
        found, dtype = _header_of(info, member, place)
        if found not in ((count,), ()) or dtype.kind != "U" or dtype.itemsize > 4 * LONGEST_TEXT:
            raise FormatError(f"{place} ({name} is an array {found} of {dtype})")
        if not dtype.itemsize:
            return [""] * count
        texts: list[str] = []
        together = max(1, _TOGETHER_BYTES // dtype.itemsize)
        while len(texts) < count:
            with foreign_bytes(place):
                some = np.frombuffer(member.read(together * dtype.itemsize), dtype).tolist()
            if not some:
                raise FormatError(f"{place} ({name} holds {len(texts)} of {count} texts)")
            texts += some
    return texts


@contextmanager
def _opened(archive: zipfile.ZipFile, name: str, place: str) -> Iterator[tuple[zipfile.ZipInfo, IO[bytes]]]:
    """Open a member for reading."""
    with foreign_bytes(place):
        info = archive.getinfo(name)
        member = archive.open(info)
    with member:
        yield info, member


def _header_of(info: zipfile.ZipInfo, member: IO[bytes], place: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Return shape and type of the array in a member, which is as large as they say."""
    with foreign_bytes(place):
        version = np.lib.format.read_magic(member)
    if version != (1, 0):
        raise FormatError(f"{place} ({info.filename} is of another version of NumPy's format)")
    with foreign_bytes(place):
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(member)
        begun = member.tell()
    if fortran or dtype.hasobject or math.prod(shape) * dtype.itemsize != info.file_size - begun:
        raise FormatError(
            f"{place} ({info.filename} is an array {shape} of {dtype} in {info.file_size:,} bytes)"
        )
    return shape, dtype


def open_archive(file: IO[bytes], size: int, place: str) -> zipfile.ZipFile:
    """Open a ZIP archive whose unpacked members are no larger than it.

    Args:
        file: open.
        size: of it, in bytes.
        place: for messages.

    Raises:
        FormatError: damaged, or members lie in one another.
        OSError: the system cannot read it.
    """
    with foreign_bytes(place):
        archive = zipfile.ZipFile(file)
    stored = [each for each in archive.infolist() if each.compress_type == zipfile.ZIP_STORED]
    if sum(max(each.file_size, each.compress_size) for each in stored) > size:
        raise FormatError(f"{place} (its members claim more bytes than it has)")
    return archive
