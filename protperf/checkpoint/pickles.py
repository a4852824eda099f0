"""Files that `torch.save` wrote, from anywhere: looked through before torch opens them, and read as plain values and tensors alone.

`torch.load(weights_only=True)` runs no code of a file, but does what the file asks with what is allowed there: a few bytes
may ask for terabytes, or be unpacked to them. So an archive is taken only if all who read it find the same members, unpacked, and its pickle only if it
names nothing but what tensors are made of.
"""

from __future__ import annotations

import os
import pickletools
import re
import struct
import warnings
import zipfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor

from protperf.batches import is_out_of_memory
from protperf.formats import FormatError
from protperf.formats.foreign import is_of_system

LARGEST_PICKLE = 16 << 20
"""Bytes of what describes the tensors: those of 36 layers with Adam's state take 124,000, in 40,000 instructions."""
MOST_STEPS, _BYTES_OF_A_STEP = 400_000, 16
"""Instructions of a pickle, and one more for so many bytes of the file; each may make objects of 200 bytes."""
_FACTOR = 2
"""Tensors may claim so many times the file's bytes together: a matrix may have two names, a hundred would fill memory."""

_PICKLE = "data.pkl"
_END, _LOCATOR = b"PK\5\6", b"PK\6\7"
_SHORT_END, _LONG_END = 22, 98
"""Bytes behind an archive's directory: 64-bit numbers stand in a record of their own, which another one locates."""
_PROTOCOL = 2
_NAMES = re.compile(
    r"collections OrderedDict|torch (Size|device|bool|u?int\d+|b?float\d+)|torch \w+Storage|torch\.nn\.parameter Parameter"
    r"|torch\._utils _rebuild_(tensor_v2|tensor_v3|parameter|sparse_tensor)|torch\.serialization _get_layout"
)
"""What state dicts, optimizers and loops are made of, besides Python's own values. What fills memory is not among it:
`bytearray`, `torch.FloatTensor` and others take a size."""
_UNTYPED = "torch.storage UntypedStorage"
_NEW_TYPES = re.compile(r"torch ((?:u?int|b?float|bits)\w{1,30})")
"""Types for which torch writes untyped storages, which it would make of any size that a file asks for."""
_STEPS_OF_A_TENSOR = 64
_REFUSED = {
    "EXT1",
    "EXT2",
    "EXT4",
    "INST",
    "OBJ",
    "NEWOBJ",
    "NEWOBJ_EX",
    "STACK_GLOBAL",
    "PERSID",
    "BYTEARRAY8",
}


Operations = Iterator[tuple[pickletools.OpcodeInfo, Any, int | None]]
"""What `pickletools` tells of a pickle: each instruction, its argument, its place."""


class Refusal(NamedTuple):
    """What to say of a file that is not taken.

    Attributes:
        what: what is wrong with it.
        remedy: what to do.
    """

    what: str
    remedy: str

    def of(self, path: Path, reason: object = "") -> FormatError:
        """Return the error for a file, with what was found in it."""
        return FormatError(f"{path}: {self.what}{reason and f' ({reason})'}; {self.remedy}")


def read_tensors(path: Path, *, cut: Refusal, objects: Refusal) -> Any:
    """Return the content of a file: values, containers and tensors on the CPU, dense ones not twice as large as the file.

    Sparse ones have no bound: whoever takes tensors refuses them before anything is made of their shapes.

    Args:
        path: the file.
        cut: what to say of one that is no whole archive.
        objects: what to say of one that holds something else.

    Raises:
        FormatError: these, or a checksum is wrong, or memory that the file does not fill is asked for.
        OSError: it cannot be read.
    """
    with open(path, "rb") as file:  # a name that cannot be read is an error of its own
        try:
            archive = zipfile.ZipFile(file)
            members = archive.infolist()
        except Exception as error:  # on foreign bytes it fails in any way
            if is_of_system(error):
                raise
            raise cut.of(path) from error
        if not (_is_the_only_directory(file, archive) and _are_plain(members)):
            raise cut.of(path, "its directory can be read in two ways, or is not at its end")
        _check_members(path, members, cut)
        try:
            damaged = archive.testzip()  # torch does not compare the checksums
            pickles = [archive.read(each) for each in members if each.filename.lower().endswith(_PICKLE)]
        except Exception as error:
            if is_of_system(error):
                raise
            raise cut.of(path) from error
    if damaged:
        raise FormatError(f"{path}: damaged (the checksum of {damaged} is wrong); give another one")
    if not pickles:
        raise cut.of(path)
    if len(pickles) > 1 or len({each.filename.lower() for each in members}) < len(members):
        # torch, to which cases are the same, could take another one
        raise cut.of(path, "it has two pickles, or two members of one name")
    size = path.stat().st_size
    try:
        _check_pickle(pickles[0], most=MOST_STEPS + size // _BYTES_OF_A_STEP)
    except FormatError as error:
        raise objects.of(path, error) from error
    except (ValueError, LookupError, OverflowError, struct.error) as error:  # of `pickletools`
        raise objects.of(path) from error
    try:
        # mapped: a rank that only asks for an entry need not hold the weights
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # on foreign bytes the unpickler fails in any way
        if is_out_of_memory(error) or is_of_system(error):
            raise
        raise objects.of(path) from error
    try:
        return _Copy(size).of(content)
    except FormatError as error:
        raise objects.of(path, error) from error
    except RuntimeError as error:  # containers without end, tensors of which torch says less than it should
        if is_out_of_memory(error):
            raise
        raise objects.of(path) from error


def _is_the_only_directory(file: IO[bytes], archive: zipfile.ZipFile) -> bool:
    """Return whether an archive's end names the directory that Python read, and names it once.

    Python takes the bytes right before the end record, and adds what is missing to all offsets; torch goes to the offset
    in the record, and to the 64-bit record by that in its locator.
    """
    size = file.seek(0, os.SEEK_END)
    file.seek(max(size - _LONG_END, 0))
    tail = file.read()
    is_long = tail[-42:-38] == _LOCATOR  # torch.save writes it whatever the size
    end, start, number = (
        size - (_LONG_END if is_long else _SHORT_END),
        archive.start_dir,
        len(archive.filelist),
    )
    if not 0 <= start <= end:
        return False
    counts, places = [min(number, 0xFFFF)] * 2, [min(end - start, 0xFFFFFFFF), min(start, 0xFFFFFFFF)]
    short = struct.pack("<4s4H2LH", _END, 0, 0, *counts, *places, 0)
    if not is_long:
        return tail.endswith(short)
    long = struct.pack("<2L4Q", 0, 0, number, number, end - start, start)
    located = struct.pack("<4sLQL", _LOCATOR, 0, end, 1)
    # four bytes tell versions, of which neither reader makes anything
    return tail[:12] == struct.pack("<4sQ", b"PK\6\6", 44) and tail[16:] == long + located + short


def _are_plain(members: list[zipfile.ZipInfo]) -> bool:
    """Return whether the first member begins the file, and none has a second name or a second place."""
    extras = [each.extra for each in members if each.extra]
    are_sizes = all(
        extra[:2] == b"\1\0" and len(extra) == 4 + int.from_bytes(extra[2:4], "little") for extra in extras
    )
    is_first = min((each.header_offset for each in members), default=0) == 0
    return are_sizes and is_first and all(each.filename == each.orig_filename for each in members)


def _check_members(path: Path, members: list[zipfile.ZipInfo], cut: Refusal) -> None:
    """Raise unless all members of an archive lie in it as they are, and claim no more bytes together than it has."""
    size = path.stat().st_size
    packed = [each for each in members if each.compress_type != zipfile.ZIP_STORED]
    if packed or any(each.compress_size != each.file_size for each in members):
        raise cut.of(path, "its members are packed, which torch.save does not do")
    pickle_bytes = sum(each.file_size for each in members if each.filename.lower().endswith(_PICKLE))
    if sum(each.file_size for each in members) > size or pickle_bytes > LARGEST_PICKLE:
        raise cut.of(path, "its members claim more bytes than it has, or its pickle too many")


def _check_pickle(data: bytes, *, most: int) -> None:
    """Raise unless a pickle of at most so many instructions names nothing but what tensors are made of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of escapes in texts that torch.save does not write
        _check_operations(pickletools.genops(data), most=most)


def _check_operations(operations: Operations, *, most: int) -> None:
    key = ""
    for steps, (operation, argument, _) in enumerate(operations):
        if operation.name == "BINUNICODE" and argument != "storage":
            key = str(argument)
        if operation.name == "GLOBAL" and not _NAMES.fullmatch(str(argument)):
            new_type = _new_type(operations) if argument == _UNTYPED else ""
            raise FormatError(f"{key!r} is of type {new_type}" if new_type else f"it names {argument}")
        other = operation.name == "PROTO" and argument != _PROTOCOL
        if operation.name in _REFUSED or other or steps > most:
            raise FormatError(f"it has {operation.name} {argument} at step {steps:,}")


def _new_type(operations: Operations) -> str:
    """Return the type of the tensor that begins with these instructions, if it is one without a storage of its own."""
    for operation, argument, _ in islice(operations, _STEPS_OF_A_TENSOR):
        if operation.name == "GLOBAL" and (found := _NEW_TYPES.fullmatch(str(argument))):
            return f"torch.{found[1]}"
    return ""


class _Copy:
    """Makes plain containers of nested ones: a file may give an `OrderedDict` attributes that stand before its methods.

    Args:
        size: bytes of the file.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._claimed = 0
        self._done: dict[int, Any] = {}

    def of(self, found: Any) -> Any:
        """Return what was read as plain values; what holds itself ends in a `RecursionError`.

        Raises:
            FormatError: a tensor claims more numbers than are stored, or all of them more than a file of this size does.
        """
        if isinstance(found, Tensor):
            self._check(found)
        if not isinstance(found, dict | list | tuple):
            return found
        if id(found) not in self._done:  # one that stands in many places is copied once
            if isinstance(found, dict):
                made: Any = {key: self.of(value) for key, value in dict.items(found)}
            else:
                made = [self.of(value) for value in found]
            self._done[id(found)] = tuple(made) if isinstance(found, tuple) else made
        return self._done[id(found)]

    def _check(self, tensor: Tensor) -> None:
        """Raise unless a tensor lies on the CPU and claims no more numbers than are stored."""
        if tensor.device.type != "cpu" or tensor.is_quantized:
            raise FormatError(f"a tensor of {tensor.dtype} on {tensor.device}")
        if tensor.layout != torch.strided:  # whoever takes it, refuses it
            return
        claimed = tensor.numel() * tensor.element_size()
        if claimed > min(self._size, tensor.untyped_storage().nbytes()):
            raise FormatError(f"a tensor of the shape {tuple(tensor.shape)} stores fewer numbers")
        self._claimed += claimed  # under each of its names: whoever copies, copies it as often
        if self._claimed > _FACTOR * self._size:
            raise FormatError(f"its tensors claim more than {_FACTOR} times the bytes of the file")
