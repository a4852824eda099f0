"""Tables of names: the same in memory and in buckets, in bounded memory, and every fault named by its line."""

from __future__ import annotations

import gzip
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from prepared import REPOSITORY, random_records, read_proteins, write_fasta

from data_prep import tables
from data_prep.options import PrepareOptions
from data_prep.prepare import prepare
from data_prep.splits import OOD, TEST, TRAIN, VALID
from data_prep.tables import ABSENT, REPRESENTATIVE, NameTable, TableWriter, write_tables
from protperf.formats import FormatError


def write_names(folder: Path, entries: list[tuple[bytes, int]]) -> NameTable:
    folder.mkdir()
    writer = TableWriter(folder, "names.tsv")
    for line, (name, value) in enumerate(entries, 1):
        writer.add(name, line, value)
    writer.finish()
    return NameTable.open(folder)


@pytest.mark.parametrize("held", [3, 500, 5000])
def test_names_are_found_with_their_values_however_few_are_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: int
):
    draw = random.Random(held)
    values = {f"A0A{number:06d}".encode(): draw.choice([0, 1, 2, 3, 8, 9]) for number in range(1000)}
    monkeypatch.setattr(tables, "_HELD", held)
    table = write_names(tmp_path / "table", list(values.items()))
    names = [*draw.sample(list(values), 1000), b"A0A", b"", b"A0A1000000", b"\xff"]
    assert table.find(names).tolist() == [values.get(name, ABSENT) for name in names]
    assert table.find([]).tolist() == []
    assert sorted(path.name for path in (tmp_path / "table").iterdir()) == ["names.npy", "values.npy"]


@pytest.mark.parametrize("held", [3, 100])
def test_buckets_give_the_bytes_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: int):
    entries = [(str(number % 90).encode(), number % 90 % 4) for number in range(120)]
    write_names(tmp_path / "memory", entries)
    monkeypatch.setattr(tables, "_HELD", held)
    write_names(tmp_path / "buckets", entries)
    for name in ("names.npy", "values.npy"):
        assert (tmp_path / "memory" / name).read_bytes() == (tmp_path / "buckets" / name).read_bytes()
    assert len(np.load(tmp_path / "buckets" / "names.npy")) == 90


def test_an_empty_table_names_nothing(tmp_path: Path):
    assert write_names(tmp_path / "table", []).find([b"a", b""]).tolist() == [ABSENT, ABSENT]


@pytest.mark.parametrize("held", [3, 50, 1 << 20])
def test_a_name_in_two_splits_is_named_by_its_later_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: int
):
    monkeypatch.setattr(tables, "_HELD", held)
    entries = [(str(number).encode(), TRAIN) for number in range(200)]
    entries[120] = (b"17", VALID)
    message = r"^names\.tsv:121: this member stands in two clusters; a member belongs to one$"
    with pytest.raises(FormatError, match=message):
        write_names(tmp_path / "table", entries)
    entries[120] = (b"17", TRAIN + REPRESENTATIVE)  # the same split: no contradiction
    table = write_names(tmp_path / "again", entries)
    assert table.find([b"17"])[0] % REPRESENTATIVE == TRAIN


def write_clusters(path: Path, lines: list[tuple[str, str]], *, end: str = "\n") -> str:
    text = "".join(f"{representative}\t{member}{end}" for representative, member in lines).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return str(path)


CLUSTERS = [(f"r{number // 4 * 4}", f"r{number}") for number in range(400)]


@pytest.mark.parametrize(("name", "end"), [("c.tsv", "\n"), ("c.tsv.gz", "\n"), ("c.tsv", "\r\n")])
def test_members_have_the_split_of_their_cluster(tmp_path: Path, name: str, end: str):
    path = write_clusters(tmp_path / name, CLUSTERS, end=end)
    (tmp_path / "table").mkdir()
    options = PrepareOptions(clusters=path, valid=10, test=20)
    assert write_tables(tmp_path / "table", options) is not None
    values = NameTable.open(tmp_path / "table").find([f"r{number}".encode() for number in range(400)])
    splits = (values % REPRESENTATIVE).reshape(100, 4)
    assert (splits == splits[:, :1]).all()
    assert np.bincount(splits[:, 0]).tolist() == [70, 10, 20]
    assert (values.reshape(100, 4) >= REPRESENTATIVE).tolist() == [[True, False, False, False]] * 100
    assert {TRAIN, VALID, TEST} == {0, 1, 2}


def test_a_byte_order_mark_is_no_part_of_a_name(tmp_path: Path):
    records = random_records([30] * 2)
    (tmp_path / "c.tsv").write_bytes(b"\xef\xbb\xbfp0\tp0\np0\tp1\n")
    options = PrepareOptions(window=64, clusters=str(tmp_path / "c.tsv"), keep="representative")
    counts = prepare([write_fasta(tmp_path / "a.fasta", records)], tmp_path / "out", options).counts
    assert (counts.not_representative, counts.outside_clusters) == (1, 0)


def test_the_order_of_a_table_says_nothing(tmp_path: Path):
    written = []
    for number, lines in enumerate((CLUSTERS, CLUSTERS[::-1], random.Random(2).sample(CLUSTERS, 400))):
        path = write_clusters(tmp_path / f"{number}.tsv", lines)
        folder = tmp_path / str(number)
        folder.mkdir()
        write_tables(folder, PrepareOptions(clusters=path, valid=10, test=0.2))
        written.append([(folder / name).read_bytes() for name in ("names.npy", "values.npy")])
    assert written[0] == written[1] == written[2]


def test_held_out_clusters_are_whole(tmp_path: Path):
    families = tmp_path / "f.tsv"
    families.write_text("r9\tPF00042\nr17\tPF00001\nr18\tPF00001,PF00042\nr19\tPF00042x\n")
    (tmp_path / "ood.txt").write_text("r40\n\nr8\n")
    options = PrepareOptions(
        clusters=write_clusters(tmp_path / "c.tsv", CLUSTERS),
        ood_clusters=str(tmp_path / "ood.txt"),
        ood_families=str(families),
        families="PF00042",
        valid=0.5,
        test=0,
    )
    (tmp_path / "table").mkdir()
    write_tables(tmp_path / "table", options)
    values = NameTable.open(tmp_path / "table").find([f"r{number}".encode() for number in range(400)])
    assert np.flatnonzero(values % REPRESENTATIVE == OOD).tolist() == [
        *range(8, 12),
        *range(16, 20),
        *range(40, 44),
    ]


def ood_headers(
    tmp_path: Path, headers: list[str], clusters: str, families: str, keep: str = "all"
) -> set[str]:
    """Make a dataset of a record for each header; return the headers of the split ood."""
    sequences = [sequence for _, sequence in random_records([30] * len(headers))]
    records = list(zip(headers, sequences, strict=True))
    (tmp_path / "c.tsv").write_text(clusters)
    (tmp_path / "f.tsv").write_text(families)
    options = PrepareOptions(
        window=64,
        clusters=str(tmp_path / "c.tsv"),
        ood_families=str(tmp_path / "f.tsv"),
        families="PF00042",
        keep=keep,
        valid=0.3,
        test=0.3,
    )
    prepare([write_fasta(tmp_path / "a.fasta", records)], tmp_path / "out", options)
    found = set(read_proteins(tmp_path / "out").get("ood", []))
    return {header for header, sequence in records if sequence in found}


@pytest.mark.parametrize("keep", ["all", "representative"])
def test_a_record_of_a_family_is_held_out_if_no_cluster_names_it(tmp_path: Path, keep: str):
    headers = ["p0", "p1", "sp|P00002|A_B x"]
    families = "p1\tPF00042\nP00002\tPF00042\n"
    assert ood_headers(tmp_path, headers, "p0\tp0\n", families, keep) == set(headers[1:])


def test_families_hold_out_clusters_whose_table_has_whole_ids(tmp_path: Path):
    headers = [f"sp|P0000{number}|A{number}_B x" for number in range(4)]
    words = [header.split()[0] for header in headers]
    clusters = "".join(f"{words[number // 2 * 2]}\t{words[number]}\n" for number in range(4))
    assert ood_headers(tmp_path, headers, clusters, "P00001\tPF00042\n") == set(headers[:2])


@pytest.mark.parametrize("damage", ["cut", "flip"])
def test_a_damaged_gzip_table_is_one_line(tmp_path: Path, damage: str):
    path = Path(write_clusters(tmp_path / "c.tsv.gz", random.Random(0).sample(CLUSTERS, 400)))
    data = bytearray(path.read_bytes())
    if damage == "cut":
        del data[len(data) // 2 :]
    else:
        data[len(data) // 2 : len(data) // 2 + 8] = bytes(8)
    path.write_bytes(data)
    (tmp_path / "table").mkdir()
    with pytest.raises(FormatError, match=r"^[^\n]*c\.tsv\.gz: damaged gzip file[^\n]*$"):
        write_tables(tmp_path / "table", PrepareOptions(clusters=str(path)))


def test_a_line_without_end_is_one_line_with_its_number(tmp_path: Path):
    path = tmp_path / "c.tsv"
    path.write_bytes(b"a\tb\n" + b"c" * (1 << 21))
    (tmp_path / "table").mkdir()
    with pytest.raises(
        FormatError, match=r"c\.tsv:2: a line of more than 1 MiB, .*; give text with one row a line"
    ):
        write_tables(tmp_path / "table", PrepareOptions(clusters=str(path)))


MEASURED = """
import sys
from pathlib import Path
from data_prep import tables
from data_prep.options import PrepareOptions
path, folder, held = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
def peak():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
tables._HELD, before = held, peak()
folder.mkdir()
tables.write_tables(folder, PrepareOptions(clusters=path, valid=1000, test=0.01))
print(peak() - before, len(tables.NameTable.open(folder).names))
"""


def memory_of_table(folder: Path, num_lines: int, held: int) -> int:
    """Return by how many KiB the peak of a process grows that writes a table of so many lines."""
    path = folder / f"{num_lines}.tsv"
    with open(path, "w") as file:
        file.writelines(f"A0A{line // 50 * 50:07d}\tA0A{line:07d}\n" for line in range(num_lines))
    command = [sys.executable, "-c", MEASURED, str(path), str(folder / str(num_lines)), str(held)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    growth, names = map(int, done.stdout.split())
    assert names == num_lines
    return growth


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc here")
def test_memory_does_not_grow_with_the_table(tmp_path: Path):
    small, large = (memory_of_table(tmp_path, number, held=100_000) for number in (250_000, 1_000_000))
    # an entry has 17 bytes and sorting copies it, so 750,000 more of them in memory would take 26 MB or more
    assert large - small < 8_800
    # as would 2 million names and their values in a dict more than 300 MB
    assert memory_of_table(tmp_path, 2_000_000, held=tables._HELD) < 100 << 10
