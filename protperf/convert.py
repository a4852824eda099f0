"""`protperf convert`: a checkpoint into a folder that people share, with the weights as safetensors and a model card."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from protperf.arguments import CHECKPOINT_HELP

if TYPE_CHECKING:
    from protperf.checkpoint import TrainedModel

TARGETS = ("safetensors",)


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    options = parse(argv)
    from protperf.checkpoint import load_model
    from protperf.checkpoint.card import CardDetails
    from protperf.checkpoint.export import export_model
    from protperf.checkpoint.folder import check_folder
    from protperf.formats.scores import MODEL, read_scores

    check_folder(options.out, force=options.force)
    scores = read_scores(options.scores) if options.scores else {}
    trained = load_model(options.source)
    if options.out.resolve() == trained.path.parent.resolve():
        raise ValueError(f"{options.out}: is where the model comes from; give another folder")
    for predictors in scores.values():
        check_scores(predictors.get(MODEL, {}), trained, place=str(options.scores))
    export_model(trained, options.out, CardDetails(options.name, options.license, scores))
    parameters = sum(parameter.numel() for parameter in trained.model.parameters())
    print(
        f"protperf convert: {trained.path}: {trained.objective.kind}, step {trained.step:,}, {parameters:,} parameters",
        file=sys.stderr,
    )
    print(options.out)
    return 0


def check_scores(score: dict[str, Any], trained: TrainedModel, *, place: str) -> None:
    """Refuse scores of another model.

    Args:
        score: what a model got on a split; older files do not say of which it is.
        trained: the model that the card is of.
        place: the file's name, for the message.

    Raises:
        ValueError: it is of another step or objective, or of other weights.
    """
    kind, step = score.get("objective", trained.objective.kind), score.get("step", trained.step)
    if (kind, step) != (trained.objective.kind, trained.step):
        raise ValueError(
            f"{place}: of a {kind} model after {step:,} steps, the checkpoint is of a {trained.objective.kind} one after "
            f"{trained.step:,}; evaluate this one"
        )
    digest = score.get("weights_sha256")
    if digest is not None and digest != trained.weights_digest():
        raise ValueError(
            f"{place}: of the weights in {score.get('checkpoint')}, those of {trained.path} are others; evaluate this one"
        )


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line; wrong usage exits with status 2."""
    parser = argparse.ArgumentParser(
        "protperf convert",
        description="Writes config.json, model.safetensors and model_card.md into a folder, which all commands take, "
        "and (after `import protperf.hf`) transformers.",
    )
    parser.add_argument("source", type=Path, metavar="CHECKPOINT", help=CHECKPOINT_HELP)
    parser.add_argument("out", type=Path, metavar="OUT_DIR", help="the folder to write")
    parser.add_argument("--to", choices=TARGETS, default=TARGETS[0], help="form of the weights (%(default)s)")
    parser.add_argument("--name", default="", help="title of the card (the run's name)")
    parser.add_argument(
        "--license",
        default="",
        metavar="ID",
        help="licence of the weights for the card, such as CC-BY-4.0 (none)",
    )
    parser.add_argument(
        "--scores", type=Path, metavar="JSON", help="results for the card, from `protperf evaluate --json`"
    )
    parser.add_argument("--force", action="store_true", help="replace a model that is in OUT_DIR")
    options = parser.parse_args(argv)
    if not re.fullmatch(r"[A-Za-z0-9.+-]*", options.license):
        parser.error(f"--license {options.license!r}: give an SPDX identifier, such as CC-BY-4.0")
    if not options.name.isprintable():
        parser.error(f"--name {options.name!r}: must be one line")
    return options


if __name__ == "__main__":
    sys.exit(main())
