"""The command line of `protperf convert`."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from protperf.convert.swap_options import add_swap_options, check_swap_options

TARGETS = ("safetensors",)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line; wrong usage exits with status 2."""
    parser = make_parser()
    options = parser.parse_args(argv)
    if not re.fullmatch(r"[A-Za-z0-9.+-]*", options.license):
        parser.error(f"--license {options.license!r}: give an SPDX identifier, such as CC-BY-4.0")
    if not options.name.isprintable():
        parser.error(f"--name {options.name!r}: must be one line")
    if options.heads is not None and options.heads < 1:
        parser.error(f"--heads {options.heads}: must be at least 1")
    check_swap_options(parser, options)
    return options


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of `protperf convert`."""
    parser = argparse.ArgumentParser(
        "protperf convert",
        description="Writes config.json, model.safetensors and model_card.md into a folder, which all commands take, "
        "and (after `import protperf.hf`) transformers: from a model of protperf, or from the pretrained weights of a "
        "masked Transformer, whose scores it keeps (BERT, RoBERTa and ESM-2 as transformers saves them, fairseq's RoBERTa "
        "such as Sapiens).",
    )
    parser.add_argument(
        "source",
        type=Path,
        metavar="SOURCE",
        help="a .ckpt file, the folder of a run (its best checkpoint), a folder with config.json and model.safetensors or "
        "pytorch_model.bin, or a file of weights with its *config.json beside it",
    )
    parser.add_argument("out", type=Path, metavar="OUT_DIR", help="the folder to write")
    parser.add_argument("--to", choices=TARGETS, default=TARGETS[0], help="form of the weights (%(default)s)")
    add_card_options(parser)
    add_source_options(parser)
    add_swap_options(parser)
    parser.add_argument("--force", action="store_true", help="replace a model that is in OUT_DIR")
    return parser


def add_card_options(parser: argparse.ArgumentParser) -> None:
    """Add what the model card tells and only the user knows."""
    card = parser.add_argument_group("the card")
    card.add_argument("--name", default="", help="title of the card (the run's name)")
    card.add_argument(
        "--license",
        default="",
        metavar="ID",
        help="licence of the weights for the card, such as CC-BY-4.0 (none)",
    )
    card.add_argument(
        "--scores", type=Path, metavar="JSON", help="results for the card, from `protperf evaluate --json`"
    )


def add_source_options(parser: argparse.ArgumentParser) -> None:
    """Add what pretrained weights may not tell of themselves."""
    source = parser.add_argument_group("pretrained weights")
    source.add_argument(
        "--heads",
        type=int,
        metavar="N",
        help="heads of each attention, where no config says it: the weights do not",
    )
    source.add_argument(
        "--vocab",
        type=Path,
        metavar="FILE",
        help="vocab.txt, tokenizer.json or vocab.json, where it does not lie beside the weights or in their config",
    )
