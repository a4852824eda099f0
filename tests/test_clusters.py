"""Tasks on a real dask cluster and in jobs of a real SLURM: same results as here, dead workers, clear errors."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import slurm
import tasks_to_run as tasks

from data_prep.executors import ExecutorOptions, make_runner
from data_prep.executors.runner import TaskRunner
from protperf import __version__

distributed = pytest.importorskip("distributed", reason="pip install 'protperf[cluster]'")
config = pytest.importorskip("dask.config")
if find_spec("dask_jobqueue") is None:  # whose import changes what Ctrl-C does
    pytest.skip("pip install 'protperf[cluster]'", allow_module_level=True)

SQUARES = {number: number * number for number in range(12)}
TESTS = Path(__file__).parent

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """The address of a cluster of two worker processes whose workers may die twice with one task."""
    with (
        config.set({"distributed.scheduler.allowed-failures": 1}),
        distributed.LocalCluster(2, threads_per_worker=1, processes=True, dashboard_address=":0") as cluster,
    ):
        yield cluster.scheduler_address


def dask(address: str, **more) -> ExecutorOptions:
    return ExecutorOptions(kind="dask", scheduler=address, start_seconds=20.0, **more)


def test_two_workers_give_what_one_process_gives(address: str):
    with make_runner(dask(address)) as runner:
        assert runner.workers == 2
        assert dict(runner.run(tasks.square, ((number,) for number in range(12)))) == SQUARES
        assert list(runner.run(tasks.square, [(5,), (5,)])) in ([(0, 25), (1, 25)], [(1, 25), (0, 25)])


def test_equal_calls_run_each_for_itself(address: str, tmp_path: Path):
    with make_runner(dask(address)) as runner:
        list(runner.run(tasks.die_first, [(str(tmp_path), 1)] * 3))
    assert (tmp_path / "1.tries").read_text() == "xxx"


def test_no_more_than_twice_the_workers_are_drawn_ahead(address: str):
    drawn = yielded = 0

    def source() -> Iterator[tuple[int]]:
        nonlocal drawn
        for number in range(20):
            drawn += 1
            assert drawn - yielded <= 4
            yield (number,)

    with make_runner(dask(address)) as runner:
        for _ in runner.run(tasks.square, source()):
            yielded += 1
    assert (drawn, yielded) == (20, 20)


def test_a_killed_worker_is_replaced_and_its_task_runs_again(address: str, tmp_path: Path):
    with make_runner(dask(address)) as runner:
        results = dict(runner.run(tasks.die_first, ((str(tmp_path), number) for number in range(12))))
    assert results == SQUARES
    assert (tmp_path / "3.tries").read_text() == "xx"


def test_a_task_that_always_kills_its_worker_is_named_in_one_line(address: str, tmp_path: Path):
    message = r"^die_first number 0, or a task beside it: workers died 2 times, the last at tcp://[^\n]*--memory[^\n]*$"
    with make_runner(dask(address)) as runner, pytest.raises(ChildProcessError, match=message):
        list(runner.run(tasks.die_first, [(str(tmp_path), 3, 99)]))


def test_what_a_task_raises_arrives_at_once(address: str):
    with make_runner(dask(address)) as runner:
        with pytest.raises(ValueError, match=r"^seqs\.fasta:7: number 3 is refused$") as caught:
            list(runner.run(tasks.refuse, ((number,) for number in range(1000))))
        assert "tasks_to_run.py" in str(caught.value.__cause__)
        assert sorted(runner.run(tasks.square, [(7,), (8,)])) == [(0, 49), (1, 64)]


def test_an_error_of_a_disk_is_tried_again_and_then_said(address: str, tmp_path: Path):
    with make_runner(dask(address)) as runner:
        assert list(runner.run(tasks.fail_on_the_disk, [(str(tmp_path), 2)])) == [(0, 3)]
        with pytest.raises(OSError, match="Stale file handle: 'part-7'"):
            list(runner.run(tasks.fail_on_the_disk, [(str(tmp_path), 99)]))
    assert (tmp_path / "tries").stat().st_size == 6


@pytest.mark.parametrize("scheduler", ["tcp://127.0.0.1:9", "nowhere.json"])
def test_a_scheduler_out_of_reach_is_one_line_after_a_bounded_time(scheduler: str):
    start = time.monotonic()
    options = ExecutorOptions(kind="dask", scheduler=scheduler, start_seconds=2.0)
    with pytest.raises(ConnectionError, match=rf"^--scheduler {scheduler}: no dask scheduler[^\n]*$"):
        make_runner(options).__enter__()
    assert time.monotonic() - start < 15


def test_programs_started_by_hand_work_and_their_faults_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "only_here.py").write_text("def task() -> int:\n    return 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    import only_here

    file = tmp_path / "dask.json"
    environment = {**os.environ, "PYTHONPATH": str(TESTS)}
    commands = (
        ["scheduler", "--port", "0", "--no-dashboard", "--scheduler-file", str(file)],
        ["worker", "--nthreads", "1", "--no-dashboard", "--scheduler-file", str(file)],
    )
    programs = []
    for name, *arguments in commands:
        command = [sys.executable, "-m", "distributed.cli.dask_" + name, *arguments]
        with open(tmp_path / f"{name}.log", "wb") as log:
            programs.append(subprocess.Popen(command, env=environment, cwd=TESTS, stdout=log, stderr=log))
    try:
        with make_runner(dask(str(file))) as runner:
            assert dict(runner.run(tasks.square, ((number,) for number in range(12)))) == SQUARES
            lacking = rf"^--scheduler {file}: its workers cannot load the tasks \([^\n]*only_here[^\n]*$"
            with pytest.raises(ConnectionError, match=lacking):
                list(runner.run(only_here.task, [()]))
            results = runner.run(tasks.square_late, [(1, 0.0), (2, 120.0)])
            assert next(results) == (0, 1)
            programs[0].kill()
            with pytest.raises(ConnectionError, match="scheduler answers no more"):
                next(results)
    finally:
        for program in programs:
            program.send_signal(signal.SIGTERM)
            program.wait(timeout=30)


CTRL_C = """
import os, signal
from data_prep.executors import ExecutorOptions, make_runner
make_runner(ExecutorOptions(kind="slurm"))
try:
    os.kill(os.getpid(), signal.SIGINT)
except KeyboardInterrupt:
    print("interrupted")
"""


def test_ctrl_c_stays_what_it_is():
    result = subprocess.run([sys.executable, "-c", CTRL_C], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (0, "interrupted\n", "")


def test_workers_of_another_version_are_refused(address: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("data_prep.executors.clusters.__version__", "0.0.7")
    message = rf"^the dask worker on \S+ has protperf {re.escape(__version__)}, this command is 0\.0\.7; "
    with make_runner(dask(address)) as runner, pytest.raises(ConnectionError, match=message):
        list(runner.run(tasks.square, [(1,)]))


@pytest.fixture(scope="module")
def slurm_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The variables that lead to a SLURM of one node."""
    with slurm.start_or_skip(tmp_path_factory.mktemp("slurm")) as environment:
        yield environment


@pytest.fixture
def on_slurm(slurm_environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder to work in where SLURM's commands work and jobs find the tests' modules."""
    for name, value in {**slurm_environment, "PYTHONPATH": str(TESTS)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def in_jobs(**more) -> ExecutorOptions:
    chosen = {"workers": 2, "worker_memory": "1GiB", "walltime": "00:10:00", "partition": "tests"}
    chosen |= {"lost_seconds": 30.0, **more}
    return ExecutorOptions(kind="slurm", **chosen)


def queue() -> str:
    return subprocess.run(["squeue", "--noheader"], capture_output=True, text=True, check=True).stdout


def test_tasks_run_in_slurm_jobs_that_end_with_the_runner(on_slurm: Path):
    said: list[str] = []
    with make_runner(in_jobs(log_dir=str(on_slurm / "logs")), say=said.append) as runner:
        script = runner.job_script
        assert dict(runner.run(tasks.square, ((number,) for number in range(12)))) == SQUARES
        (on_slurm / "pids").mkdir()
        pids = {pid for _, pid in runner.run(tasks.say_pid, [(str(on_slurm / "pids"), 0.5)] * 8)}
        assert os.getpid() not in pids
    assert said == ["2 SLURM jobs submitted; tasks start with the first of them"]
    for line in ("-J protperf", "-p tests", "-n 1", "--cpus-per-task=1", "--mem=1G", "-t 00:10:00"):
        assert f"#SBATCH {line}\n" in script
    assert not wait_while(queue)


def test_a_killed_worker_in_a_job_is_replaced(on_slurm: Path):
    with make_runner(in_jobs(workers_per_job=2, lost_seconds=90.0)) as runner:
        assert "--cpus-per-task=2\n" in runner.job_script
        assert "--mem=2G\n" in runner.job_script
        wait_for_workers(runner, on_slurm, number=2)
        assert dict(runner.run(tasks.die_first, ((str(on_slurm), number) for number in range(12)))) == SQUARES
    assert len((on_slurm / "3.tries").read_text()) >= 2  # the scheduler may try more often
    assert not wait_while(queue)


def wait_for_workers(runner: TaskRunner, folder: Path, *, number: int) -> None:
    """Wait until so many workers have each worked for a second.

    One that dies sooner, before its nanny has heard that it started, takes the nanny with it.
    """
    (folder / "pids").mkdir()
    tasks_of_all = [(str(folder / "pids"), 1.0)] * number
    assert not wait_while(lambda: len({pid for _, pid in runner.run(tasks.say_pid, tasks_of_all)}) < number)


def test_jobs_that_slurm_would_not_take_are_one_line(on_slurm: Path):
    message = r"^--executor slurm: SLURM would not take the jobs: [^\n]*partition[^\n]*$"
    with pytest.raises(ValueError, match=message):
        make_runner(in_jobs(partition="nothing")).__enter__()


def test_jobs_that_end_too_often_with_tasks_left_are_one_line(on_slurm: Path):
    with make_runner(in_jobs(lost_seconds=5.0)) as runner:
        runner._submitted_again = 2  # as often as --retries allows
        results = runner.run(tasks.say_pid, [(str(on_slurm), 0.0), (str(on_slurm), 300.0)])
        assert next(results)[0] == 0
        subprocess.run(["scancel", "--name=protperf"], check=True)
        with pytest.raises(
            ConnectionError, match=r"^--executor slurm: no worker for 5 s; the SLURM jobs have ended[^\n]*$"
        ):
            next(results)


def test_jobs_that_end_with_tasks_left_are_submitted_again(on_slurm: Path):
    said: list[str] = []
    with make_runner(in_jobs(lost_seconds=2.0), say=said.append) as runner:
        results = runner.run(tasks.say_pid, [(str(on_slurm), seconds) for seconds in (0.0, 20.0, 0.0)])
        found = [next(results)[0], next(results)[0]]
        subprocess.run(["scancel", "--name=protperf"], check=True)
        found += [index for index, _ in results]
    assert sorted(found) == [0, 1, 2]
    assert [line.split(" ")[1:4] for line in said] == [["SLURM", "jobs", "submitted;"]] * 2


def test_without_slurm_one_line_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match=r"^--executor slurm: no program `sbatch` here"):
        make_runner(in_jobs()).__enter__()


def wait_while(condition, seconds: float = 60.0):
    """Wait for something to become false; return what it is at last."""
    end = time.monotonic() + seconds
    while condition() and time.monotonic() < end:
        time.sleep(0.2)
    return condition()
