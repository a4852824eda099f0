"""Splits by number, by cluster and by family: how many there are, and that nothing leaks from one into another."""

from __future__ import annotations

import csv
import random
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from choices import check_sums, cluster_table, families_table
from prepared import SAMPLE, random_records, read_proteins, shard_bytes, split_by_sequence, write_fasta
from programs import absent, skip

from data_prep.check import check_dataset
from data_prep.clustering import run_mmseqs
from data_prep.memory import MemoryPlan
from data_prep.options import PAPER_FAMILIES, PrepareOptions
from data_prep.prepare import prepare
from protperf.formats.manifest import Manifest


def numbers_of(manifest: Manifest) -> tuple[int, int]:
    return manifest.splits["valid"].sequences, manifest.splits["test"].sequences


@pytest.mark.parametrize("duplicates", ["drop", "keep"])
def test_splits_by_number_hold_exactly_so_many_distinct_sequences(tmp_path: Path, duplicates: str):
    records = random_records([30] * 300)
    copies = [(f"copy{number}", sequence) for number, (_, sequence) in enumerate(records[::2] * 3)]
    fasta = write_fasta(tmp_path / "a.fasta", records + copies)
    options = PrepareOptions(window=64, shard_windows=30, valid=50, test=30, duplicates=duplicates)
    manifest = prepare([fasta], tmp_path / "out", options)
    found = {split: len(set(proteins)) for split, proteins in read_proteins(tmp_path / "out").items()}
    assert found == {"train": 220, "valid": 50, "test": 30}
    check_sums(manifest)
    check_dataset(tmp_path / "out")


def test_splits_by_number_depend_on_the_sequences_alone(tmp_path: Path):
    records = random_records([30] * 300)
    options = PrepareOptions(window=64, shard_windows=30, valid=50, test=30)
    prepare([write_fasta(tmp_path / "a.fasta", records)], tmp_path / "a", options)
    random.Random(1).shuffle(records)
    parts = [write_fasta(tmp_path / f"{half}.fasta", records[half::2]) for half in range(2)]
    plan = MemoryPlan(1 << 30, workers=1, part_bytes=500, step_bytes=900)
    prepare(parts, tmp_path / "b", options, plan=plan)
    prepare(parts, tmp_path / "c", replace(options, seed=9, shard_windows=1000))
    assert shard_bytes(tmp_path / "a") == shard_bytes(tmp_path / "b")
    assert split_by_sequence(tmp_path / "a") == split_by_sequence(tmp_path / "c")


def test_a_number_beside_a_fraction(tmp_path: Path):
    fasta = write_fasta(tmp_path / "a.fasta", random_records([30] * 300))
    whole = prepare([fasta], tmp_path / "whole", PrepareOptions(window=64, valid=0.1, test=0.3))
    valid = prepare([fasta], tmp_path / "valid", PrepareOptions(window=64, valid=50, test=0.3))
    test = prepare([fasta], tmp_path / "test", PrepareOptions(window=64, valid=0.3, test=50))
    assert numbers_of(valid) == (50, numbers_of(whole)[1])
    assert read_proteins(tmp_path / "valid")["test"] == read_proteins(tmp_path / "whole")["test"]
    assert numbers_of(test)[1] == 50
    assert abs(numbers_of(test)[0] / 300 - 0.3) < 0.11  # four standard deviations of 300 draws


@pytest.mark.parametrize(("valid", "test"), [(200, 101), (400, 0), (1, 300)])
def test_more_than_there_are_is_one_line(tmp_path: Path, valid: int, test: int):
    fasta = write_fasta(tmp_path / "a.fasta", random_records([30] * 300) * 2)
    message = rf"^--valid {valid} --test {test}: there are only 300 distinct sequences[^\n]*$"
    with pytest.raises(ValueError, match=message):
        prepare([fasta], tmp_path / "out", PrepareOptions(window=64, valid=valid, test=test))
    assert not (tmp_path / "out").exists()


def test_all_sequences_may_be_asked_for(tmp_path: Path):
    fasta = write_fasta(tmp_path / "a.fasta", random_records([30] * 300))
    manifest = prepare([fasta], tmp_path / "out", PrepareOptions(window=64, valid=200, test=100))
    assert numbers_of(manifest) == (200, 100)


def test_a_number_beside_a_large_fraction_leaves_nothing_to_train_on(tmp_path: Path):
    fasta = write_fasta(tmp_path / "a.fasta", random_records([30] * 300))
    manifest = prepare([fasta], tmp_path / "out", PrepareOptions(window=64, valid=0.9, test=50))
    assert numbers_of(manifest) == (250, 50)


def test_splits_by_number_hold_exactly_so_many_clusters(tmp_path: Path):
    fasta = write_fasta(tmp_path / "a.fasta", random_records([30] * 300))
    table = cluster_table(tmp_path / "c.tsv")
    options = PrepareOptions(window=64, clusters=table, valid=20, test=10)
    assert numbers_of(prepare([fasta], tmp_path / "out", options)) == (60, 30)
    with pytest.raises(
        ValueError, match=r"^--valid 95 --test 6: there are only 100 clusters in [^\n]*c\.tsv"
    ):
        prepare([fasta], tmp_path / "more", replace(options, valid=95, test=6))


def test_held_out_clusters_do_not_count_among_the_numbers(tmp_path: Path):
    fasta = write_fasta(tmp_path / "a.fasta", random_records([30] * 300))
    (tmp_path / "ood.txt").write_text("".join(f"p{i * 3}\n" for i in range(40)))
    options = PrepareOptions(
        window=64,
        clusters=cluster_table(tmp_path / "c.tsv"),
        ood_clusters=str(tmp_path / "ood.txt"),
        valid=20,
        test=10,
    )
    manifest = prepare([fasta], tmp_path / "out", options)
    assert {name: split.sequences for name, split in manifest.splits.items()} == {
        "train": 90,
        "valid": 60,
        "test": 30,
        "ood": 120,
    }


def test_records_of_held_out_families_are_ood_and_so_are_their_copies(tmp_path: Path):
    records = random_records([30] * 40)
    named = [(f"sp|P{number:05d}|N_HUMAN x", sequence) for number, (_, sequence) in enumerate(records)]
    copies = [(f"tr|Q{number:05d}|N_MOUSE y", sequence) for number, (_, sequence) in enumerate(records[:9])]
    fasta = write_fasta(tmp_path / "a.fasta", copies + named)
    families = {f"P{number:05d}": "PF00042" if number % 4 else "PF00001,PF00069" for number in range(40)}
    table = families_table(tmp_path / "f.tsv", {"accession": "pfam", **families})
    options = PrepareOptions(window=64, ood_families=table, families="PF00069 PF99999")
    manifest = prepare([fasta], tmp_path / "out", options)
    assert set(read_proteins(tmp_path / "out")["ood"]) == {sequence for _, sequence in records[::4]}
    assert manifest.counts.duplicates == 9
    assert [entry.role for entry in manifest.inputs] == ["sequences", "families"]
    check_sums(manifest)
    check_dataset(tmp_path / "out")


def test_numbers_are_exact_beside_families_whose_copies_have_other_names(tmp_path: Path):
    records = random_records([30] * 300)
    copies = [(f"o{number}", sequence) for number, (_, sequence) in enumerate(records[:100])]
    fasta = write_fasta(tmp_path / "a.fasta", records + copies)
    table = families_table(tmp_path / "f.tsv", {name: "PF00042" for name, _ in copies})
    options = PrepareOptions(window=64, ood_families=table, families="PF00042", valid=50, test=30)
    manifest = prepare([fasta], tmp_path / "out", options)
    assert {name: split.sequences for name, split in manifest.splits.items()} == {
        "train": 120,
        "valid": 50,
        "test": 30,
        "ood": 100,
    }


def test_families_hold_whole_clusters_out(tmp_path: Path):
    records = random_records([30] * 300)
    fasta = write_fasta(tmp_path / "a.fasta", records)
    options = PrepareOptions(
        window=64,
        clusters=cluster_table(tmp_path / "c.tsv"),
        ood_families=families_table(tmp_path / "f.tsv", {"p4": "PF00042", "p31": "PF00042", "p7": "PF00001"}),
        families="PF00042",
    )
    prepare([fasta], tmp_path / "out", options)
    held_out = [*records[3:6], *records[30:33]]
    assert set(read_proteins(tmp_path / "out")["ood"]) == {sequence for _, sequence in held_out}


def test_families_of_swiss_prot_entries_are_held_out(shared_dir: Path, tmp_path: Path):
    source = shared_dir / "data" / "families" / "swissprot100_pfam.tsv"
    with open(source, newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    expected = {row["sequence"] for row in rows if {"PF00001", "PF00042"} & set(row["pfam"].split(","))}
    names = [(f"sp|{row['accession']}|{row['entry']}", row["sequence"]) for row in rows]
    table = tmp_path / "families.tsv"
    table.write_text("".join(f"{row['accession']}\t{row['pfam']}\n" for row in rows))
    options = PrepareOptions(window=64, ood_families=str(table), families="PF00001,PF00042")
    flat = shared_dir / "data" / "uniprot_dat" / "emboss_swissprot_100.dat.gz"
    for name, path in (("fasta", write_fasta(tmp_path / "a.fasta", names)), ("dat", str(flat))):
        prepare([path], tmp_path / name, options)
        assert set(read_proteins(tmp_path / name)["ood"]) == expected
    prepare([str(flat)], tmp_path / "long", replace(options, ood_families=str(source)))
    assert shard_bytes(tmp_path / "long") == shard_bytes(tmp_path / "dat") == shard_bytes(tmp_path / "fasta")


@pytest.mark.parametrize(
    ("families", "message"),
    [
        (PAPER_FAMILIES, r"^[^\n]*f\.tsv: names none of the families PF18369[^\n]*--families[^\n]*$"),
        ("PF1", r"^--families 'PF1': Pfam accessions such as PF00069[^\n]*$"),
        ("", r"^--families '': Pfam accessions such as PF00069[^\n]*$"),
    ],
)
def test_families_that_are_not_there_are_one_line(tmp_path: Path, families: str, message: str):
    fasta = write_fasta(tmp_path / "a.fasta", random_records([30]))
    table = families_table(tmp_path / "f.tsv", {"p0": "PF00042"})
    with pytest.raises(ValueError, match=message):
        prepare([fasta], tmp_path / "out", PrepareOptions(ood_families=table, families=families))
    assert not (tmp_path / "out").exists()


def test_representatives_alone_are_kept_in_the_split_of_their_cluster(tmp_path: Path):
    records = random_records([30] * 300)
    fasta = write_fasta(tmp_path / "a.fasta", records)
    options = PrepareOptions(window=64, clusters=cluster_table(tmp_path / "c.tsv"), valid=20, test=10)
    prepare([fasta], tmp_path / "all", options)
    manifest = prepare([fasta], tmp_path / "some", replace(options, keep="representative"))
    assert manifest.counts.not_representative == 200
    assert numbers_of(manifest) == (20, 10)
    whole, some = (split_by_sequence(tmp_path / name) for name in ("all", "some"))
    assert some == {sequence: whole[sequence] for _, sequence in records[::3]}
    check_sums(manifest)


def test_representatives_that_are_not_in_the_input_leave_what_the_table_does_not_name(tmp_path: Path):
    fasta = write_fasta(tmp_path / "a.fasta", random_records([30] * 3))
    (tmp_path / "c.tsv").write_text("gone\tp0\n")
    options = PrepareOptions(window=64, clusters=str(tmp_path / "c.tsv"), keep="representative")
    counts = prepare([fasta], tmp_path / "out", options).counts
    assert (counts.not_representative, counts.outside_clusters) == (1, 2)


def close_records() -> list[tuple[str, str]]:
    """Return 120 records: 30 random proteins of 150 residues, each with three copies that differ in a few places."""
    generator = np.random.default_rng(3)
    records = []
    for number, (_, sequence) in enumerate(random_records([150] * 30)):
        clean = re.sub("[BOUXZJ]", "A", sequence)
        for copy in range(4):
            letters = list(clean)
            for place in generator.integers(0, len(letters), 5 * copy):
                letters[place] = "L"
            records.append((f"sp|P{number:03d}{copy:02d}|N{number}_ABC", "".join(letters)))
    return records


@pytest.fixture
def mmseqs() -> None:
    """The program MMseqs2 is here."""
    if absent("mmseqs"):
        skip("no program mmseqs (MMseqs2) here: apt-get install mmseqs2")


@pytest.mark.slow
@pytest.mark.usefixtures("mmseqs")
def test_clusters_of_mmseqs_never_straddle(tmp_path: Path):
    records = close_records()
    fasta = write_fasta(tmp_path / "a.fasta", records)
    options = PrepareOptions(window=64, clusters="mmseqs", valid=0.2, test=0.2)
    manifest = prepare([fasta], tmp_path / "out", options)
    assert manifest.counts.outside_clusters == 0
    assert manifest.options["clusters"] == "mmseqs"
    split = split_by_sequence(tmp_path / "out")
    assert set(split.values()) == {"train", "valid", "test"}
    for number in range(0, len(records), 4):
        assert len({split[sequence] for _, sequence in records[number : number + 4]}) == 1
    check_dataset(tmp_path / "out")
    table = run_mmseqs(
        [fasta], tmp_path / "mmseqs", options, threads=1, memory=1 << 30, say=lambda line: None
    )
    assert len({line.split("\t")[0] for line in table.read_text().splitlines()}) == 30
    prepare([fasta], tmp_path / "read", replace(options, clusters=str(table)))
    assert shard_bytes(tmp_path / "read") == shard_bytes(tmp_path / "out")


@pytest.mark.slow
@pytest.mark.usefixtures("mmseqs")
@pytest.mark.parametrize("form", ["{}", "gi|12|ref|{}| x", "UniRef90_{} n=2", "contam_sp|{}|Y_Z", "lcl|{}"])
def test_mmseqs_and_the_reader_give_a_record_one_name(tmp_path: Path, form: str):
    records = [(form.format(f"A{number}"), sequence) for number, (_, sequence) in enumerate(close_records())]
    fasta = write_fasta(tmp_path / "a.fasta", records)
    manifest = prepare([fasta], tmp_path / "out", PrepareOptions(window=64, clusters="mmseqs"))
    assert manifest.counts.outside_clusters == 0


@pytest.mark.slow
@pytest.mark.usefixtures("mmseqs")
def test_representatives_of_mmseqs_are_the_sample_without_its_near_copies(tmp_path: Path):
    options = PrepareOptions(window=64, clusters="mmseqs", keep="representative", cluster_identity=0.9)
    fasta = write_fasta(tmp_path / "a.fasta", close_records())
    manifest = prepare([fasta], tmp_path / "out", options)
    assert 30 <= sum(split.sequences for split in manifest.splits.values()) < 120
    check_sums(manifest)


def test_missing_mmseqs_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match=r"^--clusters mmseqs: no program `mmseqs` here; [^\n]*$"):
        prepare([str(SAMPLE)], tmp_path / "out", PrepareOptions(clusters="mmseqs"))
    assert not (tmp_path / "out").exists()
