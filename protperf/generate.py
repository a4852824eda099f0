"""`protperf generate`: new proteins from causal models, and masked places filled by masked ones."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from tqdm import tqdm

from protperf.arguments import (
    CHECKPOINT_HELP,
    add_model_arguments,
    add_record_arguments,
    check_model_arguments,
    check_outputs,
    id_of,
    policy_of,
)
from protperf.formats.fasta import Record, SequenceReader
from protperf.formats.fasta_writer import STDOUT, FastaWriter, shortest
from protperf.formats.records import quoted
from protperf.formats.skipped import SOME_LEFT_OUT, SkippedList, leave_out, skipped_path
from protperf.formats.streams import STDIN, check_inputs
from protperf.inference.sampling import Sampling
from protperf.vocab import VOCABULARY

if TYPE_CHECKING:
    from protperf.checkpoint import TrainedModel
    from protperf.inference.filling import Filled
    from protperf.inference.generation import Generated

NAME = "generated"
"""What begins the names of proteins without a prompt out of a file."""

TEMPERATURE_HELP = "below 1: likelier residues more often; 0: always the likeliest (%(default)s)"
TOP_K_HELP = "only the K likeliest residues; 0: all (%(default)s)"
TOP_P_HELP = "only the fewest residues that have the share P of all together (%(default)s)"
PROMPT_HELP = "how proteins begin: letters, or a file of which each record is a prompt (- is stdin)"
MAX_LENGTH_HELP = "cut at N residues, the prompt's included (1024)"
STEPS_HELP = "at most N forward passes a protein, each fills the most certain places (32)"

_ONLY_GENERATED = {"prompt": "", "min_length": 1, "max_length": 1024, "batch": 16}
_ONLY_FILLED = {"steps": 32}


class Made(NamedTuple):
    """A protein to write.

    Attributes:
        header: without `>`.
        tokens: residues, uint8 `(L,)`.
        drawn: how many of them the model drew.
        cut: whether it was cut at `--max-length`.
    """

    header: str
    tokens: np.ndarray
    drawn: int
    cut: bool = False


class Records:
    """Records of a file on their way into a model as tokens, and kept until the last of their samples is written.

    Args:
        reader: where they come from.
        skipped: the list of those left out; `None`: they are said alone.
        fault_of: returns why a record is left out and what is found and allowed, or `None`.
        strict: whether the first that is left out ends the work.
    """

    def __init__(
        self,
        reader: SequenceReader,
        skipped: SkippedList | None,
        fault_of: Callable[[Record], tuple[str, str] | None],
        *,
        strict: bool,
    ) -> None:
        self.reader = reader
        self.skipped = skipped
        self.fault_of = fault_of
        self.strict = strict
        self.waiting: dict[int, Record] = {}

    def __iter__(self) -> Iterator[np.ndarray]:
        """Yield the tokens of the records that are taken."""
        number = 0
        for record in self.reader:
            fault = self.fault_of(record)
            if fault:
                self.leave_out(record, *fault)
                continue
            self.waiting[number] = record
            number += 1
            yield record.tokens

    def leave_out(self, record: Record, reason: str, text: str) -> None:
        """Leave out a record that was read well."""
        skipped = leave_out(record, reason)
        line = f"{skipped.place}: record {quoted(record.id)} ({skipped.found}) {text}"
        if self.strict:
            raise ValueError(f"{line} (stopped by --strict)")
        self.reader.reject(skipped, len(record.tokens))
        if self.skipped:
            self.skipped.add(skipped)
        _say(f"left out, {reason}: {line}")

    @property
    def num_left_out(self) -> int:
        """Number of records that were read and not worked on."""
        return self.reader.records - self.reader.accepted


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    start = time.monotonic()
    options = parse(argv)
    inputs = [options.fill or options.prompt] if reads_records(options) else []
    if inputs:
        check_inputs(inputs)
    from protperf.checkpoint import load_model, model_files

    if options.out != STDOUT:
        read = [*inputs, *model_files(options.checkpoint)]
        check_outputs([Path(options.out), skipped_path(options.out)], read, force=options.force)
    from protperf.devices import choose_device

    device = choose_device(options.device, precision=options.precision)
    trained = load_model(options.checkpoint)
    trained.model.to(device)
    if trained.model.causal and not options.fill and not trained.objective.ask_eos:
        _say(f"{trained.path}: never learned where proteins end (objective.ask_eos=false)")
    with ExitStack() as stack:
        skipped = None
        if options.out != STDOUT:  # without records too: a list that is there would lie
            skipped = stack.enter_context(SkippedList(skipped_path(options.out)))
        records = open_records(options, inputs, skipped, trained.model.max_residues) if inputs else None
        made = fill_records(trained, records, options) if options.fill else None
        made = made or generate_proteins(trained, records, options)
        writer = stack.enter_context(FastaWriter(options.out))
        total = None if records else options.num
        proteins = drawn = cut = 0
        for each in tqdm(made, total=total, unit=" proteins", disable=None):
            writer.add(each.header, VOCABULARY.decode(each.tokens))
            proteins, drawn, cut = proteins + 1, drawn + each.drawn, cut + each.cut
        for line in records.reader.summary() if records else []:
            _say(line)
        if not proteins:
            raise ValueError(f"{inputs[0]}: no record is left to work on; the lines above say why")
    seconds = time.monotonic() - start
    done = f"{proteins:,} protein{'s' * (proteins != 1)} {'filled' if options.fill else 'generated'}, "
    if not options.fill:
        done += f"{cut:,} of them cut at --max-length {options.max_length}, "
    done += f"{drawn:,} residue{'s' * (drawn != 1)} drawn, {seconds:.1f} seconds"
    if seconds >= 1 and not options.fill:
        done += f", {drawn / seconds:,.0f} residues/s"
    if options.out == STDOUT:
        _say(done)
    else:
        print(f"{options.out}: {done}")
    return SOME_LEFT_OUT if records and records.num_left_out else 0


def generate_proteins(
    trained: TrainedModel, records: Records | None, options: argparse.Namespace
) -> Iterator[Made]:
    """Return new proteins, `options.num` for each prompt, one after another."""
    from protperf.inference.generation import ENDED_BY_LENGTH, generate

    prompts: Iterable[np.ndarray] = [letters_of(options)] if records is None else records
    made = generate(
        trained.model,
        options.num,
        prompts=prompts,
        sampling=options.sampling,
        min_length=options.min_length,
        max_length=options.max_length,
        batch=options.batch,
        token_budget=options.toks_per_batch,
        precision=options.precision,
    )

    def described() -> Iterator[Made]:
        for each in _within_memory(made):
            name = NAME if records is None else _name(records.waiting[each.prompt], options)
            facts = {"prompt": each.shown} if each.shown else {}
            header = header_of(name, each, facts | {"ended": each.ended}, trained, options)
            drawn, cut = len(each.tokens) - each.shown, each.ended == ENDED_BY_LENGTH
            yield Made(header, each.tokens, drawn, cut)
            if records and each.sample == options.num - 1:
                del records.waiting[each.prompt]

    return described()


def fill_records(
    trained: TrainedModel, records: Records | None, options: argparse.Namespace
) -> Iterator[Made]:
    """Return filled proteins, `options.num` for each record, one after another."""
    from protperf.inference.filling import fill

    assert records is not None
    made = fill(
        trained.model,
        records,
        options.num,
        sampling=options.sampling,
        steps=options.steps,
        token_budget=options.toks_per_batch,
        precision=options.precision,
    )

    def described() -> Iterator[Made]:
        for place, each in enumerate(made):
            number, sample = divmod(place, options.num)
            record = records.waiting[number]
            if each is not None:
                facts = {"filled": each.filled, "steps": min(options.steps, each.filled)}
                header = header_of(_name(record, options), each, facts, trained, options)
                yield Made(header, each.tokens, each.filled)
            elif sample == 0:
                text = (
                    "does not fit into memory even alone; fill it where there is more, or with --device cpu"
                )
                records.leave_out(record, "out_of_memory", text)
            if sample == options.num - 1:
                del records.waiting[number]

    return described()


def _within_memory(made: Iterator[Generated]) -> Iterator[Generated]:
    from protperf.batches import is_out_of_memory

    try:
        yield from made
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise ValueError(
            "out of memory while generating; lower --batch, --toks-per-batch if a prompt is long, or take --device cpu"
        ) from error


def header_of(
    name: str,
    made: Generated | Filled,
    facts: dict[str, object],
    trained: TrainedModel,
    options: argparse.Namespace,
) -> str:
    """Return the header of a protein: its name, what it is, and how to get the same again."""
    sampling: Sampling = options.sampling
    facts = {"length": len(made.tokens), "perplexity": f"{made.perplexity:.2f}", **facts}
    facts["temperature"] = shortest(sampling.temperature)
    if sampling.top_k:
        facts["top_k"] = sampling.top_k
    if sampling.top_p < 1:
        facts["top_p"] = shortest(sampling.top_p)
    for option in ("min_length", "max_length"):
        if getattr(options, option) != _ONLY_GENERATED[option]:
            facts[option] = getattr(options, option)
    if sampling.nonstandard:
        facts["nonstandard"] = "yes"
    if options.precision != "fp32":
        facts["precision"] = options.precision
    facts |= {"seed": sampling.seed, "checkpoint": trained.path.name}
    return " ".join([f"{name}_{made.sample + 1}", *(f"{key}={value}" for key, value in facts.items())])


def reads_records(options: argparse.Namespace) -> bool:
    """Tell whether sequences come from a file: `--fill`, or a `--prompt` that names one."""
    if options.fill or options.prompt == STDIN:
        return True
    # Path.exists raises where letters are too many
    return bool(options.prompt) and os.path.exists(options.prompt)


def letters_of(options: argparse.Namespace) -> np.ndarray:
    """Return the tokens of a prompt typed as letters, or of none."""
    if not options.prompt:
        return np.empty(0, np.uint8)
    try:
        return VOCABULARY.encode(options.prompt)
    except ValueError as error:
        raise ValueError(
            f"--prompt {quoted(options.prompt)}: no such file, and as residues: {error}"
        ) from None


def open_records(
    options: argparse.Namespace, inputs: list[str], skipped: SkippedList | None, most: int | None
) -> Records:
    """Return the prompts or the proteins to fill, of so many residues at most."""
    policy = policy_of(options, mask_token=bool(options.fill))
    reader = SequenceReader(inputs, policy, skipped_path=skipped.work if skipped else None)
    return Records(reader, skipped, partial(fault_of, options=options, most=most), strict=options.strict)


def fault_of(record: Record, options: argparse.Namespace, most: int | None) -> tuple[str, str] | None:
    """Return why a record cannot be a prompt or be filled, as a reason and in words; `None` if it can."""
    if most is not None and len(record.tokens) > most:
        return "too_long_for_model", f"is longer than this model takes; allowed: {most:,} residues"
    if options.fill:
        if (record.tokens == VOCABULARY.mask).any():
            return None
        return "no_mask", "has nothing to fill; allowed: one <mask> or more, each for one residue"
    if len(record.tokens) < options.max_length:
        return None
    return "too_long", f"is no prompt; allowed: fewer residues than --max-length {options.max_length}"


def _name(record: Record, options: argparse.Namespace) -> str:
    """Return a record's name as one word."""
    return "_".join(id_of(record, options.id).split())


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line; wrong usage exits with status 2."""
    parser = make_parser()
    options = parser.parse_intermixed_args(argv)
    check_model_arguments(parser, options)
    for name in _ONLY_GENERATED if options.fill else _ONLY_FILLED:
        if getattr(options, name) is not None:
            place = "with" if options.fill else "without"
            parser.error(f"--{name.replace('_', '-')} has no meaning {place} --fill")
    for name, default in (_ONLY_GENERATED | _ONLY_FILLED).items():
        if getattr(options, name) is None:
            setattr(options, name, default)
    if options.num is None:
        options.num = 1 if options.fill or options.temperature == 0 else 10
    for name in ("num", "batch", "min_length", "steps"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(options, name)}: must be at least 1")
    try:
        options.sampling = Sampling(
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            nonstandard=options.allow_nonstandard,
            seed=options.seed,
        )
    except ValueError as error:
        parser.error(f"--{error}")
    if options.max_length < options.min_length:
        parser.error(f"--max-length {options.max_length}: must be at least --min-length {options.min_length}")
    if options.temperature == 0 and options.num > 1:
        parser.error(f"--temperature 0 gives one and the same protein: --num {options.num} must be 1")
    return options


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of `protperf generate`."""
    parser = argparse.ArgumentParser(
        "protperf generate",
        description="Sample proteins from a causal model, or fill the <mask> places of proteins with a masked one "
        "(--fill). The same seed gives the same FASTA, whatever the batch. Perplexity in a header is the model's "
        "own, over the residues that were drawn.",
        epilog="Exit status: 0 all done, 3 some records left out, 1 failure (no file is written), 2 wrong usage.",
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help=CHECKPOINT_HELP)
    parser.add_argument("out", metavar="OUT", nargs="?", default=STDOUT, help="FASTA to write (-, stdout)")
    parser.add_argument("--num", type=int, metavar="N", help="proteins a prompt (10; with --fill 1)")
    parser.add_argument("--force", action="store_true", help="replace OUT if it is there")
    draws = parser.add_argument_group("draws")
    draws.add_argument("--seed", type=int, default=0, help="of the random numbers (%(default)s)")
    draws.add_argument("--temperature", type=float, default=1.0, metavar="T", help=TEMPERATURE_HELP)
    draws.add_argument("--top-k", "--top_k", type=int, default=0, metavar="K", help=TOP_K_HELP)
    draws.add_argument("--top-p", "--top_p", type=float, default=1.0, metavar="P", help=TOP_P_HELP)
    draws.add_argument("--allow-nonstandard", action="store_true", help="also draw B, O, U, X, Z and J")
    growing = parser.add_argument_group("with a causal model")
    growing.add_argument("--prompt", metavar="SEQ|FASTA", help=PROMPT_HELP)
    growing.add_argument("--max-length", "--max_length", type=int, metavar="N", help=MAX_LENGTH_HELP)
    growing.add_argument("--min-length", "--min_length", type=int, metavar="N", help="no end before N (1)")
    growing.add_argument("--batch", type=int, metavar="N", help="proteins that grow at once (16)")
    filling = parser.add_argument_group("with a masked model")
    filling.add_argument("--fill", metavar="FASTA", help="proteins with <mask> places; - is stdin")
    filling.add_argument("--steps", type=int, metavar="N", help=STEPS_HELP)
    add_model_arguments(parser)
    add_record_arguments(parser)
    return parser


def _say(text: str) -> None:
    """Write one line of log."""
    tqdm.write(f"protperf generate: {text}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
