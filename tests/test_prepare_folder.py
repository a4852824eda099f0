"""`protperf prepare` on bad days: kills, full disks, odd files, wrong usage; what is left on the disk, and what is said."""

from __future__ import annotations

import csv
import errno
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from prepared import REPOSITORY, SAMPLE, all_proteins, random_records, read_fasta, shard_bytes, write_fasta

from data_prep.memory import MemoryPlan
from data_prep.options import PrepareOptions
from data_prep.prepare import main, prepare
from data_prep.sorted_parts import PartRecords, write_records
from protperf.formats import FormatError
from protperf.formats.manifest import read_manifest
from protperf.formats.shards import ShardSet

SHARED = Path(os.environ.get("PROTPERF_SHARED", REPOSITORY.parent / "shared"))


KILLED_BUILD = """
import os, signal, sys
from data_prep import {module} as module
from data_prep import prepare as command
from data_prep.memory import MemoryPlan
real, calls = module.{owner}{name}, [0]
def killing(*arguments, **keywords):
    calls[0] += {caller!r} in ("", sys._getframe(1).f_code.co_name)
    if calls[0] == {call}:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*arguments, **keywords)
module.{owner}{name} = killing
command.MemoryPlan.fit = lambda memory, workers, **more: MemoryPlan(memory, 1, 20_000, 10_000)
command.main({argv!r})
"""

STAGES = {
    "before-the-first-task": ("build", "", "map_part", 1, ""),
    "while-a-part-is-written": ("sorted_parts", "", "commit_file", 3, ""),
    "before-a-part-is-in-the-journal": ("journal", "Journal.", "add", 2, ""),
    "while-a-line-of-the-journal-is-written": ("journal", "os.", "fsync", 1, "add"),
    "between-the-stages": ("build", "Build.", "_thresholds", 1, ""),
    "while-a-shard-is-written": ("shard_writer", "", "hash_file", 2, ""),
    "in-a-later-range": ("build", "", "reduce_range", 3, ""),
    "while-pieces-are-joined": ("build", "", "join_pieces", 1, ""),
    "before-the-manifest-is-made": ("prepare", "", "write_manifest", 1, ""),
    "while-files-are-moved": ("folder", "os.", "replace", 3, "publish"),
    "before-the-manifest-is-moved": ("folder", "", "sync_folder", 1, "publish"),
}
"""Module, owner and name of a function, and at which of its calls (from which function) the build is killed."""


@pytest.mark.parametrize("stage", STAGES)
def test_killed_build_looks_unfinished_and_goes_on_to_the_same_bytes(
    tmp_path: Path, stage: str, capsys: pytest.CaptureFixture[str]
):
    module, owner, name, call, caller = STAGES[stage]
    fasta = write_fasta(tmp_path / "a.fasta", [*read_fasta(SAMPLE)[:200], ("bad", "MK*K")])
    options = ["--window", "128", "--shard-windows", "200", "--valid", "0.1", "--test", "0.1"]
    options += ["--workers", "1"]
    assert main([fasta, str(tmp_path / "whole"), *options]) == 0
    argv = [fasta, str(tmp_path / "out"), *options]
    script = KILLED_BUILD.format(module=module, owner=owner, name=name, call=call, caller=caller, argv=argv)
    script = script.replace("data_prep import shard_writer", "protperf.formats import shard_writer")
    killed = subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    with pytest.raises(FormatError, match=r"no manifest\.json"):
        read_manifest(tmp_path / "out")
    capsys.readouterr()
    assert main(argv) == 0
    assert ("going on with the unfinished build" in capsys.readouterr().err) == (
        stage != "before-the-first-task"
    )
    assert shard_bytes(tmp_path / "out") == shard_bytes(tmp_path / "whole")
    assert sorted(os.listdir(tmp_path / "out")) == sorted(os.listdir(tmp_path / "whole"))
    assert read_manifest(tmp_path / "out") == read_manifest(tmp_path / "whole")
    skipped = [(tmp_path / name / "skipped.tsv").read_text() for name in ("out", "whole")]
    assert skipped[0] == skipped[1]


@pytest.mark.parametrize(
    ("module", "owner", "name", "caller"),
    [
        ("tables", "", "_as_npy", ""),
        ("journal", "Journal.", "add", "_prepare_tables"),
        ("build", "", "map_part", ""),
        ("folder", "shutil.", "rmtree", "clear"),
    ],
    ids=["while-tables-are-written", "before-the-journal", "after-the-tables", "while-the-rest-is-removed"],
)
def test_build_with_clusters_goes_on_too(tmp_path: Path, module: str, owner: str, name: str, caller: str):
    records = read_fasta(SAMPLE)[:100]
    names = [header.split("|")[1] for header, _ in records]
    table = "".join(f"{names[i // 5 * 5]}\t{member}\n" for i, member in enumerate(names))
    (tmp_path / "clusters.tsv").write_text(table)
    fasta = write_fasta(tmp_path / "a.fasta", records)
    options = ["--window", "128", "--valid", "0.3", "--test", "3", "--workers", "1"]
    options += ["--clusters", str(tmp_path / "clusters.tsv"), "--keep", "representative"]
    assert main([fasta, str(tmp_path / "whole"), *options]) == 0
    argv = [fasta, str(tmp_path / "out"), *options]
    script = KILLED_BUILD.format(module=module, owner=owner, name=name, call=1, caller=caller, argv=argv)
    killed = subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    if name == "rmtree":  # the dataset is there; the next start removes what is left beside it
        with pytest.raises(ValueError, match="holds a dataset already"):
            main(argv)
    else:
        assert main(argv) == 0
    assert shard_bytes(tmp_path / "out") == shard_bytes(tmp_path / "whole")
    assert sorted(os.listdir(tmp_path / "out")) == sorted(os.listdir(tmp_path / "whole"))
    assert read_manifest(tmp_path / "out") == read_manifest(tmp_path / "whole")


def unfinished(tmp_path: Path) -> tuple[str, list[str]]:
    """Leave an unfinished build in `out`; return its input and its options."""
    fasta = write_fasta(tmp_path / "a.fasta", read_fasta(SAMPLE)[:50])
    options = ["--window", "128", "--workers", "1"]
    argv = [fasta, str(tmp_path / "out"), *options]
    script = KILLED_BUILD.format(module="build", owner="", name="reduce_range", call=1, caller="", argv=argv)
    assert subprocess.run(
        [sys.executable, "-c", script], cwd=REPOSITORY, stderr=subprocess.DEVNULL
    ).returncode
    return fasta, options


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--seed", "3"], "--seed was 0, is 3"),
        (["--window", "64"], "--window was 128, is 64"),
        (["--taxa", "9606"], "--taxa was '', is '9606'"),
        (["--strict"], "--strict was False, is True"),
    ],
)
def test_unfinished_build_of_other_options_is_refused_by_name(
    tmp_path: Path, more: list[str], message: str, capsys: pytest.CaptureFixture[str]
):
    fasta, options = unfinished(tmp_path)
    journal = (tmp_path / "out" / ".work-prepare" / "journal.jsonl").read_text()
    with pytest.raises(ValueError, match=f"unfinished build of something else: {re.escape(message)}"):
        main([fasta, str(tmp_path / "out"), *options, *more])
    assert (tmp_path / "out" / ".work-prepare" / "journal.jsonl").read_text() == journal
    capsys.readouterr()
    assert main([fasta, str(tmp_path / "out"), *options, "--release", "says nothing of the bytes"]) == 0
    assert "going on with the unfinished build" in capsys.readouterr().err


def test_refusals_and_faults_of_the_moment_leave_what_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    fasta, options = unfinished(tmp_path)
    out, journal = str(tmp_path / "out"), tmp_path / "out" / ".work-prepare" / "journal.jsonl"
    before = journal.read_text()
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(tmp_path))
        with pytest.raises(ValueError, match="no program `sbatch`"):
            main([fasta, out, *options, "--executor", "slurm"])
        patch.setattr("data_prep.inputs._WORK_FACTOR", 1e15)
        with pytest.raises(ValueError, match="make room"):
            main([fasta, out, *options])
    assert journal.read_text() == before
    capsys.readouterr()
    assert main([fasta, out, *options]) == 0
    assert "going on with the unfinished build" in capsys.readouterr().err


def test_read_error_of_an_input_is_one_line_and_leaves_what_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    first = write_fasta(tmp_path / "a.fasta", random_records([30] * 5))
    second = write_fasta(tmp_path / "b.fasta", random_records([31] * 5, seed=1))
    argv = [first, second, str(tmp_path / "out"), "--workers", "1"]

    class Failing(io.FileIO):
        def read(self, size: int = -1) -> bytes:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def opened(path: str, mode: str = "r", **options: object) -> object:
        return (
            Failing(path) if str(path) == second and "buffering" in options else open(path, mode, **options)
        )

    with monkeypatch.context() as patch:
        patch.setattr("protperf.formats.streams.open", opened, raising=False)
        with pytest.raises(ValueError, match=r"b\.fasta: cannot be read: Input/output error"):
            main(argv)
    capsys.readouterr()
    assert main(argv) == 0
    assert "going on with the unfinished build" in capsys.readouterr().err
    assert all_proteins(tmp_path / "out").total() == 10


@pytest.mark.parametrize("lost", ["part-000001.sorted", "train-00001-of-00004.h5", "ngrams-00002.npz"])
@pytest.mark.parametrize("call", ["reduce_range", "write_manifest"])
def test_files_that_are_gone_are_made_again(tmp_path: Path, lost: str, call: str):
    fasta = write_fasta(tmp_path / "a.fasta", read_fasta(SAMPLE)[:200])
    options = [
        "--window",
        "128",
        "--shard-windows",
        "200",
        "--valid",
        "0.1",
        "--test",
        "0.1",
        "--workers",
        "1",
    ]
    assert main([fasta, str(tmp_path / "whole"), *options]) == 0
    argv = [fasta, str(tmp_path / "out"), *options]
    module = {"reduce_range": "build", "write_manifest": "prepare"}[call]
    script = KILLED_BUILD.format(
        module=module, owner="", name=call, call=4 if call == "reduce_range" else 1, caller="", argv=argv
    )
    assert subprocess.run(
        [sys.executable, "-c", script], cwd=REPOSITORY, stderr=subprocess.DEVNULL
    ).returncode
    (tmp_path / "out" / ".work-prepare" / lost).unlink()
    assert main(argv) == 0
    assert shard_bytes(tmp_path / "out") == shard_bytes(tmp_path / "whole")


def test_unfinished_build_of_changed_inputs_is_refused_until_forced(tmp_path: Path):
    fasta, options = unfinished(tmp_path)
    changed = [*read_fasta(SAMPLE)[:49], ("new", "MKVMKV")]
    write_fasta(tmp_path / "a.fasta", changed)
    argv = [fasta, str(tmp_path / "out"), *options]
    with pytest.raises(ValueError, match=r"a\.fasta was changed since"):
        main(argv)
    assert main([*argv, "--force"]) == 0
    assert all_proteins(tmp_path / "out") == Counter({sequence for _, sequence in changed})


def test_killed_replacement_runs_again_and_leaves_nothing_of_the_old_dataset(tmp_path: Path):
    old = write_fasta(tmp_path / "old.fasta", [*random_records([200] * 50), ("bad", "MK*K")])
    new = write_fasta(tmp_path / "new.fasta", random_records([20] * 5))
    options = ["--window", "64", "--shard-windows", "40", "--valid", "0", "--test", "0"]
    assert main([old, str(tmp_path / "out"), *options]) == 0
    argv = [new, str(tmp_path / "out"), *options, "--force"]
    script = KILLED_BUILD.format(
        module="folder", owner="", name="sync_folder", call=1, caller="publish", argv=argv
    )
    assert subprocess.run(
        [sys.executable, "-c", script], cwd=REPOSITORY, stderr=subprocess.DEVNULL
    ).returncode
    assert not (tmp_path / "out" / "manifest.json").exists()
    assert main(argv) == 0
    assert sorted(os.listdir(tmp_path / "out")) == [
        "manifest.json",
        "ngrams.h5",
        "report.html",
        "train-00000-of-00001.h5",
    ]


def test_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(descriptor: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    fasta = write_fasta(tmp_path / "a.fasta", random_records([30]))
    monkeypatch.setattr(os, "write", refuse)
    with pytest.raises(OSError, match="No space left on device; nothing was kept") as caught:
        prepare([fasta], tmp_path / "out", PrepareOptions())
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 3 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a small tmpfs")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("part_bytes", [300_000, 1 << 30], ids=["after-some-parts", "in-the-first-part"])
def test_really_full_disk_is_said_and_with_more_room_the_build_goes_on(
    tmp_path: Path, small_disk: Path, part_bytes: int, capsys: pytest.CaptureFixture[str]
):
    fasta, out = tmp_path / "all.fasta", small_disk / "out"
    write_fasta(fasta, [(name, sequence * 3) for name, sequence in read_fasta(SAMPLE)])
    options = PrepareOptions(shard_windows=50)
    with pytest.raises(ValueError, match=r"needs about .* MB of disk, .* MB are free there; make room"):
        prepare([str(fasta)], out, options)
    assert list(small_disk.iterdir()) == []
    plan = MemoryPlan(1 << 30, workers=1, part_bytes=part_bytes, step_bytes=1 << 20)
    kept = "what is done is kept" if part_bytes < 1 << 30 else "nothing was kept"
    with pytest.raises(OSError, match=f"No space left on device; {kept} there: make room"):
        prepare([str(fasta)], out, options, plan=plan, check_disk=False)
    assert not (out / "manifest.json").exists()
    assert out.exists() == (part_bytes < 1 << 30)
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    capsys.readouterr()
    prepare([str(fasta)], out, options, plan=plan)
    assert ("going on with the unfinished build" in capsys.readouterr().err) == (part_bytes < 1 << 30)
    prepare([str(fasta)], tmp_path / "whole", options)
    assert shard_bytes(out) == shard_bytes(tmp_path / "whole")


@pytest.mark.parametrize("num_records", [1, 40, 400])
def test_no_part_is_whole_on_a_disk_that_is_full(num_records: int):
    numbers = np.arange(num_records, dtype=np.uint64)
    part = PartRecords(numbers, numbers, np.zeros(num_records, np.uint8), numbers, [b"abc"] * num_records)

    def write() -> None:
        with open("/dev/full", "wb") as full:
            write_records(full, part)

    with pytest.raises(OSError, match="No space left"):
        write()


def test_dataset_is_replaced_only_by_force_and_whole(tmp_path: Path):
    many = write_fasta(tmp_path / "many.fasta", [*random_records([200] * 50), ("bad", "MK*K")])
    few = write_fasta(tmp_path / "few.fasta", random_records([20] * 5))
    out = tmp_path / "out"
    options = ["--window", "64", "--shard-windows", "40"]
    assert main([many, str(out), *options]) == 0
    (out / "notes.txt").write_text("mine")
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    assert "skipped.tsv" in before
    with pytest.raises(ValueError, match="--force"):
        main([few, str(out), *options])
    with pytest.raises(ValueError, match=r"few\.fasta:1: no header|empty|no sequence"):
        main([write_fasta(tmp_path / "few.fasta", []), str(out), "--force"])
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    few = write_fasta(tmp_path / "few.fasta", random_records([20] * 5))
    assert main([few, str(out), *options, "--force", "--valid", "0", "--test", "0"]) == 0
    assert sorted(os.listdir(out)) == [
        "manifest.json",
        "ngrams.h5",
        "notes.txt",
        "report.html",
        "train-00000-of-00001.h5",
    ]
    assert (out / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("name", ["report.html", "skipped.tsv"])
def test_a_file_of_ones_own_beside_a_dataset_is_never_replaced(tmp_path: Path, name: str):
    fasta, out = write_fasta(tmp_path / "a.fasta", random_records([20] * 5)), tmp_path / "out"
    assert main([fasta, str(out)]) == 0
    manifest = json.loads((out / "manifest.json").read_text())
    manifest["extras"] = []
    (out / "manifest.json").write_text(json.dumps(manifest))
    (out / name).write_text("mine")
    with pytest.raises(ValueError, match="which no manifest"):
        main([fasta, str(out), "--force"])
    assert (out / name).read_text() == "mine"


def test_files_that_no_manifest_names_are_never_replaced(tmp_path: Path):
    fasta = write_fasta(tmp_path / "a.fasta", random_records([20] * 5))
    out = tmp_path / "out"
    out.mkdir()
    (out / "train-00000-of-00001.h5").write_text("mine")
    with pytest.raises(ValueError, match=r"train-00000-of-00001\.h5, which no manifest\.json there names"):
        main([fasta, str(out), "--force"])
    assert (out / "train-00000-of-00001.h5").read_text() == "mine"
    assert os.listdir(out) == ["train-00000-of-00001.h5"]


@pytest.mark.parametrize("text", ["not json", '{"format": "other"}'])
def test_foreign_manifest_is_not_replaced(tmp_path: Path, text: str):
    fasta = write_fasta(tmp_path / "a.fasta", random_records([20] * 5))
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(FormatError, match="manifest"):
        main([fasta, str(tmp_path), "--force"])
    assert (tmp_path / "manifest.json").read_text() == text


def test_forged_manifest_cannot_reach_outside_its_folder(tmp_path: Path):
    fasta = write_fasta(tmp_path / "a.fasta", random_records([20] * 5))
    out = tmp_path / "out"
    assert main([fasta, str(out)]) == 0
    manifest = json.loads((out / "manifest.json").read_text())
    manifest["ngrams"]["file"] = "../a.fasta"
    (out / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(FormatError, match="outside its folder"):
        main([fasta, str(out), "--force"])
    assert Path(fasta).exists()


def test_two_builds_never_share_a_folder(tmp_path: Path):
    fasta = write_fasta(tmp_path / "a.fasta", random_records([20] * 5))
    script = f"""
import sys
from pathlib import Path
from data_prep.folder import OutputFolder
with OutputFolder(Path({str(tmp_path / "out")!r}), force=False):
    print("locked", flush=True)
    sys.stdin.read()
"""
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"locked\n"
        with pytest.raises(ValueError, match="another `protperf prepare`"):
            main([fasta, str(tmp_path / "out")])
        other.stdin.close()
    assert main([fasta, str(tmp_path / "out")]) == 0


POLICY_LENGTHS = {
    "c33_gap_dash.fasta": [32],
    "c34_dot_stop.fasta": [32],
    "c35_star_stop_end_and_inside.fasta": [32],
    "c54_length_over_100k.fasta.gz": [32],
    "c63_zstd.fasta.zst": [],
}
"""Where a row of CASES.tsv leaves a choice: records with gaps or an inner `*` are left out, zstd is refused."""


def read_cases() -> list[tuple[str, list[int]]]:
    table = SHARED / "cases" / "fasta" / "CASES.tsv"
    if not table.exists():
        return []
    with open(table, newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    lengths = [[int(length) for length in row["residue_lengths"].split(";") if length] for row in rows]
    return [
        (row["file"], POLICY_LENGTHS.get(row["file"], found))
        for row, found in zip(rows, lengths, strict=True)
    ]


@pytest.mark.parametrize(("name", "lengths"), read_cases())
def test_odd_fasta_file_has_its_outcome(
    shared_dir: Path, tmp_path: Path, name: str, lengths: list[int], capsys: pytest.CaptureFixture[str]
):
    argv = [str(shared_dir / "cases" / "fasta" / name), str(tmp_path / "out"), "--duplicates", "keep"]
    if not lengths:
        with pytest.raises(ValueError, match=rf"{re.escape(name)}|no record accepted") as caught:
            main(argv)
        assert "\n" not in str(caught.value)
        assert not (tmp_path / "out").exists()
        return
    assert main(argv) == 0
    counts = read_manifest(tmp_path / "out").counts
    assert sorted(map(len, all_proteins(tmp_path / "out").elements())) == sorted(lengths)
    assert counts.accepted == len(lengths)
    assert counts.records == counts.accepted + sum(counts.skipped.values())
    skipped = tmp_path / "out" / "skipped.tsv"
    assert skipped.exists() == bool(counts.skipped)
    assert capsys.readouterr().out.count("\n") == 1


def test_end_of_a_file_ends_its_record(shared_dir: Path, tmp_path: Path):
    paths = [
        str(shared_dir / "cases" / "fasta" / name)
        for name in ("c46a_first_file_no_newline.fasta", "c46b_second_file.fasta")
    ]
    assert prepare(paths, tmp_path / "out", PrepareOptions(duplicates="keep")).counts.accepted == 2
    assert sorted(map(len, all_proteins(tmp_path / "out").elements())) == [32, 32]


def test_strict_stops_at_the_first_bad_record(tmp_path: Path):
    fasta = write_fasta(tmp_path / "a.fasta", [*random_records([20] * 3), ("bad", "MK*K")])
    with pytest.raises(ValueError, match=r"a\.fasta:\d+: .*bad"):
        main([fasta, str(tmp_path / "out"), "--strict"])
    assert not (tmp_path / "out").exists()


def test_sample_prints_one_line_of_result_and_says_what_it_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["--sample", str(tmp_path / "out"), "--window", "512", "--release", "2016"]) == 0
    output, log = capsys.readouterr()
    windows = sum(stats.windows for stats in read_manifest(tmp_path / "out").splits.values())
    assert f"{windows:,} windows of 512" in output
    assert output.count("\n") == 1
    assert "B of disk in" in log
    assert "train: " in log
    assert read_manifest(tmp_path / "out").release == "2016"


def test_empty_split_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    fasta = write_fasta(tmp_path / "a.fasta", random_records([20] * 3))
    assert main([fasta, str(tmp_path / "out"), "--valid", "1e-9", "--test", "0"]) == 0
    log = capsys.readouterr().err
    assert "valid: EMPTY" in log
    assert "test: EMPTY" not in log
    with pytest.raises(ValueError, match="'valid' holds no protein"):
        ShardSet(tmp_path / "out", "valid")


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["only_one"],
        ["--sample"],
        ["--sample", "a.fasta", "out"],
        ["a.fasta", "out", "--window", "0"],
        ["a.fasta", "out", "--valid", "0.6", "--test", "0.4"],
        ["a.fasta", "out", "--valid", "nan"],
        ["a.fasta", "out", "--duplicates", "maybe"],
        ["a.fasta", "out", "--ood-clusters", "x"],
        ["a.fasta", "out", "--min-length", "5", "--max-length", "4"],
    ],
)
def test_wrong_usage_exits_with_status_2(argv: list[str]):
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2


def test_options_may_stand_between_the_paths(tmp_path: Path):
    first = write_fasta(tmp_path / "a.fasta", random_records([20]))
    second = write_fasta(tmp_path / "b.fasta", random_records([21]))
    assert main([first, "--window", "64", second, str(tmp_path / "out")]) == 0
    assert read_manifest(tmp_path / "out").counts.accepted == 2


def test_missing_input_is_named(tmp_path: Path):
    with pytest.raises(ValueError, match=r"nowhere\.fasta: no such file"):
        main([str(tmp_path / "nowhere.fasta"), str(tmp_path / "out")])
    with pytest.raises(ValueError, match=r"nowhere\.tsv: no such table"):
        main([str(SAMPLE), str(tmp_path / "out"), "--clusters", str(tmp_path / "nowhere.tsv")])
    assert not (tmp_path / "out").exists()


def test_module_runs_from_stdin_without_torch(tmp_path: Path):
    code = "import runpy, sys; sys.argv = ['prepare', '-', sys.argv[1]]\ntry: runpy.run_module('data_prep', run_name='__main__')\nfinally: assert 'torch' not in sys.modules"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "out")],
        input=b">a\nMKV\n",
        cwd=REPOSITORY,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    assert read_manifest(tmp_path / "out").inputs[0].name == "-"
    assert all_proteins(tmp_path / "out") == Counter(["MKV"])
