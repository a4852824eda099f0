"""Embeddings as a folder with one PyTorch file a protein, as esm-extract writes them, and a table of the files.

A file is a dict with the key `label` and, as far as they were asked for, `representations`, `mean_representations`,
`max_representations`, `cls_representations` and `bos_representations` (each layer -> tensor), `logits` and `contacts`.
"""

from __future__ import annotations

import io
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch

from protperf.formats import FormatError
from protperf.formats.commit import commit_bytes, sync_file, sync_folder, write_all
from protperf.formats.embedding_writers import as_stored
from protperf.formats.embeddings import Embedding, EmbeddingInfo
from protperf.formats.own_files import check_names
from protperf.formats.partial_output import PartialOutput, named, partial_paths
from protperf.formats.records import escaped

INDEX = "index.tsv"
"""The table in the folder: number, file, id, header, num_residues; a line a protein, in the order of the input."""

_COLUMNS = ("number", "file", "id", "header", "num_residues")
_DICTS = {
    "per_tok": "representations",
    "mean": "mean_representations",
    "max": "max_representations",
    "cls": "cls_representations",
    "bos": "bos_representations",
}
_SAFE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.|+=@,-]*")
_UNSAFE = re.compile(r"[^A-Za-z0-9_.|+=@,-]")
_LONGEST_NAME = 200
_FLUSHED_AT_ONCE = 16


class TensorFolder:
    """Write a folder of embeddings protein by protein; it appears under its name only when it is whole.

    A context manager: leaving it without an error publishes the folder; with one, what was committed stays beside it, and
    the next writer of the same path, `infos` and `run` goes on there.

    Args:
        path: the folder; one that is there is replaced at the end, if it was written here.
        infos: what the arrays of a protein are, one each.
        run: what else must be as it was for the folder to be gone on with; plain JSON values.
        anew: drop what an interruption left.

    Attributes:
        num_records: proteins in the folder.

    Raises:
        ValueError: another process writes it, it was begun otherwise, or the path is something else.
        FormatError: what an interruption left is damaged.
        OSError: the disk is full or the folder cannot be written.
    """

    format = "pt"

    def __init__(
        self,
        path: Path,
        infos: Sequence[EmbeddingInfo],
        run: Mapping[str, Any] | None = None,
        *,
        anew: bool = False,
    ) -> None:
        self.path = path
        self._anew = anew
        self.infos = tuple(infos)
        self.num_records = 0
        self._run = dict(run or {})
        self._work = partial_folder(path)
        self._seen: set[str] = set()
        self._waiting: list[Path] = []
        self._next_index = 0

    @property
    def committed(self) -> dict[str, Any] | None:
        """The state given with the last commit; `None` where the folder is new."""
        state = self._partial.state
        return None if state is None else state["caller"]

    def __enter__(self) -> TensorFolder:
        """Start the folder, or go on with it."""
        check_replaceable(self.path)
        self._work.mkdir(exist_ok=True)
        arrays = ", ".join(f"{info.kind} of layer {info.layer}" for info in self.infos)
        common = {
            name: value for name, value in asdict(self.infos[0]).items() if name not in ("kind", "layer")
        }
        agreed = {"format": self.format, "arrays": arrays, **common, **self._run}
        self._partial = PartialOutput(self._work / INDEX, agreed, shown=self.path, anew=self._anew)
        if self._partial.state is None:
            self._partial.append(_line(_COLUMNS))
        else:
            self.num_records = self._partial.state["num_records"]
            self._next_index = self._partial.state["next_index"]
        self._remove_uncommitted()
        return self

    def add(self, index: int, embeddings: Sequence[Embedding]) -> str:
        """Write the file of one protein; return its name.

        Args:
            index: number of its record in the whole input, larger than that of the one before.
            embeddings: one for each of `infos`.
        """
        assert index >= self._next_index, f"record {index} after {self._next_index - 1}"
        first = embeddings[0]
        found: dict[str, Any] = {"label": first.id}
        for info, embedding in zip(self.infos, embeddings, strict=True):
            assert embedding.array.shape == info.shape(embedding.num_residues), embedding.array.shape
            tensor = torch.tensor(
                as_stored(embedding, info.dtype)
            )  # a copy: a view would save all of its base
            if info.kind in _DICTS:
                found.setdefault(_DICTS[info.kind], {})[info.layer] = tensor
            else:
                found[info.kind] = tensor
        name = file_name(first.id, index, self._seen)
        self._seen.add(name.lower())
        self._save(found, self._work / name)
        self._partial.append(_line((str(index), name, first.id, first.header, str(first.num_residues))))
        self.num_records += 1
        self._next_index = index + 1
        return name

    def read(self, name: str) -> list[np.ndarray]:
        """Return the arrays of a protein that was added, one for each of `infos`."""
        found = torch.load(self._work / name, weights_only=True)
        return [
            (found[_DICTS[info.kind]][info.layer] if info.kind in _DICTS else found[info.kind]).numpy()
            for info in self.infos
        ]

    def names(self) -> Iterator[tuple[int, str]]:
        """Yield number and file of each protein that was committed."""
        table = self._partial.read(0, self._partial.size).decode("utf-8", "surrogateescape")
        for line in table.splitlines()[1:]:
            number, name, *_ = line.split("\t")
            check_names(self._work / INDEX, [name], remedy=f"--force starts {self.path.name} anew")
            yield int(number), name

    def commit(self, state: Mapping[str, Any] | None = None) -> None:
        """Make all that was added outlive a kill, and `state` (plain JSON values) with it."""
        self._sync()
        kept = {"caller": dict(state or {}), "num_records": self.num_records, "next_index": self._next_index}
        self._partial.commit(kept)

    def finish(self) -> None:
        """Flush everything to the disk: what is left is the folder's name."""
        self._sync()
        self._partial.flush()

    def discard(self) -> None:
        """Give the folder up; nothing is left of it."""
        self._partial.discard()
        shutil.rmtree(self._work)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Publish the folder if all went well, else keep what was committed."""
        if kind is not None:
            self._stop()
            return
        try:
            self.finish()
            self._publish()
        except BaseException:
            self._stop()
            raise

    def _sync(self) -> None:
        # a disk flushes many files in about the time of one
        with ThreadPoolExecutor(_FLUSHED_AT_ONCE) as pool:
            list(pool.map(sync_file, self._waiting))
        self._waiting = []
        sync_folder(self._work)

    def _stop(self) -> None:
        if self._partial.is_committed or not self._work.exists():
            self._partial.close()
        else:
            self.discard()

    def _publish(self) -> None:
        # the table first, and what says how far it was last, so that a kill between any two loses nothing
        commit_bytes(self._work / INDEX, self._partial.read(0, self._partial.size))
        old = self.path.with_name(f".{self.path.name}.old")
        if self.path.exists():
            if old.exists():
                check_replaceable(old)
                shutil.rmtree(old)
            os.replace(self.path, old)
        os.replace(self._work, self.path)
        sync_folder(self.path.parent)
        self._partial.close()
        for path in partial_paths(self.path / INDEX):
            path.unlink(missing_ok=True)
        if old.exists():
            shutil.rmtree(old)

    def _save(self, found: dict[str, Any], path: Path) -> None:
        buffer = io.BytesIO()
        torch.save(found, buffer)
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
            try:
                write_all(descriptor, buffer.getbuffer())
            finally:
                os.close(descriptor)
        except OSError as error:
            raise named(error, self.path / path.name) from error
        self._waiting.append(path)

    def _remove_uncommitted(self) -> None:
        """Remove the files that the table does not name, and remember those that it does."""
        names = {name for _, name in self.names()}
        if len(names) != self.num_records:
            raise FormatError(f"{self._work}: damaged; --force starts {self.path.name} anew")
        self._seen = {name.lower() for name in names}
        for path in self._work.glob("*.pt"):
            if path.name not in names:
                path.unlink()


def file_name(label: str, number: int, seen: set[str]) -> str:
    """Return the name of a protein's file: its label, if that is a safe name not yet taken, else with its number behind.

    Args:
        label: its id.
        number: of its record.
        seen: names taken, in lower case: some disks tell no `a` from `A`.

    >>> file_name("sp|P01308|INS_HUMAN", 7, set())
    'sp|P01308|INS_HUMAN.pt'
    >>> file_name("../a b", 7, set())
    '_a_b~0000000007.pt'
    """
    name = f"{label}.pt"
    if _SAFE.fullmatch(label) and len(label) <= _LONGEST_NAME and name.lower() not in seen:
        return name
    readable = _UNSAFE.sub("_", label.lstrip(".-"))[:_LONGEST_NAME]
    return f"{readable or '_'}~{number:010d}.pt"


def partial_folder(path: Path) -> Path:
    """Return the folder in which another one is made."""
    return path.with_name(f".{path.name}.partial")


def check_replaceable(path: Path) -> None:
    """Raise unless a path is free, or a folder that was written here.

    Raises:
        ValueError: it is something else, which is never removed.
    """
    if path.is_dir():
        try:
            with open(path / INDEX, "rb") as file:
                written_here = file.readline() == _line(_COLUMNS)
        except OSError:
            written_here = False
        if not written_here and any(path.iterdir()):
            raise ValueError(
                f"{path}: is a folder that holds other things; give a new one, such as {path / 'embeddings'}"
            )
    elif path.exists():
        raise ValueError(f"{path}: is a file; --format pt writes a folder, give another name")


def _line(cells: Sequence[str]) -> bytes:
    return ("\t".join(escaped(cell) for cell in cells) + "\n").encode("utf-8", "surrogateescape")
