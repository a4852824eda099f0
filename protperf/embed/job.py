"""One run of `protperf embed`: check, say what will happen, do it, say what was done."""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import torch

from protperf.arguments import check_outputs, policy_of
from protperf.checkpoint import TrainedModel, load_model, model_files
from protperf.devices import choose_device
from protperf.embed.engine import Arrays, Choices, Compute, Engine, Progress, Task, explain, say, summarise
from protperf.embed.outputs import Part, plan_parts, plan_paths
from protperf.embed.sinks import describe_reading, open_sinks
from protperf.embed.workers import Recipe, in_processes, in_this_process
from protperf.formats.contact_head import (
    CONTACT_HEAD_NAME,
    ContactHead,
    describe_other_model,
    read_contact_head,
)
from protperf.formats.embeddings import RECORD_OVERHEAD
from protperf.formats.fasta import SequenceReader
from protperf.formats.partial_output import is_begun
from protperf.formats.sizes import estimate_text_bytes, hash_file, in_units, peak_memory_bytes
from protperf.formats.skipped import SOME_LEFT_OUT, SkippedList, skipped_path
from protperf.formats.streams import STDIN
from protperf.inference.contacts import check_head
from protperf.inference.embedding import resolve_layers
from protperf.tensor_folder import check_replaceable
from protperf.vocab import VOCABULARY

_RECORD_BYTES = 450
"""Bytes of FASTA text for one protein of UniProt, about."""
_SAMPLED_BYTES = 1 << 20
_FIXED_BYTES = 16_000
"""Of an HDF5 file without any protein."""


def embed(options: argparse.Namespace) -> int:
    """Embed the records of some files; return the exit status.

    Raises:
        ValueError: a mistake in the options or in the input, before or while working.
        OSError: the disk is full; what is committed is kept, and the same command goes on.
    """
    devices = choose_devices(options.device, options.devices, precision=options.precision)
    trained = load_model(options.checkpoint)
    parts = choose_parts(options, trained)
    head = None
    if "contacts" in options.include:
        options.contact_head = options.contact_head or trained.path.with_name(CONTACT_HEAD_NAME)
        head = find_contact_head(options.contact_head, trained)
    paths = [options.out] if options.format == "pt" else plan_paths(options.out, parts, options.shard)
    list_path = name_skipped(options.out, options.shard)
    read = [*options.inputs, *model_files(trained.path)]
    if options.format == "pt":
        check_folder(options.out, force=options.force)
        check_outputs([list_path], read, force=options.force)
    else:
        check_files(paths, list_path, read, force=options.force)
    choices = choices_of(options, trained.model.max_residues)
    say(describe_model(trained, devices))
    say(describe_space(options, parts, trained.model.config.model_dim))
    recipe = Recipe(
        parts,
        window=options.window if options.long == "window" else 0,
        token_budget=options.toks_per_batch,
        precision=options.precision,
        dtype=options.dtype,
        head=head,
    )
    with ExitStack() as stack:
        sinks = open_sinks(stack, options, trained, parts, paths)
        skipped = stack.enter_context(SkippedList(list_path))  # published before the outputs
        engine = Engine(sinks, skipped, choices)
        is_named = options.format != "pt" and len(sinks) < len(parts)
        if is_named:
            say("an earlier run was killed while its outputs got their names; the others get theirs now")
        elif engine.progress.records:
            say(f"going on after {engine.progress.records:,} records that an earlier run is done with")
        reader = SequenceReader(
            options.inputs, policy_of(options, mask_token=True), skipped_path=skipped.work, progress=True
        )
        before, start = (engine.progress.residues, engine.progress.written), time.monotonic()
        progress = engine.run(reader, refuse_more if is_named else choose_compute(trained, devices, recipe))
        seconds = time.monotonic() - start
        for line in [*reader.summary(), *summarise(skipped)]:
            say(line)
        if not progress.written and (options.shard is None or not reader.accepted):
            for output in (*sinks, skipped):
                output.discard()
            raise ValueError(explain_nothing(reader, skipped))
        for sink in sinks:
            sink.finish(
                {
                    "records_digest": engine.whole[1],
                    "num_accepted": engine.whole[0],
                    **describe_reading(options),
                }
            )
    skipped.forget()
    num_left_out = skipped.num_added + reader.records - reader.accepted
    print(describe_outcome(paths, progress, num_left_out, before, seconds))
    return SOME_LEFT_OUT if num_left_out else 0


def check_files(paths: Sequence[Path], list_path: Path, inputs: Sequence[str | Path], *, force: bool) -> None:
    """Refuse, before any work, files that must not be written; those of a killed run that goes on are left to it.

    Raises:
        ValueError: as `check_outputs`.
    """
    begun = [path for path in paths if is_begun(path)]
    goes_on = bool(begun) and not force and all(path.exists() or path in begun for path in paths)
    check_outputs(begun if goes_on else [*paths, list_path], inputs, force=force)


def choose_devices(name: str, count: int, *, precision: str) -> list[torch.device]:
    """Return the devices to compute on: one as named, or so many GPUs or processes on a CPU.

    Raises:
        ValueError: there are not as many, or they do not compute in that precision.
    """
    first = choose_device(name, precision=precision)
    if count == 1 or first.type == "cpu":
        return [first] * count
    there = torch.cuda.device_count() if first.type == "cuda" else 1
    if ":" in name or there < count:
        raise ValueError(
            f"--devices {count} with --device {name}: there is {there} {first.type} device{'s' * (there != 1)} here; give "
            "--device auto and at most so many, or --device cpu"
        )
    return [torch.device("cuda", index) for index in range(count)]


def choose_parts(options: argparse.Namespace, trained: TrainedModel) -> tuple[Part, ...]:
    """Return what is kept of each protein.

    Raises:
        ValueError: the model has no such layer, or its `<bos>` has seen nothing.
    """
    try:
        layers = resolve_layers(options.repr_layers, trained.model.config.num_layers)
    except ValueError as error:
        raise ValueError(f"--repr-layers: {error}") from None
    parts = plan_parts(options.include, options.pool, layers)
    for part in parts:
        if part.kind in ("cls", "bos") and trained.model.causal:
            option = "--pool cls" if part.kind == "cls" else "--include bos"
            raise ValueError(
                f"{option}: <bos> stands first and a causal model has seen nothing there, so it is the same for every "
                "protein; allowed: --include mean with --pool mean or max"
            )
    return parts


def find_contact_head(path: Path, trained: TrainedModel) -> ContactHead:
    """Return what predicts contacts from the model's attention.

    Raises:
        ValueError: there is none, or it belongs to a model of another shape.
    """
    if not path.is_file():
        raise ValueError(
            f"{path}: no such file; --include contacts needs it: `protperf maps contacts` fits it to structures, then "
            "--contact-head FILE"
        )
    head = read_contact_head(path)
    try:
        check_head(trained.model, head)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if warning := describe_other_model(head, trained.path, hash_file(trained.path)[0]):
        say(f"{path} {warning}")
    return head


def check_folder(path: Path, *, force: bool) -> None:
    """Refuse, before any work, a folder that must not be written.

    Raises:
        ValueError: there is one already, or one that is not to be replaced.
    """
    check_replaceable(path)
    if path.is_dir() and any(path.iterdir()) and not force:
        raise ValueError(f"{path}: exists already; give another name, or --force to replace it")


def name_skipped(out: Path, shard: tuple[int, int] | None) -> Path:
    """Return the file that lists what was left out.

    >>> str(name_skipped(Path("a.h5"), (2, 8)))
    'a.shard-2-of-8.h5.skipped.tsv'
    """
    word = f".shard-{shard[0]}-of-{shard[1]}" if shard else ""
    return skipped_path(out.with_name(f"{out.stem}{word}{out.suffix}"))


def choices_of(options: argparse.Namespace, most: int | None) -> Choices:
    """Return what the user chose of the run itself, for a model that takes so many residues at most.

    Raises:
        ValueError: the windows are longer than that.
    """
    number, count = options.shard or (1, 1)
    longest = options.window if options.long == "error" else 0
    if options.long == "window" and most is not None:
        if options.window > most:
            raise ValueError(
                f"--window {options.window}: this model takes at most {most} residues; give so many"
            )
        most = None
    return Choices(
        id_kind=options.id,
        strict=options.strict,
        longest=longest,
        most=most or 0,
        shard=(number - 1, count),
    )


def choose_compute(trained: TrainedModel, devices: Sequence[torch.device], recipe: Recipe) -> Compute:
    """Return what computes: this process, or one a device."""
    if len(devices) == 1:
        trained.model.to(devices[0])
        return partial(in_this_process, trained, recipe)
    return partial(in_processes, trained.path, [str(device) for device in devices], recipe)


def refuse_more(tasks: Iterable[tuple[Task, list[np.ndarray]]]) -> Iterator[tuple[Task, list[Arrays | None]]]:
    """Compute nothing: all of the input was done with when some outputs got their names.

    Raises:
        ValueError: there is more to do, so the input is another one.
    """
    for _ in tasks:
        raise ValueError(
            "the input holds other records than those of the output that is there; --force begins anew"
        )
    return iter(())


def describe_model(trained: TrainedModel, devices: Sequence[torch.device]) -> str:
    """Return one line on what computes and where."""
    config = trained.model.config
    where = ", ".join(map(str, devices))
    return (
        f"{trained.path} (step {trained.step:,}, {trained.objective.kind}, {config.attention}, "
        f"{config.num_layers} layers, width {config.model_dim}) on {where}"
    )


def describe_space(options: argparse.Namespace, parts: Sequence[Part], model_dim: int) -> str:
    """Return one line on the size of the output, about, and the free space; stdin and pipes are not counted."""
    files = [name for name in options.inputs if name != STDIN and Path(name).is_file()]
    sizes = [estimate_text_bytes(name) / (options.shard or (1, 1))[1] for name in files]
    text_bytes = sum(sizes)
    proteins = sum(size / record_bytes(name) for name, size in zip(files, sizes, strict=True))
    size = 2 if options.dtype == "float16" else 4
    values = sum(part.num_values(text_bytes, proteins, model_dim, len(VOCABULARY)) for part in parts)
    need = values * size + (proteins * RECORD_OVERHEAD + _FIXED_BYTES) * len(parts)
    folder = options.out.parent
    free = shutil.disk_usage(folder).free
    verdict = "" if free > need else "; this may not be enough"
    piped = "" if len(files) == len(options.inputs) else ", and what comes from pipes"
    return f"the output takes about {in_units(need)}{piped}; {in_units(free)} are free in {folder}{verdict}"


def record_bytes(name: str) -> float:
    """Return the bytes of text of one record of a FASTA file, about: as at its beginning, or as UniProt's."""
    with open(name, "rb") as file:
        text = file.read(_SAMPLED_BYTES)
    records = text.count(b"\n>") + text.startswith(b">")
    return len(text) / records if records and text.startswith(b">") else _RECORD_BYTES


def describe_outcome(
    paths: Sequence[Path], progress: Progress, num_left_out: int, before: tuple[int, int], seconds: float
) -> str:
    """Return one line on what is in the output and how fast this run was, from the first record to the last.

    Memory is that of a GPU, if there is one, else of this process: of several it is the one that reads and writes.
    """
    tokens = progress.residues - before[0] + 2 * (progress.written - before[1])
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else peak_memory_bytes()
    return (
        f"{', '.join(map(str, paths))}: {progress.written:,} protein{'s' * (progress.written != 1)} written, "
        f"{num_left_out:,} left out, {progress.residues:,} residues, {seconds:.1f} seconds, "
        f"{tokens / max(seconds, 1e-9):,.0f} tokens/s, {in_units(peak)} memory at most"
    )


def explain_nothing(reader: SequenceReader, skipped: SkippedList) -> str:
    """Return why no record is left."""
    examples = [example.message for example in reader.skipped_examples]
    examples += [explain(each) for each in skipped.examples.values()]
    return f"no record accepted of {reader.records}; the first: {examples[0]}"
