"""Files are either whole or absent, and say so under their own name."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from protperf.formats.commit import committed_text


def test_a_text_appears_when_it_is_whole(tmp_path: Path):
    path = tmp_path / "a.csv"
    path.write_text("old")
    with committed_text(path) as file:
        file.write("protéine\n")
        assert path.read_text() == "old"
    assert path.read_bytes() == "protéine\n".encode()
    assert os.listdir(tmp_path) == ["a.csv"]


@pytest.mark.parametrize("error", [ValueError("a mistake"), KeyboardInterrupt(), SystemExit(143)])
def test_an_error_leaves_nothing_of_a_text(tmp_path: Path, error: BaseException):
    def write_half() -> None:
        with committed_text(tmp_path / "a.csv") as file:
            file.write("half")
            raise error

    with pytest.raises(type(error)):
        write_half()
    assert os.listdir(tmp_path) == []


def test_a_full_disk_is_told_by_the_name_that_was_asked_for(tmp_path: Path):
    with (
        pytest.raises(OSError, match=r"No space left.*/a\.csv'") as caught,
        committed_text(tmp_path / "a.csv"),
    ):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), ".a.csv.tmp")
    assert caught.value.filename == str(tmp_path / "a.csv")
    assert os.listdir(tmp_path) == []
