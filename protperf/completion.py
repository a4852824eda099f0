"""`protperf completion`: what a shell needs to complete `protperf`, and what it is told at a TAB.

argcomplete carries the line from the shell and the words back; at a TAB `cli` comes here before anything else. The parser
of the command on the line is built as the command builds it, so every option and choice is there; for `train`, whose
arguments are Hydra's, keys and values come from the same dataclasses and files that Hydra reads. Nothing here imports
torch or Hydra: a TAB is answered at once.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable
from dataclasses import fields
from importlib import import_module, resources
from pathlib import Path

import argcomplete
from argcomplete.completers import FilesCompleter

PARSERS = {
    "prepare": "data_prep.arguments",
    "evaluate": "protperf.evaluate",
    "embed": "protperf.embed.options",
    "score": "protperf.score.arguments",
    "generate": "protperf.generate",
    "maps": "protperf.maps.arguments",
    "convert": "protperf.convert.options",
    "bench": "protperf.bench.arguments",
    "plot": "protperf.plot",
    "completion": "protperf.completion",
}
"""Command -> the light module whose `make_parser` makes its parser."""

SHELLS = ("bash", "zsh", "fish")

PATHS = ("data.path", "init_from", "run_dir")
"""Keys of training whose values are files or folders."""


def main(argv: list[str] | None = None) -> int:
    """Print the shell code that was asked for; return the exit status."""
    options = make_parser().parse_args(argv)
    print(argcomplete.shellcode(["protperf"], shell=options.shell))
    return 0


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of `protperf completion`."""
    parser = argparse.ArgumentParser(
        "protperf completion",
        description="Print what makes a shell complete commands, options and the keys of training. For good: put the line "
        'eval "$(protperf completion bash)" into ~/.bashrc, with the full path of protperf if it is in an environment, the '
        "same with zsh into ~/.zshrc after compinit; for fish, "
        "protperf completion fish > ~/.config/fish/completions/protperf.fish.",
    )
    parser.add_argument("shell", choices=SHELLS, help="the shell")
    return parser


def complete(commands: Iterable[str]) -> None:
    """Answer the shell that started this process at a TAB, and end it.

    Args:
        commands: the names of all commands.
    """
    line, point = os.environ["COMP_LINE"], int(os.environ["COMP_POINT"])
    words = argcomplete.split_line(line, point)[3]  # without the one at the cursor
    begin = max(number for number, word in enumerate(words) if Path(word).name == "protperf")
    name = words[begin + 1] if len(words) > begin + 1 else ""
    if name in commands:
        begin += 1
        parser = _training_parser() if name == "train" else import_module(PARSERS[name]).make_parser()
    else:
        parser = argparse.ArgumentParser("protperf")
        parser.add_argument("--version", action="store_true")
        parser.add_argument("command", choices=list(commands))
    os.environ["_ARGCOMPLETE"] = str(begin + 1)  # the word, from 1, that is the program's name
    argcomplete.autocomplete(parser, always_complete_options=False, exclude=SecondSpellings())


class SecondSpellings:
    """Options such as --top_k beside --top-k: they are taken, but a TAB would stop where the two part."""

    def __contains__(self, word: object) -> bool:
        return isinstance(word, str) and word.startswith("--") and "_" in word


def _training_parser() -> argparse.ArgumentParser:
    """Return a parser that stands for Hydra's at a TAB."""
    parser = argparse.ArgumentParser("protperf train")
    parser.add_argument("--cfg", choices=("job", "hydra", "all"))
    parser.add_argument("--multirun", "-m", action="store_true")
    parser.add_argument("--resolve", action="store_true")
    overrides = parser.add_argument("overrides", nargs="*")
    overrides.completer = complete_override  # type: ignore[attr-defined]
    return parser


def complete_override(prefix: str, **_: object) -> list[str]:
    """Return what an argument of `protperf train` may go on to be.

    Args:
        prefix: the word up to the cursor.
    """
    key, equals, value = prefix.partition("=")
    if not equals:
        return _keys(key)
    if key in PATHS:
        return [f"{key}={path}" for path in FilesCompleter()(prefix=value)]
    return [f"{key}={each}" for each in _values(key)]


def _keys(prefix: str) -> list[str]:
    """Return groups, sections and keys; those of a section once its name and the dot are there."""
    from omegaconf import OmegaConf

    from protperf.config import SECTIONS

    section = prefix.partition(".")[0]
    if section in SECTIONS and "." in prefix:
        return [f"{section}.{field.name}=" for field in fields(SECTIONS[section])]
    with resources.as_file(resources.files("protperf.conf") / "train.yaml") as path:
        top = [str(key) for key in OmegaConf.load(path) if key not in ("defaults", "hydra")]
    return [*(f"{name}=" for name in (*_groups(), *top)), *(f"{name}." for name in SECTIONS)]


def _values(key: str) -> list[str]:
    """Return the values that are known of a key or a group."""
    from protperf.config import CHOICES, SECTIONS

    section, dot, name = key.partition(".")
    if not dot:
        return ["true", "false"] if key == "resume" else _groups().get(key, [])
    if section not in SECTIONS:
        return []
    if name in CHOICES[section]:
        return list(CHOICES[section][name])
    field = {each.name: each for each in fields(SECTIONS[section])}.get(name)
    return ["true", "false"] if field and isinstance(field.default, bool) else []


def _groups() -> dict[str, list[str]]:
    """Return the groups of the configuration, each with the names of its files."""
    return {
        group.name: sorted(file.name.removesuffix(".yaml") for file in group.iterdir())
        for group in sorted(resources.files("protperf.conf").iterdir(), key=lambda entry: entry.name)
        if group.is_dir() and group.name != "__pycache__"
    }


if __name__ == "__main__":
    sys.exit(main())
