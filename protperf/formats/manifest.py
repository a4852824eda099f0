"""The manifest of a prepared dataset: what is in it, where, and what it was made from.

`manifest.json` is written last, so a folder that holds one is a whole dataset. `docs/formats.md` is its specification.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from protperf.formats import FormatError, shown
from protperf.formats.commit import commit_bytes
from protperf.formats.json_files import LARGEST_JSON, read_json
from protperf.formats.own_files import check_names
from protperf.formats.typed import build
from protperf.vocab import VOCABULARY, check_fingerprint

FORMAT = "protperf-dataset"
FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"
MAX_WINDOW = 1 << 24
"""Tokens of a window at most, since a window is read whole."""
SPLITS = ("train", "valid", "test", "ood")
LENGTH_BINS = sorted({math.ceil(2 ** (i / 4)) for i in range(4 * 32)})
"""Lower bounds of the bins of `SplitStats.length_histogram`, in residues."""

DROPPED = {
    "too_short": "shorter than --min-length",
    "too_long": "longer than --max-length",
    "too_many_x": "more X than --max-x",
    "fragments": "fragments",
    "evidence": "no evidence up to --max-evidence",
    "taxon": "other taxa",
    "not_representative": "not the representatives of their clusters",
    "duplicates": "exact duplicates",
    "tail_sequences": "nothing left with the last window of a shard",
}
"""Fields of `RecordCounts` that count accepted records which are in no split, with the reason in words."""


@dataclass(frozen=True)
class InputEntry:
    """A file the dataset was made from.

    Attributes:
        name: file name without its folder; `-` is standard input.
        role: `sequences`, `clusters`, `ood` or `families`.
        bytes: size as read, compressed if the file is; None for standard input.
        sha256: hex digest of those bytes; None for standard input.
    """

    name: str
    role: str
    bytes: int | None
    sha256: str | None


@dataclass(frozen=True)
class ShardEntry:
    """One shard.

    Attributes:
        file: name inside the dataset's folder.
        split: one of `SPLITS`.
        windows: number of windows.
        offset: place of the first token in the file, in bytes.
        bytes: size of the file.
        sha256: hex digest of the file.
    """

    file: str
    split: str
    windows: int
    offset: int
    bytes: int
    sha256: str


@dataclass(frozen=True)
class NgramEntry:
    """The n-gram count file.

    Attributes:
        file: name inside the dataset's folder.
        bytes: size of the file.
        sha256: hex digest of the file.
    """

    file: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class SplitStats:
    """What a split holds.

    Attributes:
        sequences: number of proteins.
        residues: number of residues.
        tokens: residues and the `<bos>` and `<eos>` of each protein; padding is not counted.
        windows: number of windows.
        length_histogram: number of proteins by length in residues, four bins an octave: a key is the lowest length of
            its bin, one of `LENGTH_BINS`; the bin ends before the next of them.
    """

    sequences: int
    residues: int
    tokens: int
    windows: int
    length_histogram: dict[str, int]


@dataclass(frozen=True)
class RecordCounts:
    """What became of the records that were read: `accepted` = sequences of all splits + what was dropped after reading.

    Attributes:
        records: records met in the input.
        accepted: records that the reader accepted.
        residues: residues of the accepted records.
        skipped: records left out by the reader, by reason.
        repaired: what the reader dropped or replaced in accepted records, by kind.
        too_short: accepted records dropped for `min_length`.
        too_long: accepted records dropped for `max_length`.
        too_many_x: accepted records dropped for `max_x`.
        fragments: accepted records dropped because their header calls them fragments.
        evidence: accepted records dropped for their level of protein existence, or because they name none.
        taxon: accepted records dropped for their taxon, or because they name none.
        not_representative: accepted records dropped because another member represents their cluster.
        duplicates: accepted records dropped because the same sequence was there already.
        outside_clusters: records the cluster table does not name, split by their own sequence.
        split_conflicts: sequences met under two splits and kept in one.
        tail_sequences: proteins of which nothing is left because the last window of a shard was dropped.
        tail_residues: residues in dropped last windows.
    """

    records: int
    accepted: int
    residues: int
    skipped: dict[str, int]
    repaired: dict[str, int]
    too_short: int
    too_long: int
    duplicates: int
    outside_clusters: int
    split_conflicts: int
    too_many_x: int = 0
    fragments: int = 0
    evidence: int = 0
    taxon: int = 0
    not_representative: int = 0
    tail_sequences: int = 0
    tail_residues: int = 0

    @property
    def dropped(self) -> dict[str, int]:
        """The accepted records that are in no split, by reason; with the proteins of all splits they sum to `accepted`."""
        return {reason: getattr(self, name) for name, reason in DROPPED.items()}


@dataclass(frozen=True)
class Manifest:
    """All that is said of a dataset; the field order is the order in the file.

    Attributes:
        protperf_version: version of the program that wrote it.
        window: tokens per window.
        seed: seed of the order of the proteins.
        release: name of the source's release, free text.
        options: every option that determines the shards' bytes.
        inputs: the files read.
        counts: what became of the records.
        splits: contents by split, empty ones too.
        residue_counts: number of each residue token in `train`, by letter.
        shards: the shards, by split and index.
        ngrams: the n-gram count file of `train`.
        extras: names of other files of the dataset, which no program reads.
        digest: hash over the shards' hashes: equal digests mean equal datasets.
        vocabulary: the tokens, by id.
        fingerprint: hex SHA-256 of the vocabulary.
    """

    protperf_version: str
    window: int
    seed: int
    release: str
    options: dict[str, Any]
    inputs: list[InputEntry]
    counts: RecordCounts
    splits: dict[str, SplitStats]
    residue_counts: dict[str, int]
    shards: list[ShardEntry]
    ngrams: NgramEntry
    digest: str
    extras: list[str] = field(default_factory=list)
    vocabulary: list[str] = field(default_factory=lambda: list(VOCABULARY.tokens))
    fingerprint: str = VOCABULARY.fingerprint

    def shards_of(self, split: str) -> list[ShardEntry]:
        """Return the shards of `split`, in order."""
        return [shard for shard in self.shards if shard.split == split]


def dataset_digest(shards: list[ShardEntry]) -> str:
    """Return the hex SHA-256 over the lines `<sha256>  <file>` of the shards, sorted by file name."""
    lines = sorted((shard.file, shard.sha256) for shard in shards)
    return hashlib.sha256("".join(f"{sha256}  {file}\n" for file, sha256 in lines).encode()).hexdigest()


def write_manifest(dataset_dir: Path, manifest: Manifest) -> None:
    """Write `manifest.json` by rename; this makes the folder a dataset, so it comes last.

    Raises:
        ValueError: it would be larger than what is read of one.
    """
    head = {"format": FORMAT, "format_version": FORMAT_VERSION}
    data = _as_json({**head, **dataclasses.asdict(manifest)})
    _check_size(len(data), len(manifest.inputs), len(manifest.shards))
    commit_bytes(dataset_dir / MANIFEST_NAME, data)


def check_fits(inputs: list[InputEntry], num_shards: int) -> None:
    """Refuse a dataset whose manifest would be larger than what is read of one, before it is made.

    Args:
        inputs: the files read.
        num_shards: shards of all splits, as far as they are known.

    Raises:
        ValueError: it would be.
    """
    shard = ShardEntry("train-00000-of-00000.h5", "train", 10**8, 10**4, 10**12, "0" * 64)
    files = _as_json({"inputs": [dataclasses.asdict(each) for each in inputs]})
    shards = num_shards * len(_as_json({"shards": [dataclasses.asdict(shard)]}))
    _check_size(len(files) + shards, len(inputs), num_shards)


def _as_json(data: dict[str, Any]) -> bytes:
    return (json.dumps(data, indent=1, ensure_ascii=False) + "\n").encode()


def _check_size(size: int, num_inputs: int, num_shards: int) -> None:
    """Raise if a manifest has more bytes than are read."""
    if size > LARGEST_JSON:
        raise ValueError(
            f"{num_inputs:,} inputs and {num_shards:,} shards: their manifest takes {size / (1 << 20):.1f} MiB, at most "
            f"{LARGEST_JSON >> 20} MiB are read; join files of sequences (cat), or ask for larger shards (--shard-windows)"
        )


def read_manifest(dataset_dir: Path | str) -> Manifest:
    """Read the manifest of a prepared dataset.

    Raises:
        FormatError: no such folder, no manifest (`protperf prepare` did not finish there), a file that is no manifest,
            a newer format version, a damaged entry.
        ValueError: the dataset was made with another vocabulary.
    """
    path = Path(dataset_dir) / MANIFEST_NAME
    data = _load(path)
    version = data.get("format_version")
    if not isinstance(version, int) or not 1 <= version <= FORMAT_VERSION:
        raise FormatError(
            f"{path}: dataset format version {shown(version)}; this protperf reads 1 to {FORMAT_VERSION}: upgrade protperf, or prepare the dataset again"
        )
    try:
        check_fingerprint(str(data["fingerprint"]), str(path))
        manifest = _parse(data)
    except (KeyError, TypeError, AttributeError) as error:
        raise FormatError(f"{path}: damaged manifest ({error!r}); prepare the dataset again") from None
    _check_claims(path, manifest)
    return manifest


def _check_claims(path: Path, manifest: Manifest) -> None:
    """Raise unless names stay inside the folder and windows inside their files, so that no number asks for more than is there."""
    names = [*(shard.file for shard in manifest.shards), manifest.ngrams.file]
    check_names(path, names, remedy="prepare the dataset again")
    if not 1 <= manifest.window <= MAX_WINDOW:
        raise FormatError(
            f"{path}: damaged manifest (window is {manifest.window}, allowed: 1 to {MAX_WINDOW}); prepare the dataset again"
        )
    bounds = [low for stats in manifest.splits.values() for low in stats.length_histogram]
    if not all(re.fullmatch(r"[0-9]{1,9}", low) for low in bounds):
        raise FormatError(
            f"{path}: damaged manifest (a key of length_histogram is no length); prepare the dataset again"
        )
    for shard in manifest.shards:
        end = shard.offset + shard.windows * manifest.window
        if shard.windows < 1 or shard.offset < 0 or end > shard.bytes:
            raise FormatError(
                f"{path}: damaged manifest ({shard.windows} windows of {manifest.window} tokens at {shard.offset} do not lie in "
                f"the {shard.bytes} bytes of {shard.file}); prepare the dataset again"
            )


def list_files(dataset_dir: Path) -> list[str]:
    """Return the names of the files that the manifest names, itself last: what may be replaced with the dataset.

    Works for any format version and vocabulary.

    Raises:
        FormatError: as `read_manifest`, or a name that points out of the folder.
    """
    path = dataset_dir / MANIFEST_NAME
    data = _load(path)
    try:
        names = [str(entry["file"]) for entry in [*data["shards"], data["ngrams"]]]
        names += map(str, data.get("extras", []))
    except (KeyError, TypeError) as error:
        raise FormatError(f"{path}: damaged manifest ({error!r}); move the folder away") from None
    check_names(path, names, remedy="move the folder away")
    return [*names, MANIFEST_NAME]


def _load(path: Path) -> dict[str, Any]:
    """Return the JSON object at `path` after checking that it is a dataset manifest."""
    if path.parent.is_file():
        raise FormatError(
            f"{path.parent}: is a file, not a dataset folder; `protperf prepare {path.parent} OUT` makes one from it"
        )
    if not path.parent.is_dir():
        raise FormatError(
            f"{path.parent}: no such dataset folder; `protperf prepare FASTA... {path.parent}` makes it"
        )
    try:
        data = read_json(path, remedy="prepare the dataset again")
    except FileNotFoundError:
        raise FormatError(
            f"{path.parent}: no {MANIFEST_NAME}, so this is no finished dataset; run `protperf prepare` (again)"
        ) from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        found = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise FormatError(
            f"{path}: not a protperf dataset's manifest (format {shown(found)}, not {FORMAT!r})"
        )
    return data


def _parse(data: dict[str, Any]) -> Manifest:
    """Build the dataclasses; keys that a later version may have added are ignored."""
    nested = {
        "inputs": [build(InputEntry, entry) for entry in data["inputs"]],
        "counts": build(RecordCounts, data["counts"]),
        "splits": {split: build(SplitStats, stats) for split, stats in data["splits"].items()},
        "shards": [build(ShardEntry, entry) for entry in data["shards"]],
        "ngrams": build(NgramEntry, data["ngrams"]),
    }
    return build(Manifest, {**data, **nested})


def check_lengths(
    manifest: Manifest, place: str | Path, *, window: int, across: bool, most: int | None
) -> None:
    """Refuse a dataset with proteins that a model cannot take.

    Args:
        manifest: of the dataset.
        place: the dataset's folder, for messages.
        window: tokens that the model sees at once.
        across: whether proteins of a window see each other, so that a window is one document.
        most: tokens of a document that the model takes; `None`: any number.

    Raises:
        ValueError: there may be a longer one.
    """
    bounds = [int(low) for stats in manifest.splits.values() for low in stats.length_histogram]
    above = [edge for edge in LENGTH_BINS if edge > max(bounds, default=0)]
    tokens = window if across or not above else min(window, above[0] - 1 + 2)
    if most is not None and tokens > most:
        raise ValueError(
            f"{place}: its windows of {window:,} tokens may hold a document of {tokens:,}; this model takes {most:,} at most; "
            f"give it model.linformer_length (or model.max_positions) of {tokens} or more, or prepare shorter windows"
        )
