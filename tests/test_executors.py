"""Whoever carries out the tasks: same results, dead workers replaced, errors said at once, nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import tasks_to_run as tasks

from data_prep.executors import ExecutorOptions, make_runner

LOCAL = [ExecutorOptions(workers=1), ExecutorOptions(workers=2)]
TESTS = Path(__file__).parent


def alive(pid: int) -> bool:
    """Say whether a process runs; one that has ended and waits for its parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until(condition, seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


@pytest.mark.parametrize("options", LOCAL, ids=lambda options: options.workers)
def test_each_task_gives_its_result_under_its_index(options: ExecutorOptions):
    with make_runner(options) as runner:
        assert dict(runner.run(tasks.square, ((number,) for number in range(50)))) == {
            number: number * number for number in range(50)
        }
        assert list(runner.run(tasks.square, [])) == []
        assert sorted(runner.run(tasks.square, [(7,), (8,)])) == [(0, 49), (1, 64)]


def test_a_slow_task_holds_up_no_other():
    with make_runner(ExecutorOptions(workers=2)) as runner:
        order = [
            index for index, _ in runner.run(tasks.square_late, [(0, 1.0), *((n, 0.0) for n in range(1, 9))])
        ]
    assert sorted(order) == list(range(9))
    assert order[-1] == 0


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_no_more_than_twice_the_workers_are_drawn_ahead(workers: int):
    drawn = yielded = 0

    def source() -> Iterator[tuple[int]]:
        nonlocal drawn
        for number in range(40):
            drawn += 1
            assert drawn - yielded <= 2 * workers
            yield (number,)

    with make_runner(ExecutorOptions(workers=workers)) as runner:
        for _ in runner.run(tasks.square, source()):
            yielded += 1
    assert (drawn, yielded) == (40, 40)


def test_workers_get_on_while_the_reader_reads(tmp_path: Path):
    def source() -> Iterator[tuple[str, float]]:
        yield str(tmp_path), 0.0
        assert wait_until(lambda: list(tmp_path.glob("*.pid")))
        yield str(tmp_path), 0.0

    with make_runner(ExecutorOptions(workers=2)) as runner:
        assert len(list(runner.run(tasks.say_pid, source()))) == 2


def test_one_worker_is_this_process_and_two_are_not(tmp_path: Path):
    with make_runner(ExecutorOptions(workers=1)) as runner:
        assert [pid for _, pid in runner.run(tasks.say_pid, [(str(tmp_path), 0.0)])] == [os.getpid()]
    with make_runner(ExecutorOptions(workers=2)) as runner:
        pids = {pid for _, pid in runner.run(tasks.say_pid, [(str(tmp_path), 0.2)] * 6)}
    assert os.getpid() not in pids
    assert len(pids) == 2
    assert not any(alive(pid) for pid in pids)


def test_a_killed_worker_is_replaced_and_only_its_task_runs_again(tmp_path: Path):
    with make_runner(ExecutorOptions(workers=2)) as runner:
        results = dict(runner.run(tasks.die_first, ((str(tmp_path), number) for number in range(12))))
    assert results == {number: number * number for number in range(12)}
    tries = {number: len((tmp_path / f"{number}.tries").read_text()) for number in range(12)}
    assert tries == {number: 2 if number == 3 else 1 for number in range(12)}


def test_a_task_that_always_kills_its_worker_is_named_in_one_line(tmp_path: Path):
    message = (
        r"^die_first number 3: its worker process was killed by SIGKILL, 3 times; .*--memory or --workers.*"
    )
    with (
        make_runner(ExecutorOptions(workers=2, retries=2)) as runner,
        pytest.raises(ChildProcessError, match=message),
    ):
        list(runner.run(tasks.die_first, ((str(tmp_path), number, 99) for number in range(12))))
    assert len((tmp_path / "3.tries").read_text()) == 3


@pytest.mark.parametrize("options", LOCAL, ids=lambda options: options.workers)
def test_what_a_task_raises_arrives_at_once(options: ExecutorOptions):
    drawn = []

    def source() -> Iterator[tuple[int]]:
        for number in range(1000):
            drawn.append(number)
            yield (number,)

    with make_runner(options) as runner:
        with pytest.raises(ValueError, match=r"^seqs\.fasta:7: number 3 is refused$"):
            list(runner.run(tasks.refuse, source()))
        assert sorted(runner.run(tasks.square, [(7,), (8,)])) == [(0, 49), (1, 64)]
    assert len(drawn) < 20


def test_the_cause_shows_where_in_the_worker(tmp_path: Path):
    with make_runner(ExecutorOptions(workers=2)) as runner, pytest.raises(ValueError, match="3") as caught:
        list(runner.run(tasks.refuse, [(3,)]))
    assert "tasks_to_run.py" in str(caught.value.__cause__)


def test_what_does_not_pickle_is_an_error_and_no_dead_worker():
    with make_runner(ExecutorOptions(workers=2)) as runner:
        with pytest.raises(RuntimeError, match=r"^OddError: this and that$"):
            list(runner.run(tasks.refuse_oddly, [()]))
        with pytest.raises(TypeError, match="pickle"):
            list(runner.run(tasks.return_a_lock, [()]))
        with pytest.raises((AttributeError, TypeError), match="pickle"):
            list(runner.run(lambda: 1, [()]))


def test_leaving_in_the_middle_kills_what_runs(tmp_path: Path):
    start = time.monotonic()
    with make_runner(ExecutorOptions(workers=2)) as runner:
        for _ in runner.run(tasks.say_pid, [(str(tmp_path), seconds) for seconds in (0.1, 60.0, 60.0, 60.0)]):
            assert wait_until(lambda: len(list(tmp_path.glob("*.pid"))) == 2)
            break
    assert time.monotonic() - start < 30
    assert not any(alive(int(path.stem)) for path in tmp_path.glob("*.pid"))


FRONT = """
import sys
from data_prep.executors import ExecutorOptions, make_runner
import tasks_to_run as tasks

def main():
    with make_runner(ExecutorOptions(workers=2)) as runner:
        for index, result in runner.run(tasks.say_pid, [(sys.argv[1], float(sys.argv[2]))] * 4):
            print(index, result)

if __name__ == "__main__":
    main()
"""

DOOR = """
import sys
from protperf import cli
cli.COMMANDS["try"] = ("front", "")
sys.argv = ["protperf", "try", *sys.argv[1:]]
sys.exit(cli.main())
"""


def start_command(folder: Path, seconds: float) -> subprocess.Popen[str]:
    """Start four tasks through the front door of protperf, in a session of its own."""
    (folder / "front.py").write_text(FRONT)
    return subprocess.Popen(
        [sys.executable, "-c", DOOR, str(folder), str(seconds)],
        env={**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{TESTS}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def session(leader: int) -> list[int]:
    """Return the processes of a session that still run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rsplit(")", 1)[1].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[3]) == leader and fields[0] != "Z":
            found.append(int(path.parent.name))
    return found


def test_workers_start_from_the_front_door(tmp_path: Path):
    with start_command(tmp_path, 0.0) as command:
        out, error = command.communicate(timeout=60)
    assert (command.returncode, error) == (0, "")
    assert sorted(line.split()[0] for line in out.splitlines()) == ["0", "1", "2", "3"]
    assert wait_until(lambda: not session(command.pid)), session(command.pid)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_process_outlives_the_command(number: signal.Signals, tmp_path: Path):
    with start_command(tmp_path, 300.0) as command:
        try:
            assert wait_until(lambda: len(list(tmp_path.glob("*.pid"))) == 2, 60)
            if number == signal.SIGINT:  # what a terminal does
                os.killpg(command.pid, number)
            else:
                os.kill(command.pid, number)
            status = command.wait(timeout=30)
            assert wait_until(lambda: not session(command.pid)), session(command.pid)
        finally:
            for pid in session(command.pid):
                os.kill(pid, signal.SIGKILL)
        assert command.stderr.read() == ("protperf try: interrupted\n" if number == signal.SIGINT else "")
    assert status == {signal.SIGKILL: -9, signal.SIGTERM: 143, signal.SIGINT: 130}[number]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"kind": "ray"}, "--executor ray: allowed: processes dask slurm"),
        ({"workers": 0}, "--workers 0: at least 1"),
        ({"kind": "slurm", "workers_per_job": 0}, "--workers-per-job 0: at least 1"),
        ({"retries": -1}, "--retries -1: 0 or more"),
        ({"kind": "dask"}, "--executor dask and --scheduler"),
        ({"scheduler": "tcp://host:1"}, "--executor dask and --scheduler"),
    ],
)
def test_options_that_cannot_work_are_refused(wrong: dict, message: str):
    with pytest.raises(ValueError, match=message):
        ExecutorOptions(**wrong)


def test_without_the_package_one_line_says_what_to_install():
    code = (
        "import sys; sys.modules['distributed'] = sys.modules['dask_jobqueue'] = None\n"
        "from data_prep.executors import ExecutorOptions, make_runner\n"
        "make_runner(ExecutorOptions(kind='dask', scheduler='tcp://host:1'))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    last = result.stderr.splitlines()[-1]
    assert last.startswith("ValueError: --executor dask: package ")
    assert last.endswith("is missing; pip install 'protperf[cluster]'")
