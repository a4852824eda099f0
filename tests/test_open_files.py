"""Reading from many files: the bytes that are there, few files open, patience with what passes and with nothing else."""

from __future__ import annotations

import errno
import os
import pickle
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from protperf.formats import open_files
from protperf.formats.open_files import OpenFiles

WIDTH = 8
NEEDS_PROC = pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc to count open files")


def make_files(folder: Path, count: int) -> list[str]:
    """Write files in which byte i of file f is (7 f + i) mod 251."""
    paths = [folder / f"{number}.bin" for number in range(count)]
    for number, path in enumerate(paths):
        path.write_bytes(bytes((7 * number + place) % 251 for place in range(5 * WIDTH)))
    return [str(path) for path in paths]


def expected(file: int, offset: int) -> list[int]:
    return [(7 * file + offset + place) % 251 for place in range(WIDTH)]


def count_open(folder: Path) -> int:
    links = (Path(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd"))
    return sum(link.exists() and folder.resolve() in link.resolve().parents for link in links)


def read_one(files: OpenFiles, path: str, offset: int) -> list[int] | None:
    row = np.empty((1, WIDTH), np.uint8)
    return row[0].tolist() if files.read([path], [offset], row) else None


def test_rows_hold_the_bytes_at_their_places(tmp_path: Path):
    paths, files = make_files(tmp_path, 5), OpenFiles()
    generator = np.random.default_rng(0)
    which, offsets = generator.integers(5, size=200).tolist(), generator.integers(33, size=200).tolist()
    rows = np.empty((200, WIDTH), np.uint8)
    assert files.read([paths[number] for number in which], offsets, rows) == 200
    assert rows.tolist() == [expected(*place) for place in zip(which, offsets, strict=True)]


def test_the_first_row_whose_file_ends_too_early_is_told(tmp_path: Path):
    paths, files = make_files(tmp_path, 2), OpenFiles()
    rows = np.empty((4, WIDTH), np.uint8)
    for wrong in (33, 39, 40, 1000):
        assert files.read([paths[0], paths[1]] * 2, [0, 32, wrong, 0], rows) == 2
        assert rows[:2].tolist() == [expected(0, 0), expected(1, 32)]


@NEEDS_PROC
def test_no_more_files_are_open_than_allowed(tmp_path: Path):
    paths, files = make_files(tmp_path, 30), OpenFiles(limit=4)
    assert count_open(tmp_path) == 0
    for _ in range(2):
        for number, path in enumerate(paths):
            assert read_one(files, path, 3) == expected(number, 3)
            assert count_open(tmp_path) <= 4
    assert count_open(tmp_path) == 4
    files.close()
    assert count_open(tmp_path) == 0


@NEEDS_PROC
def test_files_are_open_no_longer_than_the_object(tmp_path: Path):
    paths = make_files(tmp_path, 3)
    files = OpenFiles()
    read_one(files, paths[0], 0)
    copy = pickle.loads(pickle.dumps(files))
    assert count_open(tmp_path) == 1
    assert read_one(copy, paths[1], 0) == expected(1, 0)
    del files, copy
    assert count_open(tmp_path) == 0


def test_a_process_that_may_open_few_files_reads_hundreds(tmp_path: Path):
    make_files(tmp_path, 300)
    code = (
        "import os, resource, sys; import numpy as np; from protperf.formats.open_files import OpenFiles\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)); files = OpenFiles(); row = np.empty((1, 8), np.uint8)\n"
        "for number in [*range(300), *range(300)]:\n"
        "    assert files.read([f'{sys.argv[1]}/{number}.bin'], [4], row) == 1\n"
        "    assert row[0, 0] == (7 * number + 4) % 251\n"
        "print(len(files._descriptors))"
    )
    result = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True)
    assert result.stderr == ""
    assert 1 <= int(result.stdout) <= 16


@contextmanager
def full_table() -> Iterator[None]:
    """Take every file that this process may still open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 1024), hard))
    taken = []
    try:
        while True:
            taken.append(os.dup(0))
    except OSError:
        pass
    try:
        yield
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_own_files_make_room_where_others_took_all(tmp_path: Path):
    paths, files = make_files(tmp_path, 4), OpenFiles()
    for path in paths[:3]:
        read_one(files, path, 0)
    with full_table():
        assert read_one(files, paths[3], 1) == expected(3, 1)
        files.close()


class Failing:
    """Stands in for `os.preadv`, which no test can make fail for real: fails the first times, then reads."""

    def __init__(self, times: int, number: int) -> None:
        self.left, self.number, self.calls = times, number, 0
        self.read = os.preadv

    def __call__(self, descriptor: int, buffers: Any, offset: int) -> int:
        self.calls += 1
        if self.left:
            self.left -= 1
            raise OSError(self.number, os.strerror(self.number))
        return self.read(descriptor, buffers, offset)


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Collect pauses instead of making them."""
    made: list[float] = []
    monkeypatch.setattr(time, "sleep", made.append)
    return made


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
@pytest.mark.parametrize("times", [1, 2, 4])
def test_what_passes_is_waited_for(
    number: int, times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pauses: list[float]
):
    paths, files = make_files(tmp_path, 1), OpenFiles()
    read_one(files, paths[0], 0)
    monkeypatch.setattr(os, "preadv", Failing(times, number))
    assert read_one(files, paths[0], 5) == expected(0, 5)
    assert pauses == sorted(pauses)
    assert sum(pauses) < 11


def test_a_failing_file_is_opened_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pauses: list[float]):
    paths, files = make_files(tmp_path, 2), OpenFiles()
    read_one(files, paths[0], 0)
    os.replace(paths[1], paths[0])  # the old descriptor still reads the old bytes
    assert read_one(files, paths[0], 0) == expected(0, 0)
    monkeypatch.setattr(os, "preadv", Failing(2, errno.ESTALE))
    assert read_one(files, paths[0], 0) == expected(1, 0)


def test_patience_ends_with_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pauses: list[float]):
    paths, files = make_files(tmp_path, 1), OpenFiles()
    failing = Failing(10**6, errno.EIO)
    monkeypatch.setattr(os, "preadv", failing)
    with pytest.raises(
        OSError, match=r"0\.bin: Input/output error, 5 times in 11 s; check the disk"
    ) as error:
        read_one(files, paths[0], 0)
    assert "\n" not in str(error.value)
    assert (failing.calls, len(pauses)) == (5, 4)


def test_what_does_not_pass_is_told_at_once(tmp_path: Path, pauses: list[float]):
    with pytest.raises(FileNotFoundError, match="absent"):
        read_one(OpenFiles(), str(tmp_path / "absent"), 0)
    with pytest.raises(IsADirectoryError):
        read_one(OpenFiles(), str(tmp_path), 0)
    assert pauses == []


@pytest.mark.parametrize("most", [1, 3, 7])
def test_a_read_that_was_cut_short_is_finished(most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    paths, files, preadv = make_files(tmp_path, 1), OpenFiles(), os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, rows, at: preadv(fd, [memoryview(rows[0])[:most]], at))
    assert read_one(files, paths[0], 5) == expected(0, 5)
    assert read_one(files, paths[0], 33) is None


def test_the_limit_of_the_process_is_kept_a_quarter_of(monkeypatch: pytest.MonkeyPatch):
    for soft, most in ((1024, 256), (100_000, 256), (resource.RLIM_INFINITY, 256), (100, 25), (2, 1)):
        monkeypatch.setattr(resource, "getrlimit", lambda kind, soft=soft: (soft, soft))
        assert open_files._allowed(open_files.MAX_OPEN_FILES) == most
