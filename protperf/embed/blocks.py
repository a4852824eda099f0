"""Records in blocks, and which of them need no computing because an earlier one is the same protein."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from protperf.formats.fasta import Record

BLOCK_TOKENS = 1 << 16
"""Tokens that are computed, written and committed together: 128 MiB of states at a width of 512."""

REMEMBERED = 1 << 16
"""Distinct sequences, those met last, whose place is kept, so that a later equal one is copied: 20 MB."""


@dataclass(frozen=True)
class Block:
    """Some records in the order read.

    Attributes:
        number: of the block, from 0.
        first: number of its first record among those accepted, from 0.
        records: the records.
        digest: hex hash of all records up to the last of these.
    """

    number: int
    first: int
    records: list[Record]
    digest: str

    @property
    def end(self) -> int:
        """Number of the first record after the block."""
        return self.first + len(self.records)

    @cached_property
    def distinct(self) -> dict[bytes, np.ndarray]:
        """The sequences in it, each once, in the order met: bytes of the tokens -> tokens, uint8 `(L,)`."""
        return {record.tokens.tobytes(): record.tokens for record in self.records}


def cut_blocks(records: Iterable[Record]) -> Iterator[Block]:
    """Cut records into blocks of at most `BLOCK_TOKENS` tokens; a longer one is a block of its own.

    Where blocks end depends on the records alone, so any number of devices, shards and restarts has the same blocks.
    """
    digest = hashlib.blake2b(digest_size=16)
    number = first = num_tokens = 0
    block: list[Record] = []
    for record in records:
        length = len(record.tokens) + 2
        if block and num_tokens + length > BLOCK_TOKENS:
            yield Block(number, first, block, digest.hexdigest())
            number, first, num_tokens, block = number + 1, first + len(block), 0, []
        block.append(record)
        num_tokens += length
        digest.update(record.header.encode() + b"\n" + record.tokens.tobytes() + b"\n")
    if block:
        yield Block(number, first, block, digest.hexdigest())


@dataclass(slots=True)
class Met:
    """A sequence that was met.

    Attributes:
        first: number of its first record.
        places: where each output has its numbers; empty until they are written.
        reason: why it was left out, if it was.
    """

    first: int
    places: tuple[Any, ...] = ()
    reason: str = ""


class Sequences:
    """Remembers the latest `REMEMBERED` distinct sequences and what became of them."""

    def __init__(self) -> None:
        self._met: OrderedDict[bytes, Met] = OrderedDict()

    def of(self, block: Block, fits: Callable[[Record], bool]) -> dict[bytes, Met]:
        """Return what is known of the sequences of the next block: bytes of the tokens -> `Met`.

        Args:
            block: the next one, in order.
            fits: whether a record may be written under its name; of one that may not no other is a copy.
        """
        found: dict[bytes, Met] = {}
        for place, record in enumerate(block.records, start=block.first):
            sequence = record.tokens.tobytes()
            if not fits(record):
                found.setdefault(sequence, Met(place))
                continue
            key = hashlib.blake2b(sequence, digest_size=16).digest()
            found[sequence] = self._met.setdefault(key, Met(place))
            self._met.move_to_end(key)
        while len(self._met) > REMEMBERED:
            self._met.popitem(last=False)
        return found
