"""What an embedding file holds, and the reader of its HDF5 form: one dataset a protein, as bio_embeddings writes them.

The keys are running numbers, so that alphabetical order is the order of the input and no id, however odd, is ever part of
a path; the id stands in the attribute `original_id`. `docs/formats.md` is the specification. The writers are in
`embedding_writers`.

Axis letters: `L` residues of a protein, `D` width of the model, `V` vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from protperf import __version__
from protperf.formats import FormatError
from protperf.formats.hdf5_reading import Dataset, Hdf5File
from protperf.formats.typed import build
from protperf.vocab import VOCABULARY, check_fingerprint

FORMAT = "protperf-embeddings"
FORMAT_VERSION = 2
VECTORS = ("mean", "max", "cls", "bos")
"""Kinds with one vector `(D,)` a protein."""
KINDS = (*VECTORS, "per_tok", "logits", "contacts")
"""What a file may hold; the last three have a row a residue: `(L, D)`, `(L, V)`, `(L, L)`."""
DTYPES = ("float32", "float16")
KEYS = ("number", "sequence")
_MOST = 1 << 31
_MOST_RESIDUES = (1 << 32) - 1
RECORD_OVERHEAD = 300
"""Bytes that a protein takes in a file besides its numbers, about: its names and a header of UniProt's length."""


@dataclass(frozen=True)
class EmbeddingInfo:
    """What the numbers of a file are and where they come from; each field is an attribute of the file.

    Attributes:
        kind: one of `KINDS`.
        model_dim: width D.
        checkpoint: file name of the checkpoint.
        checkpoint_sha256: hex SHA-256 of that file.
        objective: `masked` or `causal`.
        layer: number of the layer whose states these are, 0 before the first block; -1 is the last, after the final norm.
        dtype: `float32` or `float16`, as stored.
        precision: what the model computed in: `fp32`, `bf16` or `fp16`.
        long: how a long protein was shown: `whole`, or the words for its windows.
        keys: what names a protein: its running `number`, or its `sequence` (see `sequence_key`).
        shard: this part of the input, from 0.
        num_shards: the number of parts.
        protperf_version: of the writing program.
        fingerprint: of the vocabulary.
    """

    kind: str
    model_dim: int
    checkpoint: str
    checkpoint_sha256: str
    objective: str
    layer: int = -1
    dtype: str = "float32"
    precision: str = "fp32"
    long: str = "whole"
    keys: str = "number"
    shard: int = 0
    num_shards: int = 1
    protperf_version: str = __version__
    fingerprint: str = VOCABULARY.fingerprint

    def __post_init__(self) -> None:
        """Check the words."""
        for name, allowed in (("kind", KINDS), ("dtype", DTYPES), ("keys", KEYS)):
            found = getattr(self, name)
            if found not in allowed:
                raise ValueError(f"embeddings of {name} {found!r}; allowed: {', '.join(allowed)}")
        for name, least in (("model_dim", 1), ("layer", -1), ("num_shards", 1)):
            found = getattr(self, name)
            if not least <= found < _MOST:
                raise ValueError(f"embeddings of {name} {found}; allowed: {least} to {_MOST - 1:,}")
        if not 0 <= self.shard < self.num_shards:
            raise ValueError(f"embeddings of shard {self.shard} of {self.num_shards}; the first shard is 0")

    def shape(self, num_residues: int) -> tuple[int, ...]:
        """Return the shape of the array of a protein."""
        if self.kind in VECTORS:
            return (self.model_dim,)
        columns = {"per_tok": self.model_dim, "logits": len(VOCABULARY), "contacts": num_residues}
        return num_residues, columns[self.kind]

    def attributes(self) -> dict[str, str | int]:
        """Return what a file says of itself; a file of the whole input says nothing of shards."""
        found: dict[str, str | int] = {"format": FORMAT, "format_version": FORMAT_VERSION, **asdict(self)}
        if self.num_shards == 1:
            del found["shard"], found["num_shards"]
        if self.kind == "logits":
            found["tokens"] = " ".join(VOCABULARY.tokens)
        return found


class Embedding(NamedTuple):
    """One protein.

    Attributes:
        id: first word of the header, exactly as written.
        header: the whole header without `>`.
        num_residues: L.
        array: of the kind's shape (see `EmbeddingInfo.shape`) and dtype.
        key: what the file names the protein by where `keys` is `sequence`; see `sequence_key`.
    """

    id: str
    header: str
    num_residues: int
    array: np.ndarray
    key: str = ""


def sequence_key(residues: str) -> str:
    """Return the name that biotrainer gives to a sequence: the hex SHA-256 of its letters, `_` and their number."""
    return sha256(f"{residues}_{len(residues)}".encode()).hexdigest()


_ABOUT_FILE = (
    "format",
    "format_version",
    "num_records",
    "num_residues",
    *(each.name for each in fields(EmbeddingInfo)),
)
"""Attributes that are of the types that docs/formats.md says; there may be others of any type."""
_ABOUT_PROTEIN = ("original_id", "header", "num_residues")
_NUMBER = re.compile(r"[0-9]{1,20}")
_SEQUENCE_KEY = re.compile(r"([0-9a-f]{64})(?:_[0-9]{1,20})?")


class EmbeddingFile:
    """An embedding file for reading, protein by protein; a context manager.

    `len(file)` is the number of proteins, `file[i]` the i-th `Embedding`, iteration goes in the order of the input.

    Attributes:
        info: what the numbers are.
        attributes: the texts and integers that the file says of itself.

    Raises:
        ValueError: no such file, or made with another vocabulary.
        FormatError: damaged, foreign or newer; also of what reads later.
        OSError: the system cannot read it.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise ValueError(f"{path}: no such file; give what `protperf embed` wrote")
        self._file = Hdf5File(self.path, unreadable="no readable embedding file", remedy="embed again")
        try:
            found = {**self._file.attributes(), **self._file.attributes(names=_ABOUT_FILE)}
            self._lengths = found.pop("num_residues", None)
            self.attributes = {
                name: value
                for name, value in found.items()
                if name in _ABOUT_FILE or isinstance(value, str | int)
            }
            self.info = info_from(self.attributes, self.path)
            self._keys = self._file.names()
            promised = self.attributes["num_records"]
            if len(self._keys) != promised:
                raise FormatError(
                    f"{path}: holds {len(self._keys)} proteins where it promises {promised}; embed again"
                )
            if self._lengths is not None and not _are_lengths(self._lengths, promised):
                raise FormatError(f"{path}: its num_residues is no list of {promised} integers; embed again")
        except BaseException:
            self._file.close()
            raise

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, index: int) -> Embedding:
        key = self._keys[index]
        dataset = self._file.dataset(key)
        found = self._file.attributes(dataset, _ABOUT_PROTEIN)
        named = _SEQUENCE_KEY.fullmatch(key) if self.info.keys == "sequence" else None
        with self._file.reading(f"entry {key!r} is damaged"):
            if self.info.keys == "sequence" and not named:
                raise ValueError("its key is not that of a sequence")
            record_id = _text_of(found, "original_id")
            header = _text_of(found, "header") if "header" in found else record_id
            num_residues = checked_length(self._length_of(index, found, dataset))
        if dataset.shape != self.info.shape(num_residues):
            raise FormatError(
                f"{self.path}: entry {key!r} has the shape {dataset.shape}; it must be {self.info.shape(num_residues)}"
            )
        array = self._file.read_whole(dataset)
        return Embedding(record_id, header, num_residues, array, named[1] if named else "")

    def __iter__(self) -> Iterator[Embedding]:
        return (self[index] for index in range(len(self)))

    def __enter__(self) -> EmbeddingFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def numbered(self) -> Iterator[tuple[int, Embedding]]:
        """Yield the number of each protein in the whole input (a shard has gaps), and the protein."""
        by_sequence = self.info.keys == "sequence"
        for index, key in enumerate(self._keys):
            number = key
            if by_sequence:
                found = self._file.attributes(self._file.dataset(key), ("number",))
                with self._file.reading(f"entry {key!r} is damaged"):
                    number = _text_of(found, "number")
            with self._file.reading(f"entry {key!r} is damaged"):
                if not _NUMBER.fullmatch(number):
                    raise ValueError(f"its number in the input is {number!r}")
            yield int(number), self[index]

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _length_of(self, index: int, found: Mapping[str, Any], dataset: Dataset) -> int:
        """Return L of a protein: all of them stand in one list, or each at its dataset, or it has a row a residue."""
        if self._lengths is not None:
            return int(self._lengths[index])
        length = found.get("num_residues")
        if type(length) is int:
            return length
        if "num_residues" in found or self.info.kind in VECTORS or not dataset.shape:
            raise ValueError("nothing says its num_residues")
        return dataset.shape[0]


def read_embeddings(path: Path | str) -> tuple[list[str], list[np.ndarray]]:
    """Return the ids and the arrays of a whole file, in the order of the input; errors as `EmbeddingFile`.

    Equal ids may occur: zip the two lists, do not make them a dict unseen.
    """
    with EmbeddingFile(path) as file:
        embeddings = list(file)
    return [each.id for each in embeddings], [each.array for each in embeddings]


def checked_length(found: int) -> int:
    """Return the L that a file says, if a protein can have it; else raise a `ValueError`."""
    if not 1 <= found <= _MOST_RESIDUES:
        raise ValueError(f"its num_residues is {found}; allowed: 1 to {_MOST_RESIDUES:,}")
    return found


def _text_of(found: Mapping[str, Any], name: str) -> str:
    """Return a text; one with a NUL is stored as bytes."""
    value = found.get(name)
    if not isinstance(value, str | bytes):
        raise ValueError(f"its {name} is {'no text' if name in found else 'missing'}")
    return value if isinstance(value, str) else value.decode("utf-8", "surrogateescape")


def _are_lengths(found: Any, number: int) -> bool:
    return isinstance(found, np.ndarray) and found.shape == (number,) and found.dtype.kind in "iu"


def info_from(attributes: Mapping[str, Any], path: Path) -> EmbeddingInfo:
    """Return what a file says of itself.

    Raises:
        FormatError: no embedding file of a version read here.
        ValueError: made with another vocabulary.
    """
    found = attributes.get("format") if isinstance(attributes, dict) else None
    if not isinstance(found, str) or found != FORMAT:
        raise FormatError(f"{path}: no embedding file of protperf (its format is {found!r}, not {FORMAT!r})")
    for name in ("format_version", "num_records"):
        if type(attributes.get(name, 0)) is not int:
            raise FormatError(
                f"{path}: no readable embedding file (its {name} is {attributes[name]!r}, no integer)"
            )
    version = attributes.get("format_version", 0)
    if version > FORMAT_VERSION:
        raise FormatError(
            f"{path}: {FORMAT} version {version}; this protperf reads up to {FORMAT_VERSION}: update protperf"
        )
    required = {"num_records", *(field.name for field in fields(EmbeddingInfo) if field.default is MISSING)}
    for name in sorted({*required, "fingerprint"} - set(attributes)):
        raise FormatError(f"{path}: no readable embedding file (it does not say its {name})")
    check_fingerprint(str(attributes["fingerprint"]), str(path))
    names = [field.name for field in fields(EmbeddingInfo) if field.name in attributes]
    try:
        return build(EmbeddingInfo, {name: attributes[name] for name in names})
    except (TypeError, ValueError) as error:
        raise FormatError(f"{path}: no readable embedding file ({error})") from None
