"""`protperf prepare`: protein sequences in, a dataset of shuffled, concatenated, sharded windows out.

The parts of the input are sorted by a hash of each sequence (`mapping`), then each range of keys becomes a shard
(`reducing`), so memory does not grow with the input and the bytes do not depend on the order of the records, on the size of
the parts or on who carries the tasks out (`build`).
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import resources
from pathlib import Path

from tqdm import tqdm

from data_prep.arguments import parse_arguments
from data_prep.build import Build, Built
from data_prep.clustering import check_mmseqs
from data_prep.executors import make_runner
from data_prep.executors.runner import ExecutorOptions
from data_prep.folder import REPORT_NAME, SKIPPED_NAME, OutputFolder
from data_prep.inputs import check_number, check_space, check_tables, describe_table, estimate_text
from data_prep.journal import BuildOrder, Journal
from data_prep.memory import MemoryPlan
from data_prep.options import MMSEQS, PrepareOptions
from data_prep.report import render_report
from protperf import __version__
from protperf.formats import FormatError
from protperf.formats.commit import FULL_DISK, commit_bytes
from protperf.formats.manifest import (
    DROPPED,
    InputEntry,
    Manifest,
    RecordCounts,
    SplitStats,
    dataset_digest,
    write_manifest,
)
from protperf.formats.ngrams import NGRAMS_NAME, write_ngrams
from protperf.formats.streams import check_inputs

DEFAULT_MEMORY = 2 << 30

_NOTED = ("outside_clusters", "split_conflicts", "tail_residues")
"""Fields of `RecordCounts` that count what was neither dropped nor repaired."""


def prepare(
    inputs: list[str],
    out: Path,
    options: PrepareOptions,
    *,
    force: bool = False,
    strict: bool = False,
    memory: int = DEFAULT_MEMORY,
    plan: MemoryPlan | None = None,
    executor: ExecutorOptions | None = None,
    check_disk: bool = True,
) -> Manifest:
    """Make a dataset, or go on with one that was cut off.

    Args:
        inputs: files of sequences; `-` is standard input.
        out: folder to write the dataset to.
        options: what determines its bytes.
        force: replace a dataset that is already there, and forget an unfinished one of another order.
        strict: end with an error if a record would be left out.
        memory: bytes that all processes on this machine may hold together.
        plan: how the memory is shared out; made from `memory` if None.
        executor: who carries out the tasks; this process if None.
        check_disk: refuse to start where the disk is too small.

    Raises:
        ValueError: nothing to read, nothing accepted, a bad file, `out` is taken, or an unfinished build of something else
            lies there.
        OSError: the disk is full or a file cannot be read or written. In both cases nothing that looks like a dataset is
            left in `out`, except one that was there before.
    """
    executor = executor or ExecutorOptions()
    tables = {"clusters": options.clusters, "ood": options.ood_clusters, "families": options.ood_families}
    tables = {role: path for role, path in tables.items() if path and path != MMSEQS}
    check_inputs(inputs)
    check_number(inputs)
    check_tables(tables.values())
    if options.clusters == MMSEQS:
        check_mmseqs(inputs)
    text_bytes = estimate_text(inputs)
    with OutputFolder(out, force=force) as folder, _explain_full_disk(folder):
        journal = Journal(folder.work)
        order = BuildOrder.describe(inputs, list(tables.values()), options, strict=strict)
        earlier = _find_unfinished(folder, journal, order)
        if plan is None:
            workers = executor.workers if executor.kind == "processes" else 1
            part_bytes = earlier.part_bytes if earlier else 0
            plan = MemoryPlan.fit(memory, workers, text_bytes=text_bytes, part_bytes=part_bytes)
        if executor.kind == "processes":
            executor = replace(executor, workers=plan.workers)
        if earlier is None:
            folder.clear()
            journal.begin(replace(order, part_bytes=plan.part_bytes))
        if check_disk:
            there = sum(entry.stat().st_size for entry in folder.work.iterdir() if entry.is_file())
            _say(check_space(text_bytes, out, options, there=there))
        sources = [describe_table(path, role) for role, path in tables.items()]
        build = Build(
            inputs,
            folder.work,
            options,
            journal,
            strict=strict,
            memory=plan,
            part_bytes=earlier.part_bytes if earlier else plan.part_bytes,
            say=_say,
        )
        if executor.kind == "dask":
            _say(f"looking for the dask scheduler {executor.scheduler} and its workers")
        with make_runner(executor, say=_say) as runner, _keeping(folder, journal, order):
            built = build.run(runner)
            return _publish(folder, options, built, [*built.inputs, *sources])


def _find_unfinished(folder: OutputFolder, journal: Journal, order: BuildOrder) -> BuildOrder | None:
    """Return the order of the build in the work folder if it can go on; it is kept whatever is refused from here on.

    Raises:
        ValueError: it is a build of something else, and is not to be forgotten.
    """
    earlier = journal.read_order()
    if earlier is None or not earlier.can_resume or not len(journal):
        return None
    folder.keep = True
    difference = order.difference(earlier)
    if not difference:
        _say(f"going on with the unfinished build in {folder.path}: {len(journal)} tasks are done")
        return earlier
    if not folder.force:
        raise ValueError(
            f"{folder.path}: holds an unfinished build of something else: {difference}; "
            "run its command again to finish it, or --force to forget it"
        )
    folder.keep = False
    return None


@contextmanager
def _keeping(folder: OutputFolder, journal: Journal, order: BuildOrder) -> Iterator[None]:
    """Keep what is done if the build is cut off and the same command can go on.

    After a mistake in the input or the options it could not: then nothing is kept.
    """
    folder.keep = order.can_resume
    try:
        yield
    except ValueError as error:
        unreadable_now = isinstance(error.__cause__, OSError) and not isinstance(error, FormatError)
        folder.keep = folder.keep and unreadable_now and len(journal) > 0
        raise
    except BaseException:
        folder.keep = folder.keep and len(journal) > 0
        raise
    folder.keep = False


def _publish(
    folder: OutputFolder, options: PrepareOptions, built: Built, sources: list[InputEntry]
) -> Manifest:
    """Write the manifest and the report, and move all into place."""
    counts = built.counts
    skipped = [SKIPPED_NAME] if (folder.work / SKIPPED_NAME).exists() else []
    extras = [REPORT_NAME, *skipped]
    manifest = Manifest(
        protperf_version=__version__,
        window=options.window,
        seed=options.seed,
        release=options.release,
        options=options.as_manifest(),
        inputs=sources,
        counts=RecordCounts(
            records=counts.records,
            accepted=counts.accepted,
            residues=counts.residues,
            skipped=dict(sorted(counts.skipped.items())),
            repaired=dict(sorted(counts.repaired.items())),
            **{name: built.dropped[name] for name in (*DROPPED, *_NOTED)},
        ),
        splits=built.splits,
        residue_counts=built.residue_counts,
        shards=built.shards,
        ngrams=write_ngrams(folder.work / NGRAMS_NAME, built.ngrams),
        extras=extras,
        digest=dataset_digest(built.shards),
    )
    write_manifest(folder.work, manifest)
    commit_bytes(folder.work / REPORT_NAME, render_report(manifest).encode())
    folder.publish([*(shard.file for shard in built.shards), NGRAMS_NAME, *extras])
    return manifest


@contextmanager
def _explain_full_disk(folder: OutputFolder) -> Iterator[None]:
    """Turn a full disk or quota into one line that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL_DISK:
            raise
        kept = "what is done is kept there" if folder.keep else "nothing was kept there"
        raise OSError(
            f"{folder.path}: {os.strerror(error.errno or 0)}; {kept}: make room and run the same command again"
        ) from error


def _report(manifest: Manifest, options: PrepareOptions) -> None:
    """Say what was dropped after reading and what each split holds."""
    counts = manifest.counts
    notes = {
        "not in the cluster table, split by their own sequence": counts.outside_clusters,
        "met under two splits, kept in one": counts.split_conflicts,
        "residues dropped with the last windows": counts.tail_residues,
    }
    for what, number in [*counts.dropped.items(), *notes.items()]:
        if number:
            _say(f"{number:,} {'dropped: ' if what in counts.dropped else ''}{what}")
    wanted = {
        "train": 1.0,
        "valid": options.valid,
        "test": options.test,
        "ood": float(bool(options.ood_clusters or options.ood_families)),
    }
    for split, stats in manifest.splits.items():
        if stats.windows:
            num_shards = len(manifest.shards_of(split))
            _say(
                f"{split}: {stats.sequences:,} proteins, {stats.residues:,} residues, {stats.windows:,} windows, {num_shards} shard{'s' * (num_shards != 1)}"
            )
        elif stats.tokens or wanted[split]:
            _say(f"{split}: EMPTY: {_explain_empty(split, stats, options)}")


def _explain_empty(split: str, stats: SplitStats, options: PrepareOptions) -> str:
    """Return why a split has no window."""
    if options.tail == "drop" and stats.length_histogram:
        return "none of its shards fills a window; ask for a smaller --window, or --tail pad"
    if split == "train":
        return "the other splits take all there is; ask for less in them"
    if split == "ood":
        return "no record is of a held-out cluster or family"
    return f"the hash gave it none of so few proteins; raise its share (now {getattr(options, split):g}) or add data"


def _say(text: str) -> None:
    """Write one line of log."""
    tqdm.write(f"protperf prepare: {text}", file=sys.stderr)


def _check(folder: str) -> int:
    """Compare a dataset with its manifest."""
    from data_prep.check import check_dataset

    start, found = time.monotonic(), check_dataset(Path(folder))
    print(
        f"{folder}: as its manifest says: {found.shards:,} shards, {found.windows:,} windows, {found.sequences:,} proteins, "
        f"{found.residues:,} residues, {time.monotonic() - start:.1f} seconds"
    )
    return 0


def _download(name: str, folder: str, base: str | None) -> int:
    """Fetch a database."""
    from data_prep.download import download

    print(download(name, Path(folder), base=base, say=_say))
    return 0


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    start = time.monotonic()
    arguments, options, executor = parse_arguments(argv)
    *inputs, out = arguments.paths
    if arguments.check:
        return _check(out)
    if arguments.download:
        return _download(arguments.download, out, arguments.download_base)
    sample = resources.files("data_prep") / "sample" / "uniprot_sample.fasta.gz"
    with resources.as_file(sample) as sample_path:
        manifest = prepare(
            [str(sample_path)] if arguments.sample else inputs,
            Path(out),
            options,
            force=arguments.force,
            strict=arguments.strict,
            memory=arguments.memory,
            executor=executor,
            check_disk=not arguments.no_space_check,
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
