"""`data_prep.download.progress`: a bar on a terminal, lines in a log."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios

import pytest
from prepared import REPOSITORY

from data_prep.download.progress import Progress

COMMAND = """
from data_prep.download.progress import Progress
with Progress("reading", 2000, say=print, every_s=0) as progress:
    progress.move_to(500)
"""


def test_log_has_lines_now_and_then_and_no_bar(capsys: pytest.CaptureFixture[str]):
    said: list[str] = []
    with Progress("reading", 2000, say=said.append, every_s=0) as progress:
        for position in (500, 2000, 0):
            progress.move_to(position)
    assert [line.rsplit(", ", 1)[0] for line in said] == [
        "reading: 500 B of 2 kB (25%)",
        "reading: 2 kB of 2 kB (100%)",
        "reading: 0 B of 2 kB (0%)",
    ]
    assert said[2].endswith(", 0 B per second")
    with Progress("reading", 2000, say=said.append, every_s=3600) as progress:
        progress.move_to(1000)
    assert len(said) == 3
    assert capsys.readouterr() == ("", "")


def test_terminal_has_a_bar_and_no_lines():
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    command = [sys.executable, "-c", COMMAND]
    done = subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=theirs, check=True)
    os.close(theirs)  # so that reading fails where nothing came, and does not wait
    shown = os.read(ours, 65536).decode()
    os.close(ours)
    assert "reading:   0%|" in shown
    assert done.stdout == b""
