"""What the user may choose of a dataset: filters and tails against a plain reading, and laws over random datasets."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from choices import FILTERED, check_sums, families_table
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from prepared import (
    SAMPLE,
    all_proteins,
    random_records,
    read_fasta,
    read_streams,
    shard_bytes,
    split_by_sequence,
    write_fasta,
)

from data_prep.check import check_dataset
from data_prep.memory import MemoryPlan
from data_prep.options import PrepareOptions
from data_prep.prepare import prepare
from protperf.formats.manifest import Manifest, read_manifest

Records = list[tuple[str, str]]


def headed_records(num_records: int = 400, seed: int = 5) -> Records:
    """Return records with UniProt headers: some without PE or OX, some fragments, some with many X, some twice."""
    draw = random.Random(seed)
    records = []
    for number in range(num_records):
        letters = "ACDEFGHIKLMNPQRSTVWY" + "X" * draw.choice([0, 0, 1, 5])
        name = draw.choice(["Protein X", "Protein (Fragment)", "Kinase (Fragments)", "Fragment of a protein"])
        fields = ["OS=Some species", f"OX={draw.choice([9606, 96061, 10090, 562])}", "GN=abc"]
        fields.append(f"PE={draw.randint(1, 5)}")
        kept = [field for field in fields if draw.random() < 0.9]
        sequence = "".join(draw.choices(letters, k=draw.choice([3, 30, 100, 257])))
        records.append((" ".join([f"tr|P{number:05d}|P{number:05d}_ABC", name, *kept, "SV=1"]), sequence))
    return records + [(f"tr|Q{number:05d}|Q_ABC again", records[number][1]) for number in range(0, 400, 9)]


def number_in(header: str, key: str) -> int | None:
    found = re.search(rf" {key}=(\d+)", header)
    return int(found[1]) if found else None


REASONS: dict[str, tuple[dict[str, object], Callable[[str, str], bool]]] = {
    "too_short": ({"min_length": 31}, lambda header, sequence: len(sequence) < 31),
    "too_long": ({"max_length": 100}, lambda header, sequence: len(sequence) > 100),
    "too_many_x": ({"max_x": 0.05}, lambda header, sequence: sequence.count("X") * 20 > len(sequence)),
    "fragments": ({"fragments": "drop"}, lambda header, sequence: bool(re.search(r"\(Fragments?\)", header))),
    "evidence": (
        {"max_evidence": 3},
        lambda header, sequence: number_in(header, "PE") not in (1, 2, 3),
    ),
    "taxon": (
        {"taxa": "9606, 562", "exclude_taxa": "562"},
        lambda header, sequence: number_in(header, "OX") != 9606,
    ),
}
"""For each count of the manifest the options, and whether a record is dropped by a plain reading of its text."""


@pytest.mark.parametrize("names", [*([name] for name in REASONS), list(REASONS)], ids="-".join)
def test_filters_keep_what_a_plain_reading_keeps(tmp_path: Path, names: list[str]):
    fasta = write_fasta(tmp_path / "a.fasta", headed_records())
    expected, kept = Counter[str](), Counter[str]()
    for header, sequence in read_fasta(Path(fasta)):
        reason = next((name for name in names if REASONS[name][1](header, sequence)), None)
        expected[reason or "kept"] += 1
        if reason is None:
            kept[sequence] += 1
    options = {key: value for name in names for key, value in REASONS[name][0].items()}
    manifest = prepare([fasta], tmp_path / "out", PrepareOptions(window=64, **options))
    assert 0 < expected["kept"] < manifest.counts.accepted == 445
    assert {name: getattr(manifest.counts, name) for name in FILTERED} == {
        name: expected[name] for name in FILTERED
    }
    assert all_proteins(tmp_path / "out") == Counter(set(kept))
    assert manifest.counts.duplicates == kept.total() - len(kept)
    check_sums(manifest)
    check_dataset(tmp_path / "out")


@pytest.mark.slow
def test_filters_keep_of_a_proteome_what_a_plain_reading_keeps(shared_dir: Path, tmp_path: Path):
    fasta = shared_dir / "data" / "sequences" / "yeast_UP000002311_559292.fasta.gz"
    kept = {
        sequence
        for header, sequence in read_fasta(fasta)
        if 100 <= len(sequence) <= 1000 and number_in(header, "PE") in (1, 2)
    }
    options = PrepareOptions(min_length=100, max_length=1000, max_evidence=2, taxa="559292")
    manifest = prepare([str(fasta)], tmp_path / "out", options)
    assert all_proteins(tmp_path / "out") == Counter(kept)
    assert manifest.counts.taxon == 0
    check_sums(manifest)


@pytest.mark.parametrize(("num_x", "length", "share"), [(29, 100, 0.29), (7, 100, 0.07), (1, 3, 1 / 3)])
def test_largest_fraction_of_x_is_kept_to_the_letter(tmp_path: Path, num_x: int, length: int, share: float):
    allowed = "X" * num_x + "A" * (length - num_x)
    fasta = write_fasta(tmp_path / "a.fasta", [("a", allowed), ("b", "X" + allowed[:-1])])
    manifest = prepare([fasta], tmp_path / "out", PrepareOptions(window=64, max_x=share))
    assert all_proteins(tmp_path / "out") == Counter([allowed])
    assert manifest.counts.too_many_x == 1


def test_filters_that_leave_nothing_say_why_in_one_line(tmp_path: Path):
    fasta = write_fasta(tmp_path / "a.fasta", random_records([10] * 7))
    with pytest.raises(ValueError, match=r"^no record is left of 7 accepted: [^\n]*7 [^\n]*$"):
        prepare([fasta], tmp_path / "out", PrepareOptions(min_length=11))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("more", [{}, {"duplicates": "keep"}, {"valid": 40, "test": 0.2}])
def test_dropped_tails_are_counted_to_the_residue(tmp_path: Path, more: dict[str, object]):
    records = read_fasta(SAMPLE)[:400] + read_fasta(SAMPLE)[:20]
    fasta = write_fasta(tmp_path / "a.fasta", records)
    options = PrepareOptions(window=128, shard_windows=200, **more)
    padded = prepare([fasta], tmp_path / "pad", options)
    manifest = prepare([fasta], tmp_path / "drop", replace(options, tail="drop"))
    num_starts, residues = 0, Counter[str]()
    for (_, whole), (_, cut) in zip(
        read_streams(tmp_path / "pad"), read_streams(tmp_path / "drop"), strict=True
    ):
        assert cut == whole[: len(cut)]
        assert 0 <= len(whole) - len(cut) <= 128
        assert "<pad>" not in cut
        num_starts += cut.count("<bos>")
        residues.update(token for token in cut if not token.startswith("<"))
    assert manifest.counts.tail_sequences == sum(padded.splits[name].sequences for name in padded.splits) - (
        num_starts
    )
    kept = (
        records if more.get("duplicates") else [("", sequence) for sequence in dict(map(reversed, records))]
    )
    total = Counter("".join(sequence for _, sequence in kept))
    assert (total - residues).total() == manifest.counts.tail_residues > 0
    assert sum(split.residues for split in manifest.splits.values()) == residues.total()
    check_sums(manifest)
    check_dataset(tmp_path / "drop")


def test_dropped_tails_that_leave_no_window_are_one_line(tmp_path: Path):
    fasta = write_fasta(tmp_path / "a.fasta", random_records([30] * 3))
    with pytest.raises(ValueError, match=r"^[^\n]*(tail|window)[^\n]*$"):
        prepare([fasta], tmp_path / "out", PrepareOptions(window=8192, tail="drop"))
    assert not (tmp_path / "out").exists()


def test_a_split_may_lose_all_it_has_with_its_tail(tmp_path: Path):
    fasta = write_fasta(tmp_path / "a.fasta", [("long", "ACDEFGHI" * 20), ("short", "MK")])
    table = families_table(tmp_path / "f.tsv", {"long": "PF00042"})
    options = PrepareOptions(window=64, ood_families=table, families="PF00042", tail="drop", valid=0, test=0)
    manifest = prepare([fasta], tmp_path / "out", options)
    assert {shard.split: shard.windows for shard in manifest.shards} == {"ood": 2}
    assert manifest.counts.tail_sequences == 1
    assert manifest.counts.tail_residues == 2 + 160 - 127
    check_sums(manifest)
    check_dataset(tmp_path / "out")


def told(manifest: Manifest) -> Manifest:
    """Return what a manifest says of the sequences, without what it says of the files they came in."""
    counts = replace(manifest.counts, repaired={})
    return replace(manifest, inputs=[], counts=counts, ngrams=replace(manifest.ngrams, sha256="", bytes=0))


QUICK = (Phase.explicit, Phase.reuse, Phase.generate)
"""Without shrinking: each example is two builds, and a failing one is small as it is."""

SEQUENCES = st.lists(st.text("ACDEFX", min_size=1, max_size=40), min_size=1, max_size=40)


@pytest.mark.slow
@settings(max_examples=40, phases=QUICK)
@given(
    sequences=SEQUENCES,
    order=st.randoms(use_true_random=False),
    part_bytes=st.integers(1, 300),
    step_bytes=st.integers(1, 300),
    num_files=st.integers(1, 5),
    shard_windows=st.integers(1, 20),
    valid=st.sampled_from([0, 0.3, 1]),
    tail=st.sampled_from(["pad", "drop"]),
    duplicates=st.sampled_from(["drop", "keep"]),
)
def test_bytes_depend_on_nothing_but_sequences_and_options(
    tmp_path_factory: pytest.TempPathFactory,
    sequences: list[str],
    order: random.Random,
    part_bytes: int,
    step_bytes: int,
    num_files: int,
    shard_windows: int,
    valid: float,
    tail: str,
    duplicates: str,
):
    folder = tmp_path_factory.mktemp("law")
    options = PrepareOptions(
        window=4, shard_windows=shard_windows, valid=valid, test=0.2, tail=tail, duplicates=duplicates
    )
    records = [(f"p{number}", sequence) for number, sequence in enumerate([*sequences, "ACDEFACDEF"])]
    prepare([write_fasta(folder / "a.fasta", records)], folder / "a", options)
    order.shuffle(records)
    groups = [group for group in (records[start::num_files] for start in range(num_files)) if group]
    files = [write_fasta(folder / f"{number}.fasta", group) for number, group in enumerate(groups)]
    plan = MemoryPlan(1 << 30, workers=1, part_bytes=part_bytes, step_bytes=step_bytes)
    manifest = prepare(files, folder / "b", options, plan=plan)
    assert shard_bytes(folder / "a") == shard_bytes(folder / "b")
    assert told(read_manifest(folder / "a")) == told(manifest)
    check_sums(manifest)
    check_dataset(folder / "b")
    if tail == "pad":
        expected = Counter(sequence for _, sequence in records)
        assert all_proteins(folder / "b") == (expected if duplicates == "keep" else Counter(set(expected)))


@pytest.mark.slow
@settings(max_examples=25, phases=QUICK)
@given(sequences=SEQUENCES, more=SEQUENCES, seed=st.integers(0, 9), shard_windows=st.integers(1, 20))
def test_split_of_a_record_is_unchanged_when_others_are_added(
    tmp_path_factory: pytest.TempPathFactory,
    sequences: list[str],
    more: list[str],
    seed: int,
    shard_windows: int,
):
    folder = tmp_path_factory.mktemp("law")
    options = PrepareOptions(window=4, valid=0.3, test=0.3, split_seed=seed)
    few = write_fasta(folder / "few.fasta", [("p", sequence) for sequence in sequences])
    rest = write_fasta(folder / "rest.fasta", [("q", sequence) for sequence in more])
    prepare([few], folder / "few", options)
    prepare([rest, few], folder / "all", replace(options, seed=1, shard_windows=shard_windows))
    assert split_by_sequence(folder / "few").items() <= split_by_sequence(folder / "all").items()
