"""What a user may choose of a dataset: every field but `release` determines the shards' bytes."""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protperf.formats.manifest import MAX_WINDOW

DUPLICATES = ("drop", "keep")
TAILS = ("pad", "drop")
FRAGMENTS = ("keep", "drop")
KEEP = ("all", "representative")
MMSEQS = "mmseqs"

NUM_EVIDENCE_LEVELS = 5

PAPER_FAMILIES = (
    "PF18369 PF04680 PF17988 PF12325 PF03272 PF03938 PF17724 PF10696 PF11968 PF04153 "
    "PF06173 PF12378 PF04420 PF10841 PF06917 PF03492 PF06905 PF15340 PF17055 PF05318"
)
"""The Pfam families held out by Madani et al. 2020 (ProGen, arXiv:2004.03497) and Choromanski et al. 2021 (App. C.1)."""

_SAID_ELSEWHERE = ("release", "seed", "window")
_TABLES = ("clusters", "ood_clusters", "ood_families")
_FAMILY = re.compile(r"PF\d{5}")


@dataclass(frozen=True)
class PrepareOptions:
    """Options of a dataset.

    Attributes:
        window: tokens per window.
        seed: seed of the order of the proteins; it never moves a protein to another split.
        split_seed: seed of the splits.
        valid: what goes to the split `valid`: below 1 a fraction, otherwise a number, of distinct sequences or of clusters.
        test: the same for `test`; it takes the first part of the hash's range, so `valid` does not change it.
        clusters: path of a cluster table, `representative TAB member` per line; `mmseqs` has it made; empty: split by
            sequence.
        cluster_identity: least sequence identity inside a cluster that MMseqs2 makes.
        cluster_coverage: least part of both sequences that the alignment covers there.
        keep: `representative` keeps of each cluster that record alone; `all` keeps all.
        ood_clusters: path of a list of representatives whose clusters are the split `ood`; needs `clusters`.
        ood_families: path of a table of accessions and Pfam families; records of the families in `families` are `ood`.
        families: Pfam accessions held out, separated by spaces or commas.
        min_length: shortest protein kept, in residues.
        max_length: longest protein kept, in residues; 0: no limit.
        max_x: largest fraction of X in a protein kept.
        fragments: `drop` drops records whose header calls them fragments.
        max_evidence: highest level of protein existence (PE) kept, 1 (protein) to 5 (uncertain); 0: no limit.
        taxa: NCBI taxonomy numbers (OX) kept, separated by spaces or commas, each itself without its descendants; empty: all.
        exclude_taxa: taxonomy numbers dropped.
        duplicates: `drop` keeps one of equal sequences, `keep` keeps all, in one split.
        gaps: what the reader does with `-` and `.`: `refuse` or `drop`.
        unknown: what the reader does with characters that are no residue: `refuse` or `x`.
        shard_windows: windows per shard, about.
        tail: what becomes of the last window of a shard: `pad` fills it up, `drop` drops it.
        release: name of the source's release, free text.
    """

    window: int = 8192
    seed: int = 0
    split_seed: int = 0
    valid: float = 0.01
    test: float = 0.01
    clusters: str = ""
    cluster_identity: float = 0.5
    cluster_coverage: float = 0.8
    keep: str = "all"
    ood_clusters: str = ""
    ood_families: str = ""
    families: str = PAPER_FAMILIES
    min_length: int = 1
    max_length: int = 0
    max_x: float = 1.0
    fragments: str = "keep"
    max_evidence: int = 0
    taxa: str = ""
    exclude_taxa: str = ""
    duplicates: str = "drop"
    gaps: str = "refuse"
    unknown: str = "refuse"
    shard_windows: int = 16384
    tail: str = "pad"
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
        for name, allowed in (
            ("duplicates", DUPLICATES),
            ("tail", TAILS),
            ("fragments", FRAGMENTS),
            ("keep", KEEP),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"--{name} {getattr(self, name)}: allowed: {' '.join(allowed)}")
        for name in ("max_x", "cluster_identity", "cluster_coverage"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"--{name.replace('_', '-')} {getattr(self, name)}: a fraction from 0 to 1")
        if not 0 <= self.max_evidence <= NUM_EVIDENCE_LEVELS:
            raise ValueError(
                f"--max-evidence {self.max_evidence}: 1 to {NUM_EVIDENCE_LEVELS}, or 0 for no limit"
            )
        self._check_splits()
        _ = self.taxon_ids, self.excluded_taxon_ids, self.family_names

    def _check_splits(self) -> None:
        for name in ("valid", "test"):
            share = getattr(self, name)
            if not 0 <= share < math.inf or (share >= 1 and share != int(share)):
                raise ValueError(
                    f"--{name} {share:g}: a fraction from 0 to below 1, or a whole number of sequences"
                )
        if (self.valid if self.valid < 1 else 0) + (self.test if self.test < 1 else 0) >= 1:
            raise ValueError(
                f"--valid {self.valid} --test {self.test}: fractions from 0, together below 1, so that something is left to train on"
            )
        if self.ood_clusters and not self.clusters:
            raise ValueError("--ood-clusters needs --clusters, the table its representatives stand in")
        for name in ("cluster_identity", "cluster_coverage"):
            if getattr(self, name) != getattr(type(self), name) and self.clusters != MMSEQS:
                raise ValueError(
                    f"--{name.replace('_', '-')} is for --clusters {MMSEQS}, which makes the clusters"
                )
        if self.families != PAPER_FAMILIES and not self.ood_families:
            raise ValueError("--families needs --ood-families, the table that says which records are of them")
        if self.keep == "representative" and not self.clusters:
            raise ValueError("--keep representative needs --clusters, the table that names them")

    @property
    def taxon_ids(self) -> frozenset[int]:
        """The taxa that are kept; empty: all."""
        return _numbers("--taxa", self.taxa)

    @property
    def excluded_taxon_ids(self) -> frozenset[int]:
        """The taxa that are dropped."""
        return _numbers("--exclude-taxa", self.exclude_taxa)

    @property
    def family_names(self) -> frozenset[str]:
        """The Pfam families held out."""
        names = self.families.replace(",", " ").split()
        wrong = [name for name in names if not _FAMILY.fullmatch(name)]
        if wrong or not names:
            raise ValueError(
                f"--families {wrong[0] if wrong else ''!r}: Pfam accessions such as PF00069, separated by commas"
            )
        return frozenset(names)

    @property
    def filters_headers(self) -> bool:
        """Whether records are judged by their headers."""
        return bool(
            self.fragments == "drop" or self.max_evidence or self.taxon_ids or self.excluded_taxon_ids
        )

    def with_table(self, path: str) -> PrepareOptions:
        """Return the same options with a table that MMseqs2 made for them."""
        made = {name: getattr(type(self), name) for name in ("cluster_identity", "cluster_coverage")}
        return dataclasses.replace(self, clusters=path, **made)

    def as_manifest(self) -> dict[str, Any]:
        """Return the options as the manifest holds them: files by name, without what has its own place or no effect."""
        options = dataclasses.asdict(self)
        for name in _TABLES:
            options[name] = Path(options[name]).name
        for name in ("valid", "test"):
            options[name] = int(options[name]) if options[name] >= 1 else options[name]
        if self.clusters != MMSEQS:
            del options["cluster_identity"], options["cluster_coverage"]
        if not self.ood_families:
            del options["families"]
        return {name: value for name, value in options.items() if name not in _SAID_ELSEWHERE}


def _numbers(option: str, text: str) -> frozenset[int]:
    words = text.replace(",", " ").split()
    wrong = [word for word in words if not (word.isascii() and word.isdigit())]
    if wrong:
        raise ValueError(f"{option} {wrong[0]!r}: NCBI taxonomy numbers such as 9606, separated by commas")
    return frozenset(map(int, words))
