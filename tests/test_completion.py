"""A TAB completes commands, options, and keys and values of training, in real shells, without loading what computes."""

from __future__ import annotations

import os
import pty
import re
import select
import shlex
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path

import pytest
from conftest import REPOSITORY
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from programs import absent, skip
from test_cli import HEAVY, run_main

from protperf import cli
from protperf.completion import PARSERS, SHELLS, complete_override

COMMANDS = [
    "prepare",
    "evaluate",
    "embed",
    "score",
    "generate",
    "maps contacts",
    "convert",
    "bench attention",
    "plot map",
]


def answers(line: str, folder: Path, *flags: str) -> tuple[list[str], str]:
    """Ask as argcomplete's shell code does; return what could stand at the end of the line, and stderr."""
    told = folder / f"told{len(list(folder.iterdir()))}"
    done = subprocess.run(
        [sys.executable, *flags, "-m", "protperf"],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": str(REPOSITORY),
            "_ARGCOMPLETE": "1",
            "_ARGCOMPLETE_IFS": "\n",
            "_ARGCOMPLETE_SUPPRESS_SPACE": "1",
            "_ARGCOMPLETE_STDOUT_FILENAME": str(told),
            "COMP_LINE": line,
            "COMP_POINT": str(len(line)),
        },
        capture_output=True,
        text=True,
        check=True,
    )
    return told.read_text().splitlines(), done.stderr


@cache
def asked_for_options(command: str) -> tuple[list[str], str]:
    """Ask for the options of a command; stderr tells what was imported."""
    with tempfile.TemporaryDirectory() as folder:
        return answers(f"protperf {command} --", Path(folder), "-X", "importtime")


def test_each_command_has_its_parser():
    assert {*PARSERS, "train"} == {*cli.COMMANDS}


def test_all_commands_are_offered(tmp_path: Path):
    assert answers("protperf ", tmp_path)[0] == list(cli.COMMANDS)
    assert answers("protperf tr", tmp_path)[0] == ["train"]
    for before in (
        "cd runs && ",
        "cd runs; time ",
        "OMP_NUM_THREADS=1 ",
        "nice -n 5 ~/bin/",
        "protperf prepare a b | ",
    ):
        assert answers(f"{before}protperf tr", tmp_path)[0] == ["train"], before


@pytest.mark.parametrize("command", COMMANDS)
def test_the_options_of_a_command_are_those_of_its_help(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    assert run_main(*command.split(), "--help", monkeypatch=monkeypatch) == 0
    rows = re.findall(r"^  (-.*?)(?:  .*)?$", capsys.readouterr().out, flags=re.MULTILINE)
    helped = {option for row in rows for option in re.findall(r"(?<![\w-])--[a-z][\w-]*", row)}
    assert {*asked_for_options(command)[0]} == {option for option in helped if "_" not in option}


def test_choices_and_files_are_offered(tmp_path: Path):
    (tmp_path / "shards").mkdir()
    assert answers("protperf embed --precision ", tmp_path)[0] == ["fp32", "bf16", "fp16"]
    assert answers("protperf embed --precision=b", tmp_path)[0] == ["--precision=bf16"]
    assert answers("protperf bench ", tmp_path)[0][:2] == ["attention", "embedding"]
    assert answers("protperf evaluate sh", tmp_path)[0] == ["shards/"]
    assert answers("protperf train data.path=sh", tmp_path)[0] == ["data.path=shards/"]


def test_the_keys_of_training_are_those_that_hydra_composes():
    with initialize_config_module("protperf.conf", version_base="1.3"):
        composed = OmegaConf.to_container(compose("train"))
    assert isinstance(composed, dict)
    for section, keys in composed.items():
        if isinstance(keys, dict):
            assert complete_override(f"{section}.") == [f"{section}.{key}=" for key in keys]
            assert {f"{section}.", f"{section}="} <= {*complete_override("")}
        else:
            assert f"{section}=" in complete_override("")


def test_the_groups_of_training_offer_their_files():
    for group in (path for path in (REPOSITORY / "conf").iterdir() if path.is_dir()):
        if group.name != "__pycache__":
            names = sorted(path.stem for path in group.glob("*.yaml"))
            assert complete_override(f"{group.name}=") == [f"{group.name}={name}" for name in names]


def test_values_are_offered_where_they_are_few_words():
    assert complete_override("trainer.compile=") == ["trainer.compile=true", "trainer.compile=false"]
    assert complete_override("resume=") == ["resume=true", "resume=false"]
    assert "objective.kind=causal" in complete_override("objective.kind=")
    for prefix in ("model.dropout=", "nothing=", "nothing.at=", "model.nothing=", "data.valid_sets="):
        assert complete_override(prefix) == []


@pytest.mark.parametrize("command", COMMANDS)
def test_a_tab_loads_nothing_heavy(command: str):
    assert heavy_of(asked_for_options(command)[1]) == []


def test_a_tab_for_a_command_or_a_key_loads_nothing_heavy(tmp_path: Path):
    assert heavy_of(answers("protperf ", tmp_path, "-X", "importtime")[1]) == []
    assert heavy_of(answers("protperf train model.att", tmp_path, "-X", "importtime")[1]) == []


def heavy_of(imported: str) -> list[str]:
    """Return what was imported that takes long."""
    assert "argcomplete" in imported
    heavy = [name for name in HEAVY if name not in ("numpy", "omegaconf")]
    return [name for name in heavy if re.search(rf"\| +{name}$", imported, flags=re.MULTILINE)]


LINES = [
    ("protperf tra", "protperf train"),
    ("protperf train model.att", "protperf train model.attention="),
    ("protperf train model.attention=linf", "protperf train model.attention=linformer"),
    ("protperf train experiment=trembl_c", "protperf train experiment=trembl_causal_36l"),
    ("protperf embed --toks", "protperf embed --toks-per-batch"),
    ("protperf embed --precision b", "protperf embed --precision bf16"),
    ("protperf embed my", "protperf embed my_run/"),
    ("protperf bench att", "protperf bench attention"),
]
"""What is typed before TAB -> what stands there after it."""

STARTS = {
    "bash": (["bash", "--norc", "--noprofile", "-i"], 'eval "$(protperf completion bash)"'),
    "zsh": (["zsh", "-f", "-i"], 'autoload -Uz compinit; compinit -u -D; eval "$(protperf completion zsh)"'),
}


def environment(folder: Path) -> dict[str, str]:
    """Return an environment in which `protperf` is this repository's."""
    program = folder / "bin" / "protperf"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m protperf "$@"\n')
    program.chmod(0o755)
    path = f"{program.parent}{os.pathsep}{os.environ['PATH']}"
    return {"PATH": path, "PYTHONPATH": str(REPOSITORY), "HOME": str(folder), "TERM": "dumb", "PS1": "> "}


def typed(shell: str, lines: list[str], folder: Path) -> list[str]:
    """Type each line and TAB into an interactive shell; return what it then holds in its line."""
    command, start = STARTS[shell]
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(folder)
        os.execvpe(command[0], command, environment(folder))
    held = []
    try:
        say(terminal, f"{start}; echo re''ady\n", "ready")
        for number, line in enumerate(lines):
            os.write(terminal, f"{line}\t".encode())
            shown = say(terminal, f"\x01printf '<%s> ' \x05; echo en''d{number}\n", f"end{number}")
            held.append(" ".join(re.findall(r"<([^<>%]*)>", shown)))
    finally:
        os.write(terminal, b"exit\n")
        os.close(terminal)
        os.waitpid(pid, 0)
    return held


def say(terminal: int, text: str, awaited: str) -> str:
    """Type; return what the terminal shows until a word stands there that the shell, not the typing, has written."""
    os.write(terminal, text.encode())
    shown, end = "", time.monotonic() + 60
    while awaited not in shown:
        ready, _, _ = select.select([terminal], [], [], max(0, end - time.monotonic()))
        assert ready, f"no {awaited!r} in {shown!r}"
        shown += os.read(terminal, 1 << 16).decode(errors="replace")
    return shown


@pytest.mark.slow
@pytest.mark.parametrize("shell", SHELLS)
def test_a_real_shell_completes_the_line(shell: str, tmp_path: Path):
    if absent(shell):
        skip(f"no {shell}")
    (tmp_path / "my_run").mkdir()
    if shell == "fish":
        script = "protperf completion fish | source\n" + "".join(
            f"complete --do-complete {shlex.quote(line)}; echo end\n" for line, _ in LINES
        )
        done = subprocess.run(
            ["fish", "--no-config", "-c", script],
            cwd=tmp_path,
            env=environment(tmp_path),
            capture_output=True,
            text=True,
            check=True,
        )
        words = [each.split("\t")[0].strip() for each in done.stdout.split("end\n")[:-1]]
        held = [f"{line.rpartition(' ')[0]} {word}" for (line, _), word in zip(LINES, words, strict=True)]
    else:
        held = typed(shell, [line for line, _ in LINES], tmp_path)
    assert held == [completed for _, completed in LINES]
