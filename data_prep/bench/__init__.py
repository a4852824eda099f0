"""`python -m data_prep.bench`: what making and reading a dataset costs, against the least that it could cost.

Every number is a ratio against a peer or a limit taken in the same run. Jobs run in processes of their own, in turns; a
ratio is the median over the rounds of the ratio within a round.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from data_prep.bench.jobs import count_steps
from data_prep.bench.processes import run_sampled
from data_prep.memory import MemoryPlan, parse_size
from data_prep.options import PrepareOptions
from data_prep.synthetic import write_fasta
from protperf.formats.commit import commit_bytes

ROUNDS = 3
LARGE_MEMORY, SMALL_MEMORY = "2G", "256M"
GROWTH_WINDOWS = 200_000
SEGMENTS_BYTES = 20 << 20
"""Text of the build whose segments are timed."""

TREMBL_RESIDUES = 75.5e9
NODE_CORES = 16

Samples = Mapping[str, Sequence[Mapping[str, float]]]
"""What each round of each job found."""


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        name: of the row, for `--only`.
        what: is measured, in words.
        value: the number.
        unit: behind it.
        bar: what it must reach.
        aim: what it should reach; None: the bar.
        more_is_better: `value` must be at least, not at most, the bar.
        notes: arithmetic and further numbers, one a line.
    """

    name: str
    what: str
    value: float
    unit: str
    bar: float
    aim: float | None = None
    more_is_better: bool = False
    notes: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """Return `aim`, `bar` or `MISSED`."""
        for name, limit in (("aim", self.bar if self.aim is None else self.aim), ("bar", self.bar)):
            if self.value >= limit if self.more_is_better else self.value <= limit:
                return name
        return "MISSED"


def _ratio(samples: Samples, ours: str, peer: str, number: str) -> float:
    """Return the median over the rounds of one job's number over another's."""
    pairs = zip(samples[ours], samples[peer], strict=True)
    return statistics.median(one[number] / max(other[number], 1e-9) for one, other in pairs)


def _median(samples: Samples, job: str, number: str) -> float:
    return statistics.median(sample[number] for sample in samples[job])


def _seconds(samples: Samples, number: str, *jobs: str) -> str:
    """Return a note: the median seconds of jobs."""
    return f"{number} seconds: " + ", ".join(f"{job} {_median(samples, job, number):.2f}" for job in jobs)


def _parse(samples: Samples) -> list[Row]:
    value = _ratio(samples, "parse", "igzip_alone", "cpu")
    note = _seconds(samples, "cpu", "parse", "igzip_alone")
    return [
        Row("parse", "parse + tokenise .fasta.gz, CPU over igzip alone", value, "x", 2.2, 1.6, notes=(note,))
    ]


def _biopython(samples: Samples) -> list[Row]:
    value = _ratio(samples, "biopython", "parse_ahead", "wall")
    note = _seconds(samples, "wall", "biopython", "parse_ahead")
    what = "the same, two cores, faster than Biopython + gzip"
    return [Row("biopython", what, value, "x", 2.5, 5, more_is_better=True, notes=(note,))]


def _prepare(samples: Samples) -> list[Row]:
    value = _ratio(samples, "prepare_1", "igzip_alone", "cpu")
    both = _ratio(samples, "prepare_2", "igzip_alone", "cpu")
    notes = (
        _seconds(samples, "cpu", "prepare_1", "prepare_2", "igzip_alone"),
        _seconds(samples, "wall", "prepare_1", "prepare_2"),
        f"with two workers: {both:.2f}x",
    )
    return [
        Row("prepare", "all of prepare, one worker, CPU over igzip alone", value, "x", 10, 6, notes=notes)
    ]


def _memory(samples: Samples) -> list[Row]:
    value = max(sample["peak"] for sample in samples["prepare_small"]) / (1 << 20)
    separate = max(sample["separate_peaks"] for sample in samples["prepare_small"]) / (1 << 20)
    notes = (
        f"sum of each process's own peak, shared pages counted in each: {separate:.0f} MiB",
        _seconds(samples, "wall", "prepare_small"),
    )
    what = f"memory of all processes of prepare --memory {SMALL_MEMORY}"
    return [Row("memory", what, value, "MiB", 512, 384, notes=notes)]


def _forecast(samples: Samples) -> list[Row]:
    """Return the time for all of TrEMBL.

    All work grows with the residues but one: each step of a reduce task reads a segment of each part, and both numbers grow.
    Reading is one stream; tasks divide evenly among cores.
    """
    residues, text = _median(samples, "parse", "residues"), _median(samples, "igzip_alone", "bytes")
    factor = TREMBL_RESIDUES / residues
    wall, cpu = _median(samples, "prepare_2", "wall"), _median(samples, "prepare_2", "cpu")
    alone, cut = _median(samples, "reader", "wall"), _median(samples, "reader", "cpu")
    tasks, each = max(cpu - cut, 0.0), _median(samples, "segments", "seconds")
    few, many = (_count_segments(text * factor, workers) * each for workers in (2, NODE_CORES))
    two = (wall * factor + few / 2) / 3600
    node = (alone * factor + (tasks * factor + many) / NODE_CORES) / 60
    scale = f"{TREMBL_RESIDUES:.3g} residues / {residues:.4g} = {factor:.4g}"
    first = (
        f"{scale}; segments {1e6 * each:.3g} us each: {few:.0f} CPU s; "
        f"({wall:.2f} s wall x {factor:.4g} + {few:.0f} / 2) / 3600 = {two:.2f} h"
    )
    second = (
        f"reader alone {alone:.2f} s; tasks {cpu:.2f} - {cut:.2f} = {tasks:.2f} CPU s; segments {many:.0f} CPU s; "
        f"({alone:.2f} x {factor:.4g} + ({tasks:.2f} x {factor:.4g} + {many:.0f}) / {NODE_CORES}) / 60 = {node:.1f} min, "
        "if the disk keeps up and nothing overlaps"
    )
    return [
        Row("forecast", "TrEMBL on two cores", two, "h", 2, 1, notes=(first,)),
        Row("forecast", f"TrEMBL on a node of {NODE_CORES} cores", node, "min", 20, 10, notes=(second,)),
    ]


def _count_segments(text_bytes: float, workers: int) -> float:
    """Return how many segments of parts the reduce tasks of TrEMBL read, with the default memory."""
    plan = MemoryPlan.fit(parse_size(LARGE_MEMORY), workers, text_bytes=text_bytes)
    parts = math.ceil(text_bytes / plan.part_bytes)
    return parts * count_steps(TREMBL_RESIDUES, plan.step_of(parts), PrepareOptions())


def _windows(samples: Samples) -> list[Row]:
    value = 100 * _median(samples, "windows", "ratio")
    note = f"{_median(samples, 'windows', 'windows_a_second'):,.0f} windows a second, from the page cache"
    what = "random windows, speed against bare os.pread"
    return [Row("windows", what, value, "%", 50, 80, more_is_better=True, notes=(note,))]


def _growth(samples: Samples) -> list[Row]:
    value = 100 * max(sample["growth"] for sample in samples["growth"])
    ends = [_median(samples, "growth", name) / (1 << 20) for name in ("early", "late")]
    note = f"{ends[0]:.1f} MiB after {GROWTH_WINDOWS // 10:,} windows, {ends[1]:.1f} MiB after {GROWTH_WINDOWS:,}"
    return [Row("growth", "growth of a reading process", value, "%", 5, notes=(note,))]


ROWS: dict[str, tuple[tuple[str, ...], Callable[[Samples], list[Row]]]] = {
    "parse": (("igzip_alone", "parse"), _parse),
    "biopython": (("parse_ahead", "biopython"), _biopython),
    "prepare": (("igzip_alone", "prepare_1", "prepare_2"), _prepare),
    "memory": (("prepare_small",), _memory),
    "forecast": (("igzip_alone", "parse", "reader", "segments", "prepare_2"), _forecast),
    "windows": (("prepare_2", "windows"), _windows),
    "growth": (("prepare_2", "growth"), _growth),
}
"""Rows by name: the jobs they need, in the order these run in, and what makes them of the samples."""

JOBS = (
    "igzip_alone",
    "parse",
    "parse_ahead",
    "biopython",
    "reader",
    "segments",
    "prepare_1",
    "prepare_2",
    "prepare_small",
    "windows",
    "growth",
)


def run_bench(
    size: int, folder: Path, names: Sequence[str], *, rounds: int, say: Callable[[str], None]
) -> tuple[Samples, list[Row]]:
    """Measure rows on `size` bytes of generated text.

    Args:
        size: bytes of text.
        folder: for the files; needs about four times `size`.
        names: of rows.
        rounds: turns of each job.
        say: takes lines of log.

    Raises:
        ValueError: `isal` is missing, or this is not Linux.
        subprocess.CalledProcessError: a job failed.
    """
    try:
        import isal  # noqa: F401 - the peer, in other processes
    except ImportError:
        raise ValueError(
            "isal is missing, the peer of this benchmark: pip install 'protperf[fast]'"
        ) from None
    if not os.path.exists("/proc/self/smaps_rollup"):
        raise ValueError("no /proc/self/smaps_rollup: this benchmark watches processes as Linux shows them")
    path = folder / "generated.fasta.gz"
    written = write_fasta(path, size)
    say(
        f"{written.text_bytes:,} bytes of FASTA: {written.records:,} records, {written.residues:,} residues, {path.stat().st_size:,} bytes of gzip"
    )
    needed = [job for job in JOBS if any(job in ROWS[name][0] for name in names)]
    jobs = {job: _make_job(job, path, folder / "dataset", size) for job in needed}
    samples: dict[str, list[dict[str, float]]] = {job: [] for job in jobs}
    for number in range(rounds):
        for job, run in jobs.items():
            samples[job].append(run())
            say(
                f"round {number + 1}: {job}: "
                + ", ".join(f"{k} {v:.6g}" for k, v in samples[job][-1].items())
            )
    return samples, [row for name in names for row in ROWS[name][1](samples)]


def _make_job(job: str, path: Path, dataset: Path, size: int) -> Callable[[], dict[str, float]]:
    """Return a call that runs a job in a process of its own."""
    ways = {
        "prepare_1": ("1", LARGE_MEMORY, False),
        "prepare_2": ("2", LARGE_MEMORY, False),
        "prepare_small": ("2", SMALL_MEMORY, True),
    }
    if job in ways:
        return partial(
            _run_prepare, path, dataset if job == "prepare_2" else dataset.with_name(job), *ways[job]
        )
    arguments = {
        "windows": [str(dataset)],
        "growth": [str(dataset), str(GROWTH_WINDOWS)],
        "segments": [str(min(size, SEGMENTS_BYTES))],
    }.get(job, [str(path)])
    return partial(_run_job, job, arguments)


def _run_job(job: str, arguments: list[str]) -> dict[str, float]:
    """Run a job of `jobs`."""
    command = [sys.executable, "-m", "data_prep.bench.jobs", job, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=_environment())
    if done.returncode:
        said = done.stderr.strip().rpartition("\n")[2]
        raise subprocess.CalledProcessError(done.returncode, command, stderr=said)
    return json.loads(done.stdout)


def _run_prepare(path: Path, out: Path, workers: str, memory: str, sizes: bool) -> dict[str, float]:
    """Run `protperf prepare` as a user does, with its memory watched if `sizes`; leave its dataset in `out`."""
    shutil.rmtree(out, ignore_errors=True)
    command = [
        sys.executable,
        "-m",
        "data_prep",
        "--workers",
        workers,
        "--memory",
        memory,
        str(path),
        str(out),
    ]
    return run_sampled(command, sizes=sizes, environment=_environment())


def _environment() -> dict[str, str]:
    """Return the environment of jobs: libraries start no threads."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def format_table(rows: Sequence[Row]) -> str:
    """Return the rows as text, each with its notes below it."""
    lines = [f"{'':55} {'measured':>12} {'bar':>8} {'aim':>8}"]
    for row in rows:
        sign = ">=" if row.more_is_better else "<="
        aim = "" if row.aim is None else f"{sign} {row.aim:g}"
        value = f"{row.value:.3g} {row.unit}"
        lines.append(f"{row.what:55} {value:>12} {f'{sign} {row.bar:g}':>8} {aim:>8}  {row.verdict}")
        lines += [f"    {note}" for note in row.notes]
    lines.append(
        "bar: what must hold; aim: what is wanted. Below 256M of text the start of processes weighs in."
    )
    return "\n".join(lines)


def describe_unrest(samples: Samples, loads: Sequence[float]) -> str:
    """Return a line that says how quiet the machine was: its load, and the slowest over the fastest turn of a job."""
    spreads = {
        job: max(s["wall"] for s in rounds) / max(min(s["wall"] for s in rounds), 1e-9)
        for job, rounds in samples.items()
        if "wall" in rounds[0]
    }
    job, worst = max(spreads.items(), key=lambda item: item[1], default=("no job", 1.0))
    return f"load {loads[0]:.2f} before, {loads[1]:.2f} after; slowest over fastest turn: {worst:.2f} ({job})"


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    arguments = _make_parser().parse_args(argv)
    before = os.getloadavg()[0]
    say: Callable[[str], None] = partial(print, file=sys.stderr, flush=True)
    try:
        size = parse_size(arguments.size)
        if arguments.folder:
            arguments.folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="protperf-bench-", dir=arguments.folder) as folder:
            samples, rows = run_bench(size, Path(folder), arguments.only, rounds=arguments.rounds, say=say)
    except (ValueError, OSError, subprocess.CalledProcessError) as error:
        said = (
            f": {error.stderr}" if isinstance(error, subprocess.CalledProcessError) and error.stderr else ""
        )
        print(f"data_prep.bench: {error}{said}", file=sys.stderr)
        return 1
    unrest = describe_unrest(samples, (before, os.getloadavg()[0]))
    print(f"{size:,} bytes of FASTA, {arguments.rounds} rounds, {os.cpu_count()} cores, {unrest}")
    print(format_table(rows))
    if arguments.out:
        found: dict[str, Any] = {
            "size": size,
            "python": platform.python_version(),
            "machine": platform.machine(),
        }
        found |= {
            "unrest": unrest,
            "samples": samples,
            "rows": [{**asdict(row), "verdict": row.verdict} for row in rows],
        }
        commit_bytes(arguments.out, json.dumps(found, indent=1).encode())
    return 0


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m data_prep.bench", description=__doc__)
    parser.add_argument("--size", default="1G", help="of the generated text (%(default)s)")
    parser.add_argument("--folder", type=Path, help="for the files, four times the size (the system's own)")
    parser.add_argument(
        "--rounds", type=int, default=ROUNDS, metavar="N", help="turns of each job (%(default)s)"
    )
    parser.add_argument(
        "--only", nargs="+", choices=list(ROWS), default=list(ROWS), metavar="ROW", help="(all)"
    )
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="also write all numbers to this file")
    return parser
