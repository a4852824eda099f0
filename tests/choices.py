"""What the tests of `protperf prepare`'s choices share: tables, and the sum that no record escapes."""

from __future__ import annotations

from pathlib import Path

from protperf.formats.manifest import Manifest

FILTERED = ("too_short", "too_long", "too_many_x", "fragments", "evidence", "taxon", "not_representative")


def check_sums(manifest: Manifest) -> None:
    """Check that every record that was read is in the dataset or under a reason."""
    counts = manifest.counts
    assert counts.records == counts.accepted + sum(counts.skipped.values())
    dropped = sum(getattr(counts, name) for name in (*FILTERED, "duplicates", "tail_sequences"))
    assert counts.accepted == dropped + sum(split.sequences for split in manifest.splits.values())


def cluster_table(path: Path, *, size: int = 3, number: int = 300) -> str:
    """Write clusters of `size` of the records p0, p1, ... and return the path."""
    path.write_text("".join(f"p{i // size * size}\tp{i}\n" for i in range(number)))
    return str(path)


def families_table(path: Path, names: dict[str, str]) -> str:
    path.write_text("".join(f"{name}\t{families}\n" for name, families in names.items()))
    return str(path)
