"""`protperf bench embedding`: the whole of `protperf embed` beside bare forward passes, in one run.

Axis letters: `L` residues of a protein.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib import resources
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from protperf.bench import measure
from protperf.bench.figures import draw_bars
from protperf.bench.presets import read_preset
from protperf.bench.report import Report, digits, format_table, say
from protperf.checkpoint import describe
from protperf.config import ModelConfig, ObjectiveConfig, to_dict
from protperf.formats.fasta import SequenceReader
from protperf.formats.sizes import in_units
from protperf.inference.passes import frame
from protperf.model import ProteinModel
from protperf.vocab import STANDARD_RESIDUES, VOCABULARY

EMBED = "protperf embed"
BARE = "bare passes"
SINGLE = "one at a time"

BAR = 0.85
"""The share of the bare passes' rate that the whole command must reach."""

LONG_RESIDUES = (1000, 8000)
_NUM_SAMPLED = 500
_OUTCOME = re.compile(r"([\d.]+) seconds, ([\d,]+) tokens/s, ([\d.]+) (B|kB|MB|GB|TB) memory at most")
_UNITS = {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}

LEGEND = """\
protperf embed: a process of its own, from the first record read to the last written, mean vectors into HDF5.
bare passes: forward passes over as many tokens in rows that are full, nothing read, pooled or written.
one at a time: a forward pass and a mean for each protein. Ratios are medians of those within a round."""


class Outcome(NamedTuple):
    """What a run of `protperf embed` says of itself.

    Attributes:
        seconds: from the first record to the last.
        rate: tokens a second.
        memory: the most that the process held, in bytes.
    """

    seconds: float
    rate: float
    memory: float


def run(options: argparse.Namespace) -> Report:
    """Measure what is asked and lay the numbers out."""
    config = read_preset(options.preset, options.overrides, num_layers=options.layers)
    machine = measure.describe_machine(torch.device("cpu"))
    say("embedding", measure.headline(machine))
    blocks = [
        measure.headline(machine),
        f"{options.preset}: {config.num_layers} layers of {config.model_dim}",
    ]
    numbers: dict[str, object] = {"machine": dict(machine), "model": to_dict(config)}
    with tempfile.TemporaryDirectory(prefix="protperf-bench-") as folder:
        scratch = Path(folder)
        rates = compare(config, scratch, options)
        blocks += [lay_out_rates(rates), LEGEND]
        numbers["rates"] = rates
        if options.long:
            found = {
                kind: embed_long(config, kind, scratch, options) for kind in (config.attention, "softmax")
            }
            blocks.append(lay_out_long(found, options.long))
            numbers["long"] = {kind: outcome._asdict() for kind, outcome in found.items()}
        if options.longest:
            alone = {length: embed_one(config, length, scratch, options) for length in options.longest}
            blocks.append(lay_out_longest(alone))
            numbers["longest"] = {length: outcome._asdict() for length, outcome in alone.items()}
    bars = draw_bars({name: measure.median(each) for name, each in rates.items()}, title=EMBED, x="tokens/s")
    return Report(blocks, numbers, {"embedding": bars})


def compare(config: ModelConfig, scratch: Path, options: argparse.Namespace) -> dict[str, list[float]]:
    """Let the command, bare passes and the loop over single proteins take turns; return tokens a second of each round."""
    model = draw_model(config)
    checkpoint = save(model, scratch / "model.ckpt")
    sample = str(resources.files("data_prep") / "sample" / "uniprot_sample.fasta.gz")
    records = list(islice(SequenceReader([options.fasta or sample]), None if options.fasta else _NUM_SAMPLED))
    proteins = [frame(record.tokens) for record in records]
    fasta = write_fasta(scratch / "proteins.fasta", [record.tokens for record in records])
    tokens = sum(map(len, proteins))
    turns: dict[str, Callable[[], float]] = {
        EMBED: lambda: embed(checkpoint, fasta, scratch, options).rate,
        BARE: partial(timed, partial(pass_bare, model, tokens, options.toks_per_batch), tokens),
        SINGLE: partial(timed, partial(pass_singly, model, proteins), tokens),
    }
    rates: dict[str, list[float]] = {name: [] for name in turns}
    for number in range(options.rounds):
        for name, turn in turns.items():
            rates[name].append(turn())
        say("embedding", f"round {number + 1} of {options.rounds}")
    return rates


def draw_model(config: ModelConfig) -> ProteinModel:
    """Return a masked model with random weights, in evaluation mode."""
    torch.manual_seed(0)
    return ProteinModel(config, causal=False).eval()


def save(model: ProteinModel, path: Path) -> Path:
    """Write a checkpoint that `protperf embed` takes."""
    about = describe(model.config, ObjectiveConfig(), attend_across_documents=False, dataset_digest="")
    weights = {f"model.{name}": value for name, value in model.state_dict().items()}
    torch.save({"protperf": about, "state_dict": weights, "global_step": 0}, path)
    return path


@torch.inference_mode()
def pass_bare(model: ProteinModel, tokens: int, row: int) -> None:
    """Show a model so many tokens in rows that are full."""
    shown = torch.randint(0, VOCABULARY.num_standard, (1, row), dtype=torch.uint8)
    for start in range(0, tokens, row):
        model(shown[:, : tokens - start])


@torch.inference_mode()
def pass_singly(model: ProteinModel, proteins: Sequence[np.ndarray]) -> None:
    """Show a model one protein at a time and pool it."""
    for protein in proteins:
        model(torch.from_numpy(protein).unsqueeze(0))[0, 1:-1].mean(0)


def timed(call: Callable[[], None], tokens: int) -> float:
    """Return the tokens a second of a call over so many."""
    start = time.perf_counter()
    call()
    return tokens / (time.perf_counter() - start)


def embed(
    checkpoint: Path, fasta: Path, scratch: Path, options: argparse.Namespace, include: str = "mean"
) -> Outcome:
    """Run `protperf embed` in a process of its own.

    Raises:
        ValueError: it failed; with the last line that it said.
    """
    command = [
        sys.executable,
        "-m",
        "protperf",
        "embed",
        str(checkpoint),
        str(fasta),
        str(scratch / "out.h5"),
    ]
    command += ["--include", include, "--toks-per-batch", str(options.toks_per_batch), "--nogpu", "--force"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    said = _OUTCOME.search(done.stdout)
    if done.returncode or not said:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise ValueError(f"{EMBED} failed: {lines[-1]}")
    seconds, rate, memory, unit = said.groups()
    return Outcome(float(seconds), float(rate.replace(",", "")), float(memory) * _UNITS[unit])


def embed_long(config: ModelConfig, kind: str, scratch: Path, options: argparse.Namespace) -> Outcome:
    """Embed random proteins of `LONG_RESIDUES` with one kind of attention."""
    generator = np.random.default_rng(options.seed)
    lengths = generator.integers(*LONG_RESIDUES, size=options.long, endpoint=True)
    fasta = write_fasta(scratch / "long.fasta", [draw_residues(generator, length) for length in lengths])
    say("embedding", f"{options.long} long proteins with {kind}")
    return embed(
        save(draw_model(replace(config, attention=kind)), scratch / f"{kind}.ckpt"), fasta, scratch, options
    )


def embed_one(config: ModelConfig, length: int, scratch: Path, options: argparse.Namespace) -> Outcome:
    """Embed one random protein, a row a residue."""
    generator = np.random.default_rng(options.seed)
    fasta = write_fasta(scratch / "one.fasta", [draw_residues(generator, length)])
    say("embedding", f"one protein of {length:,} residues")
    return embed(save(draw_model(config), scratch / "model.ckpt"), fasta, scratch, options, "per_tok")


def draw_residues(generator: np.random.Generator, length: int) -> np.ndarray:
    """Return random standard residues, uint8 `(L,)`."""
    return generator.integers(len(STANDARD_RESIDUES), size=length, dtype=np.uint8)


def write_fasta(path: Path, proteins: Sequence[np.ndarray]) -> Path:
    """Write residue tokens as FASTA."""
    path.write_text(
        "".join(f">p{number}\n{VOCABULARY.decode(each)}\n" for number, each in enumerate(proteins))
    )
    return path


def lay_out_rates(rates: dict[str, list[float]]) -> str:
    """Return the table of tokens a second."""
    rows = []
    for name, own in rates.items():
        share = measure.ratio(own, rates[BARE])
        bar = f"{100 * BAR:.0f} {'reached' if (share or 0) >= BAR else 'below'}" if name == EMBED else "-"
        over = digits(measure.ratio(own, rates[SINGLE]), suffix="x")
        rows.append((name, (digits(measure.median(own)), digits(share, unit=0.01), over, bar)))
    columns = ("tokens/s", "of bare passes, %", "times one at a time", "bar")
    return format_table("embedding", columns, rows)


def lay_out_long(found: dict[str, Outcome], count: int) -> str:
    """Return the table of long proteins."""
    exact = found["softmax"]
    rows = [
        (
            kind,
            (
                digits(each.rate),
                in_units(each.memory),
                digits(each.rate / exact.rate, suffix="x"),
                digits(each.memory / exact.memory, suffix="x"),
            ),
        )
        for kind, each in found.items()
    ]
    columns = ("tokens/s", "memory of the process", "times softmax's rate", "times softmax's memory")
    return format_table(f"{count} of {LONG_RESIDUES[0]:,}-{LONG_RESIDUES[1]:,} residues", columns, rows)


def lay_out_longest(found: dict[int, Outcome]) -> str:
    """Return the table of single proteins."""
    rows = [
        (f"{length:,}", (digits(each.seconds), digits(1e6 * each.seconds / length), in_units(each.memory)))
        for length, each in found.items()
    ]
    return format_table("residues", ("seconds", "us/residue", "memory of the process"), rows)
