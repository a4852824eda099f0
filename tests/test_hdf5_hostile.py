"""Files that HDF5's own library does not survive are one line here."""

from __future__ import annotations

import signal
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
from prepared import REPOSITORY

from protperf.formats import FormatError, hdf5_bytes, hdf5_links
from protperf.formats.embeddings import read_embeddings
from protperf.formats.hdf5_checksum import with_checksums
from protperf.formats.hdf5_format import ATTRIBUTE, LINK_INFO, SYMBOL_TABLE, UNDEFINED
from protperf.formats.hdf5_reading import Hdf5File

KEPT = REPOSITORY / "tests" / "kept"

HOSTILE: dict[str, dict[int, int]] = {
    "ends the process": {5499 + place: 57 for place in range(8)},
    "never ends": {1224: 255},
    "takes gigabytes": {3971: 128, 5139: 212, 5140: 212},
}
"""What HDF5's library does with a kept file of which these bytes are others."""


def hostile(path: Path, name: str) -> Path:
    data = bytearray((KEPT / "embeddings_v1_mean.h5").read_bytes())
    for place, byte in HOSTILE[name].items():
        data[place] = byte
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("name", HOSTILE)
def test_what_hdf5_s_library_cannot_read_is_one_line(tmp_path: Path, name: str):
    path = hostile(tmp_path / "a.h5", name)
    with pytest.raises(FormatError, match=r"/a\.h5: .*\b(protperf_version|header|kind)\b") as caught:
        read_embeddings(path)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.skipif(h5py.version.hdf5_version != "2.0.0", reason="said of HDF5 2.0.0")
@pytest.mark.parametrize("name", HOSTILE)
def test_hdf5_s_library_fails_as_the_page_on_security_says(tmp_path: Path, name: str):
    """In a process that is ended after 3 s of processor time; no core is written."""
    script = """
import resource, sys
resource.setrlimit(resource.RLIMIT_CPU, (3, 3))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
import h5py
with h5py.File(sys.argv[1]) as file:
    try:
        [dict(owner.attrs) for owner in (file, *file.values())]
    except OSError:
        pass
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 20)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, hostile(tmp_path / "a.h5", name)], capture_output=True, text=True
    )
    ended = {"ends the process": -signal.SIGSEGV, "never ends": -signal.SIGKILL, "takes gigabytes": 0}
    assert done.returncode == ended[name], done.stderr
    assert done.returncode or int(done.stdout) >= 2


class Bytes:
    """A file in memory, begun with room for what stands first."""

    def __init__(self) -> None:
        self.data = bytearray(48)

    @property
    def size(self) -> int:
        return len(self.data)

    def append(self, data: bytes) -> int:
        self.data += data
        return len(self.data) - len(data)

    def write_at(self, offset: int, data: bytes) -> None:
        self.data[offset : offset + len(data)] = data

    def opened(self, path: Path, messages: list[tuple[int, bytes]]) -> Hdf5File:
        root = self.append(with_checksums([hdf5_bytes.header(messages)])[0])
        block = b"\x89HDF\r\n\x1a\n" + struct.pack("<4B4Q", 2, 8, 8, 0, 0, UNDEFINED, self.size, root)
        self.write_at(0, with_checksums([block])[0])
        path.write_bytes(self.data)
        return Hdf5File(path, unreadable="no file of ours", remedy="write it again")


def text_attribute(name: str, place: bytes, size: int) -> tuple[int, bytes]:
    kind = struct.pack("<B3BIB3BIHH", 0x19, 1, 1, 0, 16, 0x10, 0, 0, 0, 1, 0, 8)
    return ATTRIBUTE, hdf5_bytes.attribute(name, kind, struct.pack("<I", size) + place)


@pytest.mark.parametrize(("names", "asked"), [("abc", None), ("aa", ["a"])], ids=["shared", "twice"])
def test_attributes_are_no_larger_than_the_file(tmp_path: Path, names: str, asked: list[str] | None):
    sink = Bytes()
    (place,) = hdf5_bytes.append_to_heap(sink, [b"A" * 10_000])
    messages = [text_attribute(name, place, 10_000 if asked is None else 1) for name in names]
    with (
        sink.opened(tmp_path / "a.h5", messages) as file,
        pytest.raises(FormatError, match=r"more bytes than the file|attribute 'a' is there twice"),
    ):
        file.attributes(names=asked)


def old_group(sink: Bytes, names: list[bytes], *, leaves: int = 1) -> tuple[int, bytes]:
    """Append a group of HDF5's first kind whose one leaf is pointed at so many times; return its message."""
    letters = b"".join(name + b"\0" for name in names)
    heap = sink.append(struct.pack("<4s4xQQQ", b"HEAP", len(letters), 0, sink.append(letters)))
    starts = np.cumsum([0, *(len(name) + 1 for name in names[:-1])]).tolist()
    symbols = b"".join(struct.pack("<QQI20x", start, 48, 0) for start in starts)
    leaf = sink.append(b"SNOD" + struct.pack("<BxH", 1, len(names)) + symbols)
    pointers = struct.pack("<QQ", 0, leaf) * leaves + bytes(8)
    tree = sink.append(b"TREE" + struct.pack("<BBH", 0, 0, leaves) + b"\xff" * 16 + pointers)
    return SYMBOL_TABLE, struct.pack("<QQ", tree, heap)


@pytest.mark.parametrize(
    ("names", "leaves"), [([b"a", b""], 1), ([b"a", b"a"], 1), ([b"a", b"b"], 2)], ids=str
)
def test_members_of_a_group_have_names_of_their_own(tmp_path: Path, names: list[bytes], leaves: int):
    sink = Bytes()
    with (
        sink.opened(tmp_path / "a.h5", [old_group(sink, names, leaves=leaves)]) as file,
        pytest.raises(FormatError, match=r"a link without a name|a tree that does not end"),
    ):
        file.names()


def test_members_of_an_old_group_are_read(tmp_path: Path):
    sink = Bytes()
    sink.append(bytes(100))
    with sink.opened(tmp_path / "a.h5", [old_group(sink, [b"b", b"a"])]) as file:
        assert file.names() == ["a", "b"]


def test_links_have_room_in_the_file(tmp_path: Path):
    """Names may share their letters, so that few letters make many names."""
    sink, number = Bytes(), 100
    heap = sink.append(struct.pack("<4s4xQQQ", b"HEAP", 301, 0, sink.append(b"a" * 300 + b"\0")))
    symbols = b"".join(struct.pack("<QQI20x", place, 48, 0) for place in range(number))
    leaf = sink.append(b"SNOD" + struct.pack("<BxH", 1, number) + symbols)
    tree = sink.append(
        b"TREE" + struct.pack("<BBH", 0, 0, 1) + b"\xff" * 16 + struct.pack("<QQQ", 0, leaf, 0)
    )
    with (
        sink.opened(tmp_path / "a.h5", [(SYMBOL_TABLE, struct.pack("<QQ", tree, heap))]) as file,
        pytest.raises(FormatError, match=r"more links than the file has room for"),
    ):
        file.names()


@pytest.mark.parametrize(
    "twice", [lambda found: np.repeat(found, 2, 0), lambda found: found], ids=["object", "header"]
)
def test_an_object_of_a_heap_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, twice: Callable[[np.ndarray], np.ndarray]
):
    write_tree = hdf5_links.write_tree
    monkeypatch.setattr(hdf5_links, "write_tree", lambda sink, found: write_tree(sink, twice(found)))
    sink = Bytes()
    writer = hdf5_links.LinkWriter(sink, ordered=False)
    writer.add(b"a", 48)
    heap, tree, _ = writer.finish()
    message = LINK_INFO, bytes(2) + struct.pack("<QQ", heap, tree)
    expected = "named twice|two messages of kind 2"
    with pytest.raises(FormatError, match=expected):
        sink.opened(tmp_path / "a.h5", [message] * (1 + (len(twice(np.zeros((1, 1)))) == 1))).names()


def test_a_chunk_that_is_cut_short_is_noticed(tmp_path: Path):
    """All numbers may be there: what shows that they are right, their checksum, is not."""
    path, numbers = tmp_path / "a.h5", np.empty(100, np.int64)
    whole = zlib.compress(np.arange(100).tobytes())
    for data in (whole, whole[:-1], whole[:-4], whole[:-9]):
        with h5py.File(path, "w") as made:
            dataset = made.create_dataset("x", (100,), np.int64, chunks=(100,), compression="gzip")
            dataset.id.write_direct_chunk((0,), data)
        with Hdf5File(path, unreadable="", remedy="") as file:
            if data is whole:
                file.fill(file.dataset("x"), numbers)
                np.testing.assert_array_equal(numbers, np.arange(100))
                continue
            with pytest.raises(FormatError, match=r"the chunk at \[0\] is cut short"):
                file.fill(file.dataset("x"), numbers)
