"""What goes wrong on foreign bytes becomes a line; what is no fault of theirs does not."""

from __future__ import annotations

import errno
import os
import zipfile
from pathlib import Path

import pytest
from checkpoints import make_checkpoint
from embedding_outputs import describe, write

from protperf.checkpoint import load_model
from protperf.formats import FormatError
from protperf.formats.embedding_merge import open_embeddings
from protperf.formats.foreign import as_format_error, foreign_bytes

FAULTS = [
    KeyError("x"),
    TypeError("of a library"),
    zipfile.BadZipFile("x"),
    OSError("no errno: of a library"),
    OSError(errno.EINVAL, "a foreign offset"),
    RecursionError(),
]
OTHERS = [OSError(errno.EIO, os.strerror(errno.EIO)), MemoryError(), KeyboardInterrupt()]


@pytest.mark.parametrize("fault", FAULTS, ids=repr)
def test_whatever_a_library_raises_becomes_a_line(fault: Exception):
    line = pytest.raises(FormatError, match=r"^a\.npz: damaged \(.*\)$")
    with line, as_format_error("a.npz: damaged"), foreign_bytes():
        raise fault


@pytest.mark.parametrize("fault", OTHERS, ids=repr)
def test_what_the_system_says_stays(fault: BaseException):
    with pytest.raises(type(fault)) as caught, as_format_error("x"), foreign_bytes():
        raise fault
    assert caught.value is fault


def test_mistakes_of_ours_and_lines_of_ours_stay():
    for fault in (AttributeError("x"), TypeError("x"), AssertionError(), FormatError("a line")):
        with pytest.raises(type(fault)) as caught, as_format_error("x"):
            raise fault
        assert caught.value is fault


@pytest.mark.parametrize("method", ["__init__", "open", "testzip"])
def test_a_failing_disk_is_no_damaged_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str):
    checkpoint = make_checkpoint(tmp_path / "m.ckpt")
    write(tmp_path / "e.npz", "npz", describe(), range(3))

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(zipfile.ZipFile, method, fail)
        with pytest.raises(OSError, match="Input/output error"):
            load_model(checkpoint)
        if method != "testzip":
            with pytest.raises(OSError, match="Input/output error"):
                open_embeddings(tmp_path / "e.npz")
