"""What pages of the site are made of and nobody writes: every --help, every configuration key, figures of measurements.

A page asks for it in a line `<!-- made: NAME -->`, or `<!-- made: figures EXPERIMENT [FIGURE...] -->`: figures
drawn from the numbers in docs/paper, which `protperf bench paper` measured. What stands between
`<!-- only on GitHub -->` and `<!-- everywhere -->` is no part of the site.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from dataclasses import fields
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from sphinx.errors import ExtensionError
from sphinx.pycode import ModuleAnalyzer

from protperf import cli
from protperf.bench.paper.page import read_numbers
from protperf.completion import PARSERS
from protperf.config import SECTIONS
from protperf.figures import save_figure

if TYPE_CHECKING:
    from sphinx.application import Sphinx

DOCS = Path(__file__).parent
CONF = DOCS.parent / "conf"
WIDTH = "80"
"""Columns of the terminal in which helps are shown."""
_MADE = re.compile(r"^<!-- made: (\w+)((?: \S+)*) -->$", re.MULTILINE)
_ELSEWHERE = re.compile(r"^<!-- only on GitHub -->$.*?^<!-- everywhere -->$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[([^\]\n]+)\]\(([^)#:\s]+)\)")


def setup(app: Sphinx) -> dict[str, Any]:
    """Have every page completed as it is read."""
    app.connect("source-read", complete)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def complete(app: Sphinx, page: str, source: list[str]) -> None:
    """Put what is made into a page.

    Raises:
        ExtensionError: it asks for something that nothing here makes.
    """

    def make(match: re.Match[str]) -> str:
        name, words = match[1], match[2].split()
        if name == "figures":
            return figures(app, *words)
        if name not in MAKERS or words:
            raise ExtensionError(f"{page}: {match[0]}: there are: {', '.join(MAKERS)}, figures EXPERIMENT")
        return MAKERS[name]()

    text = _ELSEWHERE.sub("", source[0])
    source[0] = _MADE.sub(make, _LINK.sub(_without_folders, text))


def _without_folders(link: re.Match[str]) -> str:
    """Leave the text of a link to a folder of the repository, which is no part of the site."""
    return link[1] if (DOCS / link[2]).is_dir() else link[0]


def commands() -> str:
    """Return the --help of every command and of what is below it."""
    sections = []
    for command in cli.COMMANDS:
        helps = (
            [("protperf train", hydra_help())]
            if command == "train"
            else helps_of(import_module(PARSERS[command]).make_parser())
        )
        for number, (words, text) in enumerate(helps):
            sections.append(f"{'###' if number else '##'} {words}\n\n```text\n{text.rstrip()}\n```")
    return "\n\n".join(sections)


def hydra_help() -> str:
    """Return what `protperf train --help` prints; Hydra reads its arguments."""
    printed = StringIO()
    asked = patch.object(sys, "argv", ["protperf", "train", "--help"])
    with asked, redirect_stdout(printed), suppress(SystemExit):
        cli.main()
    return printed.getvalue()


def helps_of(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str]]:
    """Yield the name and the help of a command, then of each command below it."""
    with patch.dict(os.environ, COLUMNS=WIDTH):
        yield parser.prog, parser.format_help()
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from helps_of(below)


def configuration() -> str:
    """Return tables of all keys: what each is as shipped, and what the string under its field says."""
    with initialize_config_module("protperf.conf", version_base="1.3"):
        shipped = compose("train")
    sections = []
    for group, cls in SECTIONS.items():
        told = ModuleAnalyzer.for_module(cls.__module__).find_attr_docs()
        rows = []
        for field in fields(cls):
            meaning = " ".join(told[cls.__name__, field.name]).strip().replace("|", "\\|")
            is_missing = OmegaConf.is_missing(shipped[group], field.name)
            value = "must be given" if is_missing else f"`{show(shipped[group][field.name])}`"
            rows.append(f"| `{group}.{field.name}` | {value} | {meaning} |")
        head = f"## {group}\n\n{cls.__doc__.splitlines()[0]} {choices(group)}\n"
        sections.append("\n".join([head, "| key | as shipped | meaning |\n|---|---|---|", *rows]))
    return "\n\n".join([*sections, f"## experiment\n\nSettings of several groups. {choices('experiment')}"])


def contributing() -> str:
    """Return the page of the repository's root."""
    return (DOCS.parent / "CONTRIBUTING.md").read_text()


def changelog() -> str:
    """Return the page of the repository's root."""
    return (DOCS.parent / "CHANGELOG.md").read_text()


def show(value: Any) -> str:
    """Return a value as one writes it on the command line."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if value != "" else '""'


def choices(group: str) -> str:
    """Return a list of the files of a group, with what the first line of each says."""
    items = []
    for path in sorted((CONF / group).glob("*.yaml")):
        said = [line for line in path.read_text().splitlines()[:2] if re.match(r"# (?!@)", line)]
        items.append(f"- `{group}={path.stem}`" + "".join(f": {line[2:]}" for line in said[:1]))
    return "\n\n" + "\n".join(items)


def figures(app: Sphinx, experiment: str, *wanted: str) -> str:
    """Draw the figures of an experiment, all or those that are wanted; return what shows them."""
    numbers = read_numbers(DOCS / "paper" / f"{experiment}.json")
    drawn = import_module(f"protperf.bench.paper.{experiment}").lay_out(numbers).figures
    folder = Path(app.doctreedir) / "figures"
    folder.mkdir(parents=True, exist_ok=True)
    shown = []
    for name in wanted or drawn:
        figure = drawn[name]
        save_figure(figure, folder / f"{name}.svg")
        title = figure.get_suptitle() or figure.axes[0].get_title(loc="left")
        shown.append(f"![{title}]({os.path.relpath(folder, DOCS)}/{name}.svg)")
    return "\n\n".join(shown)


MAKERS = {
    "commands": commands,
    "configuration": configuration,
    "contributing": contributing,
    "changelog": changelog,
}
