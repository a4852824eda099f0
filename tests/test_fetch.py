"""`data_prep.download.fetch`, by way of a download: what may pass is tried again for a bounded time, what will not is said at once."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from mirror import (
    DATA,
    LOCK,
    NAME,
    SPROT,
    Mirror,
    drop_after,
    fetch,
    refuse,
    reset_after,
    stall_after,
    status,
)

from data_prep.download.fetch import Patience


@pytest.fixture
def mirror(monkeypatch: pytest.MonkeyPatch) -> Iterator[Mirror]:
    for variable in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY", "PROTPERF_UNIPROT_BASE"):
        monkeypatch.delenv(variable, raising=False)
    with Mirror() as mirror:
        mirror.publish(SPROT, DATA, etag='"first"')
        yield mirror


def test_missing_file_and_missing_metalink_are_named_at_once(mirror: Mirror, tmp_path: Path):
    del mirror.files[SPROT]
    refuse(mirror, tmp_path, ValueError, rf"{SPROT}: HTTP 404 Not Found; is the base address right")
    assert len(mirror.file_requests()) == 1
    mirror.files.clear()
    mirror.asked.clear()
    refuse(mirror, tmp_path, ValueError, "complete/RELEASE.metalink: HTTP 404 Not Found")
    assert len(mirror.asked) == 1
    assert os.listdir(tmp_path) == [LOCK]


@pytest.mark.parametrize("code", [500, 503, 429])
def test_busy_server_is_asked_again(mirror: Mirror, tmp_path: Path, code: int):
    mirror.faults = [status(code)] * 2
    mirror.metalink_faults = [status(code), drop_after(100), reset_after(0)]
    said = fetch(mirror, tmp_path)
    assert (tmp_path / NAME).read_bytes() == DATA
    assert sum(f"HTTP {code}" in line for line in said) == 3


def test_delays_double_and_have_an_end(mirror: Mirror, tmp_path: Path):
    mirror.faults = [status(503)] * 5
    patience = Patience(tries=6, first_delay_s=0.02, longest_delay_s=0.05)
    said = fetch(mirror, tmp_path, patience)
    assert [line.split(" in ")[1] for line in said if "503" in line] == ["0.02 s", "0.04 s"] + ["0.05 s"] * 3


def test_nobody_there_ends_in_one_line(mirror: Mirror, tmp_path: Path):
    closed = Mirror()
    closed._server.server_close()
    refuse(closed, tmp_path, ConnectionError, "Connection refused; gave up after 4 tries")


def test_connection_without_a_byte_counts_as_dropped(mirror: Mirror, tmp_path: Path):
    release = threading.Event()
    mirror.faults = [stall_after(400_000, release)]
    said = fetch(mirror, tmp_path, Patience(first_delay_s=0.001, timeout_s=0.3))
    release.set()
    assert (tmp_path / NAME).read_bytes() == DATA
    assert any("timed out" in line for line in said)
    assert mirror.file_requests()[1][0] == "bytes=400000-"


def test_redirection_is_followed_to_http_only(mirror: Mirror, tmp_path: Path):
    mirror.files["elsewhere.gz"] = DATA
    mirror.validators["elsewhere.gz"] = {"ETag": '"first"'}
    there = status(302, Location=f"{mirror.base}/elsewhere.gz")
    mirror.faults = [there, drop_after(400_000), there]
    fetch(mirror, tmp_path)
    assert (tmp_path / NAME).read_bytes() == DATA
    assert mirror.asked[-2] == ("elsewhere.gz", "bytes=400000-", '"first"')
    for number, target in enumerate(["ftp://127.0.0.1/x.gz", "file:///etc/passwd"]):
        mirror.faults = [status(302, Location=target)]
        refuse(mirror, tmp_path / str(number), ValueError, "HTTP 302|allowed: http and https")
    mirror.faults = [status(302, Location=f"{mirror.base}/{SPROT}")] * 20
    refuse(mirror, tmp_path / "circle", ValueError, "HTTP 302")
