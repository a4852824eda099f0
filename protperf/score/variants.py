"""Effects of mutations: a table in, the same table with a column for each method out."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from protperf.arguments import policy_of
from protperf.formats.commit import commit_bytes
from protperf.formats.fasta import Policy, SequenceReader
from protperf.formats.mutations import Mutant
from protperf.formats.records import judge, quoted, shortened
from protperf.formats.streams import STDIN
from protperf.formats.variants import (
    VariantTable,
    check_wild_type,
    read_mutants,
    read_variants,
    rebuild_wild_type,
)
from protperf.score.output import (
    SEPARATORS,
    STDOUT,
    Outcome,
    format_number,
    progress_bar,
    say,
    suffix_of,
    tell,
)

if TYPE_CHECKING:
    from protperf.model import ProteinModel

PREFIX = "protperf_"
"""Of the columns added to a table, before the name of the method."""


class Variants(NamedTuple):
    """A table of variants, read and checked.

    Attributes:
        table: as it stands in the file.
        mutants: of each of its rows, `None` where the row names none.
        wild_type: residue tokens, uint8 `(L,)`.
        measured: the column of measured values, NaN where there is none; empty if no column was named.
    """

    table: VariantTable
    mutants: list[Mutant | None]
    wild_type: np.ndarray
    measured: np.ndarray


def read_table(options: argparse.Namespace) -> Variants:
    """Read the table of mutations and its wild type, and check that they belong together.

    Raises:
        ValueError: the table, its columns or the wild type cannot be used; the message names file and row.
    """
    table = read_variants(
        options.mutations,
        column=options.mutation_column,
        lone=SEPARATORS.get(suffix_of(options.mutations.removesuffix(".gz")), ","),
    )
    if options.out != STDOUT:
        _check_suffix(options.out, table)
    mutants, unread = read_mutants(table, column=options.mutation_column, offset=options.offset)
    if unread and (options.strict or len(unread) == len(mutants)):
        raise ValueError(unread[0] + (" (stopped by --strict)" if options.strict else ""))
    if not mutants:
        raise ValueError(f"{table.place}: has no row below its header; nothing to score")
    if unread:
        say(
            f"{len(unread):,} of {len(mutants):,} rows name no substitutions and get no score; the first: {unread[0]}"
        )
    if options.wild_type:
        wild_type = read_wild_type(options.wild_type, policy_of(options, mask_token=False))
    elif options.sequence_column in table.columns:
        wild_type = rebuild_wild_type(table, mutants, column=options.sequence_column, offset=options.offset)
    else:
        raise ValueError(
            f"{table.place}: no column {quoted(options.sequence_column)} to take the wild type from; "
            "give --wild-type SEQUENCE or FASTA, or --sequence-column NAME"
        )
    check_wild_type(table, mutants, wild_type, offset=options.offset)
    measured = np.array(table.numbers(options.measured) if options.measured else [])
    return Variants(table, mutants, wild_type, measured)


def read_wild_type(text: str, policy: Policy) -> np.ndarray:
    """Return residue tokens, uint8 `(L,)`, of a sequence or of the only record of a FASTA file.

    Raises:
        ValueError: it is neither, or the file holds several records.
    """
    if not _is_file(text):
        verdict = judge(text.encode(), policy)
        if verdict.tokens is None:
            raise ValueError(
                f"--wild-type {shortened(text, 60)}: no such file, and as a sequence it has {quoted(verdict.found)}; "
                "give letters A-Z or a FASTA file"
            )
        return verdict.tokens
    records = list(itertools.islice(SequenceReader([text], dataclasses.replace(policy, strict=True)), 2))
    if len(records) > 1:
        raise ValueError(
            f"{text}: holds more than one record; give --wild-type a file with one, or the sequence"
        )
    return records[0].tokens


def score_variants(model: ProteinModel, variants: Variants, options: argparse.Namespace) -> Outcome:
    """Score a table's mutants by each method and write the table with the scores.

    Raises:
        ValueError: a method is not defined for the model, or its column is there already.
    """
    from protperf.inference.mutations import effect_tokens, mutation_effects

    methods = choose_methods(model, options.method)
    if model.max_residues is not None and len(variants.wild_type) > model.max_residues:
        raise ValueError(
            f"{variants.table.place}: the wild type has {len(variants.wild_type):,} residues; this model takes at most "
            f"{model.max_residues:,}; score it with another model"
        )
    variants.table.check_new(PREFIX + method for method in methods)
    read = [mutant for mutant in variants.mutants if mutant is not None]
    has_mutant = np.array([mutant is not None for mutant in variants.mutants])
    columns: dict[str, np.ndarray] = {}
    for method in methods:
        total = effect_tokens(variants.wild_type, read, method=method)
        say(f"{method}: {total:,} tokens to show")
        scores = np.full(len(variants.mutants), np.nan)
        with progress_bar(total=total) as bar:
            scores[has_mutant] = mutation_effects(
                model,
                variants.wild_type,
                read,
                method=method,
                token_budget=options.toks_per_batch,
                precision=options.precision,
                advance=bar.update,
            )
        columns[method] = scores
    scored = _count_scored(variants, columns, strict=options.strict)
    cells = {
        PREFIX + method: [format_number(score) for score in scores] for method, scores in columns.items()
    }
    data = variants.table.with_columns(cells)
    if options.out == STDOUT:
        sys.stdout.buffer.write(data)
        sys.stdout.flush()
    else:
        commit_bytes(Path(options.out), data)
    if options.measured:
        for method, scores in columns.items():
            tell(describe_correlation(method, scores, variants.measured, options.measured), options.out)
    return Outcome(scored, len(variants.mutants) - scored)


def _count_scored(variants: Variants, columns: Mapping[str, np.ndarray], *, strict: bool) -> int:
    """Return the number of rows that have every score; say how many did not fit into memory.

    Raises:
        ValueError: none has, or `strict` and some have not.
    """
    whole = ~np.isnan(np.stack([*columns.values()])).any(0)
    too_large = sum(mutant is not None for mutant in variants.mutants) - int(whole.sum())
    if too_large:
        text = f"{too_large:,} rows do not fit into memory even alone; score them where there is more, or with --device cpu"
        if strict or not whole.any():
            raise ValueError(f"{variants.table.place}: {text}")
        say(text)
    return int(whole.sum())


def describe_correlation(method: str, scores: np.ndarray, measured: np.ndarray, column: str) -> str:
    """Return one line on Spearman's coefficient between scores and measured values `(N,)`, NaN being left out."""
    from protperf.metrics import rank_correlation

    known = ~(np.isnan(scores) | np.isnan(measured))
    value = rank_correlation(scores[known], measured[known]) if known.any() else math.nan
    found = "undefined, one side has a single value" if math.isnan(value) else f"{value:.4f}"
    missing = int(np.isnan(measured).sum())
    without = f", {missing:,} without a measured value" if missing else ""
    return f"{method}: Spearman {found} against {column} over {int(known.sum()):,} rows{without}"


def choose_methods(model: ProteinModel, text: str) -> list[str]:
    """Return the methods that a comma-separated list names, all that are defined for `all`, the default for none."""
    from protperf.inference.mutations import EFFECT_METHODS
    from protperf.inference.scoring import check_method, methods_of

    if text == "all":
        return methods_of(model, EFFECT_METHODS)
    names = [name.strip() for name in text.split(",")]
    return list(dict.fromkeys(check_method(model, name, EFFECT_METHODS) for name in names))


def _is_file(name: str) -> bool:
    """Tell whether a name is a file's or stdin; `os.path` takes names of any length."""
    return name == STDIN or os.path.isfile(name)


def _check_suffix(out: str, table: VariantTable) -> None:
    """Refuse a name that says another separator than the table has, which is kept."""
    if table.separator in SEPARATORS.values() and SEPARATORS[suffix_of(out)] != table.separator:
        kind = next(suffix for suffix, separator in SEPARATORS.items() if separator == table.separator)
        raise ValueError(f"{out}: {table.place} is kept as it is, so the name must end in {kind}")
