"""`protperf bench` by itself: measure what the arguments say, print its tables, write numbers and figures."""

from __future__ import annotations

import argparse
import json
import sys
from importlib import import_module
from typing import TYPE_CHECKING

from protperf.bench.arguments import parse

if TYPE_CHECKING:
    from protperf.bench.report import Report


def main(argv: list[str] | None = None) -> int:
    """Run a benchmark, print its tables and write what was asked for; return the exit status."""
    options = parse(argv)
    check_outputs(options)
    report = measure(options)
    print(report.text)
    if options.json:
        from protperf.bench.report import plain
        from protperf.formats.commit import commit_bytes

        text = json.dumps(plain(report.numbers), indent=1, allow_nan=False)
        commit_bytes(options.json, (text + "\n").encode())
    if options.plot:
        from protperf.bench.figures import save

        for path in save(report.figures, options.plot):
            print(f"protperf bench {options.benchmark}: {path}", file=sys.stderr)
    return 0


def measure(options: argparse.Namespace) -> Report:
    """Run the benchmark that was named: the module of that name."""
    report: Report = import_module(f"protperf.bench.{options.benchmark}").run(options)
    return report


def check_outputs(options: argparse.Namespace) -> None:
    """Refuse, before any work, what must not be written.

    Raises:
        ValueError: no folder there, or a file is taken.
    """
    for path in filter(None, (options.json, options.plot)):
        if not path.parent.is_dir():
            raise ValueError(f"{path.parent}: no such folder to write {path.name} to; make it first")
    if options.json and options.json.exists() and not options.force:
        raise ValueError(f"{options.json}: exists already; give another name, or --force to replace it")
    if options.plot and options.plot.exists():
        if not options.plot.is_dir():
            raise ValueError(f"{options.plot}: is a file; --plot takes a folder")
        if any(options.plot.glob("*.png")) and not options.force:
            raise ValueError(f"{options.plot}: holds figures already; give another folder, or --force")


if __name__ == "__main__":
    sys.exit(main())
