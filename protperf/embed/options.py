"""The command line of `protperf embed`."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from protperf.arguments import (
    CHECKPOINT_HELP,
    add_model_arguments,
    add_record_arguments,
    check_model_arguments,
)

INCLUDES = ("mean", "per_tok", "bos", "logits", "contacts")
SUFFIXES = {"h5": (".h5", ".hdf5"), "npz": (".npz",), "parquet": (".parquet",), "pt": ("",)}
"""Format -> how the name of its output ends; `pt` is a folder."""

_LISTS = {"--include": re.compile("|".join(INCLUDES)), "--repr-layers": re.compile(r"-?\d+")}
"""Options that take several words, and what these look like."""


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line; wrong usage exits with status 2."""
    parser = make_parser()
    words = _one_word_each(sys.argv[1:] if argv is None else argv)
    options = parser.parse_intermixed_args(words)
    if options.merge:
        if len(options.paths) != 1:
            parser.error("--merge takes OUT alone, as it was given to the runs with --shard")
        options.out = Path(options.paths[0])
        return options
    if len(options.paths) < 3:
        parser.error("give a checkpoint, then sequence files, then the file to write")
    options.checkpoint, *options.inputs, out = options.paths
    options.out = Path(out)
    _settle_format(parser, options)
    options.include = list(dict.fromkeys(options.include or ["mean"]))
    options.repr_layers = options.repr_layers or [-1]
    check_model_arguments(parser, options)
    if options.window < 2:
        parser.error(f"--window {options.window}: must be at least 2 residues")
    if options.long == "window" and "contacts" in options.include:
        parser.error("--include contacts needs whole proteins: --long whole or --long error")
    if options.keys == "sequence" and options.format != "h5":
        parser.error(
            f"--keys sequence with --format {options.format}: only HDF5 files name proteins by their sequence"
        )
    if options.format == "pt" and options.shard:
        parser.error("--shard with --format pt: folders are not merged; take h5, npz or parquet")
    if options.devices < 1:
        parser.error(f"--devices {options.devices}: must be at least 1")
    if options.contact_head and "contacts" not in options.include:
        parser.error("--contact-head is for --include contacts")
    return options


def _settle_format(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Let the name of the output say the format, or check that they agree."""
    suffix = options.out.suffix
    named = [name for name, suffixes in SUFFIXES.items() if suffix in suffixes and suffix]
    options.format = options.format or (named[0] if named else None)
    if not options.out.name:
        parser.error(f"OUT is {str(options.out)!r}; give it a name of its own")
    if options.format is None:
        parser.error(
            f"OUT is {str(options.out)!r}; its name must end in .h5, .hdf5, .npz or .parquet, or give --format pt for a "
            "folder with a .pt file for each protein"
        )
    if options.format != "pt" and suffix not in SUFFIXES[options.format]:
        parser.error(
            f"OUT is {str(options.out)!r}; with --format {options.format} its name must end in "
            f"{' or '.join(SUFFIXES[options.format])}"
        )


def _shard(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise argparse.ArgumentTypeError(f"{text!r}; allowed: 1/N to N/N, such as 2/8")
    return int(match[1]), int(match[2])


def _one_word_each(argv: Sequence[str]) -> list[str]:
    """Turn `--include mean per_tok` into an option for each word, so that paths may follow it."""
    words: list[str] = []
    inside = ""
    for word in argv:
        option = word.replace("_", "-") if word.startswith("--") else ""
        name, _, first = word.partition("=")
        if first and name.replace("_", "-") in _LISTS:
            inside = name.replace("_", "-")
            words.append(f"{inside}={first}")
            continue
        if inside and _LISTS[inside].fullmatch(word):
            if words[-1] == inside:
                words.pop()
            words.append(f"{inside}={word}")
            continue
        inside = option if option in _LISTS else ""
        words.append(inside or word)
    return words


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of `protperf embed`."""
    parser = argparse.ArgumentParser(
        "protperf embed",
        usage="protperf embed [options] CHECKPOINT FASTA... OUT\n       protperf embed --merge OUT",
        description="Embed proteins, each of them whole, whatever its length. OUT is an HDF5 file with one dataset a "
        "protein, in the order of the input; the id stands in the attribute original_id. With several kinds or layers "
        "OUT.h5 becomes OUT.mean.h5, OUT.per_tok.h5, OUT.mean.layer0.h5 and so on. Records that are left out are listed "
        "in OUT.skipped.tsv. A run that was killed goes on when the same command is given again.",
        epilog="Exit status: 0 all records written, 3 some left out, 1 failure, 2 wrong usage.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "paths",
        nargs="+",
        metavar="CHECKPOINT FASTA... OUT",
        help=f"{CHECKPOINT_HELP}; sequence files (- is stdin); what to write",
    )
    _add_kinds(parser)
    _add_lengths(parser)
    add_model_arguments(parser)
    parser.add_argument(
        "--devices",
        type=int,
        default=1,
        metavar="K",
        help="GPUs, or processes on a CPU, at once (%(default)s)",
    )
    parser.add_argument(
        "--shard",
        type=_shard,
        metavar="I/N",
        help="embed part I of N (from 1), for arrays of jobs; then --merge OUT",
    )
    parser.add_argument(
        "--merge", action="store_true", help="join the files of all shards of OUT, in input order"
    )
    parser.add_argument("--resume", action="store_true", help="go on with a killed run; the default")
    parser.add_argument("--force", action="store_true", help="begin anew; replace files that are there")
    add_record_arguments(parser)
    return parser


def _add_kinds(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_argument_group("what is kept")
    kinds.add_argument(
        "--include",
        action="append",
        choices=INCLUDES,
        metavar="KIND",
        help="one or more: mean, one vector a protein; per_tok, one row a residue; bos, the state of <bos>; logits, the "
        "scores of all tokens at each residue; contacts, probabilities for each pair of residues (mean)",
    )
    kinds.add_argument(
        "--repr-layers",
        action="append",
        type=int,
        metavar="LAYER",
        help="one or more: 0 enters the first block, -1 is the last, after the final norm (-1)",
    )
    kinds.add_argument(
        "--pool",
        choices=("mean", "max", "cls"),
        default="mean",
        help="what --include mean keeps: the mean or maximum over residues, or the state of <bos> (%(default)s)",
    )
    kinds.add_argument(
        "--format",
        choices=tuple(SUFFIXES),
        help="h5, npz, parquet, or pt as esm-extract writes it (by the name of OUT)",
    )
    kinds.add_argument(
        "--dtype",
        choices=("float32", "float16"),
        default="float32",
        help="of the numbers in files (%(default)s)",
    )
    kinds.add_argument(
        "--keys",
        choices=("number", "sequence"),
        default="number",
        help="names of the datasets: running numbers, or the hash of the sequence, by which biotrainer looks (%(default)s)",
    )
    kinds.add_argument(
        "--contact-head",
        type=Path,
        metavar="FILE",
        help="what `protperf maps contacts` wrote (contact_head.json beside the checkpoint)",
    )


def _add_lengths(parser: argparse.ArgumentParser) -> None:
    lengths = parser.add_argument_group("long proteins")
    lengths.add_argument(
        "--long",
        choices=("whole", "window", "error"),
        default="whole",
        help="those of more than --window residues: embed them whole, stitched from windows that overlap by half (weighted "
        "by the distance from a window's ends), or leave them out (%(default)s)",
    )
    lengths.add_argument(
        "--window",
        type=int,
        default=8190,
        metavar="W",
        help="residues (%(default)s: a window of 8,192 tokens)",
    )
