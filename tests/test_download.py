"""`data_prep.download` against a real HTTP server with real faults: the bytes are the published ones, or there is no file."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from mirror import (
    DATA,
    LOCK,
    NAME,
    NEWER,
    SPROT,
    Fault,
    Handler,
    Mirror,
    begin,
    drop_after,
    fetch,
    refuse,
    reset_after,
    stall_after,
    status,
    wrong_range,
)
from prepared import REPOSITORY

from data_prep.download import address_of, download
from data_prep.download.fetch import Patience
from protperf.formats import FormatError

COMMAND = """
import sys
from pathlib import Path
from data_prep.download import download
download("sprot", Path(sys.argv[1]), base=sys.argv[2], say=print)
"""


@pytest.fixture
def mirror(monkeypatch: pytest.MonkeyPatch) -> Iterator[Mirror]:
    for variable in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY", "PROTPERF_UNIPROT_BASE"):
        monkeypatch.delenv(variable, raising=False)
    with Mirror() as mirror:
        mirror.publish(SPROT, DATA, etag='"first"')
        yield mirror


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("trembl", "knowledgebase/complete/uniprot_trembl.fasta.gz"),
        ("sprot", "knowledgebase/complete/uniprot_sprot.fasta.gz"),
        ("uniref50", "uniref/uniref50/uniref50.fasta.gz"),
        ("uniref90", "uniref/uniref90/uniref90.fasta.gz"),
    ],
)
def test_each_database_comes_from_its_place_under_its_own_name(
    mirror: Mirror, tmp_path: Path, name: str, path: str
):
    assert address_of(name) == f"https://ftp.uniprot.org/pub/databases/uniprot/current_release/{path}"
    mirror.publish(path, DATA, release="2025_04")
    said: list[str] = []
    found = download(name, tmp_path / "new" / "folder", base=mirror.base + "/", say=said.append)
    file_name = path.rsplit("/")[-1]
    assert found.read_bytes() == DATA
    assert sorted(os.listdir(tmp_path / "new" / "folder")) == [f".{file_name}.lock", file_name]
    assert "release 2025_04" in said[-1]


def test_base_is_the_argument_else_the_variable(mirror: Mirror, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PROTPERF_UNIPROT_BASE", "http://one.example/a/")
    assert address_of("sprot") == f"http://one.example/a/{SPROT}"
    assert address_of("sprot", "https://[::1]:8080") == f"https://[::1]:8080/{SPROT}"


@pytest.mark.parametrize(
    "base",
    [
        "ftp://a.example/x",
        "file:///etc",
        "a.example/x",
        "http://",
        "http://me:secret@a.example",
        "https://a:70000",
        "http://a b",
        "http://a/x?y",
        "http://a/x#y",
        "http://a/\n",
    ],
)
def test_only_plain_http_addresses_are_taken(tmp_path: Path, base: str):
    with pytest.raises(ValueError, match="not an address to fetch from") as caught:
        download("sprot", tmp_path, base=base, say=print)
    assert "secret" not in str(caught.value)
    with pytest.raises(ValueError, match="there are: trembl, sprot, uniref50, uniref90"):
        download("uniparc", tmp_path, say=print)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("drop", [drop_after, reset_after])
def test_dropped_connections_go_on_where_they_broke(mirror: Mirror, tmp_path: Path, drop: type[Fault]):
    mirror.faults = [drop(400_000), drop(1), drop(700_000)]
    fetch(mirror, tmp_path)
    assert (tmp_path / NAME).read_bytes() == DATA
    ranges = mirror.file_requests()
    assert [only_if for _, only_if in ranges] == [None, '"first"', '"first"', '"first"']
    offsets = [int(wanted.removeprefix("bytes=").removesuffix("-")) for wanted, _ in ranges[1:]]
    assert offsets == sorted(offsets)
    if drop is drop_after:  # a reset may destroy what is still on its way
        assert offsets == [400_000, 400_001, 1_100_001]
        assert mirror.sent == len(DATA)


def test_command_that_gave_up_goes_on_later(mirror: Mirror, tmp_path: Path):
    begin(mirror, tmp_path, 600_000)
    said = fetch(mirror, tmp_path)
    assert (tmp_path / NAME).read_bytes() == DATA
    assert mirror.file_requests() == [("bytes=600000-", '"first"')]
    assert mirror.sent == 900_000
    assert "600 kB are here already" in said[0]
    assert sorted(os.listdir(tmp_path)) == [LOCK, NAME]


def test_killed_download_goes_on_and_two_never_meet(mirror: Mirror, tmp_path: Path):
    release = threading.Event()
    mirror.faults = [stall_after(500_000, release)]
    command = [sys.executable, "-c", COMMAND, str(tmp_path), mirror.base]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.DEVNULL) as other:
        part, deadline = tmp_path / f"{NAME}.part", time.monotonic() + 60
        while not (part.exists() and part.stat().st_size > 200_000):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        refuse(mirror, tmp_path, ValueError, "another `protperf prepare --download` is fetching it")
        other.send_signal(signal.SIGKILL)
    release.set()
    kept = part.stat().st_size
    fetch(mirror, tmp_path)
    assert (tmp_path / NAME).read_bytes() == DATA
    assert mirror.file_requests()[1:] == [(f"bytes={kept}-", '"first"')]


def test_killed_before_the_rename_asks_for_no_byte_again(mirror: Mirror, tmp_path: Path):
    begin(mirror, tmp_path, 600_000)
    (tmp_path / f"{NAME}.part").write_bytes(DATA)
    fetch(mirror, tmp_path)
    assert (tmp_path / NAME).read_bytes() == DATA
    assert mirror.file_requests() == []


def test_part_longer_than_the_file_starts_anew(mirror: Mirror, tmp_path: Path):
    begin(mirror, tmp_path, 600_000)
    (tmp_path / f"{NAME}.part").write_bytes(DATA + b"x")
    fetch(mirror, tmp_path)
    assert (tmp_path / NAME).read_bytes() == DATA
    assert mirror.file_requests() == [(None, None)]


def test_part_goes_on_at_another_mirror_whose_etags_are_its_own(mirror: Mirror, tmp_path: Path):
    begin(mirror, tmp_path, 600_000)
    with Mirror() as other:
        other.publish(SPROT, DATA, etag='"other"')
        fetch(other, tmp_path)
        assert other.file_requests() == [("bytes=600000-", None)]
    assert (tmp_path / NAME).read_bytes() == DATA


def test_server_that_ignores_ranges_starts_anew_and_it_is_said(mirror: Mirror, tmp_path: Path):
    mirror.ranges = False
    mirror.faults = [drop_after(400_000)]
    said = fetch(mirror, tmp_path)
    assert (tmp_path / NAME).read_bytes() == DATA
    assert any("does not send parts of a file): starts anew" in line for line in said)


def test_server_that_ignores_ranges_and_drops_ends_in_bounded_tries(mirror: Mirror, tmp_path: Path):
    mirror.ranges = False
    mirror.faults = [drop_after(400_000)] * 10
    refuse(mirror, tmp_path, ConnectionError, "dropped; gave up after 4 tries: the same command continues")
    assert len(mirror.file_requests()) == 4


def test_progress_counts_tries_anew(mirror: Mirror, tmp_path: Path):
    data = random.Random(3).randbytes(90 << 20)
    mirror.publish(SPROT, data)
    mirror.faults = [drop_after(17 << 20)] * 5
    fetch(mirror, tmp_path)
    assert (tmp_path / NAME).read_bytes() == data
    assert mirror.sent == len(data)


def test_any_faults_in_any_order_end_in_the_published_bytes(mirror: Mirror, tmp_path: Path):
    def whole_then_drop(handler: Handler, data: bytes) -> None:
        del handler.headers["Range"]
        handler.answer(data, stop_after=300_000)

    for seed in range(10):
        draw = random.Random(seed)
        kinds = [drop_after(draw.randrange(900_000)), reset_after(draw.randrange(900_000)), status(503)]
        kinds += [whole_then_drop, wrong_range, status(416), drop_after(0)]
        mirror.faults = draw.choices(kinds, k=8)
        fetch(mirror, tmp_path / str(seed), Patience(tries=9, first_delay_s=0.001))
        assert (tmp_path / str(seed) / NAME).read_bytes() == DATA


@pytest.mark.parametrize("fault", [wrong_range, status(416)], ids=["other-range", "416"])
def test_answer_that_cannot_continue_the_part_starts_anew(mirror: Mirror, tmp_path: Path, fault: Fault):
    mirror.faults = [drop_after(400_000), fault]
    said = fetch(mirror, tmp_path)
    assert (tmp_path / NAME).read_bytes() == DATA
    assert mirror.file_requests()[2] == (None, None)
    assert any("starts anew" in line for line in said)


def test_file_with_another_etag_is_never_appended(mirror: Mirror, tmp_path: Path):
    begin(mirror, tmp_path, 400_000)
    mirror.publish(SPROT, DATA, etag='"second"')
    said = fetch(mirror, tmp_path)
    assert mirror.file_requests() == [("bytes=400000-", '"first"')]
    assert mirror.sent == len(DATA)
    assert any("its file is another one than before): starts anew" in line for line in said)
    assert (tmp_path / NAME).read_bytes() == DATA


@pytest.mark.parametrize("validators", [{}, {"ETag": 'W/"weak"'}], ids=["none", "weak"])
def test_without_validator_the_published_md5_decides(
    mirror: Mirror, tmp_path: Path, validators: dict[str, str]
):
    mirror.validators[SPROT] = validators
    begin(mirror, tmp_path, 400_000)
    fetch(mirror, tmp_path)
    assert mirror.file_requests() == [("bytes=400000-", None)]
    assert (tmp_path / NAME).read_bytes() == DATA
    (tmp_path / NAME).unlink()
    begin(mirror, tmp_path, 400_000)
    mirror.publish(SPROT, NEWER, release="2026_02")
    said = fetch(mirror, tmp_path)
    assert mirror.file_requests() == [(None, None)]
    assert "of another release than 2026_02: starts anew" in said[0]
    assert (tmp_path / NAME).read_bytes() == NEWER


def test_weak_etag_leaves_the_date_to_compare(mirror: Mirror, tmp_path: Path):
    date = "Wed, 28 Jan 2026 14:00:00 GMT"
    mirror.validators[SPROT] = {"ETag": 'W/"weak"', "Last-Modified": date}
    mirror.faults = [drop_after(400_000)]
    fetch(mirror, tmp_path)
    assert mirror.file_requests()[1] == ("bytes=400000-", date)


def test_wrong_md5_removes_the_part(mirror: Mirror, tmp_path: Path):
    mirror.files[SPROT] = DATA[:-1] + bytes([DATA[-1] ^ 1])
    refuse(mirror, tmp_path, FormatError, r"MD5 is \w{32}.*damaged on its way.*run the same command again")
    assert os.listdir(tmp_path) == [LOCK]
    mirror.files[SPROT] = DATA
    fetch(mirror, tmp_path)
    assert (tmp_path / NAME).read_bytes() == DATA


def test_part_of_a_silently_replaced_file_is_found_out(mirror: Mirror, tmp_path: Path):
    mirror.validators[SPROT] = {}
    begin(mirror, tmp_path, 400_000)
    mirror.files[SPROT] = random.Random(4).randbytes(len(DATA))
    refuse(mirror, tmp_path, FormatError, "MD5")
    assert os.listdir(tmp_path) == [LOCK]


@pytest.mark.parametrize("size", [len(DATA) - 1, len(DATA) + 1])
def test_file_of_another_size_is_refused_before_it_comes(mirror: Mirror, tmp_path: Path, size: int):
    mirror.files[SPROT] = (DATA + b"x")[:size]
    refuse(mirror, tmp_path, FormatError, rf"offers {size} bytes, release 2026_01 has {len(DATA)}")
    assert os.listdir(tmp_path) == [LOCK]


def new_release(mirror: Mirror, num_bytes: int) -> Fault:
    """Send the start of the old file; then a new release is there."""

    def fault(handler: Handler, data: bytes) -> None:
        handler.answer(data, stop_after=num_bytes)
        mirror.publish(SPROT, NEWER, release="2026_02", etag='"second"')

    return fault


def test_release_that_changes_in_the_middle_is_noticed(mirror: Mirror, tmp_path: Path):
    mirror.faults = [new_release(mirror, 400_000)]
    refuse(mirror, tmp_path, FormatError, "changed from release 2026_01 to 2026_02 meanwhile")
    fetch(mirror, tmp_path)
    assert (tmp_path / NAME).read_bytes() == NEWER
    assert sorted(os.listdir(tmp_path)) == [LOCK, NAME]


def test_release_that_changes_after_the_last_byte_is_said_and_the_file_kept(mirror: Mirror, tmp_path: Path):
    def fault(handler: Handler, data: bytes) -> None:
        mirror.publish(SPROT, NEWER, release="2026_02")
        handler.answer(data)

    mirror.faults = [fault]
    said = fetch(mirror, tmp_path)
    assert (tmp_path / NAME).read_bytes() == DATA
    assert "from release 2026_01 to 2026_02 meanwhile" in said[-1]
    assert f"{NAME} is release 2026_01, whole" in said[-1]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"</metalink>", b""),
        (NAME.encode(), b"uniprot_other.fasta.gz"),
        (b'type="md5"', b'type="crc"'),
        (b"<size>1500000", b"<size>-5"),
        (b"<version>2026_01", b"<version>"),
        (b"<version>2026_01", b"<version>a&#10;b"),
    ],
)
def test_metalink_that_does_not_say_enough_is_refused(mirror: Mirror, tmp_path: Path, old: bytes, new: bytes):
    path = "knowledgebase/complete/RELEASE.metalink"
    assert old in mirror.files[path]
    mirror.files[path] = mirror.files[path].replace(old, new)
    refuse(
        mirror,
        tmp_path,
        FormatError,
        "RELEASE.metalink: (not a metalink|does not give release, size and MD5)",
    )
    assert mirror.file_requests() == []


def test_finished_file_is_checked_and_not_fetched_again(mirror: Mirror, tmp_path: Path):
    fetch(mirror, tmp_path)
    mirror.asked.clear()
    assert "is there already: release 2026_01" in fetch(mirror, tmp_path)[-1]
    assert mirror.file_requests() == []


@pytest.mark.parametrize("there", [NEWER, DATA[:-1] + b"?", b""])
def test_other_file_of_that_name_is_left_as_it_is(mirror: Mirror, tmp_path: Path, there: bytes):
    (tmp_path / NAME).write_bytes(there)
    with pytest.raises(ValueError, match=r"is not uniprot_sprot\.fasta\.gz of release 2026_01.*move it away"):
        fetch(mirror, tmp_path)
    assert (tmp_path / NAME).read_bytes() == there
    assert mirror.file_requests() == []


@pytest.mark.parametrize("origin", [None, b"", b"[]", b'{"md5": 1}', b"\xff\xfe"])
def test_part_of_unknown_origin_is_not_continued(mirror: Mirror, tmp_path: Path, origin: bytes | None):
    (tmp_path / f"{NAME}.part").write_bytes(b"x" * 1000)
    if origin is not None:
        (tmp_path / f"{NAME}.part.json").write_bytes(origin)
    fetch(mirror, tmp_path)
    assert mirror.file_requests() == [(None, None)]
    assert (tmp_path / NAME).read_bytes() == DATA


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a small tmpfs")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_room_is_checked_before_and_a_full_disk_keeps_what_came(mirror: Mirror, small_disk: Path):
    filler = small_disk / "filler"
    filler.write_bytes(bytes(700_000))
    refuse(mirror, small_disk, OSError, r"1\.5 MB are needed for .* are free: make room")
    assert mirror.file_requests() == []
    filler.unlink()

    def fault(handler: Handler, data: bytes) -> None:
        filler.write_bytes(bytes(1_000_000))
        handler.answer(data)

    mirror.faults = [fault]
    refuse(mirror, small_disk, OSError, "No space left on device; what had come is kept: make room")
    kept = (small_disk / f"{NAME}.part").stat().st_size
    assert 500_000 < kept < len(DATA)
    filler.unlink()
    fetch(mirror, small_disk)
    assert (small_disk / NAME).read_bytes() == DATA
    assert mirror.file_requests()[-1][0] == f"bytes={kept}-"
