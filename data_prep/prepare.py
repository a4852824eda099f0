"""`protperf prepare`: protein sequences in, a dataset of shuffled, concatenated, sharded windows out.

Records are read once and sorted by a keyed hash of their sequence in two passes over files (`spill`, `pack`), so memory
does not grow with the input and the bytes do not depend on the order of the records.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from importlib import resources
from pathlib import Path

from tqdm import tqdm

from data_prep.folder import SKIPPED_NAME, OutputFolder
from data_prep.inputs import check_tables, describe_input, describe_space
from data_prep.options import DUPLICATES, PrepareOptions
from data_prep.pack import Packer
from data_prep.spill import BUFFER_BYTES, NUM_BUCKETS, Spill, order_key
from data_prep.splits import Splitter
from protperf import __version__
from protperf.formats.fasta import Policy, SequenceReader
from protperf.formats.manifest import InputEntry, Manifest, RecordCounts, dataset_digest, write_manifest
from protperf.formats.ngrams import NGRAMS_NAME, write_ngrams
from protperf.formats.streams import check_inputs
from protperf.vocab import VOCABULARY

_FULL_DISK = (errno.ENOSPC, errno.EDQUOT)


@dataclass
class LengthFilter:
    """Applies the length limits and counts what they drop."""

    too_short: int = 0
    too_long: int = 0

    def keeps(self, length: int, options: PrepareOptions) -> bool:
        """Return whether a protein of `length` residues is kept, and count it if not."""
        short, long = length < options.min_length, 0 < options.max_length < length
        self.too_short += short
        self.too_long += long
        return not (short or long)


def prepare(
    inputs: list[str],
    out: Path,
    options: PrepareOptions,
    *,
    force: bool = False,
    strict: bool = False,
    buffer_bytes: int = BUFFER_BYTES,
) -> Manifest:
    """Make a dataset.

    Args:
        inputs: files of sequences; `-` is standard input.
        out: folder to write the dataset to.
        options: what determines its bytes.
        force: replace a dataset that is already there.
        strict: stop at the first record that would be left out.
        buffer_bytes: memory for records on their way to the disk.

    Raises:
        ValueError: nothing to read, nothing accepted, a bad file, `out` is taken.
        OSError: the disk is full or a file cannot be read or written. In both cases nothing that looks like a dataset is
            left in `out`, except one that was there before.
    """
    tables = {"clusters": options.clusters, "ood": options.ood_clusters}
    tables = {role: path for role, path in tables.items() if path}
    check_inputs(inputs)
    check_tables(tables.values())
    _say(describe_space(inputs, out))
    with _explain_full_disk(out), OutputFolder(out, force=force) as folder:
        sources = [describe_input(path, "sequences") for path in inputs]
        sources += [describe_input(path, role) for role, path in tables.items()]
        return _build(inputs, folder, options, sources, strict=strict, buffer_bytes=buffer_bytes)


def _build(
    inputs: list[str],
    folder: OutputFolder,
    options: PrepareOptions,
    sources: list[InputEntry],
    *,
    strict: bool,
    buffer_bytes: int,
) -> Manifest:
    """Read, sort, pack and publish."""
    policy = Policy(gaps=options.gaps, unknown=options.unknown, strict=strict)
    reader = SequenceReader(inputs, policy, skipped_path=folder.work / SKIPPED_NAME, progress=True)
    splitter, lengths = Splitter(options), LengthFilter()
    spill = _read(reader, splitter, lengths, folder, options, buffer_bytes)
    packer = Packer(folder.work, options, num_tokens=spill.num_tokens)
    for number in tqdm(range(NUM_BUCKETS), "pack", unit="bucket", disable=None, leave=False):
        packer.add(spill.take(number))
    shards, splits = packer.finish()
    manifest = Manifest(
        protperf_version=__version__,
        window=options.window,
        seed=options.seed,
        release=options.release,
        options=options.as_manifest(),
        inputs=sources,
        counts=_count(reader, splitter, lengths, packer),
        splits=splits,
        residue_counts=_count_residues(packer),
        shards=shards,
        ngrams=write_ngrams(folder.work / NGRAMS_NAME, packer.ngrams),
        digest=dataset_digest(shards),
    )
    write_manifest(folder.work, manifest)
    skipped = [SKIPPED_NAME] if (folder.work / SKIPPED_NAME).exists() else []
    folder.publish([*(shard.file for shard in shards), NGRAMS_NAME, *skipped])
    return manifest


def _read(
    reader: SequenceReader,
    splitter: Splitter,
    lengths: LengthFilter,
    folder: OutputFolder,
    options: PrepareOptions,
    buffer_bytes: int,
) -> Spill:
    """Read all records into buckets, each with its key and its split."""
    buckets = folder.work / "buckets"
    buckets.mkdir()
    spill = Spill(buckets, buffer_bytes=buffer_bytes)
    for record in reader:
        if lengths.keeps(len(record.tokens), options):
            sequence = record.tokens.tobytes()
            spill.add(order_key(sequence, options.seed), sequence, splitter.split_of(record, sequence))
    spill.flush()
    for line in reader.summary():
        _say(line)
    if not any(spill.num_tokens):
        raise ValueError(_explain_nothing(reader, lengths))
    if (
        options.clusters
        and splitter.outside_clusters == reader.accepted - lengths.too_short - lengths.too_long
    ):
        raise ValueError(
            f"{options.clusters}: names none of the records; its second column holds their first words or accessions"
        )
    return spill


def _explain_nothing(reader: SequenceReader, lengths: LengthFilter) -> str:
    """Return why no record is left."""
    if reader.accepted:
        return f"no record is left: {lengths.too_short} below --min-length, {lengths.too_long} above --max-length"
    example = f"; the first: {reader.skipped_examples[0].message}" if reader.skipped_examples else ""
    return f"no record accepted of {reader.records}{example}"


def _count(reader: SequenceReader, splitter: Splitter, lengths: LengthFilter, packer: Packer) -> RecordCounts:
    """Gather the counts of all stages."""
    return RecordCounts(
        records=reader.records,
        accepted=reader.accepted,
        residues=reader.residues,
        skipped=dict(sorted(reader.skipped.items())),
        repaired=dict(sorted(reader.repaired.items())),
        too_short=lengths.too_short,
        too_long=lengths.too_long,
        duplicates=packer.removed.duplicates,
        outside_clusters=splitter.outside_clusters,
        split_conflicts=packer.removed.split_conflicts,
    )


def _count_residues(packer: Packer) -> dict[str, int]:
    """Return the number of each residue in `train`, by letter."""
    letters = VOCABULARY.tokens[: VOCABULARY.num_residues]
    return dict(zip(letters, packer.ngrams.orders[1][: len(letters)].tolist(), strict=True))


@contextmanager
def _explain_full_disk(out: Path) -> Iterator[None]:
    """Turn a full disk or quota into one line that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL_DISK:
            raise
        raise OSError(
            f"{out}: {os.strerror(error.errno or 0)}; nothing was kept there: make room and run the same command again"
        ) from error


def _report(manifest: Manifest, options: PrepareOptions) -> None:
    """Say what was dropped after reading and what each split holds."""
    counts = manifest.counts
    dropped = {
        "shorter than --min-length": counts.too_short,
        "longer than --max-length": counts.too_long,
        "dropped as exact duplicates": counts.duplicates,
        "not in the cluster table, split by their own sequence": counts.outside_clusters,
        "met under two splits, kept in one": counts.split_conflicts,
    }
    for what, number in dropped.items():
        if number:
            _say(f"{number:,} {what}")
    wanted = {
        "train": 1.0,
        "valid": options.valid,
        "test": options.test,
        "ood": float(bool(options.ood_clusters)),
    }
    for split, stats in manifest.splits.items():
        if stats.sequences:
            num_shards = len(manifest.shards_of(split))
            _say(
                f"{split}: {stats.sequences:,} proteins, {stats.residues:,} residues, {stats.windows:,} windows, {num_shards} shard{'s' * (num_shards != 1)}"
            )
        elif wanted[split]:
            _say(
                f"{split}: EMPTY: the hash gave it none of so few proteins; raise its fraction (now {wanted[split]:g}) or add data"
            )


def _say(text: str) -> None:
    """Write one line of log."""
    tqdm.write(f"protperf prepare: {text}", file=sys.stderr)


def _make_parser() -> argparse.ArgumentParser:
    """Return the parser; the options of `PrepareOptions` have its defaults."""
    parser = argparse.ArgumentParser(
        "protperf prepare",
        usage="protperf prepare [options] FASTA... OUT\n       protperf prepare [options] --sample OUT",
        description="Turn protein sequences into a dataset of shuffled, concatenated, sharded windows.",
    )
    parser.add_argument(
        "paths", nargs="+", metavar="FASTA... OUT", help="sequence files (- is stdin), then the folder"
    )
    parser.add_argument(
        "--sample", action="store_true", help="use the UniProt sample that comes with protperf"
    )
    parser.add_argument("--force", action="store_true", help="replace the dataset in OUT")
    parser.add_argument(
        "--strict", action="store_true", help="stop at the first record that would be left out"
    )
    choice = parser.add_argument_group("what the dataset holds")
    choice.add_argument("--window", type=int, help="tokens per window (%(default)s)")
    choice.add_argument("--seed", type=int, help="seed of the proteins' order (%(default)s)")
    choice.add_argument(
        "--shard-windows", type=int, metavar="N", help="windows per shard, about (%(default)s)"
    )
    choice.add_argument("--release", metavar="NAME", help="the source's release, for the manifest")
    split = parser.add_argument_group("splits")
    split.add_argument(
        "--valid", type=float, metavar="FRACTION", help="fraction for validation (%(default)s)"
    )
    split.add_argument("--test", type=float, metavar="FRACTION", help="fraction for testing (%(default)s)")
    split.add_argument("--split-seed", type=int, metavar="SEED", help="seed of the splits (%(default)s)")
    split.add_argument(
        "--clusters", metavar="TSV", help="split by cluster: lines `representative TAB member`"
    )
    split.add_argument(
        "--ood-clusters", metavar="FILE", help="representatives whose clusters are the split `ood`"
    )
    records = parser.add_argument_group("records")
    records.add_argument("--min-length", type=int, metavar="N", help="shortest protein kept (%(default)s)")
    records.add_argument(
        "--max-length", type=int, metavar="N", help="longest protein kept; 0: no limit (%(default)s)"
    )
    records.add_argument("--duplicates", choices=DUPLICATES, help="equal sequences (%(default)s)")
    records.add_argument("--gaps", choices=("refuse", "drop"), help="records with - or . (%(default)s)")
    records.add_argument("--unknown", choices=("refuse", "x"), help="other characters (%(default)s)")
    parser.set_defaults(**asdict(PrepareOptions()))
    return parser


def _parse(argv: list[str] | None) -> tuple[argparse.Namespace, PrepareOptions]:
    """Return the command line and the dataset's options; wrong usage exits with status 2."""
    parser = _make_parser()
    arguments = parser.parse_intermixed_args(argv)
    if (len(arguments.paths) == 1) != arguments.sample:
        parser.error("give FASTA files and then the folder OUT, or --sample and OUT")
    try:
        return arguments, PrepareOptions(
            **{each.name: getattr(arguments, each.name) for each in fields(PrepareOptions)}
        )
    except ValueError as error:
        parser.error(str(error))


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    start = time.monotonic()
    arguments, options = _parse(argv)
    *inputs, out = arguments.paths
    sample = resources.files("data_prep") / "sample" / "uniprot_sample.fasta.gz"
    with resources.as_file(sample) as sample_path:
        manifest = prepare(
            [str(sample_path)] if arguments.sample else inputs,
            Path(out),
            options,
            force=arguments.force,
            strict=arguments.strict,
        )
    _report(manifest, options)
    splits = manifest.splits.values()
    print(
        f"{out}: {sum(split.windows for split in splits):,} windows of {manifest.window}, "
        f"{sum(split.tokens for split in splits):,} tokens, {sum(split.sequences for split in splits):,} proteins, "
        f"{time.monotonic() - start:.1f} seconds"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
