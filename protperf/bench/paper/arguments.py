"""The arguments of `protperf bench paper`: an experiment, its data, its size."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from protperf.bench.numbers import even, natural, positive, positive_float

Parser = argparse.ArgumentParser
AddOutputs = Callable[[Parser], None]

EXPERIMENTS = ("curves",)


def add_paper(commands: argparse._SubParsersAction[Parser], *, add_outputs: AddOutputs) -> None:
    """Add `paper` with its experiments.

    Args:
        commands: benchmarks.
        add_outputs: adds what all benchmarks write.
    """
    parser = commands.add_parser(
        "paper",
        help="the evidence of the Performer paper, on real proteins",
        description="The experiments of the Performer paper (Choromanski et al. 2021) on proteins, at a size for two CPU cores: docs/paper.md "
        "says what the paper reports, what was measured, and why they differ. What is done stays in --work; a command that was killed goes on.",
    )
    experiments = parser.add_subparsers(dest="experiment", required=True, metavar="|".join(EXPERIMENTS))
    for experiment in (_add_curves(experiments),):
        add_outputs(experiment)


def check_paper(parser: Parser, options: argparse.Namespace) -> None:
    """Refuse what does not go together."""
    if hasattr(options, "model_dim") and options.model_dim % options.heads:
        parser.error(f"--model-dim {options.model_dim}: must be a multiple of --heads {options.heads}")


def _add_curves(experiments: argparse._SubParsersAction[Parser]) -> Parser:
    parser = experiments.add_parser(
        "curves",
        help="training curves of all systems (Fig. 6, Table 2)",
        description="Train all systems at equal shape, steps and data, masked and causal, several seeds of each; held-out perplexity and "
        "accuracy beside the n-gram floors.",
    )
    _add_data(parser)
    parser.add_argument("--window", type=positive, default=512, metavar="L", help="tokens (%(default)s)")
    parser.add_argument("--seeds", type=positive, default=3, metavar="N", help="0 ... N - 1 (%(default)s)")
    parser.add_argument("--systems", nargs="+", metavar="NAME", help="of those compared (all)")
    parser.add_argument("--objectives", nargs="+", metavar="NAME", help="(masked causal)")
    _add_model(parser)
    _add_training(parser, steps=800, batch=4)
    return parser


def _add_data(parser: Parser) -> None:
    """Add what proteins there are, how they are split, and where work is done."""
    parser.add_argument("fasta", type=Path, metavar="FASTA", help="proteins")
    parser.add_argument(
        "clusters",
        type=Path,
        metavar="TSV",
        help="their clusters: lines `representative TAB member`, plain or gzip",
    )
    parser.add_argument("--work", type=Path, required=True, metavar="DIR", help="dataset, runs and results")
    parser.add_argument(
        "--valid", type=share, default=0.01, metavar="SHARE", help="of the sequences held out (%(default)s)"
    )
    parser.add_argument(
        "--ood", type=share, default=0.02, metavar="SHARE", help="of the clusters held out (%(default)s)"
    )
    parser.add_argument(
        "--jobs", type=positive, default=2, metavar="N", help="processes of one thread each (%(default)s)"
    )


def _add_model(parser: Parser, *, layers: int = 2, model_dim: int = 128, feedforward_dim: int = 256) -> None:
    parser.add_argument("--layers", type=positive, default=layers, metavar="N", help="(%(default)s)")
    parser.add_argument("--heads", type=positive, default=4, metavar="N", help="(%(default)s)")
    parser.add_argument("--model-dim", type=positive, default=model_dim, metavar="D", help="(%(default)s)")
    parser.add_argument(
        "--feedforward-dim", type=positive, default=feedforward_dim, metavar="N", help="(%(default)s)"
    )
    parser.add_argument(
        "--features", type=even, default=128, metavar="M", help="random features (%(default)s)"
    )


def _add_training(parser: Parser, *, steps: int, batch: int, learning_rate: float = 3e-3) -> None:
    parser.add_argument("--steps", type=positive, default=steps, metavar="N", help="(%(default)s)")
    parser.add_argument(
        "--batch", type=positive, default=batch, metavar="N", help="windows of a step (%(default)s)"
    )
    parser.add_argument(
        "--learning-rate",
        type=positive_float,
        default=learning_rate,
        metavar="X",
        help="the peak (%(default)s)",
    )
    parser.add_argument(
        "--warmup", type=natural, default=steps // 10, metavar="N", help="steps (%(default)s)"
    )
    parser.add_argument(
        "--validate-every", type=positive, default=steps // 8, metavar="N", help="steps (%(default)s)"
    )


def share(text: str) -> float:
    """Return a number between 0 and 1, both excluded."""
    value = float(text)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be between 0 and 1")
    return value
