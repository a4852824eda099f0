"""`protperf convert`: whatever holds a model into a folder that people share, with the weights as safetensors and a card."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from protperf.convert.options import parse
from protperf.convert.swap_options import check_report
from protperf.formats import one_line

if TYPE_CHECKING:
    from protperf.checkpoint import TrainedModel


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    options = parse(argv)
    from protperf.checkpoint.card import CardDetails
    from protperf.checkpoint.export import export_model
    from protperf.checkpoint.facts import RunFacts
    from protperf.checkpoint.folder import check_folder
    from protperf.formats.scores import MODEL, read_scores

    check_folder(options.out, force=options.force)
    check_report(options)
    scores = read_scores(options.scores) if options.scores else {}
    trained = open_source(options)
    if options.out.resolve() == trained.path.parent.resolve():
        raise ValueError(f"{options.out}: is where the model comes from; give another folder")
    facts = None
    if options.attention is not None:
        trained, facts = swapped(trained, options), RunFacts()  # what the run measured was another model
    for predictors in scores.values():
        check_scores(predictors.get(MODEL, {}), trained, place=str(options.scores))
    export_model(trained, options.out, CardDetails(options.name, options.license, scores), facts=facts)
    parameters = sum(parameter.numel() for parameter in trained.model.parameters())
    say(f"{trained.path}: {trained.objective.kind}, step {trained.step:,}, {parameters:,} parameters")
    print(options.out)
    return 0


def open_source(options: argparse.Namespace) -> TrainedModel:
    """Return the model that SOURCE holds: one of protperf, or pretrained weights; say of these what was left out.

    Raises:
        ValueError: there is none, or it cannot be read; or options of pretrained weights with a model of protperf.
    """
    from protperf.checkpoint import load_model
    from protperf.convert.files import is_pretrained

    if is_pretrained(options.source):
        from protperf.convert.sources import load_pretrained

        found = load_pretrained(options.source, heads=options.heads, vocabulary=options.vocab)
        for note in found.notes():
            say(one_line(note))
        return found.trained
    for name in ("heads", "vocab"):
        if getattr(options, name) is not None:
            raise ValueError(
                f"{options.source}: --{name} is for pretrained weights of other programs; leave it out"
            )
    return load_model(options.source)


def swapped(trained: TrainedModel, options: argparse.Namespace) -> TrainedModel:
    """Return a model with the attention that was asked for, and show how well it does."""
    from protperf.convert.performer import become_performer, publish_report

    performer, report = become_performer(trained, options, say)
    publish_report(report, options)
    return performer


def say(text: str) -> None:
    """Write a line of the log to stderr."""
    print(f"protperf convert: {text}", file=sys.stderr)


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
