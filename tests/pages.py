"""What the tests of the documentation share: a page's blocks, and shell blocks run as they are written.

A fenced block of `bash` or `python` runs in the test of its page; what cannot run here is indented, and is read by the
program that it calls (`test_indented_commands.py`).

bash reads a block; a function in the place of `protperf` writes down the words of each command, which then runs where
that is quick: in this process, or in one that forks from a warm one.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from conftest import REPOSITORY

from protperf import cli

_RECORD = r"""
protperf() { printf '%s\0' "$@" >> .words; printf '\n\0' >> .words; }
"""


def read_page(name: str) -> str:
    return (REPOSITORY / name).read_text()


def blocks_of(page: str, *languages: str) -> list[tuple[str, str]]:
    """Return (language, block) of each block that is meant to run, in order."""
    pattern = rf"^```({'|'.join(languages or ('bash', 'python'))})\n(.*?)^```$"
    return re.findall(pattern, read_page(page), flags=re.MULTILINE | re.DOTALL)


def indented_blocks(text: str) -> list[str]:
    """Return what stands indented by four or more between empty lines of Markdown, outside fences, as it would be typed."""
    outside = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.MULTILINE | re.DOTALL)
    paragraphs = re.split(r"\n(?:[ \t]*\n)+", f"\n\n{outside}")
    return [textwrap.dedent(each) for each in paragraphs if re.fullmatch(r"(?: {4,}\S.*(?:\n|$))+", each)]


@contextmanager
def programs_anew() -> Iterator[None]:
    """Forget, for a while, which programs were imported: `runpy` would warn of them."""
    names = [name for module, _ in cli.COMMANDS.values() for name in (module, f"{module}.__main__")]
    kept = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    try:
        yield
    finally:
        sys.modules.update(kept)


def call(words: list[str]) -> int:
    """Run a command in this process, through the front door; return its exit status."""
    with patch.object(sys, "argv", ["protperf", *words]), programs_anew():
        try:
            return cli.main()
        except SystemExit as end:
            return int(end.code or 0)


def run_bash(block: str, folder: Path, run: Callable[[list[str]], int] = call) -> None:
    """Run a shell block in a folder; whatever fails in it fails the test."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = ["bash", "-euo", "pipefail", "-c", _RECORD + block]
    subprocess.run(command, cwd=folder, env={**os.environ, "PATH": path}, check=True, timeout=60)
    for words in recorded(folder / ".words"):
        assert run(words) == 0, words


def run_lines(block: str, folder: Path, run: Callable[[list[str]], int]) -> None:
    """Run a shell block in a folder line by line: a plain command of protperf by `run`, all else by bash."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for line in block.replace("\\\n", " ").splitlines():
        if re.fullmatch(r"protperf [^|<>&;`$]+", line):
            assert run(shlex.split(line)[1:]) == 0, line
        else:
            command = ["bash", "-euo", "pipefail", "-c", line]
            done = subprocess.run(
                command,
                cwd=folder,
                env={**os.environ, "PATH": path},
                capture_output=True,
                text=True,
                timeout=500,
            )
            assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"


def recorded(path: Path) -> Iterator[list[str]]:
    """Yield the words of each command, and forget them."""
    text = path.read_text() if path.exists() else ""
    path.unlink(missing_ok=True)
    for command in text.split("\n\0")[:-1]:
        yield command.split("\0")[:-1]
