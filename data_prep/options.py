"""What a user may choose of a dataset: every field but `release` determines the shards' bytes."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DUPLICATES = ("drop", "keep")

MAX_WINDOW = 1 << 24

_SAID_ELSEWHERE = ("release", "seed", "window")


@dataclass(frozen=True)
class PrepareOptions:
    """Options of a dataset.

    Attributes:
        window: tokens per window.
        seed: seed of the order of the proteins; it never moves a protein to another split.
        split_seed: seed of the splits.
        valid: fraction of sequences (or of clusters) in the split `valid`.
        test: the same for `test`; it takes the first part of the hash's range, so `valid` does not change it.
        clusters: path of a cluster table, `representative TAB member` per line; empty: split by sequence.
        ood_clusters: path of a list of representatives whose clusters are the split `ood`; needs `clusters`.
        min_length: shortest protein kept, in residues.
        max_length: longest protein kept, in residues; 0: no limit.
        duplicates: `drop` keeps one of equal sequences, `keep` keeps all, in one split.
        gaps: what the reader does with `-` and `.`: `refuse` or `drop`.
        unknown: what the reader does with characters that are no residue: `refuse` or `x`.
        shard_windows: windows per shard, about.
        release: name of the source's release, free text.
    """

    window: int = 8192
    seed: int = 0
    split_seed: int = 0
    valid: float = 0.01
    test: float = 0.01
    clusters: str = ""
    ood_clusters: str = ""
    min_length: int = 1
    max_length: int = 0
    duplicates: str = "drop"
    gaps: str = "refuse"
    unknown: str = "refuse"
    shard_windows: int = 16384
    release: str = ""

    def __post_init__(self) -> None:
        """Refuse values that cannot work."""
        for name in ("window", "shard_windows", "min_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} {getattr(self, name)}: at least 1 is needed")
        if self.window > MAX_WINDOW:
            raise ValueError(
                f"--window {self.window}: at most {MAX_WINDOW:,} tokens, since a window is read whole"
            )
        if self.max_length and self.max_length < self.min_length:
            raise ValueError(f"--max-length {self.max_length} is below --min-length {self.min_length}")
        if not (self.valid >= 0 and self.test >= 0 and self.valid + self.test < 1):
            raise ValueError(
                f"--valid {self.valid} --test {self.test}: fractions from 0 that leave something to train on"
            )
        if self.duplicates not in DUPLICATES:
            raise ValueError(f"--duplicates {self.duplicates}: allowed: {' '.join(DUPLICATES)}")
        if self.ood_clusters and not self.clusters:
            raise ValueError("--ood-clusters needs --clusters, the table its representatives stand in")

    def as_manifest(self) -> dict[str, Any]:
        """Return the options as the manifest holds them: files by name, without what has its own place there."""
        options = dataclasses.asdict(self)
        for name in ("clusters", "ood_clusters"):
            options[name] = Path(options[name]).name
        return {name: value for name, value in options.items() if name not in _SAID_ELSEWHERE}
