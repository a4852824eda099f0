"""An output in the making survives a kill at any moment, and goes on to the same bytes."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from embedding_outputs import content, describe, write
from prepared import REPOSITORY

from protperf.formats import FormatError
from protperf.formats.embedding_h5 import H5Writer
from protperf.formats.partial_output import PartialOutput, discard_partial, partial_paths

FORMATS = ("h5", "npz", "parquet", "pt")
OPERATIONS = ("write", "pwrite", "fsync", "replace", "ftruncate", "unlink")


class Killed(BaseException):
    """The process is no more: nothing that it would still do happens."""


class Faults:
    """Count the calls that change a disk, and end the process at one of them.

    Args:
        monkeypatch: for the calls.
        fatal: the call, from 0.
        way: `kill`, in the middle of a write and with nothing behind it; or `interrupt`, after the call, and cleaning up.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fatal: int = -1, way: str = "kill") -> None:
        self.calls = 0
        self.fatal = fatal
        self.way = way
        for name in OPERATIONS:
            monkeypatch.setattr(os, name, self.counted(name, getattr(os, name)))

    def counted(self, name: str, original):
        def call(*arguments, **options):
            self.calls += 1
            reached = self.fatal == self.calls - 1
            if self.way == "kill" and 0 <= self.fatal < self.calls:
                if name == "write" and reached:
                    original(arguments[0], bytes(arguments[1])[: len(arguments[1]) // 2])
                raise Killed
            try:
                return original(*arguments, **options)
            finally:
                if reached:
                    raise Killed

        return call


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("way", ["kill", "interrupt"])
def test_ended_at_any_operation_it_goes_on_to_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, way: str
):
    info, numbers = describe("per_tok"), range(5)
    with monkeypatch.context() as patches:
        faults = Faults(patches)
        write(tmp_path / "whole", name, info, numbers, commit_every=2)
    expected = content(tmp_path / "whole")
    assert faults.calls > 15
    resumed = 0
    for fatal in range(faults.calls):
        path = tmp_path / f"cut{fatal}"
        with monkeypatch.context() as patches:
            Faults(patches, fatal, way)
            with pytest.raises(Killed):
                write(path, name, info, numbers, commit_every=2)
        if not path.exists():
            resumed += write(path, name, info, numbers, commit_every=2) > 0
        # a folder that has its name already may still hold the marks of work
        found = {file: data for file, data in content(path).items() if not file.startswith(".")}
        assert found == expected, fatal
    assert resumed > faults.calls / 4


@pytest.mark.parametrize("name", FORMATS)
def test_full_disk_names_the_output_and_keeps_what_was_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
):
    info, numbers, path = describe("per_tok"), range(9), tmp_path / "out"
    write(tmp_path / "whole", name, info, numbers)
    original = os.write

    def fail(number: int) -> None:
        if number == 7:

            def full(descriptor: int, data: bytes) -> int:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

            monkeypatch.setattr(os, "write", full)

    with pytest.raises(OSError, match=r"No space left.*out") as caught:
        write(path, name, info, numbers, before_each=fail)
    assert "partial" not in str(caught.value)
    monkeypatch.setattr(os, "write", original)
    assert not path.exists()
    assert write(path, name, info, numbers) == 6
    assert content(path) == content(tmp_path / "whole")


@pytest.mark.parametrize("name", FORMATS)
def test_nothing_is_left_of_an_output_that_was_never_committed(tmp_path: Path, name: str):
    def fail(number: int) -> None:
        if number == 2:
            raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        write(tmp_path / "out", name, describe(), range(5), before_each=fail)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("others", "run", "message"),
    [
        ({"checkpoint_sha256": "1" * 64}, {"input": "a"}, f"checkpoint_sha256.*'{'0' * 64}'.*'{'1' * 64}'"),
        ({"precision": "bf16"}, {"input": "a"}, "'fp32'.*'bf16'"),
        ({}, {"input": "b"}, "with input 'a', now it is 'b'"),
        ({}, {}, "with input 'a', now it is None"),
    ],
)
def test_it_refuses_to_go_on_where_anything_changed(
    tmp_path: Path, name: str, others: dict[str, str], run: dict[str, str], message: str
):
    def fail(number: int) -> None:
        if number == 5:
            raise RuntimeError("stopped")

    path = tmp_path / "out"
    with pytest.raises(RuntimeError, match="stopped"):
        write(path, name, describe(), range(9), before_each=fail, run={"input": "a"})
    with pytest.raises(ValueError, match=rf"out: was begun.*{message}.*--force") as caught:
        write(path, name, describe(**others), range(9), run=run)
    assert "\n" not in str(caught.value)
    assert write(path, name, describe(), range(9), run={"input": "a"}) == 3


def test_sigkill_at_40_percent_then_the_same_command_gives_the_same_bytes(tmp_path: Path):
    script = f"""
import os, signal, sys
sys.path.insert(0, {str(REPOSITORY / "tests")!r})
from pathlib import Path
from embedding_outputs import describe, write
def kill(number):
    if number == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
print(write(Path(sys.argv[1]), "h5", describe(), range(1000), commit_every=50, before_each=kill))
"""

    def run(name: str, fatal: int) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        command = [sys.executable, "-c", script, str(tmp_path / name), str(fatal)]
        return subprocess.run(command, capture_output=True, text=True, env=environment)

    assert run("cut.h5", 420).returncode == -9
    assert not (tmp_path / "cut.h5").exists()
    done = run("cut.h5", -1)
    assert (done.stdout, done.stderr) == ("400\n", "")
    write(tmp_path / "whole.h5", "h5", describe(), range(1000), commit_every=999)
    assert content(tmp_path / "cut.h5") == content(tmp_path / "whole.h5")
    assert sorted(os.listdir(tmp_path)) == ["cut.h5", "whole.h5"]


def test_two_processes_never_write_one_output(tmp_path: Path):
    script = f"""
import sys
sys.path.insert(0, {str(REPOSITORY / "tests")!r})
from pathlib import Path
from embedding_outputs import describe, write
write(Path(sys.argv[1]), "h5", describe(), range(3))
"""
    path = tmp_path / "e.h5"
    with H5Writer(path, describe()) as writer:
        writer.commit()
        done = subprocess.run(
            [sys.executable, "-c", script, str(path)],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith(
        "e.h5: another process is writing it; wait for its end, or give another name"
    )
    assert path.exists()


@pytest.mark.parametrize("damage", ["record", "data", "log"])
def test_damaged_rest_of_an_interruption_is_refused_then_forced_away(tmp_path: Path, damage: str):
    path = tmp_path / "e.h5"
    output = PartialOutput(path, {})
    output.append(bytes(100))
    output.log(bytes(10))
    output.commit({"n": 1})
    output.close()
    data, log, record, _ = partial_paths(path)
    {
        "record": lambda: record.write_text("{"),
        "data": lambda: os.truncate(data, 99),
        "log": lambda: os.truncate(log, 9),
    }[damage]()
    with pytest.raises(FormatError, match=r"e\.h5.*--force"):
        PartialOutput(path, {})
    discard_partial(path)
    assert os.listdir(tmp_path) == []
    assert PartialOutput(path, {}).state is None


def test_state_is_that_of_the_last_commit_and_what_follows_is_cut_off(tmp_path: Path):
    output = PartialOutput(tmp_path / "e", {"a": [1, 2]})
    output.append(b"abc")
    output.commit({"n": 1})
    output.append(b"d" * (3 << 20))  # more than the buffer
    output.close()
    output = PartialOutput(tmp_path / "e", {"a": [1, 2]})
    assert (output.state, output.size, output.read(0, 9)) == ({"n": 1}, 3, b"abc")
    output.append(b"e")
    output.flush()
    output.publish()
    assert (tmp_path / "e").read_bytes() == b"abce"
    assert os.listdir(tmp_path) == ["e"]


def test_log_may_grow_while_it_is_read(tmp_path: Path):
    output = PartialOutput(tmp_path / "e", {})
    output.log(b"0123456789")
    found = output.read_log(chunk=4)
    assert next(found) == b"0123"
    output.log(b"abc")
    assert list(found) == [b"4567", b"89"]
    output.discard()
