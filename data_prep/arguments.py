"""The command line of `protperf prepare`."""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict, fields

from data_prep.executors.runner import KINDS, ExecutorOptions
from data_prep.memory import parse_size
from data_prep.options import DUPLICATES, FRAGMENTS, KEEP, MMSEQS, TAILS, PrepareOptions

_DOWNLOADS = ("trembl", "sprot", "uniref50", "uniref90")


def parse_arguments(
    argv: list[str] | None,
) -> tuple[argparse.Namespace, PrepareOptions, ExecutorOptions]:
    """Return the command line, the dataset's options and the executor's; wrong usage exits with status 2."""
    parser = make_parser()
    arguments = parser.parse_intermixed_args(argv)
    alone = [name for name in ("sample", "check", "download") if getattr(arguments, name)]
    if len(alone) > 1:
        parser.error(f"--{alone[0]} and --{alone[1]} do not go together")
    if (len(arguments.paths) == 1) != bool(alone):
        parser.error(
            "give FASTA files and then the folder OUT, or --sample, --check or --download and one folder"
        )
    try:
        arguments.memory = parse_size(arguments.memory)
        parse_size(arguments.worker_memory, "--worker-memory")
        options = PrepareOptions(
            **{each.name: getattr(arguments, each.name) for each in fields(PrepareOptions)}
        )
        executor = ExecutorOptions(
            kind=arguments.executor,
            workers=arguments.workers or _num_cores(),
            retries=arguments.retries,
            scheduler=arguments.scheduler,
            partition=arguments.partition,
            account=arguments.account,
            walltime=arguments.walltime,
            worker_memory=arguments.worker_memory,
            workers_per_job=arguments.workers_per_job,
            interface=arguments.interface,
            directives=tuple(arguments.directive),
            log_dir=arguments.job_logs,
        )
    except ValueError as error:
        parser.error(str(error))
    return arguments, options, executor


def _num_cores() -> int:
    """Return the number of cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def make_parser() -> argparse.ArgumentParser:
    """Return the parser; the options of `PrepareOptions` have its defaults."""
    parser = argparse.ArgumentParser(
        "protperf prepare",
        usage="protperf prepare [options] FASTA... OUT\n"
        "       protperf prepare [options] --sample OUT\n"
        "       protperf prepare --check OUT\n"
        "       protperf prepare --download {trembl,sprot,uniref50,uniref90} DIR",
        description="Turn protein sequences into a dataset of shuffled, concatenated, sharded windows. A build that was cut "
        "off goes on when the same command runs again.",
    )
    parser.add_argument(
        "paths", nargs="+", metavar="FASTA... OUT", help="sequence files (- is stdin), then the folder"
    )
    parser.add_argument(
        "--sample", action="store_true", help="use the UniProt sample that comes with protperf"
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help="replace the dataset in OUT, forget an unfinished one of something else",
    )
    parser.add_argument(
        "--strict", action="store_true", help="end with an error if a record would be left out"
    )
    parser.add_argument("--check", action="store_true", help="compare every shard in OUT with the manifest")
    parser.add_argument("--download", choices=_DOWNLOADS, help="fetch a database of UniProt into DIR")
    parser.add_argument(
        "--download-base", metavar="URL", help="address of UniProt's current_release, or of a mirror"
    )
    _add_content(parser)
    _add_splits(parser)
    _add_records(parser)
    _add_work(parser)
    parser.set_defaults(**asdict(PrepareOptions()))
    return parser


def _add_content(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what the dataset holds")
    group.add_argument("--window", type=int, metavar="N", help="tokens per window (%(default)s)")
    group.add_argument("--seed", type=int, help="seed of the proteins' order (%(default)s)")
    group.add_argument(
        "--shard-windows", type=int, metavar="N", help="windows per shard, about (%(default)s)"
    )
    group.add_argument("--tail", choices=TAILS, help="the last window of a shard (%(default)s)")
    group.add_argument("--release", metavar="NAME", help="the source's release, for the manifest")


def _add_splits(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("splits")
    for split in ("valid", "test"):
        group.add_argument(
            f"--{split}",
            type=float,
            metavar="SHARE",
            help="a fraction, or a number of sequences or clusters from 1 (%(default)s)",
        )
    group.add_argument("--split-seed", type=int, metavar="SEED", help="seed of the splits (%(default)s)")
    group.add_argument(
        "--clusters",
        metavar="TSV",
        help=f"split by cluster: lines `representative TAB member`; `{MMSEQS}` makes them with MMseqs2",
    )
    group.add_argument(
        "--cluster-identity", type=float, metavar="X", help=f"for `{MMSEQS}`: least identity (%(default)s)"
    )
    group.add_argument(
        "--cluster-coverage", type=float, metavar="X", help=f"for `{MMSEQS}`: least coverage (%(default)s)"
    )
    group.add_argument("--keep", choices=KEEP, help="records of a cluster that are kept (%(default)s)")
    group.add_argument(
        "--ood-clusters", metavar="FILE", help="representatives whose clusters are the split `ood`"
    )
    group.add_argument(
        "--ood-families", metavar="TSV", help="accessions and Pfam families: the families' records are `ood`"
    )
    group.add_argument(
        "--families", metavar="PF...", help="Pfam families held out (the 20 of the Performer paper)"
    )


def _add_records(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("records")
    group.add_argument("--min-length", type=int, metavar="N", help="shortest protein kept (%(default)s)")
    group.add_argument(
        "--max-length", type=int, metavar="N", help="longest protein kept; 0: no limit (%(default)s)"
    )
    group.add_argument("--max-x", type=float, metavar="FRACTION", help="most X in a protein (%(default)s)")
    group.add_argument("--fragments", choices=FRAGMENTS, help="records called fragments (%(default)s)")
    group.add_argument(
        "--max-evidence", type=int, metavar="PE", help="highest PE level kept; 0: all (%(default)s)"
    )
    group.add_argument("--taxa", metavar="OX", help="taxonomy numbers kept, without descendants (all)")
    group.add_argument("--exclude-taxa", metavar="OX", help="taxonomy numbers dropped (none)")
    group.add_argument("--duplicates", choices=DUPLICATES, help="equal sequences (%(default)s)")
    group.add_argument("--gaps", choices=("refuse", "drop"), help="records with - or . (%(default)s)")
    group.add_argument("--unknown", choices=("refuse", "x"), help="other characters (%(default)s)")


def _add_work(parser: argparse.ArgumentParser) -> None:
    defaults = ExecutorOptions()
    group = parser.add_argument_group("who works (nothing here changes the dataset)")
    group.add_argument(
        "--memory", default="2G", metavar="SIZE", help="memory of all processes together (%(default)s)"
    )
    group.add_argument("--workers", type=int, default=0, metavar="N", help="processes (one a core)")
    group.add_argument("--executor", choices=KINDS, default="processes", help="(%(default)s)")
    group.add_argument(
        "--scheduler", default="", metavar="ADDRESS|FILE", help="for dask: the scheduler, or its file"
    )
    group.add_argument(
        "--retries", type=int, default=defaults.retries, help="of a task whose worker died (%(default)s)"
    )
    group.add_argument("--no-space-check", action="store_true", help="start even if the disk looks too small")
    slurm = parser.add_argument_group("jobs of --executor slurm")
    slurm.add_argument("--partition", default="", help="the partition")
    slurm.add_argument("--account", default="", help="the account")
    slurm.add_argument("--walltime", default=defaults.walltime, metavar="TIME", help="of a job (%(default)s)")
    slurm.add_argument(
        "--worker-memory", default=defaults.worker_memory, metavar="SIZE", help="of a worker (%(default)s)"
    )
    slurm.add_argument(
        "--workers-per-job", type=int, default=1, metavar="N", help="one core each (%(default)s)"
    )
    slurm.add_argument("--interface", default="", help="network between the nodes, such as ib0")
    slurm.add_argument(
        "--directive", action="append", default=[], metavar="OPTION", help="another option of sbatch"
    )
    slurm.add_argument("--job-logs", default="", metavar="DIR", help="folder of the jobs' output")
