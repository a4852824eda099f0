"""The benchmark of making and reading datasets: every row on a small file, arithmetic by hand, processes watched."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from data_prep.bench import ROWS, Row, describe_unrest, format_table, main, run_bench
from data_prep.bench.jobs import count_steps
from data_prep.bench.processes import run_sampled
from data_prep.options import PrepareOptions

MIB = 1 << 20
ENVIRONMENT = dict(os.environ)
BUSY = "import time\nend = time.process_time() + {}\nwhile time.process_time() < end: pass\n"


def python(text: str) -> list[str]:
    return [sys.executable, "-c", text]


@pytest.mark.slow
def test_every_row_is_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "found.json"
    arguments = ["--size", "2M", "--rounds", "1", "--folder", str(tmp_path / "files"), "--out", str(out)]
    assert main(arguments) == 0
    table = capsys.readouterr().out
    found = json.loads(out.read_text())
    assert {row["name"] for row in found["rows"]} == set(ROWS)
    for row in found["rows"]:
        assert row["what"] in table
        assert all(note in table for note in row["notes"])
    samples = {job: rounds[0] for job, rounds in found["samples"].items()}
    read = [
        samples[job][number]
        for number in ("records", "residues")
        for job in ("parse", "parse_ahead", "biopython")
    ]
    assert read[:3] == [read[0]] * 3  # all readers read the same
    assert read[3:] == [read[3]] * 3
    assert samples["igzip_alone"]["bytes"] >= 2 * MIB
    assert 20 * MIB < samples["prepare_small"]["peak"] < samples["prepare_small"]["separate_peaks"]
    assert list((tmp_path / "files").iterdir()) == []


def test_rows_can_be_chosen_and_need_only_their_jobs(tmp_path: Path):
    samples, rows = run_bench(100_000, tmp_path, ["parse"], rounds=2, say=lambda line: None)
    assert {job: len(rounds) for job, rounds in samples.items()} == {"igzip_alone": 2, "parse": 2}
    assert [row.name for row in rows] == ["parse"]


def test_ratios_are_medians_within_a_round():
    igzip = [{"cpu": 1.0}, {"cpu": 10.0}, {"cpu": 2.0}]
    samples = {"igzip_alone": igzip, "parse": [{"cpu": 1.5}, {"cpu": 20.0}, {"cpu": 9.0}]}
    (row,) = ROWS["parse"][1](samples)
    assert row.value == 2.0
    assert row.verdict == "bar"


def forecast(seconds_a_segment: float) -> list[Row]:
    samples = {
        "igzip_alone": [{"bytes": 1e9}],
        "parse": [{"residues": 755e6}],  # a hundredth of TrEMBL
        "reader": [{"wall": 3.0, "cpu": 4.0}],
        "segments": [{"seconds": seconds_a_segment}],
        "prepare_2": [{"wall": 36.0, "cpu": 36.0}],
    }
    return ROWS["forecast"][1](samples)


def test_the_forecast_grows_with_the_residues():
    two, node = forecast(0.0)
    assert two.value == pytest.approx(1.0)  # 3,600 seconds
    assert node.value == pytest.approx((3 + 32 / 16) * 100 / 60)
    assert "(36.00 s wall x 100 + 0 / 2) / 3600 = 1.00 h" in two.notes[0]


def test_the_forecast_counts_the_segments_of_parts_and_steps():
    plain, some, more = forecast(0.0), forecast(20e-6), forecast(40e-6)
    for one, two, three in zip(plain, some, more, strict=True):
        assert two.value > one.value
        assert three.value - two.value == pytest.approx(two.value - one.value)
    # 512 shards of 147 MB each, of 16 steps of 16 MiB; a small build has one step
    assert count_steps(75.5e9, 1 << 24, PrepareOptions()) == 512 * 16
    assert count_steps(1e6, 1 << 24, PrepareOptions()) == 1


@pytest.mark.parametrize(("value", "verdict"), [(5.0, "aim"), (7.0, "bar"), (10.5, "MISSED")])
def test_a_verdict_says_what_was_reached(value: float, verdict: str):
    row = Row("prepare", "all of it", value, "x", 10, 6, notes=("a note",))
    assert row.verdict == verdict
    head, line, note, _ = format_table([row]).splitlines()
    assert line.startswith("all of it")
    assert line.endswith(verdict)
    assert len(head) < len(line)
    assert note.strip() == "a note"
    assert Row("windows", "", -value, "%", -10, -6, more_is_better=True).verdict == verdict


def test_a_busy_machine_is_told():
    samples = {
        "a": [{"wall": 1.0}, {"wall": 3.0}],
        "b": [{"wall": 2.0}, {"wall": 2.0}],
        "c": [{"ratio": 1.0}],
    }
    assert (
        describe_unrest(samples, (0.5, 2.0))
        == "load 0.50 before, 2.00 after; slowest over fastest turn: 3.00 (a)"
    )


def test_a_failing_job_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["--size", "nothing", "--folder", str(tmp_path)]) == 1
    assert capsys.readouterr().err.count("\n") == 1
    with pytest.raises(subprocess.CalledProcessError) as caught:
        run_sampled(python("import sys; sys.exit('first\\nlast')"), sizes=False, environment=ENVIRONMENT)
    assert (caught.value.returncode, caught.value.stderr) == (1, "last")


def test_seconds_of_processes_that_nobody_waits_for_count():
    child = f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {BUSY.format(0.3)!r}])\n"
    found = run_sampled(python(child + BUSY.format(0.9)), sizes=False, environment=ENVIRONMENT)
    # what the two spend by their own clocks, less two looks and two ticks
    assert found["cpu"] > 0.9 + 0.3 - 0.06
    assert found["wall"] > 0.9
    assert set(found) == {"wall", "cpu"}


def test_memory_of_all_processes_counts_shared_pages_once():
    hold = "import os, time\nheld = bytearray(os.urandom(1)) * (64 << 20)\n"
    found = run_sampled(
        python(hold + "child = os.fork()\ntime.sleep(0.5)\nif child: os.waitpid(child, 0)\n"),
        sizes=True,
        environment=ENVIRONMENT,
    )
    assert 64 * MIB < found["peak"] < 110 * MIB
    assert found["separate_peaks"] > 128 * MIB
