"""The command line of `protperf score`."""

from __future__ import annotations

import argparse

from protperf.arguments import (
    CHECKPOINT_HELP,
    add_model_arguments,
    add_record_arguments,
    check_model_arguments,
)
from protperf.formats.streams import STDIN
from protperf.score.output import SEPARATORS, STDOUT, suffix_of


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line; wrong usage exits with status 2."""
    parser = make_parser()
    options = parser.parse_intermixed_args(argv)
    options.checkpoint, *options.inputs = options.paths
    if options.mutations:
        if len(options.inputs) != 1:
            parser.error("with --mutations give a checkpoint, then the file to write (- is stdout)")
    elif len(options.inputs) < 2:
        parser.error("give a checkpoint, then sequence files, then the file to write (- is stdout)")
    options.out = options.inputs.pop()
    if options.out != STDOUT and suffix_of(options.out) not in SEPARATORS:
        parser.error(f"OUT is {options.out!r}; its name must end in {' or '.join(SEPARATORS)}, or be -")
    if options.mutations == options.wild_type == STDIN:
        parser.error("--mutations - and --wild-type -: stdin can be read only once")
    if not options.mutations:
        for name in ("wild_type", "measured"):
            if getattr(options, name):
                parser.error(f"--{name.replace('_', '-')} goes with --mutations")
        if "," in options.method or options.method == "all":
            parser.error("--method: one method for FASTA; several go with --mutations")
    if options.offset_idx is not None:
        options.offset = options.offset_idx - 1
    check_model_arguments(parser, options)
    return options


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of `protperf score`."""
    parser = argparse.ArgumentParser(
        "protperf score",
        usage="protperf score [options] CHECKPOINT FASTA... OUT\n"
        "       protperf score [options] CHECKPOINT --mutations TABLE [--wild-type SEQUENCE|FASTA] OUT",
        description="How likely a model finds proteins, each of them whole, whatever its length; or, with --mutations, "
        "how much likelier each mutant is than its wild type. OUT is a .csv or .tsv file, or - for stdout. Records that "
        "are left out are listed in OUT.skipped.tsv. A table of mutations keeps its columns and its rows and gets a "
        "column protperf_METHOD for each method.",
        epilog="Exit status: 0 all scored, 3 some left without a score, 1 failure (nothing is written), 2 wrong usage.",
    )
    parser.add_argument(
        "paths",
        nargs="+",
        metavar="CHECKPOINT FASTA... OUT",
        help=f"{CHECKPOINT_HELP}; sequence files (- is stdin); the file to write (- is stdout)",
    )
    parser.add_argument(
        "--method",
        "--scoring-strategy",
        default="",
        metavar="NAME",
        help="likelihood (causal models); pseudo-ppl, each residue masked alone, or strided-ppl, every seventh at once, "
        "so 7 passes a protein (masked models). With --mutations also masked-marginals (the default) and wt-marginals "
        "(masked models), several joined by commas, or all",
    )
    add_model_arguments(parser)
    parser.add_argument("--force", action="store_true", help="replace files that are there")
    table = parser.add_argument_group("mutations")
    table.add_argument(
        "--mutations", metavar="TABLE", help="CSV or TSV with a column of mutants: A23B, or A23B:C45D, or WT"
    )
    table.add_argument(
        "--wild-type",
        metavar="SEQUENCE|FASTA",
        default="",
        help="the wild type, or a file with it alone; by default rebuilt from --sequence-column",
    )
    offsets = table.add_mutually_exclusive_group()
    offsets.add_argument(
        "--offset",
        type=int,
        default=0,
        metavar="N",
        help="number in the table less place in the wild type, which counts from 1 (0)",
    )
    offsets.add_argument(
        "--offset-idx",
        "--offset_idx",
        type=int,
        metavar="N",
        help="number that the table gives to the first residue of the wild type: the same as --offset N-1",
    )
    table.add_argument(
        "--mutation-column",
        "--mutation-col",
        default="mutant",
        metavar="NAME",
        help="column of the mutants (%(default)s)",
    )
    table.add_argument(
        "--sequence-column",
        default="mutated_sequence",
        metavar="NAME",
        help="column of the mutated sequences (%(default)s)",
    )
    table.add_argument(
        "--measured",
        default="",
        metavar="COLUMN",
        help="measured values: print Spearman's coefficient of each method",
    )
    add_record_arguments(parser)
    return parser
