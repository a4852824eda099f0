"""Programs of the system that some tests run for real: where one is absent they skip with the reason, in CI they fail."""

from __future__ import annotations

import os
import shutil
from typing import NoReturn

import pytest

SYSTEM_PATH = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"))
"""Where daemons and network tools lie, which are not on everybody's path."""


def in_ci() -> bool:
    """Tell whether `.ci/run` runs the tests: all programs are there, and an index of packages."""
    return bool(os.environ.get("PROTPERF_TESTS_SKIP_NOTHING"))


def absent(*names: str) -> list[str]:
    """Return those of the programs that are not installed."""
    return [name for name in names if not shutil.which(name, path=SYSTEM_PATH)]


def path_of(name: str) -> str:
    """Return where an installed program lies."""
    path = shutil.which(name, path=SYSTEM_PATH)
    assert path, name
    return path


def skip(reason: str) -> NoReturn:
    """Skip the test that asks; fail it where all programs are said to be there, as `.ci/run` does."""
    if in_ci():
        pytest.fail(f"skipped where nothing may be skipped: {reason}")
    pytest.skip(reason)
