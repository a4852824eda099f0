"""Embedding files: HDF5 with one dataset a protein, in the layout that bio_embeddings and biotrainer read.

The keys are running numbers, so that alphabetical order is the order of the input and no id, however odd, is ever part of
a path; the id stands in the attribute `original_id`. `docs/formats.md` is the specification.

Axis letters: `L` residues of a protein, `D` width of the model.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import h5py
import numpy as np

from protperf import __version__
from protperf.formats import FormatError
from protperf.formats.commit import sync_folder, temporary_path
from protperf.vocab import VOCABULARY, check_fingerprint

FORMAT = "protperf-embeddings"
FORMAT_VERSION = 1
KINDS = ("mean", "per_tok")
RECORD_OVERHEAD = 600
"""Bytes that a protein takes in a file besides its numbers, about: keys, attributes, a header of UniProt's length."""

_KEY_DIGITS = 10


@dataclass(frozen=True)
class EmbeddingInfo:
    """What the numbers of a file are and where they come from; each field is an attribute of the file.

    Attributes:
        kind: `mean` (one vector a protein) or `per_tok` (one row a residue).
        model_dim: width D.
        checkpoint: file name of the checkpoint.
        checkpoint_sha256: hex SHA-256 of that file.
        objective: `masked` or `causal`.
        protperf_version: of the writing program.
        fingerprint: of the vocabulary.
    """

    kind: str
    model_dim: int
    checkpoint: str
    checkpoint_sha256: str
    objective: str
    protperf_version: str = __version__
    fingerprint: str = VOCABULARY.fingerprint

    def __post_init__(self) -> None:
        """Check the kind."""
        if self.kind not in KINDS:
            raise ValueError(f"embeddings of kind {self.kind!r}; allowed: {', '.join(KINDS)}")


class Embedding(NamedTuple):
    """One protein.

    Attributes:
        id: first word of the header, exactly as written.
        header: the whole header without `>`.
        num_residues: L.
        array: float32, `(D,)` for `mean`, `(L, D)` for `per_tok`.
    """

    id: str
    header: str
    num_residues: int
    array: np.ndarray


class EmbeddingWriter:
    """Write an embedding file protein by protein; it appears under its name only when it is whole.

    A context manager: leaving it without an error publishes the file, with one nothing is left of it.

    Args:
        path: the file; one that is there is replaced at the end.
        info: what its numbers are.

    Raises:
        OSError: the disk is full or the folder cannot be written.
    """

    def __init__(self, path: Path, info: EmbeddingInfo) -> None:
        self.path = path
        self.info = info
        self.num_records = 0

    def __enter__(self) -> EmbeddingWriter:
        """Start the file under a temporary name."""
        self._temporary = temporary_path(self.path)
        self._disk = _Disk(self._temporary, "w+")
        # what every HDF5 since 1.8 reads
        self._file = h5py.File(self._disk, "w", libver=("earliest", "v110"))
        self._file.attrs.update({"format": FORMAT, "format_version": FORMAT_VERSION, **asdict(self.info)})
        return self

    def add(self, embedding: Embedding) -> None:
        """Append one protein."""
        shape = (self.info.model_dim,)
        assert embedding.array.shape == (
            shape if self.info.kind == "mean" else (embedding.num_residues, *shape)
        )
        key = f"{self.num_records:0{_KEY_DIGITS}d}"
        data = embedding.array.astype(np.float32, copy=False)
        dataset = self._file.create_dataset(key, data=data, track_times=False)
        dataset.attrs["original_id"] = _as_attribute(embedding.id)
        dataset.attrs["header"] = _as_attribute(embedding.header)
        dataset.attrs["num_residues"] = embedding.num_residues
        self.num_records += 1
        self._disk.check(self.path)

    def finish(self) -> None:
        """Write the file to its end and flush it to the disk: what is left is its name.

        Several files that belong together are all finished before the first gets its name.
        """
        if not self._file:
            return
        self._file.attrs["num_records"] = self.num_records
        self._file.close()
        self._disk.check(self.path)
        os.fsync(self._disk.fileno())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Publish the file if all went well, else remove it."""
        try:
            if kind is None:
                self.finish()
                os.replace(self._temporary, self.path)
                sync_folder(self.path.parent)
            else:
                self._file.close()
        finally:
            self._disk.close()
            with suppress(FileNotFoundError):
                self._temporary.unlink()


class EmbeddingFile:
    """An embedding file for reading, protein by protein; a context manager.

    `len(file)` is the number of proteins, `file[i]` the i-th `Embedding`, iteration goes in the order of the input.

    Attributes:
        info: what the numbers are.

    Raises:
        ValueError: no such file, or made with another vocabulary.
        FormatError: damaged, foreign or newer.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise ValueError(f"{path}: no such file; give what `protperf embed` wrote")
        try:
            self._file = h5py.File(self.path, "r", locking=False)
            self.info = _read_info(self._file.attrs, self.path)
            self._keys = list(self._file)
            promised = int(self._file.attrs["num_records"])
        except (OSError, KeyError, TypeError) as error:
            raise FormatError(f"{path}: no readable embedding file ({_first_line(error)})") from None
        if len(self._keys) != promised:
            raise FormatError(
                f"{path}: holds {len(self._keys)} proteins where it promises {promised}; embed again"
            )

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, index: int) -> Embedding:
        key = self._keys[index]
        try:
            dataset = self._file[key]
            found = dataset.attrs
            texts = (_as_text(found["original_id"]), _as_text(found["header"]))
            embedding = Embedding(*texts, int(found["num_residues"]), dataset[()])
        except (OSError, KeyError, TypeError, AttributeError, ValueError) as error:
            raise FormatError(f"{self.path}: entry {key!r} is damaged ({_first_line(error)})") from None
        rows = () if self.info.kind == "mean" else (embedding.num_residues,)
        shape = (*rows, self.info.model_dim)
        if embedding.array.shape != shape:
            raise FormatError(
                f"{self.path}: entry {key!r} has the shape {embedding.array.shape}; it must be {shape}"
            )
        return embedding

    def __iter__(self) -> Iterator[Embedding]:
        return (self[index] for index in range(len(self)))

    def __enter__(self) -> EmbeddingFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_embeddings(path: Path | str) -> tuple[list[str], list[np.ndarray]]:
    """Return the ids and the arrays of a whole file, in the order of the input; errors as `EmbeddingFile`.

    Equal ids may occur: zip the two lists, do not make them a dict unseen.
    """
    with EmbeddingFile(path) as file:
        embeddings = list(file)
    return [each.id for each in embeddings], [each.array for each in embeddings]


class _Disk(io.FileIO):
    """A file that remembers its first failed write and pretends that it worked.

    HDF5 cannot end a file whose disk is full: its library then fails again while closing and may take the process
    down. So it never learns of the failure; `check` raises it where Python can handle it.
    """

    failure: OSError | None = None

    def write(self, data: Any) -> int:
        """Write all of `data`."""
        rest = memoryview(data).cast("B")
        size = len(rest)
        try:
            while rest and self.failure is None:
                rest = rest[super().write(rest) :]
        except OSError as error:
            self.failure = error
        if rest:
            self.seek(len(rest), io.SEEK_CUR)
        return size

    def truncate(self, size: int | None = None) -> int:
        """Set the size of the file."""
        try:
            super().truncate(size)
        except OSError as error:
            self.failure = self.failure or error
        return size or 0

    def readinto(self, buffer: Any) -> int:
        """Fill `buffer`; what was never written reads as zero."""
        view = memoryview(buffer).cast("B")
        count = super().readinto(view)
        view[count:] = bytes(len(view) - count)
        return len(view)

    def check(self, path: Path) -> None:
        """Raise the first failed write, in the name of `path`."""
        if self.failure is not None:
            number = self.failure.errno or 0
            raise OSError(number, os.strerror(number), str(path))


def _as_attribute(text: str) -> str | np.void:
    """Return what stores a text exactly: HDF5's strings end at the first NUL, opaque bytes do not."""
    return np.void(text.encode()) if "\0" in text else text


def _as_text(attribute: str | np.void) -> str:
    return attribute if isinstance(attribute, str) else attribute.tobytes().decode()


def _read_info(attributes: h5py.AttributeManager, path: Path) -> EmbeddingInfo:
    """Return what a file says of itself; raise unless it is an embedding file of a version read here."""
    found, version = attributes.get("format"), int(attributes.get("format_version", 0))
    if found != FORMAT:
        raise FormatError(f"{path}: no embedding file of protperf (its format is {found!r}, not {FORMAT!r})")
    if version > FORMAT_VERSION:
        raise FormatError(
            f"{path}: {FORMAT} version {version}; this protperf reads up to {FORMAT_VERSION}: update protperf"
        )
    check_fingerprint(str(attributes["fingerprint"]), str(path))
    values = {field.name: attributes[field.name] for field in fields(EmbeddingInfo)}
    return EmbeddingInfo(**values | {"model_dim": int(values["model_dim"])})


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
