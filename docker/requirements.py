"""Print what pip must install beside protperf itself: `python requirements.py EXTRA,EXTRA`, where pyproject.toml lies."""

import sys
from pathlib import Path

import tomllib

PROJECT = tomllib.loads(Path("pyproject.toml").read_text())
KNOWN = PROJECT["project"]["optional-dependencies"]

asked = [name for name in sys.argv[1].split(",") if name]
if unknown := [name for name in asked if name not in KNOWN]:
    sys.exit(f"EXTRAS: there is no {', '.join(unknown)}; allowed: {', '.join(KNOWN)}")
lines = [*PROJECT["build-system"]["requires"], *PROJECT["project"]["dependencies"]]
print(*lines, *(line for name in asked for line in KNOWN[name]), sep="\n")
