"""A Transformer becomes a Performer: the swap, what it learns, and what is measured on the way."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from torch import Tensor
from tqdm import tqdm

from protperf.batches import Batch
from protperf.checkpoint import TrainedModel
from protperf.convert.proteins import (
    MOST_TOKENS,
    Proteins,
    exam,
    gather_proteins,
    measure_accuracy,
    practice,
)
from protperf.convert.swap import measure_pair_squares, swap_attention
from protperf.convert.swap_report import EXACT, SWAPPED, TRANSFERRED, TUNED, SwapReport, as_json, as_text
from protperf.convert.transfer import transfer_attention
from protperf.convert.tuning import tune
from protperf.formats.commit import commit_bytes
from protperf.inference.approximation import measure_approximation
from protperf.model import ProteinModel

_TOKENS_PER_PASS = 2048

_SAID = (
    "attention",
    "features",
    "projection_seed",
    "keep_softmax",
    "transfer",
    "transfer_rate",
    "tune",
    "tune_method",
    "lora_rank",
    "rate",
    "proteins_per_step",
    "seed",
)
"""The options that the report repeats."""


def become_performer(
    trained: TrainedModel, options: argparse.Namespace, say: Callable[[str], None]
) -> tuple[TrainedModel, SwapReport]:
    """Swap the attention of a model, let it learn what is asked for, and measure each stage.

    Args:
        trained: with exact attention in all layers; stays as it is.
        options: checked by `check_swap_options`.
        say: writes a line of the log.

    Returns:
        The Performer, and what was found; of this nothing but settings where no protein is given.

    Raises:
        ValueError: there is no such layer, no exact attention, proteins that cannot be read or are too few, or what was
            learned are no numbers.
    """
    layers = trained.model.config.num_layers
    if options.transfer and set(options.keep_softmax) >= set(range(layers)):
        raise ValueError(
            f"--transfer {options.transfer}: --keep-softmax keeps all {layers} layers, so that nothing is left to learn; "
            "leave --transfer out or let a layer be swapped"
        )
    proteins = _proteins_of(trained.model, options)
    for note in proteins.notes:
        say(note)
    model = swap_attention(
        trained.model,
        attention=options.attention,
        num_features=options.features,
        projection_seed=options.projection_seed,
        softmax_layers=options.keep_softmax,
        features="learned" if options.transfer else "drawn",
    )
    if options.attention == "oprf":
        pieces = proteins.learned or proteins.measured
        questions = exam(pieces, trained.objective, seed=options.seed, token_budget=_TOKENS_PER_PASS)
        measure_pair_squares(trained.model, model, ((batch.inputs, seen) for batch, seen in questions))
    report = SwapReport(
        model.config, {name: getattr(options, name) for name in _SAID} | {"proteins": proteins.about}
    )
    _measure(report, EXACT, trained, trained.model, proteins, options)
    _measure(report, SWAPPED, trained, model, proteins, options)
    if options.transfer:
        _transfer(trained, model, proteins, options)
        _measure(report, TRANSFERRED, trained, model, proteins, options)
    if options.tune:
        _tune(trained, model, proteins, options)
        _measure(report, TUNED, trained, model, proteins, options)
    source = trained.origin or f"{trained.path.name} (protperf, weights SHA-256 {trained.weights_digest()})"
    origin = f"{source}; {_story(options)}"
    return replace(trained, model=model, step=trained.step + options.tune, origin=origin), report


def publish_report(report: SwapReport, options: argparse.Namespace) -> None:
    """Print the tables, and write the file that was asked for."""
    if report.accuracy:
        print(as_text(report))
    if options.report is not None:
        commit_bytes(options.report, json.dumps(as_json(report), indent=2).encode() + b"\n")


def _proteins_of(model: ProteinModel, options: argparse.Namespace) -> Proteins:
    most = min(MOST_TOKENS, model.max_length or MOST_TOKENS)
    learns = bool(options.transfer or options.tune)
    return gather_proteins(options.fasta, options.evaluate, learns=learns, most=most)


def _measure(
    report: SwapReport,
    stage: str,
    trained: TrainedModel,
    model: ProteinModel,
    proteins: Proteins,
    options: argparse.Namespace,
) -> None:
    """Add to a report how a stage answers, and how its attention approximates that of the exact model."""
    if not proteins.measured:
        return
    asked = {"seed": options.seed, "token_budget": _TOKENS_PER_PASS}
    report.accuracy[stage] = measure_accuracy(model, proteins.measured, trained.objective, **asked)
    if stage in (SWAPPED, TRANSFERRED):
        questions = exam(proteins.measured, trained.objective, **asked)
        batches = ((batch.inputs, documents) for batch, documents in questions)
        report.approximations[stage] = measure_approximation(trained.model, model, batches)


def _practice(
    trained: TrainedModel, proteins: Proteins, options: argparse.Namespace, *, steps: int
) -> Iterator[tuple[Batch, Tensor]]:
    """Yield the questions of so many steps of learning."""
    return practice(
        proteins.learned, trained.objective, steps=steps, size=options.proteins_per_step, seed=options.seed
    )


def _transfer(
    trained: TrainedModel, model: ProteinModel, proteins: Proteins, options: argparse.Namespace
) -> None:
    questions = _practice(trained, proteins, options, steps=options.transfer)
    with _progress("transfer", options.transfer) as advance:
        transfer_attention(
            trained.model,
            model,
            questions,
            steps=options.transfer,
            rate=options.transfer_rate,
            advance=advance,
        )
    _check_numbers(model, f"--transfer-rate {options.transfer_rate:g}")


def _tune(
    trained: TrainedModel, model: ProteinModel, proteins: Proteins, options: argparse.Namespace
) -> None:
    questions = _practice(trained, proteins, options, steps=options.tune)
    with _progress("tuning", options.tune) as advance:
        tune(
            model,
            questions,
            steps=options.tune,
            rate=options.rate,
            method=options.tune_method,
            lora_rank=options.lora_rank,
            seed=options.seed,
            advance=advance,
        )
    _check_numbers(model, f"--rate {options.rate:g}")


def _check_numbers(model: ProteinModel, rate: str) -> None:
    """Refuse a model that learning has destroyed.

    Raises:
        ValueError: a weight is no finite number; the message names it and the rate.
    """
    for name, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            raise ValueError(f"{rate}: {name} is no finite number after learning; give a lower rate")


@contextmanager
def _progress(name: str, steps: int) -> Iterator[Callable[[Tensor], None]]:
    """Show a bar of steps with the mean loss; silent where stderr is no terminal."""
    with tqdm(total=steps, unit="step", desc=name, disable=None) as bar:

        def advance(loss: Tensor) -> None:
            bar.set_postfix_str(f"loss {float(loss.mean()):.4f}", refresh=False)
            bar.update()

        yield advance


def _story(options: argparse.Namespace) -> str:
    """Say for the card what became of the weights."""
    parts = [f"exact attention swapped for {options.attention}"]
    if options.keep_softmax:
        parts.append(f"but in layers {', '.join(map(str, options.keep_softmax))}")
    if options.transfer:
        parts.append(f"its features trained for {options.transfer:,} steps to follow it")
    if options.tune:
        parts.append(f"then tuned for {options.tune:,} steps ({options.tune_method})")
    return ", ".join(parts)
