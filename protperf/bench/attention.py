"""`protperf bench attention`: time and memory of every attention against length, beside exact attention and the X line.

Axis letters: `B` batch, `H` heads, `L` length in tokens, `K` head width.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from protperf.attention import ATTENTIONS, Hashing
from protperf.bench import measure
from protperf.bench.attention_tables import PASSES, Cell, lay_out
from protperf.bench.contestants import Attention, Contestant, Setting, cut, gather, performer_pytorch
from protperf.bench.report import Report, say
from protperf.formats.sizes import in_units
from protperf.work import attention_work, rows_for


@dataclass(frozen=True)
class Inputs:
    """Tensors that all contestants of a table get, `(B, H, L, K)` each, from N(0, 1).

    Attributes:
        q: queries.
        k: keys.
        v: values.
        gradient: of the output; `None` where only the forward pass runs.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    gradient: Tensor | None

    def forget_gradients(self) -> None:
        """Release the gradients that a call left on q, k and v."""
        for x in (self.q, self.k, self.v):
            x.grad = None

    def attend(self, attention: Attention) -> Tensor:
        """Make one pass; the gradients are left on q, k and v."""
        if self.gradient is None:
            with torch.no_grad():
                return attention(self.q, self.k, self.v)
        self.forget_gradients()
        out = attention(self.q, self.k, self.v)
        out.backward(self.gradient)
        return out


def run(options: argparse.Namespace) -> Report:
    """Measure all cells and lay them out."""
    setting = read_setting(options)
    machine = measure.describe_machine(setting.device)
    say("attention", measure.headline(machine))
    try:
        performer_pytorch(setting, causal=False)
    except ImportError as error:
        say("attention", str(error))
    cells: list[Cell] = []
    for direction in options.directions:
        history: dict[tuple[str, str], list[Cell]] = {}
        for length in options.lengths:
            contestants = gather(setting, causal=direction == "causal", length=length)
            for passes in PASSES:
                place = Cell("", direction, passes, length)
                found = measure_cells(contestants, setting, place, history)
                done = sum(cell.seconds is not None for cell in found)
                say("attention", f"{direction}, {passes}, {length:,} tokens: {done} of {len(found)} measured")
                cells += found
    return lay_out(cells, setting, machine)


def read_setting(options: argparse.Namespace) -> Setting:
    """Check what the command line could not.

    Raises:
        ValueError: an attention or a device that is not there.
    """
    unknown = [kind for kind in options.kinds or () if kind not in ATTENTIONS]
    if unknown:
        raise ValueError(f"--kinds {' '.join(unknown)}: not there; allowed: {', '.join(ATTENTIONS)}")
    return Setting(
        kinds=tuple(dict.fromkeys(options.kinds or ATTENTIONS)),
        batch=options.batch,
        heads=options.heads,
        head_dim=options.head_dim,
        num_features=options.features,
        packed=options.packed,
        dtype=getattr(torch, options.dtype),
        device=measure.choose_bench_device(options.device),
        layout=None if options.layout == "auto" else options.layout,
        rounds=options.rounds,
        budget=options.budget,
        seed=options.seed,
    )


def measure_cells(
    contestants: Sequence[Contestant],
    setting: Setting,
    place: Cell,
    history: dict[tuple[str, str], list[Cell]],
) -> list[Cell]:
    """Measure one length of one table: those who are not too slow take turns, with a matrix product among them.

    Args:
        contestants: in the order of their turns.
        setting: what they share.
        place: direction, passes and length.
        history: (contestant, passes) -> cells measured at shorter lengths; what is measured is added.
    """
    inputs = draw_inputs(setting, place)
    calls = {each.name: partial(inputs.attend, each.attend) for each in contestants}
    cells, warm = {}, {}
    for each in contestants:
        before = history.get((each.name, place.passes), [])
        warm[each.name], reason = _warm_up(calls[each.name], before, setting, place.length)
        cells[each.name] = replace(place, contestant=each.name, reason=reason)
    product = measure.matrix_product(setting.dtype, setting.device)
    running: dict[str, measure.Call] = {measure.MATMUL: product}
    running |= {name: call for name, call in calls.items() if not cells[name].reason}
    warm[measure.MATMUL] = measure.warm_up(product, device=setting.device)
    repeats = measure.plan_turns({name: warm[name] for name in running})
    samples = measure.alternate(running, rounds=setting.rounds, device=setting.device, repeats=repeats)
    for each in contestants:
        if each.name not in samples:
            history.setdefault((each.name, place.passes), []).append(cells[each.name])
        else:
            cell = replace(
                cells[each.name],
                rounds=tuple(samples[each.name]),
                product_rounds=tuple(samples[measure.MATMUL]),
                extra_bytes=extra_bytes(calls[each.name], inputs, setting.device),
            )
            cells[each.name] = evaluate(cell, each, setting)
            history.setdefault((each.name, place.passes), []).append(cells[each.name])
    return list(cells.values())


def draw_inputs(setting: Setting, place: Cell) -> Inputs:
    """Draw q, k, v and, for a backward pass, the gradient of the output."""
    shape = (setting.batch, setting.heads, place.length, setting.head_dim)
    q, k, v, gradient = (
        measure.normal(*shape, seed=setting.seed + number).to(setting.device, setting.dtype)
        for number in range(4)
    )
    backward = place.passes == PASSES[1]
    for x in (q, k, v):
        x.requires_grad_(backward)
    return Inputs(q, k, v, gradient if backward else None)


def _warm_up(call: measure.Call, before: Sequence[Cell], setting: Setting, length: int) -> tuple[float, str]:
    """Return the seconds of a warm call and why it is left out: empty if it is not."""
    if before and not before[-1].rounds:
        return 0.0, f"left out from {before[-1].length:,} tokens on: {before[-1].reason}"
    reason = too_much(before, length, budget=setting.budget, device=setting.device)
    if reason:
        return 0.0, reason
    try:
        seconds = measure.warm_up(call, device=setting.device)
    except (RuntimeError, MemoryError) as error:
        if not measure.is_out_of_memory(error):
            raise
        return 0.0, "out of memory"
    slow = seconds > setting.budget
    return seconds, f"one call took {seconds:.1f} s, above --budget {setting.budget:g}" if slow else ""


def too_much(before: Sequence[Cell], length: int, *, budget: float, device: torch.device) -> str:
    """Return why a cell is left out, judged by how the cells of shorter lengths grew; empty if it is not."""
    seconds = measure.forecast([(cell.length, min(cell.rounds)) for cell in before], length)
    if seconds is not None and seconds > budget:
        return f"one call would take about {seconds:.3g} s, above --budget {budget:g}"
    needed = measure.forecast([(cell.length, float(cell.extra_bytes or 0)) for cell in before], length)
    free = measure.free_bytes(device)
    if needed is not None and needed > free:
        return f"a call would take about {in_units(needed)} of memory, {in_units(free)} are free"
    return ""


def extra_bytes(call: measure.Call, inputs: Inputs, device: torch.device) -> int:
    """Return the peak of a call beyond what the caller gives (q, k, v) and gets (out; gradients of q, k and v)."""
    results = inputs.v.nbytes * (1 if inputs.gradient is None else 4)
    inputs.forget_gradients()
    return max(0, measure.peak_allocated(call, device=device) - results)


def evaluate(cell: Cell, contestant: Contestant, setting: Setting) -> Cell:
    """Fill in the median and, from the closed form, the rate of arithmetic."""
    seconds = measure.median(cell.rounds)
    if contestant.kind is None:
        return replace(cell, seconds=seconds)
    work = attention_work(
        contestant.kind,
        causal=cell.direction == "causal",
        documents=cut(cell.length, setting.packed, seed=setting.seed) if contestant.packed else [cell.length],
        head_dim=setting.head_dim,
        rows=rows_for(contestant.kind, setting.num_features, setting.head_dim),
        hashing=Hashing(),
    ).times(setting.batch * setting.heads)
    flops = work.forward if cell.passes == PASSES[0] else sum(work)
    slower = measure.ratio(cell.rounds, cell.product_rounds) or math.inf
    share = flops / measure.MATMUL_FLOPS / slower
    return replace(cell, seconds=seconds, gflops=flops / seconds / 1e9, share=share)
