"""`protperf bench paper`: the evidence of the Performer paper (Choromanski et al. 2021, arXiv:2009.14794), on real proteins.

Each experiment is a module of its name with a function `run`, which returns a report, and a function `rows`, which turns the
numbers of its JSON file into the tables of docs/paper.md. Long work is made of jobs (`jobs`) in the folder `--work`,
so that a command that was killed goes on where it was.
"""

from __future__ import annotations

import argparse
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from protperf.bench.report import Report


def run(options: argparse.Namespace) -> Report:
    """Run the experiment that was named."""
    report: Report = import_module(f"protperf.bench.paper.{options.experiment}").run(options)
    return report
