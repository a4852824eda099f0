"""Where arrays go: a file a part, or a folder that takes all parts of a protein."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Generic, TypeVar

from protperf.checkpoint import TrainedModel
from protperf.embed.engine import Arrays, Named
from protperf.embed.outputs import Part
from protperf.formats.embedding_merge import WRITERS, open_embeddings
from protperf.formats.embedding_writers import EmbeddingWriter
from protperf.formats.embeddings import Embedding, EmbeddingInfo, sequence_key
from protperf.formats.sizes import hash_file
from protperf.tensor_folder import TensorFolder
from protperf.vocab import VOCABULARY

T = TypeVar("T")


class _Earlier(Generic[T]):
    """Where an earlier run put proteins, by ascending number."""

    def __init__(self, places: Iterable[tuple[int, T]]) -> None:
        self._places = iter(places)
        self._next = next(self._places, None)

    def find(self, index: int) -> T | None:
        """Return the place of a protein, `None` if there is none; ask in ascending order."""
        while self._next is not None and self._next[0] < index:
            self._next = next(self._places, None)
        return self._next[1] if self._next is not None and self._next[0] == index else None


class FileSink:
    """One part of each protein, in one file.

    Args:
        writer: open.
        place: of the part among all parts.
    """

    def __init__(self, writer: EmbeddingWriter, place: int) -> None:
        self.writer = writer
        self.committed = writer.committed
        self._place = place
        self._earlier = _Earlier(
            (entry.number, entry.address) for entry in (writer.entries() if writer.committed else ())
        )

    def can_name(self, named: Named) -> bool:
        """Return whether the file can hold a protein's id and header."""
        return self.writer.can_name(named.id, named.header)

    def add(self, index: int, named: Named, arrays: Arrays) -> int:
        """Append a protein; return its address."""
        key = sequence_key(VOCABULARY.decode(named.tokens)) if self.writer.info.keys == "sequence" else ""
        embedding = Embedding(named.id, named.header, len(named.tokens), arrays[self._place], key)
        return self.writer.add(index, embedding)

    def find(self, index: int) -> int | None:
        """Return the address of a protein that an earlier run wrote, if it did; asked in ascending order."""
        return self._earlier.find(index)

    def read(self, place: int, num_residues: int) -> Arrays:
        """Return what was written of a protein."""
        return [self.writer.read(place, num_residues)]

    def commit(self, state: Mapping[str, Any]) -> None:
        """Make all that was added outlive a kill."""
        self.writer.commit(state)

    def finish(self, about: Mapping[str, str | int]) -> None:
        """Write the file to its end; what is left is its name."""
        self.writer.finish(about)

    def discard(self) -> None:
        """Give the file up; nothing is left of it."""
        self.writer.discard()


class FolderSink:
    """All parts of each protein, in a file for each protein.

    Args:
        folder: open.
    """

    def __init__(self, folder: TensorFolder) -> None:
        self.folder = folder
        self.committed = folder.committed
        self._earlier = _Earlier(folder.names() if folder.committed else ())

    def can_name(self, named: Named) -> bool:
        """Return whether the folder can hold a protein's id and header."""
        return True

    def add(self, index: int, named: Named, arrays: Arrays) -> str:
        """Write the file of a protein; return its name."""
        length = len(named.tokens)
        return self.folder.add(index, [Embedding(named.id, named.header, length, array) for array in arrays])

    def find(self, index: int) -> str | None:
        """Return the file of a protein that an earlier run wrote, if it did; asked in ascending order."""
        return self._earlier.find(index)

    def read(self, place: str, num_residues: int) -> Arrays:
        """Return what was written of a protein."""
        return self.folder.read(place)

    def commit(self, state: Mapping[str, Any]) -> None:
        """Make all that was added outlive a kill."""
        self.folder.commit(state)

    def finish(self, about: Mapping[str, str | int]) -> None:
        """Flush everything to the disk; what is left is the folder's name."""
        self.folder.finish()

    def discard(self) -> None:
        """Give the folder up; nothing is left of it."""
        self.folder.discard()


def open_sinks(
    stack: ExitStack,
    options: argparse.Namespace,
    trained: TrainedModel,
    parts: Sequence[Part],
    paths: Sequence[Path],
) -> list[FileSink] | list[FolderSink]:
    """Open the outputs, or go on with what an earlier run left of them.

    Args:
        stack: which publishes them at its end, or keeps what was committed.
        options: of the command.
        trained: the model.
        parts: what is kept of each protein.
        paths: a file for each part.

    Raises:
        ValueError: an earlier run was asked something else.
    """
    run = {
        "model": trained.describe()["model"],
        "parts": [part.name for part in parts],
        "toks_per_batch": options.toks_per_batch,
        **describe_reading(options),
    }
    digest, _ = hash_file(trained.path)
    infos = [describe_part(options, trained, part, digest) for part in parts]
    if options.format == "pt":
        folder = TensorFolder(options.out, infos, run, anew=options.force)
        return [FolderSink(stack.enter_context(folder))]
    sinks = []
    for place, (info, path) in enumerate(zip(infos, paths, strict=True)):
        if path.exists() and not options.force:  # it has its name already; the others were cut off
            check_published(path, info, describe_reading(options))
            continue
        sinks.append(
            FileSink(stack.enter_context(WRITERS[options.format](path, info, run, anew=options.force)), place)
        )
    return sinks


def check_published(path: Path, info: EmbeddingInfo, about: Mapping[str, str | int]) -> None:
    """Refuse a file that stands beside others of a killed run and is not of the same run.

    Raises:
        ValueError: it says something else of itself.
    """
    with open_embeddings(path) as file:
        for name, value in {**info.attributes(), **about}.items():
            if file.attributes.get(name) != value:
                raise ValueError(
                    f"{path}: exists already, with {name} {file.attributes.get(name)!r} instead of {value!r}; give another "
                    "name, or --force to replace it"
                )


def describe_reading(options: argparse.Namespace) -> dict[str, str | int]:
    """Return what else the numbers and names in a file depend on; attributes of the file."""
    found: dict[str, str | int] = {"id": options.id, "gaps": options.gaps, "unknown": options.unknown}
    if options.contact_head:
        found["contact_head_sha256"] = hash_file(options.contact_head)[0]
    return found


def describe_part(
    options: argparse.Namespace, trained: TrainedModel, part: Part, digest: str
) -> EmbeddingInfo:
    """Return what the file of a part says of itself."""
    number, count = options.shard or (1, 1)
    return EmbeddingInfo(
        kind=part.kind,
        model_dim=trained.model.config.model_dim,
        checkpoint=trained.path.name,
        checkpoint_sha256=digest,
        objective=trained.objective.kind,
        layer=-1 if part.layer is None else part.layer,
        dtype=options.dtype,
        precision=options.precision,
        long=options.long if options.long == "whole" else f"{options.long} {options.window}",
        keys=options.keys,
        shard=number - 1,
        num_shards=count,
    )
