"""`protperf embed`: embeddings of proteins of any length, in the order and under the ids of the input.

Records are read in blocks, computed in batches of similar length, and written in the order read, so memory does not grow
with the input. The work itself is `protperf.batches.embed_proteins`.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from tqdm import tqdm

from protperf.formats.embeddings import (
    KINDS,
    RECORD_OVERHEAD,
    Embedding,
    EmbeddingInfo,
    EmbeddingWriter,
)
from protperf.formats.fasta import Policy, Record, SequenceReader, Skipped
from protperf.formats.records import quoted
from protperf.formats.sizes import estimate_text_bytes, hash_file, in_units
from protperf.formats.skipped import SkippedList
from protperf.formats.streams import STDIN, check_inputs

if TYPE_CHECKING:
    from protperf.checkpoint import TrainedModel

SUFFIXES = (".h5", ".hdf5")
SOME_LEFT_OUT = 3
"""Exit status when some records were written and some left out."""

BLOCK_TOKENS = 1 << 17
"""Tokens read before they are computed: enough to find batches of equal length, 256 MiB of states at a width of 512."""

_TYPICAL_RECORD = 450
"""Bytes of FASTA text for one protein of UniProt."""


class Outcome(NamedTuple):
    """What a run did.

    Attributes:
        written: proteins in the output.
        left_out: records that are not.
        residues: residues in the output.
    """

    written: int
    left_out: int
    residues: int


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    start = time.monotonic()
    options = parse(argv)
    outputs = output_paths(options.out, options.include)
    skipped_path = options.out.with_suffix(".skipped.tsv")
    check_inputs(options.inputs)
    check_outputs([*outputs.values(), skipped_path], options.inputs, force=options.force)
    from protperf.checkpoint import load_model
    from protperf.devices import choose_device

    device = choose_device(options.device)
    trained = load_model(options.checkpoint)
    trained.model.to(device)
    policy = Policy(gaps=options.gaps, unknown=options.unknown, mask_token=True, strict=options.strict)
    _say(describe_model(trained, str(device)))
    _say(describe_space(options.inputs, options.out.parent, options.include, trained.model.config.model_dim))
    outcome = embed(
        trained, options.inputs, outputs, skipped_path, policy=policy, token_budget=options.toks_per_batch
    )
    seconds = time.monotonic() - start
    print(
        f"{', '.join(map(str, outputs.values()))}: {outcome.written:,} protein{'s' * (outcome.written != 1)} written, "
        f"{outcome.left_out:,} left out, {outcome.residues:,} residues, {seconds:.1f} seconds, "
        f"{(outcome.residues + 2 * outcome.written) / seconds:,.0f} tokens/s"
    )
    return SOME_LEFT_OUT if outcome.left_out else 0


def embed(
    trained: TrainedModel,
    inputs: Sequence[str | Path],
    outputs: dict[str, Path],
    skipped_path: Path,
    *,
    policy: Policy,
    token_budget: int,
) -> Outcome:
    """Embed all records of some files.

    Args:
        trained: from `load_model`, on the device to compute on.
        inputs: sequence files; `-` is stdin.
        outputs: kind (see `KINDS`) -> file; each appears only when it is whole.
        skipped_path: file for the list of the records that were left out.
        policy: what to do with odd records; `strict` also stops at one that does not fit into memory.
        token_budget: tokens in a batch.

    Raises:
        ValueError: a bad file, or nothing accepted; nothing is left of the output then.
        OSError: the disk is full.
    """
    from protperf.batches import embed_proteins

    model = trained.model
    device = next(model.parameters()).device
    infos = describe_outputs(trained, outputs)
    with ExitStack() as stack:
        skipped = stack.enter_context(SkippedList(skipped_path))
        writers = [stack.enter_context(EmbeddingWriter(path, infos[kind])) for kind, path in outputs.items()]
        reader = SequenceReader(inputs, policy, skipped_path=skipped.work, progress=True)
        residues = 0
        for block in cut_blocks(reader):
            distinct = {record.tokens.tobytes(): record.tokens for record in block}
            found = embed_proteins(model, list(distinct.values()), token_budget=token_budget, device=device)
            states = dict(zip(distinct, found, strict=True))
            for record in block:
                rows = states[record.tokens.tobytes()]
                if rows is None:
                    leave_out(record, skipped, strict=policy.strict)
                    continue
                residues += len(rows)
                for writer in writers:
                    writer.add(pool(record, rows, writer.info.kind))
        for line in [*reader.summary(), *summarise_too_large(skipped.added)]:
            _say(line)
        written = reader.accepted - len(skipped.added)
        if not written:
            raise ValueError(explain_nothing(reader, skipped.added))
        for writer in writers:
            writer.finish()
    return Outcome(written, reader.records - written, residues)


def cut_blocks(records: Iterable[Record]) -> Iterator[list[Record]]:
    """Cut records into blocks of at most `BLOCK_TOKENS` tokens; a longer one is a block of its own."""
    block: list[Record] = []
    num_tokens = 0
    for record in records:
        length = len(record.tokens) + 2
        if block and num_tokens + length > BLOCK_TOKENS:
            yield block
            block, num_tokens = [], 0
        block.append(record)
        num_tokens += length
    if block:
        yield block


def pool(record: Record, states: np.ndarray, kind: str) -> Embedding:
    """Return what a file of some kind holds of a protein, from the states of its residues `(L, D)`.

    The mean is taken over residues alone (a `<mask>` stands for one), in float64.
    """
    array = states.mean(0, dtype=np.float64).astype(np.float32) if kind == "mean" else states
    return Embedding(record.id, record.header, len(states), array)


def describe_outputs(trained: TrainedModel, outputs: dict[str, Path]) -> dict[str, EmbeddingInfo]:
    """Return what each output file says of itself."""
    digest, _ = hash_file(trained.path)
    return {
        kind: EmbeddingInfo(
            kind=kind,
            model_dim=trained.model.config.model_dim,
            checkpoint=trained.path.name,
            checkpoint_sha256=digest,
            objective=trained.objective.kind,
        )
        for kind in outputs
    }


def leave_out(record: Record, skipped: SkippedList, *, strict: bool) -> None:
    """Leave out a record that does not fit into memory even alone; an error where `strict`."""
    found = f"{len(record.tokens)} residues"
    skipped.add(Skipped(record.path, record.line, record.id, None, "out_of_memory", found, record.unit))
    if strict:
        raise ValueError(f"{explain_too_large(skipped.added[-1])} (stopped by --strict)")


def explain_too_large(skipped: Skipped) -> str:
    """Return one line on a record that did not fit into memory."""
    return (
        f"{skipped.place}: record {quoted(skipped.id)} ({skipped.found}) does not fit into memory even alone; "
        "embed it where there is more, or with --device cpu"
    )


def summarise_too_large(skipped: Sequence[Skipped]) -> list[str]:
    """Return a line on the records that did not fit into memory, if there were any."""
    if not skipped:
        return []
    return [f"left out, out_of_memory: {len(skipped):,} (first: {explain_too_large(skipped[0])})"]


def explain_nothing(reader: SequenceReader, too_large: Sequence[Skipped]) -> str:
    """Return why no record is left."""
    examples = [example.message for example in reader.skipped_examples]
    examples += [explain_too_large(skipped) for skipped in too_large]
    return f"no record accepted of {reader.records}; the first: {examples[0]}"


def output_paths(out: Path, kinds: Sequence[str]) -> dict[str, Path]:
    """Return the file of each kind: `out` itself for one kind, `STEM.KIND.h5` for several.

    >>> [str(path) for path in output_paths(Path("a.h5"), ["mean", "per_tok"]).values()]
    ['a.mean.h5', 'a.per_tok.h5']
    """
    if len(kinds) == 1:
        return {kinds[0]: out}
    return {kind: out.with_suffix(f".{kind}{out.suffix}") for kind in kinds}


def check_outputs(paths: Sequence[Path], inputs: Sequence[str], *, force: bool) -> None:
    """Refuse, before any work, what must not be written.

    Raises:
        ValueError: no folder there, or a path is an input, a folder, or taken.
    """
    folder = paths[0].parent
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder to write {paths[0].name} to; make it first")
    read = {Path(name).resolve() for name in inputs if name != STDIN}
    for path in paths:
        if path.resolve() in read:
            raise ValueError(f"{path}: is an input; give another name for the output")
        if path.is_dir():
            raise ValueError(
                f"{path}: is a folder; give the name of a file, such as {path / 'embeddings.h5'}"
            )
        if path.exists() and not force:
            raise ValueError(f"{path}: exists already; give another name, or --force to replace it")


def describe_model(trained: TrainedModel, device: str) -> str:
    """Return one line on what computes and where."""
    config = trained.model.config
    return (
        f"{trained.path} (step {trained.step:,}, {trained.objective.kind}, {config.attention}, "
        f"{config.num_layers} layers, width {config.model_dim}) on {device}"
    )


def describe_space(inputs: Sequence[str], folder: Path, kinds: Sequence[str], model_dim: int) -> str:
    """Return one line on the size of the output, about, and the free space; stdin and pipes are not counted."""
    files = [name for name in inputs if name != STDIN and Path(name).is_file()]
    text_bytes = sum(estimate_text_bytes(name) for name in files)
    proteins = text_bytes / _TYPICAL_RECORD
    vectors = {"mean": proteins, "per_tok": text_bytes}
    need = sum(vectors[kind] * model_dim * 4 + proteins * RECORD_OVERHEAD for kind in kinds)
    free = shutil.disk_usage(folder).free
    verdict = "" if free > need else "; this may not be enough"
    piped = "" if len(files) == len(inputs) else ", and what comes from pipes"
    return f"the output takes about {in_units(need)}{piped}; {in_units(free)} are free in {folder}{verdict}"


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line; wrong usage exits with status 2."""
    parser = _make_parser()
    options = parser.parse_intermixed_args(_one_kind_each(sys.argv[1:] if argv is None else argv))
    if len(options.paths) < 3:
        parser.error("give a checkpoint, then sequence files, then the file to write")
    options.checkpoint, *options.inputs, out = options.paths
    options.out = Path(out)
    if options.out.suffix not in SUFFIXES:
        parser.error(f"OUT is {out!r}; its name must end in {' or '.join(SUFFIXES)}")
    options.include = list(dict.fromkeys(options.include or ["mean"]))
    if options.toks_per_batch < 1:
        parser.error(f"--toks-per-batch {options.toks_per_batch}: must be at least 1")
    if options.nogpu:
        if options.device not in ("auto", "cpu"):
            parser.error(f"--nogpu and --device {options.device} contradict each other")
        options.device = "cpu"
    return options


def _one_kind_each(argv: Sequence[str]) -> list[str]:
    """Turn `--include mean per_tok` into an option for each, so that paths may follow it."""
    words: list[str] = []
    inside = False
    for word in argv:
        inside = word == "--include" or (inside and word in KINDS)
        if inside and word in KINDS:
            if words[-1] == "--include":
                words.pop()
            words.append(f"--include={word}")
        else:
            words.append(word)
    return words


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "protperf embed",
        usage="protperf embed [options] CHECKPOINT FASTA... OUT",
        description="Embed proteins, each of them whole, whatever its length. OUT is an HDF5 file with one dataset a "
        "protein, in the order of the input; the id stands in the attribute original_id. With two kinds of embedding "
        "OUT.h5 becomes OUT.mean.h5 and OUT.per_tok.h5. Records that are left out are listed in OUT.skipped.tsv.",
        epilog="Exit status: 0 all records written, 3 some left out, 1 failure (nothing is written), 2 wrong usage.",
    )
    parser.add_argument(
        "paths",
        nargs="+",
        metavar="CHECKPOINT FASTA... OUT",
        help="a .ckpt file or the folder of a run (its best checkpoint); sequence files (- is stdin); the .h5 file to write",
    )
    parser.add_argument(
        "--include",
        action="append",
        choices=KINDS,
        help="one or both: mean, one vector a protein; per_tok, one row a residue (mean)",
    )
    parser.add_argument(
        "--toks-per-batch",
        "--toks_per_batch",
        type=int,
        default=4096,
        metavar="N",
        help="tokens in a batch (%(default)s)",
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N or mps (%(default)s)")
    parser.add_argument("--nogpu", action="store_true", help="the same as --device cpu")
    parser.add_argument("--force", action="store_true", help="replace files that are there")
    records = parser.add_argument_group("records")
    records.add_argument(
        "--strict", action="store_true", help="stop at the first record that would be left out"
    )
    records.add_argument(
        "--gaps", choices=("refuse", "drop"), default="refuse", help="records with - or . (%(default)s)"
    )
    records.add_argument(
        "--unknown",
        choices=("refuse", "x"),
        default="refuse",
        help="other characters; x reads them as X (%(default)s)",
    )
    return parser


def _say(text: str) -> None:
    """Write one line of log."""
    tqdm.write(f"protperf embed: {text}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
