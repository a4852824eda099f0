"""`protperf bench paper page`: tables of docs/paper.md are made of the numbers of the experiments, never typed.

A table stands between the lines `<!-- NAME -->` and `<!-- /NAME -->`, NAME being its experiment.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from protperf.bench.paper.arguments import EXPERIMENTS
from protperf.bench.report import Report
from protperf.formats.commit import commit_bytes


def run(options: argparse.Namespace) -> Report:
    """Put the numbers of some experiments into a page.

    Raises:
        ValueError: a file that no experiment wrote, or a page without a place for it.
    """
    if not options.page.is_file():
        raise ValueError(f"{options.page}: no such file; give a page with places for tables")
    page = options.page.read_text()
    filled = []
    for path in options.results:
        numbers = read_numbers(path)
        page = fill(page, numbers, place=str(options.page))
        filled.append(numbers["experiment"])
    commit_bytes(options.page, page.encode())
    return Report([f"{options.page}: {', '.join(filled)}"], {"filled": filled})


def read_numbers(path: Path) -> dict[str, Any]:
    """Read what `--json` of an experiment wrote.

    Raises:
        ValueError: no such file, or something else.
    """
    try:
        numbers: dict[str, Any] = json.loads(path.read_text())
        if numbers["experiment"] not in EXPERIMENTS:
            raise ValueError(f"no experiment {numbers['experiment']!r}")
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{path}: not what `protperf bench paper EXPERIMENT --json` writes ({type(error).__name__})"
        ) from error
    return numbers


def fill(page: str, numbers: dict[str, Any], *, place: str) -> str:
    """Return a page with the tables of an experiment in their place.

    Args:
        page: Markdown.
        numbers: of the experiment.
        place: the page's name, for messages.

    Raises:
        ValueError: the page has no place for them, or some are missing.
    """
    name = numbers["experiment"]
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    between = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    if len(between.findall(page)) != 1:
        raise ValueError(f"{place}: has {begin} ... {end} not once; that is where the tables go")
    try:
        rows = import_module(f"protperf.bench.paper.{name}").rows(numbers)
        machine = numbers["machine"]
        origin = f"{numbers['setting']}. {machine['device']}, torch {machine['torch']}."
    except KeyError as error:
        raise ValueError(f"the numbers of {name} have no {error}; run it again") from None
    return between.sub(lambda _: f"{begin}\n{origin}\n\n{rows}\n{end}", page)


def markdown_table(title: str, columns: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    """Return a table as Markdown.

    >>> print(markdown_table("ms", ["256", "512"], [("SDPA", ["1.2", "4.8"])]))
    | ms | 256 | 512 |
    |---|---|---|
    | SDPA | 1.2 | 4.8 |
    """
    head, *lines = (
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in (name, *cells))} |"
        for name, cells in ((title, columns), *rows)
    )
    return "\n".join([head, "|---" * (1 + len(columns)) + "|", *lines])
