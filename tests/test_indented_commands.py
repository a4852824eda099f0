"""What a page indents cannot run here: it needs GPUs, a cluster, docker, TrEMBL. The program that it calls takes every word of it.

bash reads a block, so its quotes, variables and `$(...)` are what they would be; no program is started, each is written down.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from itertools import product
from pathlib import Path

import engine
import pytest
import yaml
from conftest import REPOSITORY
from hydra import compose, initialize_config_module
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from pages import indented_blocks, read_page, recorded

from protperf.cli import COMMANDS
from protperf.completion import PARSERS
from protperf.train import read_settings

PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    *sorted(f"docs/{path.name}" for path in REPOSITORY.glob("docs/*.md")),
]
PROGRAMS = (
    *("protperf", "torchrun", "srun", "sbatch", "dask", "docker", "apptainer", "enroot", "kubectl", "sky"),
    *("git", "hf", "pip", "source", "export", "cp", "aws"),
)
"""What a block of commands begins with."""
SHELL = re.compile(rf"(?:{'|'.join((*PROGRAMS, *COMMANDS))}) |\w+=\S")
"""How a block of commands begins: an image is given what stands behind `protperf`."""
OURS = re.compile(
    rf"(?<![\w/.`-])protperf (?:{'|'.join(COMMANDS)})\b|^(?:{'|'.join(COMMANDS)}) |\.sbatch\b|--wrap .*|docker compose\b.*\brun\b|sky jobs\b",
    flags=re.MULTILINE,
)
"""What a command of ours cannot be written without."""
WRITE_DOWN = r"""
command_not_found_handle() { printf '%s\0' "$@" $'\n' >> .words; }
exec() { "$@"; }
cd() { :; }
source() { :; }
"""


def typed(block: str, *arguments: str, folder: Path) -> list[list[str]]:
    """Return the words of each program that bash would start for a block, which finds none of them."""
    command = [shutil.which("bash"), "-euo", "pipefail", "-c", f"{WRITE_DOWN}{block}\nwait", *arguments]
    subprocess.run(command, cwd=folder, env={"PATH": "/nowhere"}, check=True, timeout=60)
    return list(recorded(folder / ".words"))


def calls_of(words: list[str], folder: Path) -> Iterator[list[str]]:
    """Yield the arguments of each protperf that a program would start."""
    if "--wrap" in words:
        for inner in typed(words[words.index("--wrap") + 1], folder=folder):
            yield from calls_of(inner, folder)
    elif words[0] == "sbatch":
        (at,) = [number for number, word in enumerate(words) if word.endswith(".sbatch")]
        (command,) = re.findall(r'"\$\{protperf\[@\]\}" (\w+)', (REPOSITORY / words[at]).read_text())
        yield [command, *words[at + 1 :]]
    elif words[:2] == ["docker", "compose"] and "run" in words:
        options = engine.parse(words[1:])
        services = yaml.safe_load((REPOSITORY / options.file).read_text())["services"]
        program, *entry = services[options.service]["entrypoint"][2:]  # behind `tini --`
        if program == "bash":
            block = entry[1].replace("$$", "$")
            for inner in typed(block, *entry[2:], *options.arguments, folder=folder):
                yield from calls_of(inner, folder)
        else:
            yield [*entry, *options.arguments]
    elif words[:2] == ["sky", "jobs"]:
        (arguments,) = [word for word in words if word.startswith("ARGUMENTS=")]
        yield ["train", *arguments.removeprefix("ARGUMENTS=").split()]
    elif words[0] in COMMANDS:
        yield words
    elif words[0] != "docker" and "protperf" in words:
        yield words[words.index("protperf") + 1 :]


def check_call(command: str, *words: str) -> None:
    """Have the program read its arguments, and go no further."""
    if command == "train":
        check_training([word for word in words if word != "-m"], several="-m" in words)
    else:
        module = import_module(PARSERS[command])
        (module.parse_arguments if command == "prepare" else module.parse)(list(words))


def check_training(overrides: list[str], *, several: bool) -> None:
    """Compose and check the settings of a run, or of each run of a sweep."""
    choices = [
        [f"{each.key_or_group}={value}" for value in each.sweep_string_iterator()]
        if several and each.is_sweep_override()
        else [str(each.input_line)]
        for each in OverridesParser.create().parse_overrides(overrides)
    ]
    for run in product(*choices):
        compose_run(run)


@cache
def compose_run(overrides: tuple[str, ...]) -> None:
    """Compose and check the settings of one run, once for all pages that have it."""
    with initialize_config_module("protperf.conf", version_base="1.3"):
        read_settings(compose("train", list(overrides)), overrides)


def check_page(text: str, folder: Path) -> int:
    """Check all indented commands of a page; return how many of them are ours."""
    found = 0
    for block in indented_blocks(text):
        commands = typed(block, folder=folder) if SHELL.match(block) else []
        assert not [word for words in commands for word in words if lies_nowhere(word)]
        calls = [list(calls_of(words, folder)) for words in commands]
        assert sum(map(bool, calls)) == len(OURS.findall(block)), (
            f"a command that this test cannot read:\n{block}"
        )
        for call in (call for made in calls for call in made):
            check_call(*call)
        found += sum(map(bool, calls))
    return found


def lies_nowhere(word: str) -> bool:
    """Tell whether a word is a file of `docker/` that is not there."""
    return word.startswith("docker/") and not (REPOSITORY / word).is_file()


@pytest.mark.parametrize("page", PAGES)
def test_every_word_of_an_indented_command_is_taken(page: str, tmp_path: Path):
    check_page(read_page(page), tmp_path)


BEFORE = "Here:\n\n    "


@pytest.mark.parametrize(
    ("block", "number"),
    [
        ("protperf train \\\n        data.path=a", 1),
        ("A=1 srun -n 2 \\\n        protperf train data.path=a -m model.num_layers=1,2   # of both", 1),
        ("a=data.path=a\n    sky jobs launch docker/skypilot.yaml --env ARGUMENTS=\"$a name='x'\"", 1),
        ("docker compose -f docker/compose.yaml run --rm demo trainer.max_steps=10", 1),
        (
            'job=$(sbatch --parsable docker/slurm/embed_array.sbatch a b c.h5)\n    sbatch --wrap "${SRUN:-srun} protperf embed --merge c.h5"',
            2,
        ),
        ("dask worker &\n    pip install x && protperf prepare --check a", 1),
        ("trembl/ngrams.h5   the floors of `protperf evaluate`", 0),
    ],
)
def test_commands_are_found_as_they_may_be_written(block: str, number: int, tmp_path: Path):
    assert check_page(f"{BEFORE}{block}\n\nThere.\n", tmp_path) == number


@pytest.mark.parametrize(
    ("block", "error"),
    [
        ("protperf train data.path=a trainer.max_step=1", HydraException),
        ("protperf train trainer.max_steps=1", ValueError),
        ("protperf train data.path=a trainer.max_steps=-1", ValueError),
        ("protperf train data.path=a model.num_layers=1,2", HydraException),
        ("torchrun --nnodes 4 -m protperf train trainer=dpp data.path=a", HydraException),
        (
            "srun protperf train -m hydra/launcher=submitit_slurm hydra.launcher.partitions=x data.path=a",
            HydraException,
        ),
        ("docker compose -f docker/compose.yaml run --rm demo trainer.max_step=10", HydraException),
        ("sbatch docker/slurm/prepare.sbatch a b --releases 2026_01", SystemExit),
        ("protperf embed run.ckpt", SystemExit),
        ("kubectl apply -f docker/kubernetes/trains.yaml", AssertionError),
        ("mpirun -n 8 protperf train data.path=a", AssertionError),
        ("parallel protperf embed a b ::: c", AssertionError),
    ],
)
def test_what_no_program_takes_is_found(block: str, error: type[BaseException], tmp_path: Path):
    with pytest.raises(error):
        check_page(f"{BEFORE}{block}\n\nThere.\n", tmp_path)
