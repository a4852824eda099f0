"""Which accepted records are kept, and in which split those are that a table names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data_prep.options import PrepareOptions
from data_prep.sorted_parts import BY_SEQUENCE
from data_prep.tables import ABSENT, REPRESENTATIVE, NameTable
from protperf.formats.blocks import Block
from protperf.formats.headers import Header, first_word, parse_header
from protperf.vocab import VOCABULARY

_X = VOCABULARY.id_of("X")


@dataclass(frozen=True)
class Filters:
    """Judges the records of a block.

    Attributes:
        options: what is kept.
        table: values of names; None if no table is given.
    """

    options: PrepareOptions
    table: NameTable | None

    @classmethod
    def open(cls, options: PrepareOptions, table_dir: Path) -> Filters:
        """Return the filters of a dataset whose tables, if any, lie in `table_dir`."""
        has_table = bool(options.clusters or options.ood_families)
        return cls(options, NameTable.open(table_dir) if has_table else None)

    def keep(self, block: Block, dropped: Counter[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return which records are kept and in which split.

        Args:
            block: accepted records, N of them.
            dropped: gets the numbers of those that are not kept, by the name of their count in the manifest; the first
                reason that applies counts.

        Returns:
            bool `(N,)`; uint8 `(N,)`, the number of the split or `BY_SEQUENCE`.
        """
        kept = np.ones(len(block), bool)
        splits = np.full(len(block), BY_SEQUENCE, np.uint8)
        lengths = block.ends - block.starts

        def drop(reason: str, failing: np.ndarray) -> None:
            dropped[reason] += int((kept & failing).sum())
            kept[failing] = False

        drop("too_short", lengths < self.options.min_length)
        if self.options.max_length:
            drop("too_long", lengths > self.options.max_length)
        if self.options.max_x < 1:
            drop("too_many_x", _count_x(block) / lengths > self.options.max_x)
        if self.options.filters_headers:
            self._judge_headers([parse_header(block.header(number)) for number in range(len(block))], drop)
        if self.table is not None:
            values = self._values(block)
            if self.options.clusters:
                dropped["outside_clusters"] += int((kept & (values == ABSENT)).sum())
            if self.options.keep == "representative":
                drop("not_representative", (values != ABSENT) & (values < REPRESENTATIVE))
            named = values != ABSENT
            splits[named] = values[named] % REPRESENTATIVE
        return kept, splits

    def _judge_headers(self, headers: list[Header], drop: Callable[[str, np.ndarray], None]) -> None:
        options = self.options
        if options.fragments == "drop":
            drop("fragments", np.array([header.fragment for header in headers], bool))
        if options.max_evidence:
            levels = np.array([header.evidence or 0 for header in headers], np.int64)
            drop("evidence", (levels < 1) | (levels > options.max_evidence))
        for wanted, found in ((options.taxon_ids, False), (options.excluded_taxon_ids, True)):
            if wanted:
                drop("taxon", np.array([(header.taxon_id in wanted) == found for header in headers], bool))

    def _values(self, block: Block) -> np.ndarray:
        """Return what the table says of each record, by its id or else by its accession; uint8 `(N,)`."""
        assert self.table is not None
        headers = [block.header(number) for number in range(len(block))]
        values = self.table.find([_to_bytes(first_word(header)) for header in headers])
        absent = np.flatnonzero(values == ABSENT)
        accessions = [_to_bytes(parse_header(headers[number]).accession) for number in absent.tolist()]
        values[absent] = self.table.find(accessions)
        return values


def _count_x(block: Block) -> np.ndarray:
    """Return the number of X in each record, int64 `(N,)`."""
    places = np.flatnonzero(np.frombuffer(block.tokens, np.uint8) == _X)
    return np.searchsorted(places, block.ends) - np.searchsorted(places, block.starts)


def _to_bytes(name: str) -> bytes:
    """Return the bytes a name had in its file."""
    return name.encode("utf-8", "surrogateescape")
