"""Archives written here are read by Python's own reader, beyond 65,535 members and 4 GiB too."""

from __future__ import annotations

import os
import zipfile
import zlib
from pathlib import Path

from protperf.formats.partial_output import PartialOutput
from protperf.formats.zip_bytes import Member, append_directory, local_header


def test_more_members_than_16_bits_count(tmp_path: Path):
    output = PartialOutput(tmp_path / "a.zip", {})
    members = [Member(f"{number}", zlib.crc32(b"x"), 1, 1, number * 100) for number in range(70_000)]
    for place, member in enumerate(members):
        members[place] = member._replace(address=output.append(local_header(member) + b"x"))
    append_directory(output, members)
    output.publish()
    with zipfile.ZipFile(tmp_path / "a.zip") as archive:
        assert len(archive.namelist()) == 70_000
        assert archive.read("69999") == archive.read("0") == b"x"
        assert archive.getinfo("0").date_time == (1980, 1, 1, 0, 0, 0)


def test_member_of_5_gib_and_one_behind_it(tmp_path: Path):
    size = 5 << 30
    large = Member("large", 0, size, size, 0)
    path = tmp_path / "a.zip"
    with open(path, "wb") as file:
        file.write(local_header(large))
        file.seek(size, os.SEEK_CUR)  # a hole, which takes no room
        small = Member("small", zlib.crc32(b"abc"), 3, 3, file.tell())
        file.write(local_header(small) + b"abc")

    class Sink:
        @property
        def size(self) -> int:
            return path.stat().st_size

        def append(self, data: bytes) -> int:
            with open(path, "ab") as file:
                file.write(data)
            return 0

        def write_at(self, offset: int, data: bytes) -> None:
            raise NotImplementedError

    append_directory(Sink(), [large, small])
    with zipfile.ZipFile(path) as archive:
        assert [info.file_size for info in archive.infolist()] == [size, 3]
        assert archive.read("small") == b"abc"
        with archive.open("large") as member:
            assert member.read(8) == bytes(8)
