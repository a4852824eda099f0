"""The arguments of `protperf bench paper`: an experiment, its data, its size."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from protperf.bench.numbers import even, natural, positive, positive_float, several

if TYPE_CHECKING:
    Experiments = argparse._SubParsersAction[argparse.ArgumentParser]

Parser = argparse.ArgumentParser
AddOutputs = Callable[[Parser], None]

EXPERIMENTS = ("curves", "long", "speed", "error", "transfer", "redraw", "similarity")
PAGE = "page"


def add_paper(commands: Experiments, *, add_outputs: AddOutputs) -> None:
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
    experiments = parser.add_subparsers(
        dest="experiment", required=True, metavar="|".join((*EXPERIMENTS, PAGE))
    )
    for add in (_add_curves, _add_long, _add_speed, _add_error, _add_transfer, _add_redraw, _add_similarity):
        add_outputs(add(experiments))
    page = experiments.add_parser(
        PAGE,
        help="put numbers into a page",
        description="Replace the tables of a page between `<!-- NAME -->` and `<!-- /NAME -->` by those of experiments.",
    )
    page.add_argument("page", type=Path, metavar="PAGE", help="Markdown, such as docs/paper.md")
    page.add_argument(
        "results", type=Path, nargs="+", metavar="JSON", help="what --json of an experiment wrote"
    )
    page.set_defaults(json=None, plot=None, force=False)


def check_paper(parser: Parser, options: argparse.Namespace) -> None:
    """Refuse what does not go together, and fill in what follows from other options."""
    if hasattr(options, "model_dim"):
        # heads of an even width, in `long` half as wide too
        least = options.heads * (4 if options.experiment == "long" else 2)
        if options.model_dim % least:
            parser.error(
                f"--model-dim {options.model_dim}: must be a multiple of {least} with --heads {options.heads}"
            )
    if hasattr(options, "steps"):
        options.warmup = options.steps // 10 if options.warmup is None else options.warmup
        options.validate_every = options.validate_every or max(1, options.steps // 8)


def _add_curves(experiments: Experiments) -> Parser:
    parser = experiments.add_parser(
        "curves",
        help="training curves of all systems (Fig. 6, Table 2)",
        description="Train all systems at equal shape, steps and data, masked and causal, several seeds of each; held-out perplexity and "
        "accuracy beside the n-gram floors.",
    )
    _add_data(parser)
    _add_window(parser, 512)
    parser.add_argument("--seeds", type=positive, default=3, metavar="N", help="0 ... N - 1 (%(default)s)")
    parser.add_argument(
        "--systems", nargs="+", metavar="NAME", help="such as Transformer or Performer-ReLU (all)"
    )
    _add_objectives(parser, "masked causal")
    _add_model(parser)
    _add_training(parser, steps=360)
    return parser


def _add_long(experiments: Experiments) -> Parser:
    parser = experiments.add_parser(
        "long",
        help="windows of 8,192 tokens: a Performer against the Transformer of its memory (Fig. 7)",
        description="Measure the memory of a training step; train a Performer, the deepest equally wide exact Transformer that needs no more "
        "memory, and the paper's small one, each for --seconds of one thread, on joined proteins.",
    )
    _add_data(parser)
    _add_window(parser, 8192)
    _add_model(parser, layers=6, model_dim=64, features=64)
    parser.add_argument("--objective", choices=("masked", "causal"), default="causal", help="(%(default)s)")
    parser.add_argument(
        "--depths",
        type=positive,
        nargs="+",
        default=(3, 5, 6, 7, 8),
        metavar="N",
        help="layers of Transformers to measure (3 5 6 7 8)",
    )
    parser.add_argument(
        "--seconds", type=positive_float, default=400.0, metavar="S", help="of training (%(default)s)"
    )
    _add_training(parser, steps=None, batch=1)
    return parser


def _add_speed(experiments: Experiments) -> Parser:
    parser = experiments.add_parser(
        "speed",
        help="time and memory of a training step against length (Fig. 3)",
        description="A training step of a Performer, a Transformer and the X line, in turns, at each length.",
    )
    parser.add_argument(
        "--lengths",
        type=positive,
        nargs="+",
        default=(512, 1024, 2048, 4096, 8192, 16384),
        metavar="L",
        help="tokens (512 ... 16384)",
    )
    _add_model(parser)
    parser.add_argument("--rounds", type=positive, default=3, metavar="N", help="turns of each (%(default)s)")
    parser.add_argument(
        "--budget",
        type=positive_float,
        default=30.0,
        metavar="SECONDS",
        help="leave out what would take longer for one step (%(default)s)",
    )
    parser.set_defaults(precision="32-true")
    return parser


def _add_error(experiments: Experiments) -> Parser:
    parser = experiments.add_parser(
        "error",
        help="error of attention against features and layers (Fig. 4, 14)",
        description="`protperf bench error` at the paper's sizes: positive and trigonometric features, rows independent or orthogonal.",
    )
    parser.add_argument(
        "--features",
        type=even,
        nargs="+",
        default=(16, 32, 64, 128, 256),
        metavar="F",
        help="random features (16 ... 256)",
    )
    parser.add_argument(
        "--sigmas",
        type=positive_float,
        nargs="+",
        default=(0.25, 0.5, 1.0),
        metavar="S",
        help="q and k are S N(0, 1) (0.25 0.5 1)",
    )
    parser.add_argument("--length", type=positive, default=4096, metavar="L", help="tokens (%(default)s)")
    parser.add_argument("--head-dim", type=even, default=16, metavar="K", help="(%(default)s)")
    parser.add_argument("--heads", type=positive, default=1, metavar="N", help="(%(default)s)")
    parser.add_argument("--seeds", type=positive, default=15, metavar="N", help="draws (%(default)s)")
    parser.add_argument(
        "--layers", type=natural, default=12, metavar="N", help="of a model; 0: none (%(default)s)"
    )
    for name, default in (("features", 256), ("heads", 8), ("head-dim", 64), ("length", 512), ("seeds", 3)):
        parser.add_argument(
            f"--layer-{name}", type=positive, default=default, metavar="N", help="of that model (%(default)s)"
        )
    return parser


def _add_transfer(experiments: Experiments) -> Parser:
    parser = experiments.add_parser(
        "transfer",
        help="a Transformer's weights in a Performer (Fig. 5)",
        description="Train Transformers, move their weights to positive and trigonometric features, and tune, beside training from scratch.",
    )
    _add_data(parser)
    _add_window(parser, 512)
    _add_model(parser)
    _add_training(parser)
    parser.add_argument(
        "--tune-steps", type=several, default=100, metavar="N", help="after the move (%(default)s)"
    )
    parser.add_argument(
        "--tune-learning-rate",
        type=positive_float,
        default=1e-3,
        metavar="X",
        help="of these, constant after a tenth of them (%(default)s)",
    )
    return parser


def _add_redraw(experiments: Experiments) -> Parser:
    parser = experiments.add_parser(
        "redraw",
        help="features redrawn against features drawn once (Fig. 5, 15)",
        description="Train Performer-softmax with several projections, drawn once and redrawn, all else equal.",
    )
    _add_data(parser)
    _add_window(parser, 512)
    parser.add_argument(
        "--projections", type=positive, default=4, metavar="N", help="seeds of projections (%(default)s)"
    )
    parser.add_argument("--redraw-every", type=positive, default=50, metavar="N", help="steps (%(default)s)")
    _add_model(parser, features=32)
    _add_training(parser, steps=300)
    return parser


def _add_similarity(experiments: Experiments) -> Parser:
    parser = experiments.add_parser(
        "similarity",
        help="amino acids that heads look at alike, against BLOSUM62 (Fig. 13)",
        description="Compare the attention of the models that `curves` trained in the same --work with BLOSUM62, beside models with new weights.",
    )
    _add_work(parser)
    _add_window(parser, 512)
    _add_objectives(parser, "masked", default=["masked"])
    parser.add_argument(
        "--proteins", type=positive, default=500, metavar="N", help="held out, at most (%(default)s)"
    )
    return parser


def _add_data(parser: Parser) -> None:
    """Add what proteins there are and how they are split."""
    parser.add_argument("fasta", type=Path, metavar="FASTA", help="proteins")
    parser.add_argument(
        "clusters",
        type=Path,
        metavar="TSV",
        help="their clusters: lines `representative TAB member`, plain or gzip",
    )
    parser.add_argument(
        "--valid", type=share, default=0.01, metavar="SHARE", help="of the sequences held out (%(default)s)"
    )
    parser.add_argument(
        "--ood", type=share, default=0.02, metavar="SHARE", help="of the clusters held out (%(default)s)"
    )
    _add_work(parser)


def _add_work(parser: Parser) -> None:
    """Add where work is done, and by how many."""
    parser.add_argument("--work", type=Path, required=True, metavar="DIR", help="datasets, runs and results")
    parser.add_argument(
        "--jobs", type=positive, default=2, metavar="N", help="processes of one thread each (%(default)s)"
    )


def _add_window(parser: Parser, default: int) -> None:
    parser.add_argument("--window", type=positive, default=default, metavar="L", help="tokens (%(default)s)")


def _add_objectives(parser: Parser, shown: str, *, default: list[str] | None = None) -> None:
    parser.add_argument("--objectives", nargs="+", default=default, metavar="NAME", help=f"({shown})")


def _add_model(parser: Parser, *, layers: int = 2, model_dim: int = 128, features: int = 128) -> None:
    parser.add_argument(
        "--layers", type=positive, default=layers, metavar="N", help="of a model (%(default)s)"
    )
    parser.add_argument("--heads", type=positive, default=4, metavar="N", help="of a layer (%(default)s)")
    parser.add_argument("--model-dim", type=positive, default=model_dim, metavar="D", help="(%(default)s)")
    parser.add_argument("--feedforward-dim", type=positive, default=256, metavar="N", help="(%(default)s)")
    parser.add_argument(
        "--features", type=even, default=features, metavar="M", help="random features (%(default)s)"
    )


def _add_training(parser: Parser, *, steps: int | None = 400, batch: int = 8) -> None:
    """Add how models train; `steps=None` where they follow from something else."""
    if steps:
        parser.add_argument("--steps", type=several, default=steps, metavar="N", help="(%(default)s)")
        parser.add_argument("--warmup", type=natural, metavar="N", help="steps (a tenth)")
        parser.add_argument("--validate-every", type=positive, metavar="N", help="steps (an eighth)")
    parser.add_argument(
        "--batch", type=positive, default=batch, metavar="N", help="windows of a step (%(default)s)"
    )
    parser.add_argument(
        "--learning-rate", type=positive_float, default=3e-3, metavar="X", help="the peak (%(default)s)"
    )


def share(text: str) -> float:
    """Return a number between 0 and 1, both excluded."""
    value = float(text)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be between 0 and 1")
    return value
