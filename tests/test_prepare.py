"""`protperf prepare`: nothing is lost, nothing leaks, and the bytes depend on the sequences, options and seeds alone."""

from __future__ import annotations

import csv
import gzip
import json
import math
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from prepared import (
    SAMPLE,
    all_proteins,
    random_records,
    read_fasta,
    read_proteins,
    read_streams,
    shard_bytes,
    split_by_sequence,
    write_fasta,
)

from data_prep.memory import MemoryPlan
from data_prep.options import PrepareOptions
from data_prep.prepare import prepare
from protperf.formats.manifest import Manifest, read_manifest
from protperf.formats.ngrams import read_ngrams
from protperf.formats.shards import ShardSet


@pytest.fixture(scope="module")
def sample_dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sample in windows of 512 and several shards, with all its splits."""
    out = tmp_path_factory.mktemp("sample") / "data"
    prepare([str(SAMPLE)], out, PrepareOptions(window=512, shard_windows=500, valid=0.05, test=0.05))
    return out


def test_each_protein_of_the_sample_lies_in_one_place(sample_dataset: Path):
    reference = [sequence for _, sequence in read_fasta(SAMPLE)]
    assert all_proteins(sample_dataset) == Counter(set(reference))
    manifest = read_manifest(sample_dataset)
    assert manifest.counts.records == len(reference) == 2800
    assert manifest.counts.residues == sum(map(len, reference))
    assert manifest.counts.duplicates == len(reference) - len(set(reference))
    assert len(manifest.shards_of("train")) > 2


def test_manifest_counts_are_those_of_the_shards(sample_dataset: Path):
    manifest, proteins = read_manifest(sample_dataset), read_proteins(sample_dataset)
    windows = Counter()
    for split, tokens in read_streams(sample_dataset):
        windows[split] += len(tokens) // 512
    for split, stats in manifest.splits.items():
        lengths = [len(protein) for protein in proteins.get(split, [])]
        assert stats.sequences == len(lengths)
        assert stats.residues == sum(lengths)
        assert stats.tokens == sum(lengths) + 2 * len(lengths)
        assert stats.windows == windows[split]
        bounds = sorted({math.ceil(2 ** (i / 4)) for i in range(80)})
        bins = Counter(str(max(bound for bound in bounds if bound <= length)) for length in lengths)
        assert stats.length_histogram == dict(bins)
    residues = Counter("".join(proteins["train"]))
    assert {letter: n for letter, n in manifest.residue_counts.items() if n} == dict(residues)
    ShardSet(sample_dataset, "train").verify()


def test_padding_only_ends_the_last_window_of_a_shard(sample_dataset: Path):
    for _, tokens in read_streams(sample_dataset):
        assert "<pad>" not in tokens[:-511]
        assert tokens[0] == "<bos>"


def test_ngrams_are_those_of_the_train_proteins(sample_dataset: Path):
    token_ids = {
        token: i
        for i, token in enumerate(json.loads((sample_dataset / "manifest.json").read_text())["vocabulary"])
    }
    bos, eos = token_ids["<bos>"], token_ids["<eos>"]
    expected = [Counter() for _ in range(5)]
    for protein in read_proteins(sample_dataset)["train"]:
        tokens = [bos, *(token_ids[letter] for letter in protein), eos]
        for order in (1, 2, 3, 4):
            expected[order].update(zip(*(tokens[place:] for place in range(order)), strict=False))
    for order, counts in read_ngrams(sample_dataset / "ngrams.h5").orders.items():
        places = zip(*counts.nonzero(), strict=True)
        assert {tuple(map(int, place)): int(counts[place]) for place in places} == dict(expected[order])


def test_splits_have_about_their_fractions(sample_dataset: Path):
    splits = read_manifest(sample_dataset).splits
    total = sum(stats.sequences for stats in splits.values())
    for split in ("valid", "test"):  # 2,800 draws at 5 %: five standard deviations are 2.1 %
        assert abs(splits[split].sequences / total - 0.05) < 0.021


def test_lengths_around_the_window_lose_nothing_at_the_seam(tmp_path: Path):
    lengths = [*range(1, 36), 160, 161]
    fasta = write_fasta(tmp_path / "a.fasta", random_records(lengths))
    for window in (1, 2, 16):
        out = tmp_path / f"w{window}"
        prepare(
            [fasta], out, PrepareOptions(window=window, shard_windows=max(1, 64 // window), duplicates="keep")
        )
        assert all_proteins(out) == Counter(sequence for _, sequence in read_fasta(Path(fasta)))


def test_lengths_around_8192_lose_nothing_at_the_seam(shared_dir: Path, tmp_path: Path):
    fasta = shared_dir / "cases" / "fasta" / "c52_length_8191_8192_8193.fasta.gz"
    manifest = prepare([str(fasta)], tmp_path / "out", PrepareOptions(valid=0, test=0))
    assert all_proteins(tmp_path / "out") == Counter(sequence for _, sequence in read_fasta(fasta))
    assert manifest.splits["train"].tokens == 8190 + 8191 + 8192 + 8193 + 4 * 2
    assert manifest.splits["train"].windows == 5


def test_keep_keeps_copies_in_one_split(tmp_path: Path):
    records = random_records([5, 9, 30, 31])
    fasta = write_fasta(tmp_path / "a.fasta", records * 3)
    manifest = prepare([fasta], tmp_path / "keep", PrepareOptions(duplicates="keep", valid=0.3, test=0.3))
    assert manifest.counts.duplicates == 0
    assert all_proteins(tmp_path / "keep") == Counter({sequence: 3 for _, sequence in records})
    for proteins in read_proteins(tmp_path / "keep").values():
        assert set(Counter(proteins).values()) == {3}
    dropped = prepare([fasta], tmp_path / "drop", PrepareOptions(valid=0.3, test=0.3)).counts
    assert (dropped.accepted, dropped.duplicates) == (12, 8)


def test_length_limits_drop_and_count(tmp_path: Path):
    fasta = write_fasta(tmp_path / "a.fasta", random_records([1, 4, 5, 9, 10, 11]))
    counts = prepare([fasta], tmp_path / "out", PrepareOptions(min_length=5, max_length=10)).counts
    assert (counts.accepted, counts.too_short, counts.too_long) == (6, 2, 1)
    assert sorted(map(len, all_proteins(tmp_path / "out"))) == [5, 9, 10]


def test_bytes_depend_on_the_sequences_alone(tmp_path: Path):
    records = read_fasta(SAMPLE)[:600]
    options = PrepareOptions(window=128, shard_windows=300, valid=0.1, test=0.1)
    prepare([write_fasta(tmp_path / "a.fasta", records)], tmp_path / "a", options)
    np.random.default_rng(0).shuffle(records)
    renamed = [(f"other{i}", sequence.lower()) for i, (_, sequence) in enumerate(records)]
    first, second = write_fasta(tmp_path / "b1.fasta", renamed[:250]), tmp_path / "b2.fasta.gz"
    with gzip.open(second, "wt") as file:
        file.write(Path(write_fasta(tmp_path / "b2.fasta", renamed[250:])).read_text())
    plans = {  # parts of a record, of the first, and of thousands; steps of a few proteins, and of all
        "b": MemoryPlan(1 << 30, workers=1, part_bytes=1, step_bytes=3000),
        "c": MemoryPlan(1 << 30, workers=1, part_bytes=50_000, step_bytes=1 << 30),
    }
    prepare([str(second), first], tmp_path / "b", options, plan=plans["b"])
    prepare([first, str(second)], tmp_path / "c", options, plan=plans["c"])
    assert len(shard_bytes(tmp_path / "a")) > 5
    assert shard_bytes(tmp_path / "a") == shard_bytes(tmp_path / "b") == shard_bytes(tmp_path / "c")
    assert read_manifest(tmp_path / "a").digest == read_manifest(tmp_path / "b").digest


@pytest.mark.parametrize("written", [1, 2, 31, 64, 65])
def test_nothing_is_lost_where_a_task_writes_in_pieces(
    tmp_path: Path, written: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("data_prep.reducing._WRITTEN_BYTES", written)
    for length in (1, 15, 31, 32, 63):
        records = random_records([length] * 4)
        fasta = write_fasta(tmp_path / "a.fasta", records)
        out = tmp_path / f"out{length}"
        prepare([fasta], out, PrepareOptions(window=16, valid=0, test=0, duplicates="keep"))
        assert all_proteins(out) == Counter(sequence for _, sequence in records)


@pytest.mark.slow
def test_many_copies_of_a_record_take_no_memory(tmp_path: Path):
    (name, sequence), *others = random_records([400] * 10)
    text = f">{name}\n{sequence}\n" * 500_000
    (tmp_path / "a.fasta").write_text(text + "".join(f">{name}\n{sequence}\n" for name, sequence in others))
    script = """
import sys
from data_prep.prepare import main
from protperf.formats.sizes import peak_memory_bytes
main(sys.argv[1:])
print(peak_memory_bytes())
"""
    argv = [str(tmp_path / "a.fasta"), str(tmp_path / "out"), "--memory", "256M", "--workers", "1"]
    done = subprocess.run([sys.executable, "-c", script, *argv], capture_output=True, text=True, check=True)
    assert int(done.stdout.splitlines()[-1]) < 256 << 20
    assert read_manifest(tmp_path / "out").counts.duplicates == 499_999
    assert all_proteins(tmp_path / "out").total() == 10


def test_split_depends_on_the_sequence_alone(tmp_path: Path):
    records = read_fasta(SAMPLE)[:400]
    fasta = write_fasta(tmp_path / "all.fasta", records)
    half = write_fasta(tmp_path / "half.fasta", records[::-2])
    options = {"window": 128, "valid": 0.2, "test": 0.2}
    prepare([fasta], tmp_path / "all", PrepareOptions(**options))
    prepare([half], tmp_path / "half", PrepareOptions(**options, seed=7, shard_windows=100))
    prepare([fasta], tmp_path / "other", PrepareOptions(**options, split_seed=1))
    reference, other = split_by_sequence(tmp_path / "all"), split_by_sequence(tmp_path / "other")
    assert set(reference.values()) == {"train", "valid", "test"}
    assert split_by_sequence(tmp_path / "half").items() <= reference.items()
    assert other.keys() == reference.keys()
    assert other != reference


def test_larger_valid_leaves_test_as_it_was(tmp_path: Path):
    fasta = write_fasta(tmp_path / "a.fasta", random_records([30] * 300))
    tests = []
    for valid in (0.0, 0.1, 0.5):
        prepare([fasta], tmp_path / str(valid), PrepareOptions(window=64, valid=valid, test=0.2))
        tests.append(set(read_proteins(tmp_path / str(valid))["test"]))
    assert tests[0] == tests[1] == tests[2]


def test_seed_shuffles_and_the_order_is_not_that_of_the_file(tmp_path: Path):
    records = random_records([20] * 200)
    fasta = write_fasta(tmp_path / "a.fasta", records)
    orders = []
    for seed in (0, 1):
        prepare([fasta], tmp_path / str(seed), PrepareOptions(window=64, seed=seed, valid=0, test=0))
        orders.append(read_proteins(tmp_path / str(seed))["train"])
    place = {sequence: number for number, (_, sequence) in enumerate(records)}
    ranks = [[place[protein] for protein in order] for order in orders]
    for one, two in ((ranks[0], range(200)), (ranks[1], range(200)), (ranks[0], ranks[1])):
        assert abs(np.corrcoef(one, two)[0, 1]) < 0.3  # four standard deviations of 200 independent ranks


def cluster_dataset(
    tmp_path: Path, table: str, records: list[tuple[str, str]], **options: object
) -> Manifest:
    (tmp_path / "clusters.tsv").write_text(table)
    fasta = write_fasta(tmp_path / "a.fasta", records)
    choice = PrepareOptions(window=64, clusters=str(tmp_path / "clusters.tsv"), **options)
    return prepare([fasta], tmp_path / "out", choice)


def test_clusters_never_straddle_and_are_matched_by_accession_or_first_word(tmp_path: Path):
    sequences = [sequence for _, sequence in random_records([30] * 300)]
    ids = [f"sp|P{i:05d}|X{i}_HUMAN some protein" if i % 2 else f"p{i} more" for i in range(300)]
    names = [f"P{i:05d}" if i % 2 else f"p{i}" for i in range(300)]
    cluster_of = [names[i // 6 * 6] for i in range(300)]
    table = "".join(f"{cluster}\t{name}\n" for cluster, name in zip(cluster_of, names, strict=True))
    manifest = cluster_dataset(tmp_path, table, list(zip(ids, sequences, strict=True)), valid=0.3, test=0.3)
    assert manifest.counts.outside_clusters == 0
    split = split_by_sequence(tmp_path / "out")
    places = {cluster: set() for cluster in cluster_of}
    for cluster, sequence in zip(cluster_of, sequences, strict=True):
        places[cluster].add(split[sequence])
    assert all(len(place) == 1 for place in places.values())
    assert set(split.values()) == {"train", "valid", "test"}


def test_held_out_clusters_are_the_ood_split(tmp_path: Path):
    records = random_records([30] * 12)
    table = "".join(f"p{i // 4 * 4}\tp{i}\n" for i in range(12))
    (tmp_path / "ood.txt").write_text("p4\n")
    manifest = cluster_dataset(tmp_path, table, records, ood_clusters=str(tmp_path / "ood.txt"))
    assert set(read_proteins(tmp_path / "out")["ood"]) == {sequence for _, sequence in records[4:8]}
    assert manifest.splits["ood"].sequences == 4
    assert [entry.role for entry in manifest.inputs] == ["sequences", "clusters", "ood"]


def test_sequence_in_two_clusters_is_kept_once_in_the_held_out_one(tmp_path: Path):
    records = [*random_records([30] * 4), ("twin", random_records([30] * 4)[1][1])]
    (tmp_path / "ood.txt").write_text("twin\n")
    table = "p0\tp0\np0\tp1\np0\tp2\np0\tp3\ntwin\ttwin\n"
    manifest = cluster_dataset(tmp_path, table, records, ood_clusters=str(tmp_path / "ood.txt"))
    assert read_proteins(tmp_path / "out")["ood"] == [records[1][1]]
    assert all_proteins(tmp_path / "out") == Counter(sequence for _, sequence in records[:4])
    assert (manifest.counts.split_conflicts, manifest.counts.duplicates) == (1, 1)


def test_record_outside_the_table_is_counted(tmp_path: Path):
    manifest = cluster_dataset(tmp_path, "p0\tp0\n", random_records([30] * 3))
    assert manifest.counts.outside_clusters == 2


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("p0\tp0\np0 p1\n", r"clusters\.tsv:2: 'p0 p1' is not"),
        ("p0\tp0\np0\tp1\tx\n", r"clusters\.tsv:2:"),
        ("p0\t\n", r"clusters\.tsv:1:"),
        ("x\ty\n", "names none of the records"),
        (
            "".join(f"c{i}\tp0\n" for i in range(200)),
            r"clusters\.tsv:\d+: this member stands in two clusters",
        ),
    ],
)
def test_bad_cluster_table_is_refused(tmp_path: Path, table: str, message: str):
    with pytest.raises(ValueError, match=message):
        cluster_dataset(tmp_path, table, random_records([30] * 3), valid=0.3, test=0.3)
    assert not (tmp_path / "out").exists()


def test_held_out_cluster_that_is_not_in_the_table_is_named(tmp_path: Path):
    (tmp_path / "ood.txt").write_text("nobody\n")
    with pytest.raises(ValueError, match="'nobody' is no representative"):
        cluster_dataset(tmp_path, "p0\tp0\n", random_records([30]), ood_clusters=str(tmp_path / "ood.txt"))


@pytest.mark.slow
def test_real_clusters_never_straddle(shared_dir: Path, tmp_path: Path):
    fasta = shared_dir / "data" / "sequences" / "mmseqs_db_20k.fasta.gz"
    table = shared_dir / "data" / "labels" / "mmseqs_db_20k.cluster_id30_cov80.tsv.gz"
    with gzip.open(table, "rt") as file:
        cluster_of = {member: cluster for cluster, member in csv.reader(file, delimiter="\t")}
    held_out = sorted(set(cluster_of.values()))[::100]
    (tmp_path / "ood.txt").write_text("\n".join(held_out))
    options = PrepareOptions(
        clusters=str(table), ood_clusters=str(tmp_path / "ood.txt"), valid=0.05, test=0.05
    )
    manifest = prepare([str(fasta)], tmp_path / "out", options)
    assert manifest.counts.outside_clusters == 0
    split = split_by_sequence(tmp_path / "out")
    places: dict[str, set[str]] = {}
    reference = [(header.split("|")[1], sequence) for header, sequence in read_fasta(fasta)]
    for accession, sequence in reference:
        places.setdefault(cluster_of[accession], set()).add(split[sequence])
    assert all(len(place) == 1 for place in places.values())
    assert {cluster for cluster, place in places.items() if place == {"ood"}} == set(held_out)
    assert all_proteins(tmp_path / "out") == Counter({sequence for _, sequence in reference})
