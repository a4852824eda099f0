"""The command line of `protperf bench`: what is measured, on what, and where the numbers go."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from protperf.bench.report import Report

LENGTHS = tuple(2**power for power in range(8, 17))
FEATURES = tuple(2**power for power in range(4, 11))
MODEL_LENGTH = 8192
SIGMAS = (0.125, 0.25, 0.5, 1.0)
DIRECTIONS = {
    "bidirectional": ("bidirectional",),
    "causal": ("causal",),
    "both": ("bidirectional", "causal"),
}


def main(argv: list[str] | None = None) -> int:
    """Run a benchmark, print its tables and write what was asked for; return the exit status."""
    options = parse(argv)
    check_outputs(options)
    report = measure(options)
    print(report.text)
    if options.json:
        from protperf.bench.report import plain
        from protperf.formats.commit import commit_bytes

        text = json.dumps(plain(report.numbers), indent=1, allow_nan=False)
        commit_bytes(options.json, (text + "\n").encode())
    if options.plot:
        from protperf.bench.figures import save

        for path in save(report.figures, options.plot):
            print(f"protperf bench {options.benchmark}: {path}", file=sys.stderr)
    return 0


def measure(options: argparse.Namespace) -> Report:
    """Run the benchmark that was named."""
    if options.benchmark == "attention":
        from protperf.bench.attention import run
    elif options.benchmark == "error":
        from protperf.bench.error import run
    elif options.benchmark == "reading":
        from protperf.bench.reading import run
    else:
        from protperf.bench.model import run
    return run(options)


def check_outputs(options: argparse.Namespace) -> None:
    """Refuse, before any work, what must not be written.

    Raises:
        ValueError: no folder there, or a file is taken.
    """
    for path in filter(None, (options.json, options.plot)):
        if not path.parent.is_dir():
            raise ValueError(f"{path.parent}: no such folder to write {path.name} to; make it first")
    if options.json and options.json.exists() and not options.force:
        raise ValueError(f"{options.json}: exists already; give another name, or --force to replace it")
    if options.plot and options.plot.exists():
        if not options.plot.is_dir():
            raise ValueError(f"{options.plot}: is a file; --plot takes a folder")
        if any(options.plot.glob("*.png")) and not options.force:
            raise ValueError(f"{options.plot}: holds figures already; give another folder, or --force")


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line; wrong usage exits with status 2."""
    parser = argparse.ArgumentParser(
        "protperf bench",
        description="Measure attention, models and reading on this machine. Within a table all contestants take turns in one run "
        "and medians count; measure on a quiet machine all the same. OMP_NUM_THREADS sets the number of threads.",
    )
    commands = parser.add_subparsers(dest="benchmark", required=True, metavar="attention|error|model|reading")
    _add_attention(commands)
    _add_error(commands)
    _add_model(commands)
    _add_reading(commands)
    options = parser.parse_args(argv)
    if options.benchmark == "attention":
        options.lengths = sorted(set(options.lengths))
        options.directions = DIRECTIONS[options.direction]
        if options.packed > min(options.lengths):
            parser.error(f"--packed {options.packed}: more documents than tokens at {min(options.lengths)}")
    if options.benchmark == "error":
        options.features = sorted(set(options.features))
        options.sigmas = sorted(set(options.sigmas))
    if options.benchmark == "reading":
        options.workers = sorted(set(options.workers))
    if options.benchmark == "model":
        if options.data and (options.length or options.packed):
            parser.error(
                "--data: the windows of the dataset have their own --length, and are --packed already"
            )
        options.length = options.length or MODEL_LENGTH
        if options.packed > options.length:
            parser.error(f"--packed {options.packed}: more proteins than tokens ({options.length})")
    return options


def _add_attention(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "attention",
        help="time and memory of attention against length",
        description="Time and peak memory of every attention, forward and forward + backward, against length, beside "
        "torch's SDPA, the X line (attention that returns v: the limit) and, if it is installed, performer-pytorch.",
    )
    parser.add_argument(
        "--lengths", type=_positive, nargs="+", default=LENGTHS, metavar="L", help="tokens (256 ... 65536)"
    )
    parser.add_argument("--direction", choices=DIRECTIONS, default="both", help="(%(default)s)")
    parser.add_argument("--kinds", nargs="+", metavar="KIND", help="attentions beside softmax (all)")
    parser.add_argument("--heads", type=_positive, default=8, metavar="N", help="(%(default)s)")
    parser.add_argument(
        "--head-dim", type=_positive, default=64, metavar="N", help="width of a head (%(default)s)"
    )
    parser.add_argument(
        "--features", type=_even, default=256, metavar="N", help="random features (%(default)s)"
    )
    parser.add_argument("--batch", type=_positive, default=1, metavar="N", help="(%(default)s)")
    parser.add_argument(
        "--packed",
        type=_positive,
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
        type=_positive_float,
        default=20.0,
        metavar="SECONDS",
        help="leave out what would take longer for one call (%(default)s)",
    )
    _add_device(parser)
    _add_common(parser, rounds=5)


def _add_error(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "error",
        help="error of attention against features and layers",
        description="Relative error of random-feature attention against exact softmax, against the number of features and "
        "against the number of layers of a model with random weights, with uniform attention as the null.",
    )
    parser.add_argument(
        "--features", type=_even, nargs="+", default=FEATURES, metavar="F", help="(16 ... 1024)"
    )
    parser.add_argument(
        "--sigmas",
        type=_positive_float,
        nargs="+",
        default=SIGMAS,
        metavar="S",
        help="q and k are S N(0, 1) (%(default)s)",
    )
    parser.add_argument("--kinds", nargs="+", metavar="KIND", help="attentions that stand for softmax (all)")
    parser.add_argument(
        "--couplings", nargs="+", metavar="NAME", help="of projections (iid, orthogonal, simplex)"
    )
    parser.add_argument("--length", type=_positive, default=1024, metavar="L", help="tokens (%(default)s)")
    parser.add_argument(
        "--head-dim", type=_even, default=64, metavar="N", help="width of a head (%(default)s)"
    )
    parser.add_argument(
        "--seeds", type=_positive, default=5, metavar="N", help="medians are over N draws (%(default)s)"
    )
    parser.add_argument(
        "--layers", type=_natural, default=12, metavar="N", help="of the model; 0: no model (%(default)s)"
    )
    parser.add_argument(
        "--layer-features", type=_even, default=256, metavar="F", help="features in the model (%(default)s)"
    )
    parser.add_argument("--heads", type=_positive, default=8, metavar="N", help="(%(default)s)")
    _add_device(parser)
    _add_common(parser)


def _add_model(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "model",
        help="a whole training step of a preset",
        description="A training step (forward, loss, backward, AdamW; masked objective) of a preset, of its X line (the same "
        "model with attention that returns v) and of the same model with exact attention.",
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="KEY=VALUE", help="of the model, such as attention=favor"
    )
    parser.add_argument(
        "--preset", default="performer_36l", metavar="NAME", help="a file of conf/model (%(default)s)"
    )
    parser.add_argument("--layers", type=_positive, metavar="N", help="cut the depth to N (the preset's)")
    parser.add_argument("--batch", type=_positive, default=1, metavar="N", help="windows (%(default)s)")
    parser.add_argument(
        "--length", type=_positive, metavar="L", help="tokens of a window of random residues (8192)"
    )
    parser.add_argument(
        "--packed", type=_positive, default=0, metavar="N", help="cut each window into N proteins"
    )
    parser.add_argument(
        "--data", type=Path, metavar="DIR", help="windows of a dataset by `protperf prepare` instead"
    )
    parser.add_argument(
        "--precision",
        choices=("32-true", "bf16-mixed"),
        default="32-true",
        help="as in training (%(default)s)",
    )
    parser.add_argument(
        "--budget",
        type=_positive_float,
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
        "performer_36l is meant to take on one H200, beside bare reads of the same windows.",
    )
    parser.add_argument(
        "data", nargs="?", type=Path, metavar="DATA", help="a dataset by `protperf prepare` (generated)"
    )
    parser.add_argument(
        "--workers",
        type=_natural,
        nargs="+",
        default=(0, 2),
        metavar="N",
        help="processes that read; 0: the one that takes the batches (0 2)",
    )
    parser.add_argument("--batch-size", type=_positive, default=8, metavar="N", help="windows (%(default)s)")
    parser.add_argument("--batches", type=_positive, default=512, metavar="N", help="in a turn (%(default)s)")
    _add_common(parser, rounds=3)


def _add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(%(default)s)")


def _add_common(parser: argparse.ArgumentParser, *, rounds: int = 0) -> None:
    """Add what all benchmarks take; `rounds` where something is timed."""
    if rounds:
        parser.add_argument(
            "--rounds", type=_positive, default=rounds, metavar="N", help="turns of each (%(default)s)"
        )
    parser.add_argument(
        "--seed", type=_natural, default=0, metavar="N", help="of all that is drawn (%(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all numbers to FILE")
    parser.add_argument("--plot", type=Path, metavar="DIR", help="also write figures into DIR")
    parser.add_argument("--force", action="store_true", help="replace files that are there")


def _positive(text: str) -> int:
    return _at_least(1, int(text))


def _natural(text: str) -> int:
    return _at_least(0, int(text))


def _even(text: str) -> int:
    if _at_least(2, int(text)) % 2:
        raise argparse.ArgumentTypeError(f"{text} is odd: some kinds make two features of each row")
    return int(text)


def _positive_float(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: must be above 0")
    return value


def _at_least(low: int, value: int) -> int:
    if value < low:
        raise argparse.ArgumentTypeError(f"{value}: must be at least {low}")
    return value


if __name__ == "__main__":
    sys.exit(main())
