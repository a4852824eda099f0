"""Fixtures shared by all tests."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("protperf", deadline=None, derandomize=True)
settings.load_profile("protperf")

REPOSITORY = Path(__file__).resolve().parents[1]
SAMPLE = REPOSITORY / "data_prep" / "sample" / "uniprot_sample.fasta.gz"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take longest: at the end one of them would leave the other processes idle."""
    minutes: Counter[Path] = Counter()
    for item in items:
        if marker := item.get_closest_marker("slow"):
            minutes[item.path] += marker.kwargs.get("minutes", 0.1)
    items.sort(key=lambda item: -minutes[item.path])


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """Folder of real proteins and odd files kept beside the repository; tests that need it skip without it."""
    path = Path(os.environ.get("PROTPERF_SHARED", REPOSITORY.parent / "shared"))
    if not (path / "data").is_dir():
        pytest.skip(f"no real-data folder at {path} (set PROTPERF_SHARED)")
    return path


@pytest.fixture(scope="session")
def sample_path() -> Path:
    """The real UniProt sample in the repository: 2,800 records."""
    return SAMPLE
