"""Where arrays go: a file a part, or a folder that takes all parts of a protein."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from protperf.checkpoint import TrainedModel
from protperf.embed.engine import Arrays, Named
from protperf.embed.outputs import Part
from protperf.formats.embedding_merge import WRITERS
from protperf.formats.embedding_writers import EmbeddingWriter
from protperf.formats.embeddings import Embedding, EmbeddingInfo, sequence_key
from protperf.formats.partial_output import discard_partial
from protperf.formats.sizes import hash_file
from protperf.tensor_folder import TensorFolder, discard_partial_folder
from protperf.vocab import VOCABULARY


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
        self._earlier = writer.entries() if writer.committed else iter(())

    def add(self, index: int, named: Named, arrays: Arrays) -> int:
        """Append a protein; return its address."""
        key = sequence_key(VOCABULARY.decode(named.tokens)) if self.writer.info.keys == "sequence" else ""
        embedding = Embedding(named.id, named.header, len(named.tokens), arrays[self._place], key)
        return self.writer.add(index, embedding)

    def find(self, index: int) -> int:
        """Return the address of a protein that an earlier run wrote; asked in ascending order."""
        return next(entry.address for entry in self._earlier if entry.number == index)

    def read(self, place: int, num_residues: int) -> Arrays:
        """Return what was written of a protein."""
        return [self.writer.read(place, num_residues)]

    def commit(self, state: Mapping[str, Any]) -> None:
        """Make all that was added outlive a kill."""
        self.writer.commit(state)

    def finish(self, about: Mapping[str, str | int]) -> None:
        """Write the file to its end; what is left is its name."""
        self.writer.finish(about)


class FolderSink:
    """All parts of each protein, in a file for each protein.

    Args:
        folder: open.
    """

    def __init__(self, folder: TensorFolder) -> None:
        self.folder = folder
        self.committed = folder.committed
        self._earlier = folder.names() if folder.committed else iter(())

    def add(self, index: int, named: Named, arrays: Arrays) -> str:
        """Write the file of a protein; return its name."""
        length = len(named.tokens)
        return self.folder.add(index, [Embedding(named.id, named.header, length, array) for array in arrays])

    def find(self, index: int) -> str:
        """Return the file of a protein that an earlier run wrote; asked in ascending order."""
        return next(name for number, name in self._earlier if number == index)

    def read(self, place: str, num_residues: int) -> Arrays:
        """Return what was written of a protein."""
        return self.folder.read(place)

    def commit(self, state: Mapping[str, Any]) -> None:
        """Make all that was added outlive a kill."""
        self.folder.commit(state)

    def finish(self, about: Mapping[str, str | int]) -> None:
        """Flush everything to the disk; what is left is the folder's name."""
        self.folder.finish()


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
        "id": options.id,
        "gaps": options.gaps,
        "unknown": options.unknown,
        "toks_per_batch": options.toks_per_batch,
        "contact_head": hash_file(options.contact_head)[0] if options.contact_head else "",
    }
    if options.format == "pt":
        if options.force:
            discard_partial_folder(options.out)
        infos = [describe_part(options, trained, part) for part in parts]
        return [FolderSink(stack.enter_context(TensorFolder(options.out, infos, run)))]
    sinks = []
    for place, (part, path) in enumerate(zip(parts, paths, strict=True)):
        if options.force:
            discard_partial(path)
        info = describe_part(options, trained, part)
        sinks.append(FileSink(stack.enter_context(WRITERS[options.format](path, info, run)), place))
    return sinks


def describe_part(options: argparse.Namespace, trained: TrainedModel, part: Part) -> EmbeddingInfo:
    """Return what the file of a part says of itself."""
    digest, _ = hash_file(trained.path)
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
