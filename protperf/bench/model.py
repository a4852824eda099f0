"""`protperf bench model`: a whole training step of a preset, beside its X line and the same model with exact attention.

Axis letters: `B` batch, `L` length in tokens.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from protperf.bench import measure
from protperf.bench.contestants import X_LINE
from protperf.bench.figures import draw_bars
from protperf.bench.presets import Question, draw_question, read_preset, read_question
from protperf.bench.replaced import attention_replaced, return_values
from protperf.bench.report import Report, digits, format_table, say
from protperf.config import ModelConfig, OptimConfig
from protperf.model import ProteinModel
from protperf.objectives import NOT_ASKED, token_sums
from protperf.optim import build_optimizer
from protperf.work import training_work, weights_work

EXACT = "softmax"

PRECISIONS = {"32-true": torch.float32, "bf16-mixed": torch.bfloat16}
"""As in training -> the type of the matrix product that rates are compared with."""

LEGEND = """\
A step is forward, loss, backward and AdamW; masked objective. X line: the same model with attention that returns v.
MFU: arithmetic of weights and attention, forward and backward, without what is computed again, in a second, over that of
  a 1024^3 matrix product in the same round. Ratios are medians of those within a round.
step: peak of what a step allocates, gradients among it. held: weights and AdamW's two moments, which come on top."""

COLUMNS = ("s/step", "tokens/s", "MFU, %", "time / X line", "faster than softmax", "step, GiB", "held, GiB")

_GIBIBYTE = 2**30


@dataclass(frozen=True)
class Result:
    """What was measured of one model.

    Attributes:
        name: its attention.
        seconds: of a step, the median; `None` where it was left out.
        rounds: seconds of a step in each round.
        product_rounds: seconds of the matrix product in each round.
        tokens_per_second: B L over the seconds.
        mfu: share of the rate of a 1024^3 matrix product in the same rounds.
        step_bytes: peak of what a step allocates beyond what is there before it.
        held_bytes: weights, buffers and the optimizer's state.
        reason: why it was left out.
    """

    name: str
    seconds: float | None = None
    rounds: tuple[float, ...] = ()
    product_rounds: tuple[float, ...] = ()
    tokens_per_second: float | None = None
    mfu: float | None = None
    step_bytes: int | None = None
    held_bytes: int | None = None
    reason: str = ""


class Trainee:
    """A model in training on one question, with a learning rate of 0: every step is the same."""

    def __init__(
        self, config: ModelConfig, question: Question, *, precision: str, causal: bool = False
    ) -> None:
        self.question = question
        self.device = question.batch.inputs.device
        self.mixed = precision != "32-true"
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.model = ProteinModel(config, causal=causal).to(self.device)
        self.optimizer = build_optimizer(self.model, OptimConfig(learning_rate=0.0))

    def step(self) -> None:
        """Make one training step."""
        batch = self.question.batch
        self.optimizer.zero_grad()
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.mixed):
            hidden = self.model(batch.inputs, self.question.documents)
            asked = batch.targets != NOT_ASKED
            sums = token_sums(self.model.logits(hidden[asked]), batch.targets[asked].long())
        (sums.nll / sums.asked).backward()
        self.optimizer.step()

    def step_without_attention(self) -> None:
        """Make one training step of the X line."""
        with attention_replaced(return_values):
            self.step()

    def held_bytes(self) -> int:
        """Return the size of weights, buffers and the optimizer's state."""
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        held = [*self.model.parameters(), *self.model.buffers(), *states]
        return sum(tensor.nbytes for tensor in held if isinstance(tensor, Tensor))


def run(options: argparse.Namespace) -> Report:
    """Measure the models and lay the numbers out."""
    config = read_preset(options.preset, options.overrides, num_layers=options.layers)
    device = measure.choose_bench_device(options.device)
    if options.data:
        question = read_question(options.data, batch=options.batch, seed=options.seed, device=device)
    else:
        question = draw_question(
            batch=options.batch,
            length=options.length,
            packed=options.packed,
            seed=options.seed,
            device=device,
        )
    machine = measure.describe_machine(device)
    say("model", measure.headline(machine))
    results = compare(config, question, options, device)
    return lay_out(results, config, question, machine, options)


def compare(
    config: ModelConfig, question: Question, options: argparse.Namespace, device: torch.device
) -> list[Result]:
    """Let the preset, its X line and the same model with exact attention take turns."""
    results: dict[str, Result] = {}
    calls: dict[str, measure.Call] = {}
    trainees: dict[str, Trainee] = {}
    for kind in dict.fromkeys((config.attention, EXACT)):
        own = replace(config, attention=kind)
        reason = too_slow(own, question, options, device)
        results[kind] = Result(kind, reason=reason)
        if not reason:
            trainees[kind] = Trainee(own, question, precision=options.precision)
            calls[kind] = trainees[kind].step
    if not trainees:
        return list(results.values())
    trainees[X_LINE] = next(iter(trainees.values()))
    calls[X_LINE] = trainees[X_LINE].step_without_attention
    results[X_LINE] = Result(X_LINE)
    product = measure.matrix_product(PRECISIONS[options.precision], device)
    calls[measure.MATMUL] = product
    repeats = measure.plan_turns({name: measure.warm_up(call, device=device) for name, call in calls.items()})
    say("model", "warm")
    samples = measure.alternate(calls, rounds=options.rounds, device=device, repeats=repeats)
    for name, trainee in trainees.items():
        seconds = measure.median(samples[name])
        slower = measure.ratio(samples[name], samples[measure.MATMUL]) or math.inf
        trainee.optimizer.zero_grad()
        results[name] = Result(
            name,
            seconds,
            tuple(samples[name]),
            tuple(samples[measure.MATMUL]),
            tokens_per_second=question.batch.inputs.numel() / seconds,
            mfu=step_flops(config, question, kind=name) / measure.MATMUL_FLOPS / slower,
            step_bytes=measure.peak_allocated(calls[name], device=device),
            held_bytes=trainee.held_bytes(),
        )
    return list(results.values())


def too_slow(
    config: ModelConfig, question: Question, options: argparse.Namespace, device: torch.device
) -> str:
    """Return why a model is left out, judged by a step of its first layer alone; empty if it is not."""
    if config.num_layers == 1:
        return ""
    first = Trainee(replace(config, num_layers=1), question, precision=options.precision)
    seconds = config.num_layers * measure.warm_up(first.step, device=device)
    if seconds <= options.budget:
        return ""
    return (
        f"a step would take about {seconds:.3g} s, above --budget {options.budget:g}; --layers cuts the depth"
    )


def step_flops(config: ModelConfig, question: Question, *, kind: str) -> int:
    """Return the operations of a step, forward and backward, without what is computed again.

    Args:
        config: shape.
        question: lengths.
        kind: of attention; `X_LINE` has no arithmetic.
    """
    num_asked = int((question.batch.targets != NOT_ASKED).sum())
    if kind == X_LINE:
        work = weights_work(config, num_tokens=question.batch.inputs.numel(), num_asked=num_asked)
    else:
        work = training_work(
            replace(config, attention=kind),
            causal=False,
            documents=question.document_lengths(),
            num_asked=num_asked,
        )
    return work.forward + work.backward


def lay_out(
    results: Sequence[Result],
    config: ModelConfig,
    question: Question,
    machine: Mapping[str, Any],
    options: argparse.Namespace,
) -> Report:
    """Turn results into a table, plain numbers and a figure."""
    batch, length = question.batch.inputs.shape
    documents = sum(map(len, question.document_lengths()))
    title = (
        f"{options.preset}: {config.num_layers} layers of {config.model_dim}, {config.num_heads} heads, batch {batch} of "
        f"{length:,} tokens in {documents:,} document{'s' * (documents > 1)}, {options.precision}, {options.rounds} rounds"
    )
    ratios = {result.name: _ratios(result, results) for result in results}
    rows = [(result.name, _row(result, **ratios[result.name])) for result in results]
    notes = [f"-: {result.name}: {result.reason}" for result in results if result.reason]
    notes.append(measure.warn_of_unrest([each for result in results for each in result.product_rounds]))
    numbers = {
        "machine": dict(machine),
        "setting": {"preset": options.preset, "batch": batch, "length": length, "documents": documents}
        | {"precision": options.precision, "model": asdict(config)},
        "results": [asdict(result) | ratios[result.name] for result in results],
    }
    blocks = [measure.headline(machine), title, format_table("attention", COLUMNS, rows), LEGEND]
    blocks += [note for note in notes if note]
    seconds = {result.name: result.seconds for result in results if result.seconds}
    bars = draw_bars(seconds, title=f"training step of {options.preset}", x="seconds")
    return Report(blocks, numbers, {"model": bars})


def _row(result: Result, *, over_x_line: float | None, faster_than_softmax: float | None) -> tuple[str, ...]:
    return (
        digits(result.seconds),
        digits(result.tokens_per_second),
        digits(result.mfu, unit=0.01),
        digits(over_x_line, suffix="x"),
        digits(faster_than_softmax, suffix="x"),
        digits(result.step_bytes, unit=_GIBIBYTE),
        digits(result.held_bytes, unit=_GIBIBYTE),
    )


def _ratios(result: Result, results: Sequence[Result]) -> dict[str, float | None]:
    """Return the time over the X line's, and exact attention's time over this one's."""
    rounds = {each.name: each.rounds for each in results}
    return {
        "over_x_line": measure.ratio(result.rounds, rounds.get(X_LINE, ())),
        "faster_than_softmax": measure.ratio(rounds.get(EXACT, ()), result.rounds),
    }
