"""`protperf bench scaling`: what a step costs on many GPUs, by arithmetic alone; nothing is run.

With n GPUs, P parameters in float32, T tokens a GPU and step, f operations a token (forward and backward, as MFU counts
them) and r = MFU x the GPU's dense bf16 peak / f tokens a second:

    possible        MFU <= (f / p16) / (f16 / p16 + f32 / p32): of all that is computed, again or not, f16 in bf16 at the peak
                    p16, and f32, linear attention, in float32 at the peak p32
    computing       t = T / r; with m pieces a step (trainer.windows_at_once), each takes t / m, its backward pass (backward + again) / all of it
    all-reduce      2 (n - 1) / n x 4 P bytes leave every GPU and as many arrive, once a step, in buckets of 25 MiB
    FSDP            3 (n - 1) / n x 4 P bytes, once a piece: weights are gathered forward and backward, gradients scattered
    links           bytes / (REACHED x slowest link); within a node NVLink's rate of a GPU; between nodes the lesser of that
                    and all network cards of a node together, since NCCL lays one ring through each of them
    latency         HOP a hop: 2 ceil(log2 n) hops for an all-reduce (a tree), n - 1 for a gather or a scatter (a ring)
    left open       what the backward pass (a gather: the forward pass) cannot cover, at least the last bucket or block
    small ones      all-reduces of a number: asked tokens, which a step waits for; the stop flag, which has a step to come
    efficiency      t / (t + left open + small ones)

Not in it: stragglers, other users of the network, reading, checkpoints, validation, launching kernels.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from protperf.bench.figures import draw_lines
from protperf.bench.presets import read_preset
from protperf.bench.report import Report, digits, format_table
from protperf.config import ModelConfig, to_dict
from protperf.devices import PEAKS, Peak
from protperf.work import Work, float32_work, training_work

GPUS_PER_NODE = 8
REACHED = 0.8
"""The share of a link's rate that large collectives get."""
HOP = 5e-6
"""Seconds that a message takes from a GPU to the next."""
BUCKET = 25 * 2**20
"""Bytes of gradients that DDP reduces at once."""
FLOAT = 4
"""Bytes of a weight or a gradient: both stay float32 under mixed precision."""
ASKED = 0.15
"""Share of tokens that the masked objective asks."""
CARDS = (8, 1)
"""Network cards of a node, best first: one for each GPU, or one for all."""

SMALL_REDUCES = 1
"""All-reduces of a single number each step, besides that of asked tokens."""


@dataclass(frozen=True)
class Model:
    """What a step computes and sends.

    Attributes:
        parameters: P.
        blocks: units that FSDP gathers one by one, besides the rest of the model.
        work: of one token.
        tokens_per_second: of one GPU that waits for nobody, r.
        window: tokens.
        possible_mfu: which no program of this arithmetic can pass.
    """

    parameters: int
    blocks: int
    work: Work
    tokens_per_second: float
    window: int
    possible_mfu: float = 1.0


@dataclass(frozen=True)
class Links:
    """How GPUs are joined.

    Attributes:
        inside: bytes a second that a GPU sends within its node.
        card: bytes a second that a network card sends.
        cards: network cards of a node.
    """

    inside: float
    card: float
    cards: int

    def rate(self, gpus: int) -> float:
        """Return the bytes a second of each GPU in a collective of so many."""
        slowest = self.inside if gpus <= GPUS_PER_NODE else min(self.inside, self.cards * self.card)
        return REACHED * slowest


@dataclass(frozen=True)
class Step:
    """One optimizer step.

    Attributes:
        gpus: n.
        pieces: m, whose gradients make the step.
        computing: seconds of each GPU.
        sent_bytes: that leave each GPU.
        sending: seconds that takes, were nothing computed.
        open_seconds: of it that computing does not cover.
        small: seconds of single numbers.
    """

    gpus: int
    pieces: int
    computing: float
    sent_bytes: float
    sending: float
    open_seconds: float
    small: float

    @property
    def efficiency(self) -> float:
        """The share of the time in which GPUs compute."""
        return self.computing / (self.computing + self.open_seconds + self.small)


def ddp_step(model: Model, links: Links, *, gpus: int, windows: int, pieces: int) -> Step:
    """Return a step in which every GPU holds the whole model.

    Args:
        model: what is computed.
        links: how GPUs are joined.
        gpus: n.
        windows: of each GPU in each batch.
        pieces: m.
    """
    computing, _, backward = _passes(model, windows, pieces)
    gradients = FLOAT * model.parameters
    sent = 2 * (gpus - 1) / gpus * gradients
    buckets = math.ceil(gradients / BUCKET)
    sending = sent / links.rate(gpus) + buckets * _number(gpus)
    left = max(sending - backward, sending / buckets)
    return Step(gpus, pieces, computing, sent, sending, left, (1 + SMALL_REDUCES) * _number(gpus))


def fsdp_step(model: Model, links: Links, *, gpus: int, windows: int, pieces: int) -> Step:
    """Return a step in which GPUs hold shards of the model and gather each block when they need it; see `ddp_step`."""
    computing, forward, backward = _passes(model, windows, pieces)
    units = model.blocks + 1
    shared = (gpus - 1) / gpus * FLOAT * model.parameters
    gather = (
        shared / links.rate(gpus) + units * (gpus - 1) * HOP
    )  # and a scatter, the other way round, as long
    left = max(gather - forward, gather / units) + max(2 * gather - backward, gather / units)
    small = (1 + SMALL_REDUCES) * _number(gpus)
    return Step(gpus, pieces, computing, 3 * pieces * shared, 3 * pieces * gather, pieces * left, small)


def _passes(model: Model, windows: int, pieces: int) -> tuple[float, float, float]:
    """Return the seconds of a step, of a batch's forward pass and of a batch's backward pass."""
    one = windows * model.window / model.tokens_per_second
    forward = one * model.work.forward / sum(model.work)
    return pieces * one, forward, one - forward


def _number(gpus: int) -> float:
    """Return the seconds of an all-reduce of a single number."""
    return 2 * math.ceil(math.log2(gpus)) * HOP


def share_out(gpus: int, *, at_once: int, at_most: int) -> tuple[int, int]:
    """Return the windows of each GPU in each batch, and of the whole step: `at_once` a GPU until the step has `at_most`.

    >>> share_out(8, at_once=8, at_most=512), share_out(256, at_once=8, at_most=512)
    ((8, 64), (2, 512))
    """
    windows = max(1, min(at_once, at_most // gpus))
    return windows, windows * gpus


def run(options: argparse.Namespace) -> Report:
    """Work the tables out."""
    config = read_preset(options.preset, options.overrides, num_layers=options.layers)
    model = describe(config, window=options.window, gpu=options.gpu, mfu=options.mfu)
    joined = [Links(1e9 * options.nvlink, 1e9 / 8 * options.network, cards) for cards in CARDS]
    ways = {
        f"{name}, {links.cards} card{'s' * (links.cards > 1)}": (way, links)
        for name, way in (("DDP", ddp_step), ("FSDP", fsdp_step))
        for links in joined
    }
    steps: dict[str, list[Step]] = {name: [] for name in ways}
    for gpus in options.gpus:
        windows, _ = share_out(gpus, at_once=options.windows, at_most=options.at_most)
        for name, (way, links) in ways.items():
            steps[name].append(way(model, links, gpus=gpus, windows=windows, pieces=1))
    return lay_out(steps, model, config, options)


def describe(config: ModelConfig, *, window: int, gpu: str, mfu: float) -> Model:
    """Return the model's parameters, its work a token and its rate on one GPU.

    Raises:
        ValueError: a GPU whose peak in bf16 is not in the table, or an MFU that it cannot reach.
    """
    from protperf.model import ProteinModel

    known = [name for name, peak in PEAKS.items() if not math.isnan(peak.bf16)]
    if gpu not in known:
        raise ValueError(f"--gpu {gpu}: not there; allowed: {', '.join(known)}")
    whole = training_work(config, causal=False, documents=[[window]], num_asked=round(ASKED * window))
    possible = possible_mfu(whole, float32_work(config, causal=False, documents=[[window]]), PEAKS[gpu])
    if mfu > possible:
        raise ValueError(
            f"--mfu {mfu:g}: out of reach of {gpu}, where linear attention computes in float32; allowed: at most {rounded_down(possible)}"
        )
    work = Work(*(round(part / window) for part in whole))
    rate = mfu * 1e12 * PEAKS[gpu].bf16 / (work.forward + work.backward)
    parameters = sum(each.numel() for each in ProteinModel(config, causal=False).parameters())
    return Model(parameters, config.num_layers, work, rate, window, possible)


def possible_mfu(whole: Work, float32: Work, peak: Peak) -> float:
    """Return the MFU of a GPU that reaches both its peaks, as a share of the one in bf16.

    A tenth of the work at a tenth of the rate takes nearly half of the time:

    >>> round(possible_mfu(Work(100, 200, 0), Work(10, 20, 0), Peak(10, 50, 100, 100)), 3)
    0.526

    Args:
        whole: of some tokens.
        float32: the part of it that is computed in float32, without TF32.
        peak: of the GPU.
    """
    seconds = (sum(whole) - sum(float32)) / peak.bf16 + sum(float32) / peak.float32
    return (whole.forward + whole.backward) / peak.bf16 / seconds


def rounded_down(share: float) -> str:
    """Return three digits that are allowed where the share is the most.

    >>> rounded_down(0.1969)
    '0.196'
    """
    return f"{math.floor(1000 * share) / 1000:.3f}"


def lay_out(
    steps: dict[str, list[Step]], model: Model, config: ModelConfig, options: argparse.Namespace
) -> Report:
    """Turn steps into tables, plain numbers and a figure."""
    work = model.work
    title = (
        f"{options.preset}: {model.parameters:,} parameters; {(work.forward + work.backward) / 1e6:.1f} MFLOP a token, "
        f"{work.again / 1e6:.1f} more computed again\n"
        f"{options.gpu}: {PEAKS[options.gpu].bf16:,.1f} TFLOP/s (bf16, dense) x MFU {options.mfu:g} (at most {rounded_down(model.possible_mfu)}) = "
        f"{model.tokens_per_second:,.0f} tokens/s; NVLink {options.nvlink:g} GB/s a GPU, {options.network:g} Gb/s a network card"
    )
    best = steps["DDP, 8 cards"]
    first = f"GPUs ({model.window:,} tokens a window)"
    names = [f"{gpus}" for gpus in options.gpus]
    shares = [share_out(gpus, at_once=options.windows, at_most=options.at_most) for gpus in options.gpus]
    settings = [
        (f"{windows}", f"{total:,}", f"{total * model.window / 1e6:.2f}", digits(step.computing, unit=1e-3))
        for (windows, total), step in zip(shares, best, strict=True)
    ]
    tables = [
        format_table(
            first,
            ("windows a GPU", "data.batch_size", "million tokens a step", "computing, ms"),
            list(zip(names, settings, strict=True)),
        )
    ]
    tables += [_communication(name, each, names) for name, each in steps.items()]
    tables.append(_epoch(best, model, names, options))
    numbers: dict[str, Any] = {
        "setting": {
            "preset": options.preset,
            "model": to_dict(config),
            "gpu": options.gpu,
            "mfu": options.mfu,
            "possible_mfu": model.possible_mfu,
        },
        "parameters": model.parameters,
        "work_per_token": work._asdict(),
        "tokens_per_second": model.tokens_per_second,
        "steps": {
            name: [asdict(step) | {"efficiency": step.efficiency} for step in each]
            for name, each in steps.items()
        },
    }
    curves = {name: [(step.gpus, 100 * step.efficiency) for step in each] for name, each in steps.items()}
    figure = draw_lines(curves, title=f"{options.preset}, by arithmetic", x="GPUs", y="efficiency, %")
    legend = (
        "Arithmetic, not measurement: protperf/bench/scaling.py says the formulas. Collectives reach "
        f"{REACHED:.0%} of a link, a hop takes {1e6 * HOP:g} us."
    )
    return Report([title, *tables, legend], numbers, {"scaling": figure})


def _communication(name: str, steps: Sequence[Step], names: Sequence[str]) -> str:
    rows = [
        (
            f"{step.sent_bytes / 1e6:,.0f}",
            digits(step.sending, unit=1e-3),
            digits(step.open_seconds, unit=1e-3),
            digits(step.small, unit=1e-3),
            f"{100 * step.efficiency:.1f}",
        )
        for step in steps
    ]
    columns = ("MB sent", "ms", "left open, ms", "small ones, ms", "efficiency, %")
    return format_table(f"{name} a node", columns, list(zip(names, rows, strict=True)))


def _epoch(steps: Sequence[Step], model: Model, names: Sequence[str], options: argparse.Namespace) -> str:
    """Return the table of what one pass over all tokens costs."""
    rows = []
    for step in steps:
        rate = step.gpus * model.tokens_per_second * step.efficiency
        hours = 1e9 * options.epoch / rate / 3600
        rows.append((f"{rate / 1e6:,.2f}", digits(hours), digits(hours * step.gpus)))
    columns = ("million tokens/s", "hours", "GPU hours")
    title = f"{options.epoch:g} billion tokens, DDP, 8 cards"
    return format_table(title, columns, list(zip(names, rows, strict=True)))
