"""The options of a swap: which attention, with what it learns to follow the exact one, and on which proteins."""

from __future__ import annotations

import argparse
from pathlib import Path

from protperf.arguments import check_outputs

SWAPS = ("favor", "favor_hyperbolic", "oprf", "relu", "relu_unprojected", "elu")
"""What exact attention may be swapped for: feature maps of queries and keys as they are, in both directions."""

UNPROJECTED = ("relu_unprojected", "elu")
"""Those of them that have no projection: those of `protperf.attention`, which imports torch, and `--help` shall not."""

METHODS = ("full", "lora")
"""What tuning moves: all weights, or thin matrices beside them."""

_DEFAULTS = {
    "features": 256,
    "projection_seed": 0,
    "keep_softmax": (),
    "transfer": 0,
    "transfer_rate": 3e-2,
    "tune": 0,
    "tune_method": "full",
    "lora_rank": 8,
    "rate": 1e-3,
    "proteins_per_step": 8,
    "seed": 0,
}


def add_swap_options(parser: argparse.ArgumentParser) -> None:
    """Add what makes a Performer of a Transformer; `check_swap_options` checks it and fills in what was left out."""
    swap = parser.add_argument_group(
        "another attention",
        "Replaces the exact attention of a model, whose weights stay, by one that is linear in the length; then lets it learn "
        "from proteins, if asked, and measures on proteins that it did not learn from.",
    )
    swap.add_argument("--attention", choices=SWAPS, help="which (none: attention stays exact)")
    swap.add_argument("--features", type=int, metavar="M", help="rows of the random projection (256)")
    swap.add_argument("--projection-seed", type=int, metavar="N", help="of its draw (0)")
    swap.add_argument(
        "--keep-softmax", type=_layers, metavar="LAYERS", help="layers that stay exact, from 0, such as 0,11"
    )
    swap.add_argument(
        "--fasta",
        type=Path,
        metavar="FILE",
        help="proteins to learn from and to measure on; a tenth is held out where anything is learned",
    )
    swap.add_argument(
        "--evaluate", type=Path, metavar="FILE", help="proteins to measure on, instead of that tenth"
    )
    swap.add_argument(
        "--report", type=Path, metavar="JSON", help="also write all that was measured to a file"
    )
    learn = parser.add_argument_group("what another attention learns")
    learn.add_argument(
        "--transfer",
        type=int,
        metavar="STEPS",
        help="let the features of each head, and a factor of its logits, learn to gather what exact attention gathers (0)",
    )
    learn.add_argument("--transfer-rate", type=float, metavar="RATE", help="of that (0.03)")
    learn.add_argument(
        "--tune", type=int, metavar="STEPS", help="then train the model on what it was trained to answer (0)"
    )
    learn.add_argument(
        "--tune-method",
        choices=METHODS,
        help="what moves then: all weights, or LoRA, merged at the end; it needs the package peft (full)",
    )
    learn.add_argument("--lora-rank", type=int, metavar="R", help="width of the thin matrices of LoRA (8)")
    learn.add_argument("--rate", type=float, metavar="RATE", help="learning rate of the tuning (0.001)")
    learn.add_argument("--proteins-per-step", type=int, metavar="N", help="in transfer and tuning (8)")
    learn.add_argument("--seed", type=int, metavar="N", help="of what is masked and drawn in both (0)")


def check_swap_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """End with status 2 where options of the swap are wrong or contradict each other; fill in the defaults."""
    given = {
        name for name in (*_DEFAULTS, "fasta", "evaluate", "report") if getattr(options, name) is not None
    }
    if options.attention is None:
        for name in sorted(given):
            parser.error(f"{_flag(name)}: is of another attention; add --attention favor")
    for name, value in _DEFAULTS.items():
        if name not in given:
            setattr(options, name, value)
    for name, least in (
        ("features", 1),
        ("transfer", 0),
        ("tune", 0),
        ("lora_rank", 1),
        ("proteins_per_step", 1),
    ):
        if getattr(options, name) < least:
            parser.error(f"{_flag(name)} {getattr(options, name)}: must be at least {least}")
    for name in ("projection_seed", "seed"):
        if not 0 <= getattr(options, name) < 2**63:
            parser.error(f"{_flag(name)} {getattr(options, name)}: must be at least 0 and below 2^63")
    for name in ("transfer_rate", "rate"):
        if not 0 < getattr(options, name) < float("inf"):
            parser.error(f"{_flag(name)} {getattr(options, name)}: must be above 0")
    _check_together(parser, options, given)


def check_report(options: argparse.Namespace) -> None:
    """Refuse, before any work, a report that cannot be written.

    Raises:
        ValueError: its folder is not there, it is an input or belongs to a model, or it exists.
    """
    if options.report is not None:
        report = options.report.resolve()
        in_source = report.exists() and report.is_relative_to(options.source.resolve())
        if in_source or report.is_relative_to(options.out.resolve()):
            raise ValueError(
                f"--report {options.report}: is the place of a model; give another name for the report"
            )
        inputs = [path for path in (options.source, options.fasta, options.evaluate) if path is not None]
        check_outputs([options.report], inputs, force=options.force)


def _check_together(parser: argparse.ArgumentParser, options: argparse.Namespace, given: set[str]) -> None:
    """Refuse options that say nothing without another one."""
    needs = [
        ("transfer_rate", "transfer", bool(options.transfer)),
        ("tune_method", "tune", bool(options.tune)),
        ("rate", "tune", bool(options.tune)),
        ("lora_rank", "tune-method lora", bool(options.tune) and options.tune_method == "lora"),
        ("proteins_per_step", "transfer or --tune", bool(options.transfer or options.tune)),
    ]
    for name, other, there in needs:
        if name in given and not there:
            parser.error(f"{_flag(name)}: says something with --{other} alone")
    for name in ("transfer", "tune"):
        if getattr(options, name) and options.fasta is None:
            parser.error(f"{_flag(name)} {getattr(options, name)}: needs proteins; add --fasta FILE")
    if options.report and not (options.fasta or options.evaluate):
        parser.error("--report: nothing is measured without proteins; add --fasta FILE or --evaluate FILE")
    if options.attention == "oprf" and options.fasta is None:
        parser.error("--attention oprf: fits its features to the norms of queries and keys; add --fasta FILE")
    if options.attention in UNPROJECTED:
        for name in sorted(given & {"features", "projection_seed"}):
            parser.error(f"{_flag(name)}: --attention {options.attention} has no projection")
        if options.transfer:
            parser.error(f"--transfer: --attention {options.attention} has no features that could learn")


def _layers(text: str) -> tuple[int, ...]:
    """Return the numbers of layers in a list with commas, sorted."""
    try:
        return tuple(sorted({int(number) for number in text.split(",")}))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: give numbers of layers, from 0, such as 0,11") from None


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
