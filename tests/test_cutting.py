"""A record with more text than any protein is left out by name, and nothing else changes."""

from __future__ import annotations

import csv
import gzip
from pathlib import Path

import pytest
from checkpoints import make_checkpoint
from prepared import SAMPLE, read_fasta, shard_bytes, write_fasta
from reading import read, repeated, skipped
from training import protperf

from data_prep.executors import ExecutorOptions
from data_prep.memory import MemoryPlan
from data_prep.options import PrepareOptions
from data_prep.prepare import prepare
from protperf.formats import FormatError
from protperf.formats.fasta import Policy
from protperf.formats.manifest import Manifest

MIB = 1 << 20


@pytest.mark.parametrize("pack", [bytes, gzip.compress, lambda data: gzip.compress(data, 0)])
def test_the_longest_record_does_not_depend_on_how_it_is_packed(tmp_path: Path, pack):
    path = tmp_path / "a.fasta"
    for size, fits in ((8 * MIB, True), (8 * MIB + 1, False)):
        long = b">a\n" + b"M" * (size - 4) + b"\n"
        for content in (long, long + b">b\nMK\n", b">b\nMK\n" + long + b">c\nMK\n"):
            path.write_bytes(pack(content))
            found, reader = read(path)
            assert len(found) + len(skipped(reader)) == content.count(b">")
            line = content[: content.index(b">a")].count(b"\n") + 1
            left_out = [] if fits else [(line, "a", None, "too_much_text", "8,388,609 bytes of text")]
            assert skipped(reader) == left_out


def test_a_record_that_is_too_long_is_named_and_ends_a_strict_reading(tmp_path: Path):
    path = tmp_path / "a.fasta"
    path.write_bytes(
        gzip.compress(b">b\nMK\n>a contig\n") + repeated(b"", b"M", 16) + gzip.compress(b"\n>c\nMK\n")
    )
    assert [name for name, _ in read(path)[0]] == ["b", "c"]
    with pytest.raises(
        FormatError, match=r"a\.fasta:3: record 'a' has 16,777,227 bytes of text; allowed: 8 MiB; .*--strict"
    ):
        read(path, Policy(strict=True))


def test_text_without_any_header_has_a_bound_too(tmp_path: Path):
    path = tmp_path / "a.fasta"
    path.write_bytes(repeated(b"", b"\n", 64))
    with pytest.raises(FormatError, match=r"a\.fasta:1: more than 8 MiB of text before the first '>' header"):
        read(path)


def long_among_others(path: Path) -> str:
    """Write the first records of the sample, a bad one, a long one and more of the sample; return the path."""
    records = read_fasta(SAMPLE)[:300]
    write_fasta(
        path,
        [*records[:100], ("bad", "MK*K"), ("long x", "M\r\n" * (3 * MIB)), *records[100:], ("last", "-")],
    )
    return str(path)


@pytest.mark.slow
def test_prepare_leaves_it_out_whoever_maps_its_part(tmp_path: Path):
    def prepared(path: str, name: str, workers: int, part_bytes: int) -> Manifest:
        plan = MemoryPlan(1 << 30, workers=workers, part_bytes=part_bytes, step_bytes=100_000)
        options, executor = PrepareOptions(window=128, shard_windows=200), ExecutorOptions(workers=workers)
        return prepare([path], tmp_path / name, options, plan=plan, executor=executor)

    prepared(write_fasta(tmp_path / "a.fasta", read_fasta(SAMPLE)[:300]), "whole", 1, MIB)
    path = long_among_others(tmp_path / "b.fasta")
    text = Path(path).read_bytes()
    lines = {name: text[: text.index(name)].count(b"\n") + 1 for name in (b">bad", b">long", b">last")}
    for name, workers, part_bytes in (("one", 1, MIB), ("small", 1, 9000), ("two", 2, 20_000)):
        counts = prepared(path, name, workers, part_bytes).counts
        assert (counts.records, counts.accepted) == (303, 300)
        assert shard_bytes(tmp_path / name) == shard_bytes(tmp_path / "whole")
        with open(tmp_path / name / "skipped.tsv", newline="") as file:
            rows = [list(row.values())[1:] for row in csv.DictReader(file, delimiter="\t")]
        assert rows == [
            [str(lines[b">bad"] + 1), "bad", "3", "inner_stop", "*"],
            [str(lines[b">long"]), "long", "", "too_much_text", f"{9 * MIB + 9:,} bytes of text"],
            [str(lines[b">last"] + 1), "last", "1", "gap", "-"],
        ]


@pytest.mark.slow
def test_embed_leaves_it_out_and_says_so(tmp_path: Path):
    make_checkpoint(tmp_path / "m.ckpt")
    packed = gzip.compress(b">a\nMKTAYI\n>long\n") + repeated(b"", b"M", 16) + gzip.compress(b"\n>b\nMK\n")
    (tmp_path / "a.fasta").write_bytes(packed)
    done = protperf("embed", "m.ckpt", "a.fasta", "out.h5", cwd=tmp_path)
    assert done.returncode == 3, done.stderr
    assert "left out, too_much_text: 1 (first: a.fasta:3: record 'long' has 16,777,223 bytes" in done.stderr
    rows = (tmp_path / "out.h5.skipped.tsv").read_text().splitlines()
    assert rows[1:] == ["a.fasta\t3\tlong\t\ttoo_much_text\t16,777,223 bytes of text"]
