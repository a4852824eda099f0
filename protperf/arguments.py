"""What the commands that use a trained model ask alike: where to compute, how records are read, what may be written."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from protperf.formats.fasta import Policy, Record
from protperf.formats.streams import STDIN

PRECISIONS = ("fp32", "bf16", "fp16")
IDS = ("word", "header", "accession")

CHECKPOINT_HELP = (
    "a .ckpt file, the folder of a run (its best checkpoint), or one with config.json and model.safetensors"
)


def add_model_arguments(parser: argparse.ArgumentParser, *, token_budget: int | None = 4096) -> None:
    """Add `--toks-per-batch`, `--precision`, `--device` and `--nogpu`; `check_model_arguments` checks them.

    Args:
        parser: of the command.
        token_budget: default of `--toks-per-batch`; `None` for a command that shows one protein at a time.
    """
    if token_budget is not None:
        parser.add_argument(
            "--toks-per-batch",
            "--toks_per_batch",
            type=int,
            default=token_budget,
            metavar="N",
            help="tokens in a forward pass (%(default)s)",
        )
    parser.add_argument(
        "--precision", choices=PRECISIONS, default="fp32", help="of the computation (%(default)s)"
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N or mps (%(default)s)")
    parser.add_argument("--nogpu", action="store_true", help="the same as --device cpu")


def check_model_arguments(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """End with status 2 where the options of `add_model_arguments` are wrong; settle `--nogpu`."""
    if getattr(options, "toks_per_batch", 1) < 1:
        parser.error(f"--toks-per-batch {options.toks_per_batch}: must be at least 1")
    if options.nogpu:
        if options.device not in ("auto", "cpu"):
            parser.error(f"--nogpu and --device {options.device} contradict each other")
        options.device = "cpu"


def add_record_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--id`, `--strict`, `--gaps` and `--unknown`: what is read from FASTA and under which name."""
    records = parser.add_argument_group("records")
    records.add_argument(
        "--id",
        choices=IDS,
        default="word",
        help="what names a protein: the first word of its header, the whole header, or the accession (%(default)s)",
    )
    records.add_argument(
        "--strict", action="store_true", help="stop at the first record that would be left out"
    )
    records.add_argument(
        "--gaps", choices=("refuse", "drop"), default="refuse", help="records with - or . (%(default)s)"
    )
    records.add_argument(
        "--unknown",
        choices=("refuse", "x"),
        default="refuse",
        help="other characters; x reads them as X (%(default)s)",
    )


def policy_of(options: argparse.Namespace, *, mask_token: bool) -> Policy:
    """Return what to do with odd records, as `add_record_arguments` asked."""
    return Policy(gaps=options.gaps, unknown=options.unknown, mask_token=mask_token, strict=options.strict)


def id_of(record: Record, kind: str) -> str:
    """Return the name of a record: one of `IDS`."""
    return {"word": record.id, "header": record.header}.get(kind) or record.accession


def check_outputs(paths: Sequence[Path], inputs: Sequence[str | Path], *, force: bool) -> None:
    """Refuse, before any work, what must not be written.

    Raises:
        ValueError: no folder there, or a path is an input, a folder, or taken.
    """
    read = {Path(name).resolve() for name in inputs if name != STDIN}
    for number, path in enumerate(paths):
        if path.resolve() in {other.resolve() for other in paths[:number]}:
            raise ValueError(f"{path}: is asked for twice; give each output a name of its own")
        if not path.parent.is_dir():
            raise ValueError(f"{path.parent}: no such folder to write {path.name} to; make it first")
        if path.resolve() in read:
            raise ValueError(f"{path}: is an input; give another name for the output")
        if path.is_dir():
            raise ValueError(f"{path}: is a folder; give the name of a file")
        if path.exists() and not force:
            raise ValueError(f"{path}: exists already; give another name, or --force to replace it")
