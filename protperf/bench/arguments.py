"""The arguments of `protperf bench`: what is measured, on what, and where the numbers go."""

from __future__ import annotations

import argparse
from pathlib import Path

from protperf.bench.numbers import even, natural, positive, positive_float, several
from protperf.bench.paper.arguments import add_paper, check_paper

BENCHMARKS = ("attention", "embedding", "error", "model", "paper", "reading", "scaling", "training")

LENGTHS = tuple(2**power for power in range(8, 17))
FEATURES = tuple(2**power for power in range(4, 11))
MODEL_LENGTH = 8192
TRAINING_WINDOW = 512
GPUS = tuple(2**power for power in range(3, 10))
TREMBL = 75.9
SIGMAS = (0.125, 0.25, 0.5, 1.0)
DIRECTIONS = {
    "bidirectional": ("bidirectional",),
    "causal": ("causal",),
    "both": ("bidirectional", "causal"),
}


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line; wrong usage exits with status 2."""
    parser = make_parser()
    options = parser.parse_args(argv)
    if options.benchmark == "attention":
        options.lengths = sorted(set(options.lengths))
        options.directions = DIRECTIONS[options.direction]
        if options.packed > min(options.lengths):
            parser.error(f"--packed {options.packed}: more documents than tokens at {min(options.lengths)}")
    if options.benchmark == "error":
        options.features = sorted(set(options.features))
        options.sigmas = sorted(set(options.sigmas))
    if options.benchmark == "paper":
        check_paper(parser, options)
    if options.benchmark == "reading":
        options.workers = sorted(set(options.workers))
    if options.benchmark == "scaling":
        options.gpus = sorted(set(options.gpus))
    if options.benchmark == "training":
        _check_training(parser, options)
    if options.benchmark == "model":
        if options.data and (options.length or options.packed):
            parser.error(
                "--data: the windows of the dataset have their own --length, and are --packed already"
            )
        options.length = options.length or MODEL_LENGTH
        if options.packed > options.length:
            parser.error(f"--packed {options.packed}: more proteins than tokens ({options.length})")
    return options


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of `protperf bench`."""
    parser = argparse.ArgumentParser(
        "protperf bench",
        description="Measure attention, models, training and reading on this machine, or work out what many GPUs would do. Within a table all contestants take turns in one run "
        "and medians count; measure on a quiet machine all the same. OMP_NUM_THREADS sets the number of threads.",
    )
    commands = parser.add_subparsers(dest="benchmark", required=True, metavar="|".join(BENCHMARKS))
    _add_attention(commands)
    _add_embedding(commands)
    _add_error(commands)
    _add_model(commands)
    add_paper(commands, add_outputs=_add_outputs)
    _add_reading(commands)
    _add_scaling(commands)
    _add_training(commands)
    return parser


def _add_attention(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "attention",
        help="time and memory of attention against length",
        description="Time and peak memory of every attention, forward and forward + backward, against length, beside "
        "torch's SDPA, the X line (attention that returns v: the limit) and, if it is installed, performer-pytorch.",
    )
    parser.add_argument(
        "--lengths", type=positive, nargs="+", default=LENGTHS, metavar="L", help="tokens (256 ... 65536)"
    )
    parser.add_argument("--direction", choices=DIRECTIONS, default="both", help="(%(default)s)")
    parser.add_argument("--kinds", nargs="+", metavar="KIND", help="attentions beside softmax (all)")
    parser.add_argument("--heads", type=positive, default=8, metavar="N", help="(%(default)s)")
    parser.add_argument(
        "--head-dim", type=positive, default=64, metavar="N", help="width of a head (%(default)s)"
    )
    parser.add_argument(
        "--features", type=even, default=256, metavar="N", help="random features (%(default)s)"
    )
    parser.add_argument("--batch", type=positive, default=1, metavar="N", help="(%(default)s)")
    parser.add_argument(
        "--packed",
        type=positive,
        default=0,
        metavar="N",
        help="also windows of N documents of random lengths",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16", "float64"),
        default="float32",
        help="of q, k, v (%(default)s)",
    )
    parser.add_argument(
        "--layout",
        choices=("auto", "blocked", "batched"),
        default="auto",
        help="of linear attention (%(default)s)",
    )
    parser.add_argument(
        "--budget",
        type=positive_float,
        default=20.0,
        metavar="SECONDS",
        help="leave out what would take longer for one call (%(default)s)",
    )
    _add_device(parser)
    _add_common(parser, rounds=5)


def _add_embedding(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "embedding",
        help="`protperf embed` beside bare forward passes; long proteins; the longest",
        description="Tokens a second of `protperf embed` (reading, packing, pooling, writing) beside bare forward passes of the same "
        "model over full rows and beside one protein at a time, in turns; then long proteins beside exact attention, and the time and "
        "memory of the longest. Weights are random.",
    )
    _add_preset(parser, preset="performer_36l", layers=4)
    parser.add_argument("--fasta", type=Path, metavar="FILE", help="proteins (500 of the UniProt sample)")
    parser.add_argument(
        "--toks-per-batch", type=positive, default=4096, metavar="N", help="tokens in a pass (%(default)s)"
    )
    parser.add_argument(
        "--long",
        type=natural,
        default=100,
        metavar="N",
        help="random proteins of 1,000 to 8,000 residues, beside exact attention (%(default)s)",
    )
    parser.add_argument(
        "--longest",
        type=positive,
        nargs="*",
        default=(34_350, 68_700),
        metavar="L",
        help="residues of single proteins: titin and twice titin (34350 68700); none: leave them out",
    )
    _add_common(parser, rounds=3)


def _add_error(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "error",
        help="error of attention against features and layers",
        description="Relative error of random-feature attention against exact softmax, against the number of features and "
        "against the number of layers of a model with random weights, with uniform attention as the null.",
    )
    parser.add_argument(
        "--features", type=even, nargs="+", default=FEATURES, metavar="F", help="(16 ... 1024)"
    )
    parser.add_argument(
        "--sigmas",
        type=positive_float,
        nargs="+",
        default=SIGMAS,
        metavar="S",
        help="q and k are S N(0, 1) (%(default)s)",
    )
    parser.add_argument("--kinds", nargs="+", metavar="KIND", help="attentions that stand for softmax (all)")
    parser.add_argument(
        "--couplings", nargs="+", metavar="NAME", help="of projections (iid, orthogonal, simplex)"
    )
    parser.add_argument("--length", type=positive, default=1024, metavar="L", help="tokens (%(default)s)")
    parser.add_argument(
        "--head-dim", type=even, default=64, metavar="N", help="width of a head (%(default)s)"
    )
    parser.add_argument(
        "--seeds", type=positive, default=5, metavar="N", help="medians are over N draws (%(default)s)"
    )
    parser.add_argument(
        "--layers", type=natural, default=12, metavar="N", help="of the model; 0: no model (%(default)s)"
    )
    parser.add_argument(
        "--layer-features", type=even, default=256, metavar="F", help="features in the model (%(default)s)"
    )
    parser.add_argument("--heads", type=positive, default=8, metavar="N", help="(%(default)s)")
    _add_device(parser)
    _add_common(parser)


def _add_model(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "model",
        help="a whole training step of a preset",
        description="A training step (forward, loss, backward, AdamW; masked objective) of a preset, of its X line (the same "
        "model with attention that returns v) and of the same model with exact attention.",
    )
    _add_preset(parser, preset="performer_36l")
    _add_precision(parser)
    parser.add_argument("--batch", type=positive, default=1, metavar="N", help="windows (%(default)s)")
    parser.add_argument(
        "--length", type=positive, metavar="L", help="tokens of a window of random residues (8192)"
    )
    parser.add_argument(
        "--packed", type=positive, default=0, metavar="N", help="cut each window into N proteins"
    )
    parser.add_argument(
        "--data", type=Path, metavar="DIR", help="windows of a dataset by `protperf prepare` instead"
    )
    parser.add_argument(
        "--budget",
        type=positive_float,
        default=120.0,
        metavar="SECONDS",
        help="leave out what would take longer for one step (%(default)s)",
    )
    _add_device(parser)
    _add_common(parser, rounds=3)


def _add_reading(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "reading",
        help="tokens a second that training's loader hands out",
        description="How many tokens a second the loader of training hands out, masked and causal, as a multiple of what "
        "performer_36l would take on one H200 at an MFU of 24 %, beside bare reads of the same windows.",
    )
    parser.add_argument(
        "data", nargs="?", type=Path, metavar="DATA", help="a dataset by `protperf prepare` (generated)"
    )
    parser.add_argument(
        "--workers",
        type=natural,
        nargs="+",
        default=(0, 2),
        metavar="N",
        help="processes that read; 0: the one that takes the batches (0 2)",
    )
    parser.add_argument("--batch-size", type=positive, default=8, metavar="N", help="windows (%(default)s)")
    parser.add_argument("--batches", type=positive, default=512, metavar="N", help="in a turn (%(default)s)")
    _add_common(parser, rounds=3)


def _add_scaling(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "scaling",
        help="a step of a preset on many GPUs, by arithmetic",
        description="Communication against computation on many GPUs, the efficiency that follows, and the cost of one pass over "
        "TrEMBL: arithmetic from stated assumptions; nothing is run.",
    )
    _add_preset(parser, preset="performer_36l")
    parser.add_argument("--gpus", type=several, nargs="+", default=GPUS, metavar="N", help="(8 ... 512)")
    parser.add_argument("--gpu", default="H100", metavar="NAME", help="in protperf/devices.py (%(default)s)")
    parser.add_argument(
        "--mfu", type=positive_float, default=0.1, metavar="SHARE", help="of its bf16 peak (%(default)s)"
    )
    parser.add_argument(
        "--window", type=positive, default=MODEL_LENGTH, metavar="L", help="tokens of a window (%(default)s)"
    )
    parser.add_argument(
        "--windows", type=positive, default=8, metavar="N", help="of a GPU at once (%(default)s)"
    )
    parser.add_argument(
        "--at-most", type=positive, default=512, metavar="N", help="windows of a step (%(default)s)"
    )
    parser.add_argument(
        "--nvlink", type=positive_float, default=450, metavar="GB/s", help="each way (%(default)s)"
    )
    parser.add_argument(
        "--network", type=positive_float, default=400, metavar="Gb/s", help="of one card (%(default)s)"
    )
    parser.add_argument(
        "--epoch",
        type=positive_float,
        default=TREMBL,
        metavar="N",
        help="billion tokens (%(default)s: TrEMBL)",
    )
    _add_outputs(parser)


def _add_training(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "training",
        help="the whole training loop beside its bare step; several ranks beside one",
        description="Tokens a second of `protperf train` (data, logging, checkpoints) beside its bare training step, and of several "
        "ranks beside one, in alternating runs on the same windows.",
    )
    _add_preset(parser, preset="performer_12l", layers=2)
    _add_precision(parser)
    parser.add_argument(
        "--batch", type=positive, default=2, metavar="N", help="windows, of all ranks together (%(default)s)"
    )
    parser.add_argument("--window", type=positive, metavar="L", help="tokens of a window of the sample (512)")
    parser.add_argument(
        "--data",
        type=Path,
        metavar="DIR",
        help="a dataset by `protperf prepare` instead of the UniProt sample",
    )
    parser.add_argument(
        "--devices",
        type=positive,
        nargs="*",
        default=(1, 2),
        metavar="N",
        help="numbers of ranks, each with one thread (1 2); none: leave them out",
    )
    parser.add_argument(
        "--workers", type=natural, default=2, metavar="N", help="processes that read (%(default)s)"
    )
    parser.add_argument(
        "--steps", type=positive, default=60, metavar="N", help="of each run of training (%(default)s)"
    )
    parser.add_argument("--log-every", type=positive, default=10, metavar="N", help="steps (%(default)s)")
    parser.add_argument(
        "--checkpoint-every", type=positive, default=50, metavar="N", help="steps (%(default)s)"
    )
    _add_device(parser)
    _add_common(parser, rounds=3)


def _check_training(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    if options.data and options.window:
        parser.error("--window: that of --data is what it was prepared with")
    options.window = options.window or TRAINING_WINDOW
    options.devices = sorted(set(options.devices))
    for ranks in options.devices:
        if options.batch % ranks:
            parser.error(f"--batch {options.batch}: {ranks} ranks (--devices) cannot share it evenly")
    if options.steps % options.log_every or options.steps < 2 * options.log_every:
        parser.error(
            f"--steps {options.steps}: must be 2 or more times --log-every {options.log_every}; the first interval is warm-up"
        )


def _add_preset(parser: argparse.ArgumentParser, *, preset: str, layers: int | None = None) -> None:
    """Add what says which model is meant."""
    parser.add_argument(
        "overrides", nargs="*", metavar="KEY=VALUE", help="of the model, such as attention=favor"
    )
    parser.add_argument("--preset", default=preset, metavar="NAME", help="a file of conf/model (%(default)s)")
    shown = layers or "the preset's"
    parser.add_argument(
        "--layers", type=positive, default=layers, metavar="N", help=f"cut the depth to N ({shown})"
    )


def _add_precision(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--precision",
        choices=("32-true", "bf16-mixed"),
        default="32-true",
        help="as in training (%(default)s)",
    )


def _add_device(parser: argparse.ArgumentParser) -> None:
    """Add where a benchmark runs."""
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(%(default)s)")


def _add_common(parser: argparse.ArgumentParser, *, rounds: int = 0) -> None:
    """Add what all benchmarks take; `rounds` where something is timed."""
    if rounds:
        parser.add_argument(
            "--rounds", type=positive, default=rounds, metavar="N", help="turns of each (%(default)s)"
        )
    parser.add_argument(
        "--seed", type=natural, default=0, metavar="N", help="of all that is drawn (%(default)s)"
    )
    _add_outputs(parser)


def _add_outputs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all numbers to FILE")
    parser.add_argument("--plot", type=Path, metavar="DIR", help="also write figures into DIR")
    parser.add_argument("--force", action="store_true", help="replace files that are there")
