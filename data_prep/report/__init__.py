"""The report of a dataset: one HTML page that holds all it shows, made from the manifest alone.

It needs no script, no font and no network, reads on a phone and prints.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from itertools import accumulate, pairwise

from data_prep.report.charts import bar_cell, escape, length_chart
from protperf.formats.manifest import LENGTH_BINS, Manifest, SplitStats
from protperf.formats.sizes import in_units
from protperf.vocab import OTHER_RESIDUES, STANDARD_RESIDUES

TREMBL_RELEASE = "UniProtKB/TrEMBL release 2023_04 of 13 September 2023: 88,161,770,578 residues"
TREMBL_SOURCE = "https://www.ebi.ac.uk/uniprot/TrEMBLstats"
_PUBLISHED = """
L9.85 A9.03 G7.27 V6.86 S6.82 E6.24 R5.84 T5.55 I5.53 D5.47 P4.99 K4.93 F3.88 Q3.80 N3.79 Y2.88 M2.33 H2.22 W1.30 C1.29
"""
TREMBL_PERCENT = {entry[0]: float(entry[1:]) for entry in _PUBLISHED.split()}
"""Composition of all of TrEMBL in percent, as published under "Amino acid composition" of its release statistics."""

_STYLE = """
:root{--ink:#1b2733;--soft:#5b6b7b;--line:#d9e0e7;--bar:#2f6f9f;--lost:#b9c4cf;--mark:#c2410c}
*{box-sizing:border-box}
body{margin:0 auto;padding:1rem;max-width:46rem;font:16px/1.5 system-ui,sans-serif;color:var(--ink);background:#fff}
h1{font-size:1.6rem;line-height:1.2;margin:.5rem 0}h2{font-size:1.15rem;margin:2rem 0 .4rem}h3{font-size:1rem;margin:1rem 0 0}
p{margin:.4rem 0}.soft,caption{color:var(--soft);font-size:.875rem}.warn{border-left:4px solid var(--mark);padding-left:.6rem}
.wide{overflow-x:auto}table{border-collapse:collapse;width:100%;font-size:.9rem;font-variant-numeric:tabular-nums}
th,td{padding:.25rem .5rem .25rem 0;text-align:left;vertical-align:top;border-bottom:1px solid var(--line)}
th{font-weight:600}td.n,th.n{text-align:right;white-space:nowrap}tr.sum td{font-weight:600}tr.less td:first-child{padding-left:1.2rem}
code{font:.8rem ui-monospace,monospace;overflow-wrap:anywhere}td.draw{width:35%;min-width:4rem}@media(max-width:30rem){th,td{padding-right:.35rem;font-size:.82rem}}
svg.cell{display:block;width:100%;height:14px;margin-top:.3rem}svg.chart{display:block;width:100%;max-width:36rem}
svg text{font:12px system-ui,sans-serif;fill:var(--soft)}.axis{stroke:var(--soft);stroke-width:1}
.bar{fill:var(--bar)}.lost{fill:var(--lost)}.mark{fill:var(--mark)}
@media print{body{max-width:none;padding:0;font-size:11pt}section{break-inside:avoid}svg{print-color-adjust:exact;-webkit-print-color-adjust:exact}.wide{overflow:visible}}
"""


def render_report(manifest: Manifest) -> str:
    """Return the report as one HTML page; every number is the manifest's, every text from outside is escaped."""
    sections = (
        _summary(manifest),
        _sources(manifest),
        _records(manifest),
        _splits(manifest),
        _lengths(manifest),
        _composition(manifest),
        _options(manifest),
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Dataset {escape(manifest.release or manifest.digest[:12])}</title><style>{_STYLE}</style></head>\n"
        f"<body>{''.join(sections)}</body></html>\n"
    )


def _summary(manifest: Manifest) -> str:
    """Return the head of the page."""
    splits = manifest.splits.values()
    sequences, residues = _total(splits, "sequences"), _total(splits, "residues")
    size = in_units(sum(shard.bytes for shard in manifest.shards))
    release = f"Release {manifest.release}" if manifest.release else "Release not named"
    return (
        f"<header><h1>Protein dataset</h1><p>{escape(release)}. {sequences:,} proteins, {residues:,} residues in "
        f"{_total(splits, 'windows'):,} windows of {manifest.window:,} tokens; {len(manifest.shards):,} shards, {size}.</p>"
        f'<p class="soft">protperf {escape(manifest.protperf_version)} · digest <code>{escape(manifest.digest)}</code></p>'
        "</header>\n"
    )


def _sources(manifest: Manifest) -> str:
    """Return the files the dataset was made from."""
    rows = [
        [
            f"{escape(entry.name)}<br><code>{escape(entry.sha256 or 'a pipe: no hash')}</code>",
            escape(entry.role),
            "" if entry.bytes is None else in_units(entry.bytes),
        ]
        for entry in manifest.inputs
    ]
    return _section("Made from", _table(["file and SHA-256", "role", "#size"], rows))


def _records(manifest: Manifest) -> str:
    """Return what became of the records: a table that adds up, and what was changed or moved."""
    counts = manifest.counts
    packed = _total(manifest.splits.values(), "sequences")
    flow = [("records met", counts.records, "sum")]
    flow += [(f"left out: {reason}", number, "less") for reason, number in counts.skipped.items()]
    flow.append(("accepted by the reader", counts.accepted, "sum"))
    flow += [(f"dropped: {reason}", number, "less") for reason, number in counts.dropped.items() if number]
    flow.append(("packed", packed, "sum"))
    rows = []
    for what, number, kind in flow:
        share = number / counts.records if counts.records else 0
        bar = bar_cell(share, tone="bar" if kind == "sum" else "lost")
        rows.append([escape(what), f"{number:,}", f"{share:.2%}", bar])
    table = _table(["", "#records", "#of all", "~"], rows, kinds=[kind for *_, kind in flow])
    lost = (
        counts.records - sum(counts.skipped.values()) - counts.accepted,
        counts.accepted - sum(counts.dropped.values()) - packed,
    )
    verdict = "<p>Every record is accounted for.</p>"
    if any(lost):
        verdict = (
            f'<p class="warn">Does not add up: {lost[0]:,} and {lost[1]:,} records are unaccounted for.</p>'
        )
    return _section("What became of the records", table + verdict + _remarks(manifest))


def _remarks(manifest: Manifest) -> str:
    """Return what was changed, moved or cut, and how clusters were used."""
    counts = manifest.counts
    lines = [f"{counts.residues:,} residues in the accepted records."]
    lines += [f"Repaired by the reader: {kind}: {number:,}." for kind, number in counts.repaired.items()]
    if counts.accepted:
        lines.append(
            f"Exact duplicates: {counts.duplicates:,}, {counts.duplicates / counts.accepted:.2%} of the accepted."
        )
    if manifest.options.get("clusters"):
        lines.append(
            f"Split by the clusters of {manifest.options['clusters']}; {counts.outside_clusters:,} records are not in it and were split by their own sequence."
        )
    if counts.split_conflicts:
        lines.append(f"Sequences met under two splits and kept in one: {counts.split_conflicts:,}.")
    if counts.tail_residues:
        lines.append(f"Dropped with last windows that were not full: {counts.tail_residues:,} residues.")
    return "".join(f"<p>{escape(line)}</p>" for line in lines)


def _splits(manifest: Manifest) -> str:
    """Return the contents of the splits and their shards."""
    total = _total(manifest.splits.values(), "sequences")
    rows = []
    for split, stats in manifest.splits.items():
        shards = manifest.shards_of(split)
        share = stats.sequences / total if total else 0
        size = in_units(sum(shard.bytes for shard in shards))
        numbers = (stats.residues, stats.tokens, stats.windows, len(shards))
        texts = [f"{number:,}" for number in numbers]
        rows.append([escape(split), f"{stats.sequences:,}", f"{share:.2%}", *texts, size])
    heads = ["split", "#proteins", "#share", "#residues", "#tokens", "#windows", "#shards", "#size"]
    windows, tokens = (_total(manifest.splits.values(), name) for name in ("windows", "tokens"))
    padding = windows * manifest.window - tokens
    sizes = [shard.windows for shard in manifest.shards]
    range_text = f"A shard holds {min(sizes):,} to {max(sizes):,} windows. " if sizes else ""
    note = f'<p class="soft">{range_text}Tokens are residues and the &lt;bos&gt; and &lt;eos&gt; of each protein; besides, {padding:,} &lt;pad&gt; fill last windows.</p>'
    return _section("Splits and shards", _table(heads, rows) + note)


def _lengths(manifest: Manifest) -> str:
    """Return a histogram of lengths for each split that has proteins, all over the same axis."""
    upper = dict(pairwise(LENGTH_BINS))
    histograms = {
        split: {int(low): (upper[int(low)], count) for low, count in stats.length_histogram.items()}
        for split, stats in manifest.splits.items()
        if stats.sequences
    }
    end = max((high for bins in histograms.values() for high, _ in bins.values()), default=2)
    parts = []
    for split, bins in histograms.items():
        low, high = _middle_bin(bins)
        mean = manifest.splits[split].residues / manifest.splits[split].sequences
        text = f"{split}: mean {mean:,.1f} residues, median between {low:,} and {high - 1:,}"
        chart = length_chart(bins, end=end, label=f"Lengths of the proteins of {text}")
        parts.append(f"<h3>{escape(text)}</h3>{chart}")
    note = '<p class="soft">Share of the split\'s proteins by length, four bins an octave.</p>'
    if manifest.counts.tail_residues:
        note += '<p class="soft">Of what was dropped with last windows the mean is without it, the rest with it.</p>'
    return _section("Lengths", note + "".join(parts))


def _middle_bin(bins: dict[int, tuple[int, int]]) -> tuple[int, int]:
    """Return the bounds of the bin that holds the median, the upper one outside."""
    lows = sorted(bins)
    sums = list(accumulate(bins[low][1] for low in lows))
    low = next(low for low, so_far in zip(lows, sums, strict=True) if 2 * so_far >= sums[-1])
    return low, bins[low][0]


def _composition(manifest: Manifest) -> str:
    """Return the residues of train beside the published composition of TrEMBL."""
    counts, total = manifest.residue_counts, sum(manifest.residue_counts.values())
    if not total:
        return _section("Residues of train", "<p>train is empty.</p>")
    scale = 1.05 * max(
        [*TREMBL_PERCENT.values(), *(100 * counts[letter] / total for letter in TREMBL_PERCENT)]
    )
    rows = []
    for letter, published in TREMBL_PERCENT.items():
        percent = 100 * counts[letter] / total
        bar = bar_cell(percent / scale, mark=published / scale)
        rows.append([letter, f"{percent:.2f}", f"{published:.2f}", f"{percent - published:+.2f}", bar])
    others = [f"{letter} {counts[letter]:,}" for letter in OTHER_RESIDUES]
    note = (
        f'<p class="soft">In percent of all residues; bar: train, line: TrEMBL. Published composition: {escape(TREMBL_RELEASE)}, '
        f"{escape(TREMBL_SOURCE)}.</p><p>Letters beside the {len(STANDARD_RESIDUES)} of the genetic code, counted in train: {', '.join(others)}.</p>"
    )
    heads = ["residue", "#train", "#TrEMBL", "#differ", "~"]
    return _section("Residues of train", _table(heads, rows) + note)


def _options(manifest: Manifest) -> str:
    """Return every option that determines the shards' bytes."""
    options = {"window": manifest.window, "seed": manifest.seed, **manifest.options}
    rows = [
        [escape(name), escape("none" if value in ("", None) else value)] for name, value in options.items()
    ]
    note = '<p class="soft">The same sequences with these options give the same shards, byte by byte.</p>'
    return _section("Options", _table(["option", "value"], rows) + note)


def _section(title: str, body: str) -> str:
    """Return a section of the page; `body` is HTML."""
    return f"<section><h2>{title}</h2>{body}</section>\n"


def _table(heads: list[str], rows: Iterable[list[str]], kinds: list[str] | None = None) -> str:
    """Return a table.

    Args:
        heads: column titles; one that starts with `#` is a column of numbers, `~` alone one of drawings.
        rows: cells as HTML.
        kinds: CSS class of each row.
    """
    classes = [{"#": "n", "~": "draw"}.get(head[:1], "") for head in heads]
    lines = ["".join(_cell("th", head.lstrip("#~"), kind) for head, kind in zip(heads, classes, strict=True))]
    lines += ["".join(_cell("td", *pair) for pair in zip(row, classes, strict=True)) for row in rows]
    names = ["", *(kinds or [""] * (len(lines) - 1))]
    body = "".join(
        f'<tr class="{name}">{line}</tr>' if name else f"<tr>{line}</tr>"
        for name, line in zip(names, lines, strict=True)
    )
    return f'<div class="wide"><table>{body}</table></div>'


def _cell(tag: str, content: str, kind: str) -> str:
    """Return one cell of a table; `content` is HTML."""
    return f'<{tag} class="{kind}">{content}</{tag}>' if kind else f"<{tag}>{content}</{tag}>"


def _total(splits: Iterable[SplitStats], name: str) -> int:
    """Return the sum of one of the splits' numbers."""
    return sum(asdict(stats)[name] for stats in splits)
