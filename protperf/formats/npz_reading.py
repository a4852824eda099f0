"""Members of a NumPy archive from anywhere: what one claims is compared with what is there before memory is taken for it.

Axis letters: `N` texts, `W` letters that each has room for.
"""

from __future__ import annotations

import copy
import math
import sys
import warnings
import zipfile
from typing import IO, Any, Literal

import numpy as np

from protperf.formats.foreign import foreign_bytes

LONGEST_TEXT = 1 << 20
"""Letters of a text."""
_LETTERS_ALWAYS, _LETTERS_A_BYTE = 1 << 26, 4
"""Letters of an array of texts: so many, or so many for each byte of the archive."""
LARGEST_PACKED = 256 << 20
"""Bytes that a compressed array of numbers may unpack to; one that lies in its archive as it is may have any number."""
_TOGETHER_BYTES = 1 << 22


def read_numbers(archive: zipfile.ZipFile, name: str, *, shape: tuple[int, ...], kinds: str) -> np.ndarray:
    """Return an array of numbers.

    Args:
        archive: open.
        name: of the member.
        shape: that it must have.
        kinds: NumPy's letters of the allowed kinds of numbers; no integer may be negative.

    Raises:
        ValueError: damaged, or it is another array.
        OSError: the system cannot read it.
    """
    info = _info_of(archive, name)
    if info.compress_type != zipfile.ZIP_STORED and info.file_size > LARGEST_PACKED:
        raise ValueError(f"{name} unpacks to more than {LARGEST_PACKED >> 20} MiB")
    with _opened(archive, name) as member:
        found, dtype, order = _header_of(archive, name, member)
        if found != shape or dtype.kind not in kinds:
            raise ValueError(f"{name} is an array {found} of {dtype}")
        data = _read_rest(name, member, math.prod(shape) * dtype.itemsize)
    array = np.ascontiguousarray(np.frombuffer(data, dtype).reshape(shape, order=order))
    if dtype.kind == "i" and array.size and array.min() < 0:
        raise ValueError(f"{name} has the number {array.min()}")
    return array


def shape_of(archive: zipfile.ZipFile, name: str) -> tuple[int, ...]:
    """Return the shape that an array has; errors as `read_numbers`."""
    with _opened(archive, name) as member:
        return _header_of(archive, name, member)[0]


def read_texts(archive: zipfile.ZipFile, name: str, *, count: int) -> list[str]:
    """Return an array of texts `(N,)`, read a few at a time: NumPy gives each the room of the longest.

    Args:
        archive: open.
        name: of the member.
        count: N, that it must have.

    Raises:
        ValueError: damaged, another array, or texts of more letters than such an archive may have.
        OSError: the system cannot read it.
    """
    packed = sum(each.compress_size for each in archive.infolist())
    most = max(_LETTERS_ALWAYS, _LETTERS_A_BYTE * packed)
    with _opened(archive, name) as member:
        found, dtype, _ = _header_of(archive, name, member)
        if found not in ((count,), ()) or dtype.kind != "U" or dtype.itemsize > 4 * LONGEST_TEXT:
            raise ValueError(f"{name} is an array {found} of {dtype}")
        if not dtype.itemsize:
            _read_rest(name, member, 0)
            return [""] * count
        texts: list[str] = []
        letters = 0
        together = max(1, _TOGETHER_BYTES // dtype.itemsize)
        while len(texts) < count:
            with foreign_bytes():
                number = min(together, count - len(texts))
                data = member.read(number * dtype.itemsize)
                codes = np.frombuffer(data, np.dtype("u4").newbyteorder(dtype.byteorder))
                if (
                    codes.size and codes.max() > sys.maxunicode
                ):  # of which NumPy would make a text that Python cannot write
                    raise ValueError(f"{name} holds the letter {codes.max()}")
                some = np.frombuffer(data, dtype).tolist()
            if not some:
                raise ValueError(f"{name} holds {len(texts)} of {count} texts")
            letters += sum(map(len, some))
            if letters > most:
                raise ValueError(f"{name} unpacks to more than {most:,} letters")
            texts += some
        _read_rest(name, member, 0)
    return texts


def _info_of(archive: zipfile.ZipFile, name: str) -> zipfile.ZipInfo:
    if name not in archive.NameToInfo:
        raise ValueError(f"it has no {name}")
    return archive.NameToInfo[name]


def _opened(archive: zipfile.ZipFile, name: str) -> IO[bytes]:
    """Open a member; one byte more than it claims can be read of it, if it is there."""
    info = copy.copy(_info_of(archive, name))
    info.file_size += 1
    with foreign_bytes():
        return archive.open(info)


def _read_rest(name: str, member: IO[bytes], size: int) -> bytearray:
    """Return so many bytes, which are all that is left of a member; read at once, it might unpack to a gigabyte first."""
    data = bytearray()
    with foreign_bytes():
        while more := member.read(min(_TOGETHER_BYTES, size + 1 - len(data))):
            data += more
    if len(data) != size:
        raise ValueError(f"{name} unpacks to {'more' if len(data) > size else 'fewer'} bytes than it claims")
    return data


def _header_of(
    archive: zipfile.ZipFile, name: str, member: IO[bytes]
) -> tuple[tuple[int, ...], np.dtype[Any], Literal["C", "F"]]:
    """Return shape, type and order of the array in a member, which is as large as they say."""
    with foreign_bytes():
        version = np.lib.format.read_magic(member)
    if version != (1, 0):
        raise ValueError(f"{name} is of another version of NumPy's format")
    try:
        with foreign_bytes(), warnings.catch_warnings():
            warnings.simplefilter("error")  # of a header of Python 2
            shape, fortran, dtype = np.lib.format.read_array_header_1_0(member)
    except MemoryError:  # so Python says of an expression that is nested too deep
        raise ValueError(f"{name} has a header that cannot be read") from None
    size, begun = archive.getinfo(name).file_size, member.tell()
    if dtype.hasobject or math.prod(shape) * dtype.itemsize != size - begun:
        raise ValueError(f"{name} is an array {shape} of {dtype} in {size:,} bytes")
    return shape, dtype, "F" if fortran else "C"


def open_archive(file: IO[bytes], size: int) -> zipfile.ZipFile:
    """Open a ZIP archive whose unpacked members are no larger than it.

    Args:
        file: open.
        size: of it, in bytes.

    Raises:
        ValueError: it is none, members lie in one another, or are packed otherwise than by deflate.
        OSError: the system cannot read it.
    """
    with foreign_bytes():
        archive = zipfile.ZipFile(file)
    for each in archive.infolist():
        if each.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ValueError(f"a member is packed by method {each.compress_type}; allowed: 0 and 8 (deflate)")
    stored = [each for each in archive.infolist() if each.compress_type == zipfile.ZIP_STORED]
    if sum(max(each.file_size, each.compress_size) for each in stored) > size:
        raise ValueError("its members claim more bytes than it has")
    return archive
