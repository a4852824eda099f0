"""Embedding files of any format, and how the shards of one are put together."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any

from protperf.formats import FormatError
from protperf.formats.embedding_h5 import MOST_OPAQUE, H5Writer
from protperf.formats.embedding_npz import NpzFile, NpzWriter
from protperf.formats.embedding_parquet import ParquetFile, ParquetWriter
from protperf.formats.embedding_writers import KEY_DIGITS, EmbeddingWriter
from protperf.formats.embeddings import Embedding, EmbeddingFile
from protperf.formats.foreign import as_format_error

WRITERS: dict[str, type[EmbeddingWriter]] = {
    writer.format: writer for writer in (H5Writer, NpzWriter, ParquetWriter)
}
"""The formats of one file an output, by name."""

AnyFile = EmbeddingFile | NpzFile | ParquetFile

_READERS: tuple[tuple[bytes, str, type[AnyFile]], ...] = (
    (b"\x89HDF\r\n\x1a\n", "h5", EmbeddingFile),
    (b"PK", "npz", NpzFile),
    (b"PAR1", "parquet", ParquetFile),
)


def format_of(path: Path | str) -> str:
    """Return the format of an embedding file, by its first bytes.

    Raises:
        ValueError: no such file.
        FormatError: no embedding file.
    """
    return _reader_of(Path(path))[0]


def open_embeddings(path: Path | str) -> AnyFile:
    """Open an embedding file of any format; errors as `EmbeddingFile` and `format_of`."""
    return _reader_of(Path(path))[1](path)


def merge_embeddings(paths: Sequence[Path], out: Path, *, anew: bool = False) -> int:
    """Put the shards of one input together: byte for byte the file that one run with the same numbers writes.

    Args:
        paths: all the shards, in any order.
        out: the file; it appears when it is whole.
        anew: drop what an interrupted run left of it.

    Returns:
        the proteins in it.

    Raises:
        ValueError: a shard is missing, there twice, or from another run; the message names the file and the difference.
        FormatError: a file is damaged or no embedding file.
        OSError: the disk is full.
    """
    if out.resolve() in {path.resolve() for path in paths}:
        raise ValueError(f"{out}: is one of the shards; give another name for the output")
    name = format_of(paths[0]) if paths else "h5"
    with ExitStack() as stack:
        files = [open_embeddings(path) for path in paths]
        for file in files:
            stack.callback(file.close)
        check_shards(files)
        _check_attributes(files[0])
        info = replace(files[0].info, shard=0, num_shards=1)
        writer = stack.enter_context(WRITERS[name](out, info, {"merged": len(files)}, anew=anew))
        numbered = heapq.merge(*map(_rising, files), key=itemgetter(0))
        for number, path, embedding in _each_once(numbered):
            with as_format_error(f"{path}: record {number} cannot be merged"):
                if not writer.can_name(embedding.id, embedding.header):
                    raise ValueError(f"{name} cannot hold its id or header")
                writer.add(number, embedding)
        writer.finish(_about(files[0]))
    return writer.num_records


def check_shards(files: Sequence[AnyFile]) -> None:
    """Raise unless files are all the shards of one run, each once; see `merge_embeddings`."""
    if not files:
        raise ValueError("no shard to merge; give all files of one run with --shard")
    first = files[0]
    places: dict[int, Path] = {}
    for file in files:
        if file.info.num_shards == 1:
            raise ValueError(
                f"{file.path}: no shard but a whole file; only files of runs with --shard are merged"
            )
        if format_of(file.path) != format_of(first.path):
            raise ValueError(
                f"{file.path}: is {format_of(file.path)}, but {first.path} is {format_of(first.path)}"
            )
        expected, found = (_agreed(each) for each in (first, file))
        for name in [*expected, *found]:
            if expected.get(name) != found.get(name):
                raise FormatError(
                    f"{file.path}: its {name} is {found.get(name)!r}, that of {first.path} is {expected.get(name)!r}; "
                    "merge only the shards of one run"
                )
        if file.info.shard in places:
            raise ValueError(
                f"{file.path}: shard {file.info.shard + 1} again, as {places[file.info.shard]}; give each once"
            )
        places[file.info.shard] = file.path
    missing = first.info.num_shards - len(places)
    if missing:
        numbers = (number + 1 for number in range(first.info.num_shards) if number not in places)
        listed = ", ".join(map(str, islice(numbers, 5))) + (", ..." if missing > 5 else "")
        raise ValueError(
            f"{first.path}: {missing:,} of {first.info.num_shards} shards are missing: {listed}; give all"
        )


def _agreed(file: AnyFile) -> dict[str, Any]:
    """Return what must be equal for all shards."""
    return {name: value for name, value in file.attributes.items() if name not in ("shard", "num_records")}


def _about(file: AnyFile) -> dict[str, Any]:
    """Return the further attributes that were given when a file was finished."""
    known = {*asdict(file.info), *file.info.attributes(), "num_records"}
    return {name: value for name, value in file.attributes.items() if name not in known}


def _check_attributes(file: AnyFile) -> None:
    """Raise unless each attribute is one that every format holds."""
    for name, value in file.attributes.items():
        texts = (name, value) if isinstance(value, str) else (name,)
        fits = isinstance(value, str) or (isinstance(value, int) and -1 << 63 <= value < 1 << 63)
        with as_format_error(f"{file.path}: its attribute {name[:60]!r} cannot be merged"):
            if not fits or sum(len(text.encode()) for text in texts) > MOST_OPAQUE:
                raise ValueError(
                    f"it is neither an integer of 64 bits nor a text of {MOST_OPAQUE:,} bytes at most"
                )


def _rising(file: AnyFile) -> Iterator[tuple[int, Path, Embedding]]:
    """Yield the proteins of a file with their numbers, which rise."""
    before = -1
    for number, embedding in file.numbered():
        if not before < number < 10**KEY_DIGITS:
            raise FormatError(
                f"{file.path}: a protein has the number {number} after {before}; "
                f"numbers rise and have {KEY_DIGITS} digits at most; embed again"
            )
        before = number
        yield number, file.path, embedding


def _each_once(
    numbered: Iterator[tuple[int, Path, Embedding]],
) -> Iterator[tuple[int, Path, Embedding]]:
    before, owner = -1, Path()
    for number, path, embedding in numbered:
        if number == before:
            raise FormatError(f"{path}: record {number} is in {owner} too; embed again with one --shard each")
        before, owner = number, path
        yield number, path, embedding


def _reader_of(path: Path) -> tuple[str, type[AnyFile]]:
    if not path.is_file():
        raise ValueError(f"{path}: no such file; give what `protperf embed` wrote")
    with open(path, "rb") as file:
        start = file.read(8)
    for signature, name, reader in _READERS:
        if start.startswith(signature):
            return name, reader
    raise FormatError(f"{path}: no embedding file: neither HDF5 nor NumPy's archive nor Parquet")
