"""The one reader: it decompresses the inputs in turn and cuts them into parts, each the input of a map task."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from data_prep.journal import Journal
from data_prep.mapping import MapTask
from protperf.formats.blocks import entry_text
from protperf.formats.cutting import BLOCK_BYTES, LongRecord, count_lines, cut_records
from protperf.formats.fasta import nothing_in
from protperf.formats.manifest import InputEntry
from protperf.formats.streams import STDIN, Advance, SequenceStream, open_stream, place_of


class PartReader:
    """Yields a map task for each part of the inputs that is not mapped yet.

    Args:
        inputs: paths, `-` for standard input.
        work: folder for the parts' text.
        journal: knows which parts are mapped and which inputs are read to their ends.
        part_bytes: text of a part, about: it ends with the block that reaches this.
        advance: called with the number of stored bytes at each read.

    Attributes:
        num_parts: parts met so far.
    """

    def __init__(
        self, inputs: list[str], work: Path, journal: Journal, *, part_bytes: int, advance: Advance
    ) -> None:
        self.num_parts = 0
        self._inputs = inputs
        self._work = work
        self._journal = journal
        self._part_bytes = part_bytes
        self._advance = advance

    def __iter__(self) -> Iterator[MapTask]:
        """Read all inputs that are not read yet.

        Raises:
            FormatError: an input is damaged, foreign or empty.
            ValueError: it cannot be read.
        """
        for number, path in enumerate(self._inputs):
            known = self._journal.of("file").get(number)
            if known is not None and all(part in self._journal.of("part") for part in range(*known["parts"])):
                self.num_parts = known["parts"][1]
                self._advance(known["bytes"])
                continue
            yield from self._read(number, path)

    def inputs(self) -> list[InputEntry]:
        """Return what the manifest says of the inputs, after all were read."""
        entries = []
        for number, path in enumerate(self._inputs):
            known, is_file = self._journal.of("file")[number], os.path.isfile(path)
            entries.append(
                InputEntry(
                    as_text(Path(path).name) if path != STDIN else STDIN,
                    "sequences",
                    known["bytes"] if is_file else None,
                    known["sha256"] if is_file else None,
                )
            )
        return entries

    def parts_of(self, number: int) -> range:
        """Return the numbers of an input's parts."""
        return range(*self._journal.of("file")[number]["parts"])

    def _read(self, number: int, path: str) -> Iterator[MapTask]:
        first, digest, size = self.num_parts, hashlib.sha256(), 0

        def advance(num_bytes: int) -> None:
            nonlocal size
            size += num_bytes
            self._advance(num_bytes)

        with open_stream(path, advance, ahead=True, digest=digest) as stream:
            line, unit = 1, "line" if stream.kind == "fasta" else "entry"
            for blocks, lines in self._parts(stream):
                task = self._task_of(blocks, place_of(path), line, unit)
                self.num_parts += 1
                line += lines
                if task.index not in self._journal.of("part"):
                    with open(task.text_path, "wb") as file:
                        for block in blocks:
                            file.write(block.start if isinstance(block, LongRecord) else block)
                    yield task
        if first == self.num_parts:
            raise nothing_in(place_of(path))
        known = {"sha256": digest.hexdigest(), "bytes": size, "parts": [first, self.num_parts]}
        self._journal.add("file", number, known)

    def _task_of(self, blocks: list[bytes | LongRecord], place: str, line: int, unit: str) -> MapTask:
        """Return the task of a part that begins at a line of an input."""
        long = {
            number: (block.lines, block.size)
            for number, block in enumerate(blocks)
            if isinstance(block, LongRecord)
        }
        return MapTask(self.num_parts, self._work, place, line, unit, tuple(map(_num_kept, blocks)), long)

    def _parts(self, stream: SequenceStream) -> Iterator[tuple[list[bytes | LongRecord], int]]:
        """Yield parts, each as blocks of text, with the number of lines or entries in it."""
        held: list[bytes | LongRecord] = []
        size = lines = 0
        for block, num_lines in _blocks(stream, min(BLOCK_BYTES, self._part_bytes)):
            held.append(block)
            size, lines = size + _num_kept(block), lines + num_lines
            if size >= self._part_bytes:
                yield held, lines
                held, size, lines = [], 0, 0
        if held:
            yield held, lines


def _num_kept(block: bytes | LongRecord) -> int:
    """Return the bytes of a block that are written."""
    return len(block.start if isinstance(block, LongRecord) else block)


def _blocks(stream: SequenceStream, size: int) -> Iterator[tuple[bytes | LongRecord, int]]:
    """Yield blocks of about `size` bytes for a `BlockParser`, with the number of lines or entries in each."""
    if stream.kind == "fasta":
        for text in cut_records(stream.pieces(), size, source=stream.place):
            yield text, text.lines if isinstance(text, LongRecord) else count_lines(text)
        return
    from protperf.formats.flatfiles import entries

    held: list[bytes] = []
    num_held = 0
    for entry in entries(stream):
        held.append(entry_text(entry))
        num_held += len(held[-1])
        if num_held >= size:
            yield b"".join(held), len(held)
            held, num_held = [], 0
    if held:
        yield b"".join(held), len(held)


def as_text(name: str) -> str:
    """Return a file name that JSON can hold: bytes that are no UTF-8 are escaped."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")
