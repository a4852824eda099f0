"""Whoever carries the tasks out, and whatever dies on the way, the bytes are the same; so they are from any kind of input."""

from __future__ import annotations

import csv
import gzip
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from Bio import SeqIO
from prepared import REPOSITORY, SAMPLE, all_proteins, random_records, read_fasta, shard_bytes, write_fasta

from data_prep.check import check_dataset
from data_prep.executors import ExecutorOptions
from data_prep.memory import MemoryPlan
from data_prep.options import PrepareOptions
from data_prep.prepare import main, prepare
from protperf.formats.manifest import read_manifest

OPTIONS = PrepareOptions(window=128, shard_windows=200, valid=0.05, test=40)
PLAN = MemoryPlan(1 << 30, workers=1, part_bytes=30_000, step_bytes=100_000)
"""Some thirty parts and eight ranges of the sample."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sample's dataset, made in this process."""
    out = tmp_path_factory.mktemp("whole") / "out"
    prepare([str(SAMPLE)], out, OPTIONS, plan=PLAN)
    assert len(shard_bytes(out)) > 8
    return out


def check_same(out: Path, whole: Path) -> None:
    """Check that two datasets have the same bytes and files, and that nothing else was left."""
    assert shard_bytes(out) == shard_bytes(whole)
    assert sorted(os.listdir(out)) == sorted(os.listdir(whole))
    assert read_manifest(out) == read_manifest(whole)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 3])
def test_processes_give_the_bytes_of_one(tmp_path: Path, whole: Path, workers: int):
    plan = replace(PLAN, workers=workers, part_bytes=70_000)
    executor = ExecutorOptions(workers=workers)
    prepare([str(SAMPLE)], tmp_path / "out", OPTIONS, plan=plan, executor=executor)
    check_same(tmp_path / "out", whole)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Address, scheduler file and client of a dask cluster of two worker processes that are replaced when they die."""
    distributed = pytest.importorskip("distributed", reason="pip install 'protperf[cluster]'")
    file = tmp_path_factory.mktemp("cluster") / "scheduler.json"
    with (
        distributed.LocalCluster(2, threads_per_worker=1, processes=True, dashboard_address=":0") as cluster,
        distributed.Client(cluster) as client,
    ):
        client.write_scheduler_file(str(file))
        yield {"address": cluster.scheduler_address, "file": str(file), "client": client}


@pytest.mark.slow
@pytest.mark.parametrize("how", ["address", "file"])
def test_a_dask_cluster_gives_the_bytes_of_one_process(
    tmp_path: Path, whole: Path, cluster: dict[str, Any], how: str
):
    executor = ExecutorOptions(kind="dask", scheduler=cluster[how])
    prepare([str(SAMPLE)], tmp_path / "out", OPTIONS, plan=PLAN, executor=executor)
    check_same(tmp_path / "out", whole)


@pytest.mark.slow
def test_paths_are_those_of_the_command_not_of_the_workers(
    tmp_path: Path, whole: Path, cluster: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / SAMPLE.name).write_bytes(SAMPLE.read_bytes())
    executor = ExecutorOptions(kind="dask", scheduler=cluster["address"])
    prepare([SAMPLE.name], Path("out"), OPTIONS, plan=PLAN, executor=executor)
    check_same(tmp_path / "out", whole)


BUILD = """
import sys
from data_prep import prepare as command
from data_prep.memory import MemoryPlan
command.MemoryPlan.fit = lambda memory, workers, **more: MemoryPlan(memory, workers, 40_000, 50_000)
sys.exit(command.main(sys.argv[1:]))
"""
"""A build of small parts: about 120 of them, and 64 ranges, of the file that `long_input` makes."""

ARGUMENTS = ["--window", "128", "--shard-windows", "300", "--valid", "0.1", "--test", "30"]


@pytest.fixture(scope="module")
def long_input(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A file of four samples, three of them changed, and its dataset, made in this process."""
    folder = tmp_path_factory.mktemp("long")
    records = read_fasta(SAMPLE)
    changed = [(f"{turn}{name}", sequence + "W" * turn) for turn in range(4) for name, sequence in records]
    fasta = write_fasta(folder / "a.fasta", [*changed, ("bad", "MK*K")])
    assert main([fasta, str(folder / "out"), *ARGUMENTS, "--workers", "1"]) == 0
    return fasta, folder / "out"


Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def start_build() -> Iterator[Start]:
    """Starts builds in processes of their own; those that still run at the end are killed."""
    with ExitStack() as stack:

        def start(arguments: list[str], log: Path, **more: Any) -> subprocess.Popen[bytes]:
            with open(log, "ab") as file:
                command = [sys.executable, "-c", BUILD, *arguments]
                build = subprocess.Popen(command, cwd=REPOSITORY, stdout=file, stderr=file, **more)
            stack.enter_context(build)
            stack.callback(build.kill)
            return build

        yield start


def wait_for_tasks(out: Path, kind: str, number: int, build: subprocess.Popen[bytes]) -> None:
    """Wait until so many tasks of a kind are done; fail if the build ends before."""
    journal = out / ".work-prepare" / "journal.jsonl"
    while not (journal.exists() and journal.read_text().count(f'["{kind}", ') >= number):
        assert build.poll() is None, "the build ended before it could be disturbed"
        time.sleep(0.005)


def children_of(parent: int) -> list[int]:
    """Return the processes whose parent is `parent`."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == parent and fields[0] != "Z":
            found.append(int(folder.name))
    return found


def workers_of(build: subprocess.Popen[bytes]) -> list[int]:
    """Return the workers of a build: the children of its fork server."""
    return [worker for server in children_of(build.pid) for worker in children_of(server)]


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc here")


@needs_proc
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "number"), [("part", 5), ("range", 3)])
def test_a_worker_killed_in_the_middle_changes_nothing(
    tmp_path: Path, start_build: Start, long_input: tuple[str, Path], kind: str, number: int
):
    fasta, whole = long_input
    out = tmp_path / "out"
    build = start_build([fasta, str(out), *ARGUMENTS, "--workers", "2"], tmp_path / "log")
    wait_for_tasks(out, kind, number, build)
    workers = workers_of(build)
    assert len(workers) == 2
    os.kill(workers[0], signal.SIGKILL)
    assert build.wait(120) == 0, (tmp_path / "log").read_text()
    check_same(out, whole)
    assert not any(map(lives, workers))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "number"), [("part", 5), ("range", 3)])
def test_a_dask_worker_killed_in_the_middle_changes_nothing(
    tmp_path: Path,
    start_build: Start,
    long_input: tuple[str, Path],
    cluster: dict[str, Any],
    kind: str,
    number: int,
):
    fasta, whole = long_input
    out = tmp_path / "out"
    dask = ["--executor", "dask", "--scheduler", cluster["file"]]
    build = start_build([fasta, str(out), *ARGUMENTS, *dask], tmp_path / "log")
    wait_for_tasks(out, kind, number, build)
    cluster["client"].wait_for_workers(2)
    os.kill(min(cluster["client"].run(os.getpid).values()), signal.SIGKILL)
    assert build.wait(120) == 0, (tmp_path / "log").read_text()
    check_same(out, whole)
    cluster["client"].wait_for_workers(2)


@needs_proc
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "number"), [("part", 5), ("range", 3)])
def test_a_build_killed_while_workers_run_leaves_none_and_goes_on(
    tmp_path: Path, start_build: Start, long_input: tuple[str, Path], kind: str, number: int
):
    fasta, whole = long_input
    out = tmp_path / "out"
    arguments = [fasta, str(out), *ARGUMENTS, "--workers", "2"]
    build = start_build(arguments, tmp_path / "first")
    wait_for_tasks(out, kind, number, build)
    workers = workers_of(build)
    assert len(workers) == 2
    build.kill()
    assert build.wait() == -signal.SIGKILL
    again = start_build(arguments, tmp_path / "second")
    end = time.monotonic() + 20
    while any(map(lives, workers)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(map(lives, workers))
    assert again.wait(120) == 0, (tmp_path / "second").read_text()
    assert "going on with the unfinished build" in (tmp_path / "second").read_text()
    check_same(out, whole)


@pytest.mark.slow
def test_a_killed_build_on_dask_goes_on_here(
    tmp_path: Path, start_build: Start, long_input: tuple[str, Path], cluster: dict[str, Any]
):
    fasta, whole = long_input
    out = tmp_path / "out"
    arguments = [fasta, str(out), *ARGUMENTS]
    dask = ["--executor", "dask", "--scheduler", cluster["address"]]
    build = start_build([*arguments, *dask], tmp_path / "first")
    wait_for_tasks(out, "part", 5, build)
    build.kill()
    build.wait()
    assert main([*arguments, "--workers", "1"]) == 0
    check_same(out, whole)


@pytest.mark.slow
def test_interrupted_build_leaves_no_process_and_goes_on(
    tmp_path: Path, start_build: Start, long_input: tuple[str, Path]
):
    fasta, whole = long_input
    out = tmp_path / "out"
    arguments = [fasta, str(out), *ARGUMENTS, "--workers", "2"]
    build = start_build(arguments, tmp_path / "first", start_new_session=True)
    wait_for_tasks(out, "part", 5, build)
    workers = workers_of(build)
    os.killpg(build.pid, signal.SIGINT)  # as Ctrl-C in a terminal
    assert build.wait(60) != 0
    assert not any(map(lives, workers))
    assert main([*arguments[:-1], "1"]) == 0
    check_same(out, whole)


@pytest.mark.slow
def test_standard_input_is_read_once_and_from_the_start_again(
    tmp_path: Path, start_build: Start, long_input: tuple[str, Path]
):
    fasta, whole = long_input
    arguments = ["-", str(tmp_path / "out"), *ARGUMENTS, "--workers", "2"]
    text = Path(fasta).read_bytes()
    build = start_build(arguments, tmp_path / "first", stdin=subprocess.PIPE)
    build.stdin.write(text[: len(text) // 2])
    build.stdin.flush()
    wait_for_tasks(tmp_path / "out", "part", 5, build)
    build.kill()
    build.wait()
    with open(fasta, "rb") as file:
        again = start_build(arguments, tmp_path / "second", stdin=file)
        assert again.wait(120) == 0, (tmp_path / "second").read_text()
    assert "going on" not in (tmp_path / "second").read_text()
    assert shard_bytes(tmp_path / "out") == shard_bytes(whole)
    (entry,) = read_manifest(tmp_path / "out").inputs
    assert (entry.name, entry.role, entry.bytes, entry.sha256) == ("-", "sequences", None, None)


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_many_small_inputs_give_the_bytes_of_one(tmp_path: Path, workers: int):
    records = random_records([30] * 600)
    options = PrepareOptions(window=64, shard_windows=50)
    prepare([write_fasta(tmp_path / "all.fasta", records)], tmp_path / "one", options)
    paths = []
    for number in range(300):
        paths.append(write_fasta(tmp_path / f"{number}.fasta", records[number::300]))
        if number % 3 == 0:
            Path(paths[-1]).write_bytes(gzip.compress(Path(paths[-1]).read_bytes()))
    plan = replace(PLAN, workers=workers)
    manifest = prepare(
        paths, tmp_path / "many", options, plan=plan, executor=ExecutorOptions(workers=workers)
    )
    assert shard_bytes(tmp_path / "many") == shard_bytes(tmp_path / "one")
    assert [entry.name for entry in manifest.inputs] == [f"{number}.fasta" for number in range(300)]


FLAT_FILES = [
    ("swiss", "uniprot_dat/biopython_multi_ex_8.dat"),
    ("swiss", "uniprot_dat/emboss_swissprot_100.dat.gz"),
    ("swiss", "uniprot_dat/emboss_trembl_9.dat"),
    ("swiss", "uniprot_dat/sp016"),
    ("uniprot-xml", "uniprot_xml/multi_ex_8.xml.gz"),
    ("uniprot-xml", "uniprot_xml/mzlib_humanGAPDH.xml.gz"),
]


def read_flat(path: Path, kind: str) -> list[Any]:
    opener: Callable[..., Any] = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rb" if kind == "uniprot-xml" else "rt") as file:
        return list(SeqIO.parse(file, kind))


@pytest.mark.parametrize(("kind", "name"), FLAT_FILES)
def test_flat_files_give_the_proteins_that_biopython_reads(
    shared_dir: Path, tmp_path: Path, kind: str, name: str
):
    path = shared_dir / "data" / name
    expected = Counter(str(entry.seq) for entry in read_flat(path, kind))
    plan = MemoryPlan(1 << 30, workers=1, part_bytes=700, step_bytes=1000)
    options = PrepareOptions(window=64, duplicates="keep")
    manifest = prepare([str(path)], tmp_path / "out", options, plan=plan)
    assert all_proteins(tmp_path / "out") == expected
    assert manifest.counts.records == manifest.counts.accepted == expected.total()
    check_dataset(tmp_path / "out")


ENTRIES = {
    "P00750": (9606, 1, False),
    "P56540": (1049, 3, True),
    "Q51858": (297, 3, False),
    "Q51481": (287, 2, False),
    "Q8NE62": (9606, 2, False),
    "P00981": (8620, 1, True),
    "P28799": (9606, 1, False),
    "Q01436": (10665, 4, False),
}
"""Taxon, level of evidence and whether it is a fragment, read by eye in the files of eight entries."""


@pytest.mark.parametrize(("kind", "name"), [FLAT_FILES[0], FLAT_FILES[4]])
@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"taxa": "9606"}, lambda taxon, level, fragment: taxon == 9606),
        ({"exclude_taxa": "9606,297"}, lambda taxon, level, fragment: taxon not in (9606, 297)),
        ({"max_evidence": 2}, lambda taxon, level, fragment: level <= 2),
        ({"fragments": "drop"}, lambda taxon, level, fragment: not fragment),
    ],
    ids=["taxa", "exclude_taxa", "max_evidence", "fragments"],
)
def test_flat_files_are_filtered_by_what_their_entries_say(
    shared_dir: Path,
    tmp_path: Path,
    kind: str,
    name: str,
    options: dict[str, Any],
    kept: Callable[[int, int, bool], bool],
):
    path = shared_dir / "data" / name
    sequences = {entry.id: str(entry.seq) for entry in read_flat(path, kind)}
    assert sequences.keys() == ENTRIES.keys()
    prepare([str(path)], tmp_path / "out", PrepareOptions(window=64, **options))
    assert all_proteins(tmp_path / "out") == Counter(
        sequences[name] for name, facts in ENTRIES.items() if kept(*facts)
    )


@pytest.mark.parametrize("part_bytes", [1, 1 << 20])
def test_left_out_entries_are_named_by_their_number(shared_dir: Path, tmp_path: Path, part_bytes: int):
    text = (shared_dir / "data" / "uniprot_dat" / "biopython_multi_ex_8.dat").read_text()
    entries = text.split("//\n")[:-1]
    for number in (2, 5):
        head, mark, sequence = entries[number].rpartition("CRC64;\n     ")
        entries[number] = head + mark + "*" + sequence[1:]
    path = tmp_path / "a.dat"
    path.write_text("//\n".join(entries) + "//\n")
    plan = MemoryPlan(1 << 30, workers=1, part_bytes=part_bytes, step_bytes=1000)
    counts = prepare([str(path)], tmp_path / "out", PrepareOptions(window=64), plan=plan).counts
    assert (counts.records, counts.accepted) == (8, 6)
    with open(tmp_path / "out" / "skipped.tsv", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    assert [(row["file"], row["line"]) for row in rows] == [(str(path), "3"), (str(path), "6")]
    assert [row["id"] for row in rows] == [
        entries[number].partition("\nAC   ")[2].partition(";")[0] for number in (2, 5)
    ]
