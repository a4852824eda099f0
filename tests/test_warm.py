"""A process that forks from a warm one is the process that Python starts anew."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from training import clean_environment, command_line
from warm import WarmProcess

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is warm")

PIPES = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}

TELL = """
import json, os, sys
numbers = [os.getppid(), os.getpgrp(), os.getsid(0), sorted(map(int, os.listdir("/proc/self/fd")))[:3]]
streams = [[s.name, s.encoding, s.errors, s.line_buffering] for s in (sys.stdin, sys.stdout, sys.stderr)]
print(__name__, __file__, os.getpid())
print(json.dumps([numbers, os.getcwd(), sys.argv, sys.orig_argv, sys.path, dict(os.environ), streams, sys.stdin.read()]))
print("last words", file=sys.stderr)
sys.exit(7)
"""


def both(command: list[str], folder: Path) -> list[subprocess.Popen[str]]:
    environment = clean_environment(folder, MINE="1")
    return [
        kind(command, cwd=folder, env=environment, text=True, **PIPES)
        for kind in (subprocess.Popen, WarmProcess)
    ]


@pytest.mark.parametrize("arguments", [["--version"], ["trian"], ["embed"], ["train", "name"]])
def test_a_command_says_and_returns_the_same(arguments: list[str], tmp_path: Path):
    cold, warm = both(command_line(*arguments), tmp_path)
    assert warm.communicate() == cold.communicate()
    assert warm.returncode == cold.returncode


def test_it_is_a_child_of_this_process_with_what_it_was_given(tmp_path: Path):
    (tmp_path / "tell.py").write_text(TELL)
    told = []
    for process in both([sys.executable, "-m", "tell", "me", "--more"], tmp_path):
        out, error = process.communicate("from stdin")
        first, _, rest = out.partition("\n")
        assert first.split() == ["__main__", str(tmp_path / "tell.py"), str(process.pid)]
        assert error == "last words\n"
        assert process.returncode == 7
        told.append(json.loads(rest))
    assert told[0] == told[1]
    assert told[0][0][0] == os.getpid()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_a_signal_ends_it(number: signal.Signals, tmp_path: Path):
    (tmp_path / "wait.py").write_text("import time\nprint('here', flush=True)\ntime.sleep(100)\n")
    for process in both([sys.executable, "-m", "wait"], tmp_path):
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        process.send_signal(number)
        process.communicate()
        assert process.returncode == -number
