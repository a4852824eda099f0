"""Likelihoods of proteins: sequence files in, one row a protein out, in the order read."""

from __future__ import annotations

import argparse
import csv
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from protperf.arguments import id_of, policy_of
from protperf.formats.commit import committed_text
from protperf.formats.fasta import Record, SequenceReader, Skipped
from protperf.formats.records import quoted
from protperf.formats.skipped import SkippedList, leave_out, skipped_path
from protperf.score.output import SEPARATORS, STDOUT, Outcome, format_number, progress_bar, say, suffix_of

if TYPE_CHECKING:
    from protperf.inference.scoring import ProteinScore
    from protperf.model import ProteinModel

MANY_TOKENS = 10_000_000
"""A protein that takes more is announced: some minutes of one CPU core with a small model."""

REMEDIES = {
    "out_of_memory": "does not fit into memory even alone; score it where there is more, or with --device cpu",
    "too_long_for_model": "is longer than this model takes; score it with another model",
}
"""Why a record that was read well is left out, and what to do about it."""

COLUMNS = ("id", "num_residues", "method", "log_likelihood", "mean_log_likelihood", "perplexity")


def score_records(model: ProteinModel, options: argparse.Namespace) -> Outcome:
    """Score all records of the input files, in the order read; memory does not grow with their number.

    Raises:
        ValueError: a bad file, or nothing scored; nothing is left of the output then.
    """
    from protperf.inference.scoring import METHODS, check_method

    method = check_method(model, options.method, METHODS)
    with ExitStack() as stack:
        skipped, out = None, sys.stdout
        if options.out != STDOUT:
            skipped = stack.enter_context(SkippedList(skipped_path(options.out)))
            out = stack.enter_context(committed_text(Path(options.out)))
        reader = SequenceReader(
            options.inputs,
            policy_of(options, mask_token=False),
            skipped_path=skipped.work if skipped else None,
            progress=True,
        )
        table = csv.writer(out, delimiter=SEPARATORS[suffix_of(options.out)], lineterminator="\n")
        table.writerow(COLUMNS)
        scored, too_large = 0, []

        def refuse(record: Record, reason: str) -> None:
            too_large.append(leave_out(record, reason))
            if skipped:
                skipped.add(too_large[-1])
            if options.strict:
                raise ValueError(f"{_explain(too_large[-1])} (stopped by --strict)")

        for record, score in _score_each(model, _fitting(model, reader, refuse), method, options):
            if score is None:
                refuse(record, "out_of_memory")
                continue
            numbers = (score.log_likelihood, score.mean_log_likelihood, score.perplexity)
            table.writerow(
                (id_of(record, options.id), score.num_residues, method, *map(format_number, numbers))
            )
            out.flush()
            scored += 1
        for line in [*reader.summary(), *map(_explain, too_large)]:
            say(line)
        if not scored:
            reasons = [example.message for example in reader.skipped_examples] + [*map(_explain, too_large)]
            raise ValueError(f"no record scored of {reader.records}; the first: {reasons[0]}")
    return Outcome(scored, reader.records - scored)


def _score_each(
    model: ProteinModel, records: Iterable[Record], method: str, options: argparse.Namespace
) -> Iterator[tuple[Record, ProteinScore | None]]:
    """Yield each record with its score; the few that are being scored are held."""
    from protperf.inference.scoring import score_proteins, tokens_of

    held: deque[Record] = deque()

    def proteins() -> Iterator[np.ndarray]:
        announced = False
        for record in records:
            num_tokens = tokens_of(len(record.tokens), method=method)
            if num_tokens > MANY_TOKENS and not announced:
                announced = True
                say(_announce(record, method, num_tokens))
            held.append(record)
            yield record.tokens

    with progress_bar(total=None) as bar:
        for score in score_proteins(
            model,
            proteins(),
            method=method,
            token_budget=options.toks_per_batch,
            precision=options.precision,
            advance=bar.update,
        ):
            yield held.popleft(), score


def _fitting(
    model: ProteinModel, records: Iterable[Record], refuse: Callable[[Record, str], None]
) -> Iterator[Record]:
    """Yield the records that are no longer than the model takes; the others are refused as they come."""
    for record in records:
        if model.max_residues is not None and len(record.tokens) > model.max_residues:
            refuse(record, "too_long_for_model")
        else:
            yield record


def _announce(record: Record, method: str, num_tokens: int) -> str:
    """Return one line on a protein that takes long, and on what takes less."""
    from protperf.inference.scoring import tokens_of

    text = f"record {quoted(record.id)} ({len(record.tokens):,} residues): {method} shows the model {num_tokens:,} tokens"
    if method == "pseudo-ppl":
        text += f"; strided-ppl {tokens_of(len(record.tokens), method='strided-ppl'):,}"
    return text


def _explain(skipped: Skipped) -> str:
    """Return one line on a record that the model does not take, or that does not fit into memory."""
    return f"{skipped.place}: record {quoted(skipped.id)} ({skipped.found}) {REMEDIES[skipped.reason]}"
