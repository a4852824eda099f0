"""The arguments of `protperf maps`."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from protperf.arguments import (
    CHECKPOINT_HELP,
    add_model_arguments,
    add_record_arguments,
    check_model_arguments,
)
from protperf.formats.contact_head import CONTACT_HEAD_NAME

FIGURES = (".png", ".svg", ".pdf")
NUMBERS = ".npz"

_STATUS = "Exit status: 0 all done, {some}1 failure, 2 wrong usage."
_SPAN = re.compile(r"(\d+)(?:-(\d+))?")


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line; wrong usage exits with status 2."""
    parser, parsers = _make_parsers()
    options = parser.parse_args(argv)
    chosen = parsers[options.map]
    check_model_arguments(chosen, options)
    allowed = (*FIGURES, NUMBERS) if options.map == "attention" else FIGURES
    if options.out.suffix not in allowed:
        chosen.error(f"OUT is {str(options.out)!r}; its name must end in {', '.join(allowed)}")
    if options.map == "similarity" and options.max_proteins < 1:
        chosen.error(f"--max-proteins {options.max_proteins}: must be at least 1")
    if options.map == "contacts":
        _check_contacts(chosen, options)
    return options


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of `protperf maps`."""
    return _make_parsers()[0]


def _make_parsers() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """Return the parser of the command, and that of each map."""
    parser = argparse.ArgumentParser(
        "protperf maps",
        description="Where a model looks, which amino acids are alike to it, which residues it says touch: figures (PNG, "
        "SVG or PDF, as the name says) and numbers. Layers and heads count from 0, -1 is the last; residues count from 1.",
    )
    commands = parser.add_subparsers(dest="map", required=True, metavar="attention|similarity|contacts")
    parsers = {
        "attention": _add_attention(commands),
        "similarity": _add_similarity(commands),
        "contacts": _add_contacts(commands),
    }
    return parser, parsers


def _check_contacts(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    if options.regularisation <= 0:
        parser.error(f"--regularisation {options.regularisation}: must be above 0")
    if options.head and options.save_head:
        parser.error("--head is fitted already: it does not go with --save-head")
    if not options.head and not options.save_head:
        options.save_head = options.out.with_name(CONTACT_HEAD_NAME)


def _add_attention(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        "attention",
        usage="protperf maps attention CHECKPOINT FASTA OUT [options]",
        help="maps of one protein by layer and head",
        description="Attention maps of one protein by layer and head. Rows look at columns; colours tell weights "
        "relative to even attention.",
        epilog=_STATUS.format(some=""),
    )
    parser.add_argument("checkpoint", type=Path, help=CHECKPOINT_HELP)
    parser.add_argument("input", metavar="FASTA", help="sequence file; - is stdin")
    parser.add_argument(
        "out", type=Path, metavar="OUT", help=".png, .svg or .pdf; or .npz, the numbers themselves"
    )
    parser.add_argument(
        "--record", metavar="ID", help="which record, as --id names it, or by its accession (the first)"
    )
    parser.add_argument(
        "--layers", nargs="+", type=_place, metavar="N", help="or all (up to 4 from first to last)"
    )
    parser.add_argument("--heads", nargs="+", type=_place, metavar="N", help="or all (the first 8)")
    parser.add_argument(
        "--rows",
        nargs="+",
        type=_span,
        metavar="RESIDUE",
        help="residues that look, such as 10 50 100-160; needed for long proteins (all, and <bos> and <eos>)",
    )
    _add_shared(parser)
    return parser


def _add_similarity(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        "similarity",
        help="amino acids that heads look at alike, beside BLOSUM62",
        description="Similarity of amino acids: the correlation, over all heads of all layers, of the shares of attention "
        "that go to them; beside BLOSUM62, with Pearson's correlation of the two over the 190 pairs.",
        epilog=_STATUS.format(some="3 some records left out, "),
    )
    parser.add_argument("checkpoint", type=Path, help=CHECKPOINT_HELP)
    parser.add_argument("inputs", nargs="+", metavar="FASTA", help="sequence files; - is stdin")
    parser.add_argument("out", type=Path, metavar="OUT", help="figure: .png, .svg or .pdf")
    parser.add_argument(
        "--max-proteins", type=int, default=800, metavar="N", help="the first N records (%(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers to FILE")
    _add_shared(parser, token_budget=4096)
    return parser


def _add_contacts(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        "contacts",
        usage="protperf maps contacts CHECKPOINT OUT --structures PATH... [options]",
        help="contacts out of attention maps, against structures",
        description="Contacts out of attention maps by logistic regression: each structure is predicted by a regression "
        "fitted to the others, and one fitted to all is saved. A contact is two C-beta atoms (C-alpha of glycine) under 8 "
        "Angstrom apart, of residues at least 6 apart along the chain.",
        epilog=_STATUS.format(some="3 some structures left out, "),
    )
    parser.add_argument("checkpoint", type=Path, help=CHECKPOINT_HELP)
    parser.add_argument("out", type=Path, metavar="OUT", help="figure: .png, .svg or .pdf")
    parser.add_argument(
        "--structures",
        nargs="+",
        type=Path,
        required=True,
        metavar="PATH",
        help="PDB or mmCIF files, plain or gzip, or folders of them; FILE:CHAIN names a chain (the first protein)",
    )
    parser.add_argument("--head", type=Path, metavar="FILE", help="judge this head; none is fitted")
    parser.add_argument(
        "--save-head",
        type=Path,
        metavar="FILE",
        help=f"where the fitted head goes ({CONTACT_HEAD_NAME} beside OUT)",
    )
    parser.add_argument(
        "--regularisation",
        type=float,
        default=0.01,
        metavar="C",
        help="inverse strength of the L2 penalty on weights of standardised maps (%(default)s)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers to FILE")
    _add_shared(parser, records=False)
    return parser


def _add_shared(
    parser: argparse.ArgumentParser, *, token_budget: int | None = None, records: bool = True
) -> None:
    add_model_arguments(parser, token_budget=token_budget)
    parser.add_argument("--force", action="store_true", help="replace files that are there")
    if records:
        add_record_arguments(parser)


def _place(text: str) -> int | None:
    """Read a layer or head; `None` is all."""
    if text == "all":
        return None
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number such as 0 or -1, and not all") from None


def _span(text: str) -> range:
    """Read residues `A` or `A-B`, from 1."""
    match = _SPAN.fullmatch(text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is no residue or span of residues, such as 10 or 100-160")
    first, last = int(match[1]), int(match[2] or match[1])
    if not 1 <= first <= last:
        raise argparse.ArgumentTypeError(f"{text!r}: residues count from 1, and a span rises")
    return range(first, last + 1)
