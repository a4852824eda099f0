"""The report of a dataset: all that it says is the manifest's, it adds up, and it stands alone."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest
from prepared import SAMPLE, read_fasta, read_proteins

from data_prep.options import PrepareOptions
from data_prep.prepare import prepare
from data_prep.report import TREMBL_PERCENT, render_report
from protperf.formats.manifest import (
    InputEntry,
    Manifest,
    NgramEntry,
    RecordCounts,
    ShardEntry,
    SplitStats,
)

EMPTY = SplitStats(0, 0, 0, 0, {})
VOID_TAGS = {"meta", "br", "link", "img"}


def make_manifest(**changes: object) -> Manifest:
    """Return a manifest written by hand whose numbers add up: 1,310 records, 1,251 accepted, 1,200 packed."""
    counts = RecordCounts(
        records=1310,
        accepted=1251,
        residues=500_000,
        skipped={"gap": 50, "empty": 9},
        repaired={"stop": 77},
        too_short=3,
        too_long=4,
        duplicates=31,
        outside_clusters=5,
        split_conflicts=2,
        too_many_x=6,
        fragments=1,
        evidence=2,
        taxon=2,
        not_representative=1,
        tail_sequences=1,
        tail_residues=345,
    )
    train = SplitStats(1000, 300_000, 302_000, 600, {"256": 600, "305": 300, "1024": 100})
    valid = SplitStats(200, 60_000, 60_400, 120, {"7": 50, "256": 150})
    shards = [
        ShardEntry("train-00000-of-00001.h5", "train", 600, 2048, 309_248, "a" * 64),
        ShardEntry("valid-00000-of-00001.h5", "valid", 120, 2048, 63_488, "b" * 64),
    ]
    residues = {letter: 14_999 for letter in "ACDEFGHIKLMNPQRSTVWY"} | dict.fromkeys("BOUZJ", 0) | {"X": 20}
    manifest = Manifest(
        protperf_version="9.8.7",
        window=512,
        seed=0,
        release="2026_01",
        options={"split_seed": 0, "clusters": "uniref50.tsv", "release": "2026_01"},
        inputs=[InputEntry("trembl.fasta.gz", "sequences", 60_000_000_000, "c" * 64)],
        counts=counts,
        splits={"train": train, "valid": valid, "test": EMPTY, "ood": EMPTY},
        residue_counts=residues,
        shards=shards,
        ngrams=NgramEntry("ngrams.h5", 1234, "d" * 64),
        digest="e" * 64,
    )
    return dataclasses.replace(manifest, **changes)


class Page(HTMLParser):
    """Gathers tags, attributes and the cells of tables; checks that tags close in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str]] = []
        self.rows: list[list[str]] = []
        self.text = ""
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.text += "\n"
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID_TAGS:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" in self.open:
            return
        self.text += data
        if "td" in self.open or "th" in self.open:
            self.rows[-1][-1] += data

    def row(self, name: str) -> list[str]:
        return next(row for row in self.rows if row[0].startswith(name))


def to_int(text: str) -> int:
    return int(text.replace(",", ""))


def test_page_is_whole_and_needs_nothing_from_elsewhere():
    text = render_report(make_manifest())
    page = Page(text)
    assert not page.tags.keys() & {"script", "link", "img", "iframe", "object", "embed", "form", "a"}
    assert not {name for name, _ in page.attributes} & {"src", "href", "srcset", "style"}
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert not re.search(r"url\(|@import|@font-face", text)
    assert ("name", "viewport") in page.attributes
    assert "@media print" in text


def test_every_number_of_the_manifest_is_there():
    manifest = make_manifest()
    words = set(re.findall(r"[\d,]+(?<!,)", Page(render_report(manifest)).text))
    counts = dataclasses.asdict(manifest.counts)
    numbers = [value for value in counts.values() if isinstance(value, int)]
    numbers += [*manifest.counts.skipped.values(), *manifest.counts.repaired.values()]
    for stats in manifest.splits.values():
        numbers += [stats.sequences, stats.residues, stats.tokens, stats.windows]
        numbers += stats.length_histogram.values()
    assert {f"{number:,}" for number in numbers} <= words


def test_records_add_up_from_met_to_packed():
    page = Page(render_report(make_manifest()))
    first, last = (number for number, row in enumerate(page.rows) if row[0] in ("records met", "packed"))
    steps = page.rows[first : last + 1]
    sums = [to_int(row[1]) for row in steps if row[0] in ("records met", "accepted by the reader", "packed")]
    left_out = sum(to_int(row[1]) for row in steps if row[0].startswith("left out"))
    dropped = sum(to_int(row[1]) for row in steps if row[0].startswith("dropped"))
    assert sums == [1310, 1251, 1200]
    assert left_out == 1310 - 1251
    assert dropped == 1251 - 1200
    assert "Every record is accounted for." in page.text


def test_counts_that_do_not_add_up_are_said():
    counts = dataclasses.replace(make_manifest().counts, too_long=0)
    page = Page(render_report(make_manifest(counts=counts)))
    assert "0 and 4 records are unaccounted for" in page.text
    assert "Every record is accounted for." not in page.text


@pytest.mark.parametrize(
    "hostile", ["<script>alert(1)</script>", '"><b onload=x>', "a & b", "<!--", "ü 蛋白"]
)
def test_texts_from_outside_are_shown_as_they_are(hostile: str):
    counts = dataclasses.replace(make_manifest().counts, skipped={hostile: 59}, repaired={hostile: 1})
    inputs = [InputEntry(hostile, hostile, None, None)]
    options = {hostile: hostile, "clusters": hostile}
    manifest = make_manifest(
        counts=counts,
        inputs=inputs,
        options=options,
        release=hostile,
        protperf_version=hostile,
        digest=hostile,
    )
    page = Page(render_report(manifest))
    assert page.tags.keys() == Page(render_report(make_manifest())).tags.keys()
    assert page.text.count(hostile) >= 9
    assert not [name for name, _ in page.attributes if name.startswith("on")]


def test_bars_of_lengths_are_as_high_as_their_counts_and_stand_by_their_logarithm():
    text = render_report(make_manifest())
    charts = re.findall(r'<svg class="chart".*?</svg>', text)
    assert len(charts) == 2
    bar = re.compile(r'<rect class="bar" x="([\d.]+)" y="[\d.]+" width="([\d.]+)" height="([\d.]+)">')
    train = [tuple(map(float, found)) for found in bar.findall(charts[0])]
    heights = [height for _, _, height in train]
    assert [height / heights[0] for height in heights] == pytest.approx([1, 1 / 2, 1 / 6], abs=0.01)
    octave = (train[2][0] - train[0][0]) / 2  # from 256 to 1024
    assert train[1][0] - train[0][0] == pytest.approx(octave * math.log2(305 / 256), abs=0.2)
    assert train[2][1] == pytest.approx(octave / 4, abs=1)
    assert "256 to 304 residues: 600 (60.00%)" in charts[0]
    valid = [tuple(map(float, found)) for found in bar.findall(charts[1])]
    assert valid[1][0] == train[0][0], "the axes are the same"
    assert "train: mean 300.0 residues, median between 256 and 304" in text


def test_published_composition_is_that_of_the_release_statistics():
    assert set(TREMBL_PERCENT) == set("ACDEFGHIKLMNPQRSTVWY")
    assert (TREMBL_PERCENT["L"], TREMBL_PERCENT["A"], TREMBL_PERCENT["W"]) == (9.85, 9.03, 1.30)
    assert sum(TREMBL_PERCENT.values()) == pytest.approx(99.87)  # the rest is X and other letters
    page = Page(render_report(make_manifest()))
    assert page.row("L")[1:4] == ["5.00", "9.85", "-4.85"]
    assert "2023_04" in page.text
    assert "X 20" in page.text


def test_dataset_without_proteins_in_train_has_a_report():
    empty = dict.fromkeys(make_manifest().residue_counts, 0)
    splits = dict.fromkeys(("train", "valid", "test", "ood"), EMPTY)
    zero = dict.fromkeys((each.name for each in dataclasses.fields(RecordCounts)), 0)
    counts = RecordCounts(**zero | {"skipped": {}, "repaired": {}})
    page = Page(
        render_report(make_manifest(residue_counts=empty, splits=splits, counts=counts, shards=[], inputs=[]))
    )
    assert "train is empty" in page.text


def test_thousands_of_shards_make_no_heavier_page():
    shards = [
        ShardEntry(f"train-{number:05d}-of-09000.h5", "train", 600, 2048, 309_248, "a" * 64)
        for number in range(9000)
    ]
    text = render_report(make_manifest(shards=shards))
    assert len(text.encode()) < 50_000
    assert Page(text).row("train")[6] == "9,000"


def test_report_of_the_sample_says_what_its_shards_hold(tmp_path: Path):
    options = PrepareOptions(window=512, valid=0.05, test=0.05, release="2026_01")
    manifest = prepare([str(SAMPLE)], tmp_path / "out", options)
    page = Page(render_report(manifest))
    proteins = read_proteins(tmp_path / "out")
    for split in ("train", "valid", "test"):
        row = page.row(split)
        assert to_int(row[1]) == len(proteins[split])
        assert to_int(row[3]) == sum(map(len, proteins[split]))
    train = "".join(proteins["train"])
    for letter in "ACDEFGHIKLMNPQRSTVWY":
        assert float(page.row(letter)[1]) == pytest.approx(100 * train.count(letter) / len(train), abs=0.0051)
    assert to_int(page.row("records met")[1]) == len(read_fasta(SAMPLE))
