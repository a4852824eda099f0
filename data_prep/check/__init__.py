"""Check a dataset to the last byte against its manifest and against itself: what `docs/formats.md` promises.

Each shard is read once, in blocks. Memory is flat but for 8 bytes for each protein outside the largest split: 40 MB for
the 2 % of TrEMBL that `valid` and `test` hold.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from data_prep.check.scan import ShardScan, find_repeated, scan_shard, split_histogram
from data_prep.keys import KEY_BITS, order_keys
from protperf.formats import FormatError, shards
from protperf.formats.hdf5_reading import Hdf5File
from protperf.formats.manifest import (
    MANIFEST_NAME,
    SPLITS,
    Manifest,
    NgramEntry,
    RecordCounts,
    ShardEntry,
    SplitStats,
    dataset_digest,
    list_files,
    read_manifest,
)
from protperf.formats.ngrams import ORDERS, read_ngrams
from protperf.formats.sizes import hash_file
from protperf.vocab import VOCABULARY

_BOS, _EOS, _PAD = VOCABULARY.bos, VOCABULARY.eos, VOCABULARY.pad
_REMEDY = "damaged; copy it or prepare it again"


@dataclass(frozen=True)
class CheckResult:
    """What was read and found right.

    Attributes:
        shards: number of shards.
        bytes: size of all files that the manifest names.
        windows: number of windows.
        sequences: number of proteins.
        residues: number of residues.
    """

    shards: int
    bytes: int
    windows: int
    sequences: int
    residues: int


def check_dataset(folder: Path) -> CheckResult:
    """Read every byte of a dataset and compare it with the manifest and with what a dataset must be.

    Proteins are compared by 64 bits of their hashes: a clash of two that differ has a chance of one in 10,000 for a dataset
    like TrEMBL.

    Raises:
        FormatError: the first fault, by file and place.
        ValueError: the dataset was made with another vocabulary.
    """
    manifest = read_manifest(folder)
    _check_types(folder / MANIFEST_NAME, manifest)
    _check_sums(folder / MANIFEST_NAME, manifest)
    list_files(folder)  # names that point out of the folder
    sizes = {entry.file: entry.bytes for entry in manifest.shards}
    sizes[manifest.ngrams.file] = manifest.ngrams.bytes
    for name, size in sizes.items():
        _check_size(folder / name, size)
    _check_splits(folder, manifest)
    splits = manifest.splits.values()
    return CheckResult(
        shards=len(manifest.shards),
        bytes=sum(sizes.values()),
        windows=sum(stats.windows for stats in splits),
        sequences=sum(stats.sequences for stats in splits),
        residues=sum(stats.residues for stats in splits),
    )


def _check_types(place: Path, manifest: Manifest) -> None:
    """Raise unless all counts and sizes are numbers from 0, and the lists are whole."""
    tables = manifest.options, manifest.residue_counts, manifest.counts.skipped, manifest.counts.repaired
    if not all(isinstance(table, dict) for table in tables):
        raise FormatError(
            f"{place}: options, residue_counts, skipped and repaired must be objects: {_REMEDY}"
        )
    parts: dict[str, RecordCounts | NgramEntry | SplitStats | ShardEntry]
    parts = {"counts": manifest.counts, "ngrams": manifest.ngrams}
    parts |= {f"splits.{name}": stats for name, stats in manifest.splits.items()}
    parts |= {f"shards[{number}]": shard for number, shard in enumerate(manifest.shards)}
    numbers: dict[str, object] = {"window": manifest.window}
    for part, entry in parts.items():
        values = dataclasses.asdict(entry)
        names = [each.name for each in dataclasses.fields(entry) if each.type == "int"]
        numbers |= {f"{part}.{name}": values[name] for name in names}
    for name, table in (("skipped", manifest.counts.skipped), ("repaired", manifest.counts.repaired)):
        numbers |= {f"counts.{name}[{key!r}]": number for key, number in table.items()}
    for name, value in numbers.items():
        if type(value) is not int or value < 0:
            raise FormatError(f"{place}: {name} is {value!r}, not a number from 0: {_REMEDY}")
    if manifest.window < 1:
        raise FormatError(f"{place}: window is 0: {_REMEDY}")
    if tuple(manifest.splits) != SPLITS or manifest.vocabulary != list(VOCABULARY.tokens):
        raise FormatError(f"{place}: its splits or its vocabulary are not those of protperf: {_REMEDY}")
    wrong = [shard for shard in manifest.shards if shard.split not in SPLITS]
    if wrong:
        raise FormatError(
            f"{place}: shard {wrong[0].file} is of split {wrong[0].split!r}; known: {' '.join(SPLITS)}"
        )


def _check_sums(place: Path, manifest: Manifest) -> None:
    """Raise unless the manifest's own numbers add up."""
    counts, splits = manifest.counts, manifest.splits.values()
    sequences = sum(stats.sequences for stats in splits)
    _check_equal(place, "counts.records", counts.records, counts.accepted + sum(counts.skipped.values()))
    dropped = sum(counts.dropped.values())
    _check_equal(place, "counts.accepted", counts.accepted, sequences + dropped)
    for split in SPLITS:
        windows = sum(shard.windows for shard in manifest.shards_of(split))
        _check_equal(place, f"splits.{split}.windows", manifest.splits[split].windows, windows)
    _check_equal(place, "digest", manifest.digest, dataset_digest(manifest.shards))
    names = [shard.file for shard in manifest.shards]
    _check_equal(place, "number of shards", len(names), len(set(names)))
    packed = sum(stats.residues for stats in splits)
    if counts.residues < packed:
        raise FormatError(
            f"{place}: counts.residues is {counts.residues}, the splits hold {packed}: {_REMEDY}"
        )


def _check_equal(place: Path, name: str, said: object, found: object) -> None:
    """Raise unless what the manifest says of `name` is what was found."""
    if said != found:
        raise FormatError(f"{place}: {name} is {said}, counted are {found}: {_REMEDY}")


def _check_size(path: Path, num_bytes: int) -> None:
    """Raise unless the file is there with the manifest's size."""
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise FormatError(
            f"{path}: missing, though the manifest names it; copy it or prepare it again"
        ) from None
    if size != num_bytes:
        raise FormatError(f"{path}: {size} bytes, the manifest says {num_bytes}: {_REMEDY}")


def _check_splits(folder: Path, manifest: Manifest) -> None:
    """Read all shards, the largest split last, so that its proteins need not be remembered."""
    held: dict[str, np.ndarray] = {}
    order = sorted(SPLITS, key=lambda split: manifest.splits[split].sequences)
    total, disorder = sum(shard.bytes for shard in manifest.shards), ""
    with tqdm(total=total, desc="check", unit="B", unit_scale=True, disable=None, leave=False) as bar:
        for split in order:
            totals = _SplitTotals()
            for shard in manifest.shards_of(split):
                path = folder / shard.file
                scan = _check_shard(path, shard, manifest, totals)
                _check_apart(path, scan.lows, held)
                totals.add(scan, keep_hashes=split != order[-1])
                bar.update(shard.bytes)
            _compare_split(folder / MANIFEST_NAME, split, manifest, totals)
            held[split] = np.sort(np.concatenate([np.zeros(0, np.uint64), *totals.lows]))
            if split == "train":
                _check_ngrams(folder, manifest, totals)
            disorder = disorder or totals.disorder
    if disorder:
        raise FormatError(f"{disorder}: prepare the dataset again")


class _SplitTotals:
    """Sums over the shards of a split.

    Attributes:
        pairs: see `ShardScan`.
        lengths: see `ShardScan`.
        lows: see `ShardScan`, of each shard, where they are kept.
        disorder: the first place where proteins are not in the order of their keys, in words; empty if there is none.
        ranges: number of the last shard's range and of all ranges, None before the first shard.
    """

    def __init__(self) -> None:
        empty = ShardScan(1, cut_tail=False)
        self.pairs, self.lengths = empty.pairs, empty.lengths
        self.lows: list[np.ndarray] = []
        self.ranges: tuple[int, int] | None = None
        self.disorder = ""

    def add(self, scan: ShardScan, *, keep_hashes: bool) -> None:
        """Add one shard."""
        self.pairs += scan.pairs
        self.lengths += scan.lengths
        if keep_hashes:
            self.lows.append(scan.lows)


def _check_shard(path: Path, shard: ShardEntry, manifest: Manifest, totals: _SplitTotals) -> ShardScan:
    """Read one shard; raise unless its bytes, its HDF5 frame and its tokens are right."""
    end = shard.offset + shard.windows * manifest.window
    if not shard.windows or end > shard.bytes:
        raise FormatError(
            f"{path}: {shard.windows} windows at {shard.offset} do not lie in its {shard.bytes} bytes, says {MANIFEST_NAME}: {_REMEDY}"
        )
    digest, scan = scan_shard(path, shard, manifest.window, cut_tail=_has_cut_tail(manifest))
    if digest != shard.sha256:
        where = f" (first seen at {scan.fault})" if scan.fault else ""
        raise FormatError(f"{path}: its SHA-256 is not the manifest's{where}: {_REMEDY}")
    with Hdf5File(path, unreadable="no readable shard", remedy="prepare the dataset again") as file:
        _check_frame(path, file, shard, manifest, totals)
    if scan.fault:
        raise FormatError(f"{path}: {scan.fault}; a shard holds whole proteins: prepare the dataset again")
    if manifest.options.get("duplicates") == "drop" and (twice := find_repeated(scan.lows)):
        raise FormatError(
            f"{path}: proteins {twice[0]} and {twice[1]} are the same, though duplicates were to be dropped: prepare the dataset again"
        )
    totals.disorder = totals.disorder or _find_disorder(path, scan, manifest.seed, totals)
    return scan


def _find_disorder(path: Path, scan: ShardScan, seed: int, totals: _SplitTotals) -> str:
    """Say where proteins are not in the order of their keys, or outside the shard's range of keys."""
    assert totals.ranges is not None
    index, num_shards = totals.ranges
    keys = order_keys(scan.highs, seed)
    falling = np.flatnonzero(keys[1:] < keys[:-1])
    if falling.size:
        return (
            f"{path}: protein {falling[0] + 1} comes before protein {falling[0]} in the order of seed {seed}"
        )
    for number in (0, len(keys) - 1) if len(keys) else ():
        if int(keys[number]) * num_shards >> KEY_BITS != index:
            return f"{path}: protein {number} belongs to another shard by the order of seed {seed}"
    return ""


def _check_frame(
    path: Path, file: Hdf5File, shard: ShardEntry, manifest: Manifest, totals: _SplitTotals
) -> None:
    """Raise unless the HDF5 file says of itself what the manifest says, and is laid out to be read without HDF5."""
    about = file.attributes()
    index, num_shards = about.get("shard"), about.get("num_shards")
    if type(index) is not int or type(num_shards) is not int:
        raise FormatError(f"{path}: no readable shard (it does not say which one it is): {_REMEDY}")
    before, of_all = totals.ranges or (-1, num_shards)
    if not before < index < num_shards == of_all:
        raise FormatError(
            f"{path}: is shard {index} of {num_shards}, after shard {before} of {of_all}; they rise: {_REMEDY}"
        )
    totals.ranges = index, num_shards
    tokens = file.dataset("tokens")
    expected = {
        "format": shards.FORMAT,
        "split": shard.split,
        "window": manifest.window,
        "vocabulary": " ".join(VOCABULARY.tokens),
        "fingerprint": VOCABULARY.fingerprint,
        "layout": ("|u1", (shard.windows, manifest.window), (), ()),
        "offset": shard.offset,
        "format_version": shards.FORMAT_VERSION,
    }
    found = {name: about.get(name) for name in expected if name not in ("layout", "offset")}
    layout = tokens.dtype, tokens.shape, tokens.chunks, tokens.filters
    found |= {"layout": layout, "offset": tokens.address}
    for name, value in expected.items():
        if found[name] != value:
            raise FormatError(f"{path}: its {name} is {found[name]}, not {value}: {_REMEDY}")


def _check_apart(path: Path, hashes: np.ndarray, held: dict[str, np.ndarray]) -> None:
    """Raise if a protein of this shard, by its hash, lies in one of the splits read before, `int64 (P,)` sorted each."""
    for other, known in held.items():
        places = np.searchsorted(known, hashes)
        inside = np.flatnonzero(places < len(known))
        both = inside[known[places[inside]] == hashes[inside]]
        if both.size:
            raise FormatError(
                f"{path}: protein {both[0]} lies in the split {other!r} too ({both.size} such in this shard); splits must be apart: prepare the dataset again"
            )


def _compare_split(place: Path, split: str, manifest: Manifest, totals: _SplitTotals) -> None:
    """Raise unless the manifest says of the split what its shards hold."""
    stats, counts = manifest.splits[split], totals.pairs.sum(axis=0)
    residues = counts[: VOCABULARY.num_residues].tolist()
    _check_equal(place, f"splits.{split}.sequences", stats.sequences, int(counts[_BOS]))
    _check_equal(place, f"splits.{split}.residues", stats.residues, sum(residues))
    _check_equal(place, f"splits.{split}.tokens", stats.tokens, int(counts.sum() - counts[_PAD]))
    if not _has_cut_tail(manifest):  # the length of a protein that was cut is not known
        found = split_histogram(totals.lengths)
        _check_equal(place, f"splits.{split}.length_histogram", stats.length_histogram, found)
    if split == "train":
        letters = VOCABULARY.tokens[: VOCABULARY.num_residues]
        found = dict(zip(letters, residues, strict=True))
        _check_equal(place, "residue_counts", manifest.residue_counts, found)


def _check_ngrams(folder: Path, manifest: Manifest, totals: _SplitTotals) -> None:
    """Raise unless the n-gram counts are those of train: orders 1 and 2 as counted, 3 and 4 by their sums over an end.

    Where tails were dropped they are counted all the same, so that only the sums can be compared.
    """
    path = folder / manifest.ngrams.file
    if hash_file(path)[0] != manifest.ngrams.sha256:
        raise FormatError(f"{path}: its SHA-256 is not the manifest's: {_REMEDY}")
    counts = read_ngrams(path).orders
    inside = totals.pairs.copy()
    inside[_EOS] = inside[_PAD] = 0
    expected = {1: totals.pairs.sum(axis=0), 2: inside}
    expected[1][_PAD] = 0
    if _has_cut_tail(manifest):
        expected = {}
    wrong = [order for order, array in expected.items() if not np.array_equal(counts[order], array)]
    wrong += [order for order in ORDERS[1:] if not _is_marginal(counts[order], counts[order - 1])]
    if wrong:
        raise FormatError(f"{path}: order{wrong[0]} does not count the proteins of train; prepare it again")


def _is_marginal(counts: np.ndarray, shorter: np.ndarray) -> bool:
    """Return whether n-gram counts sum to those of one order less over the last token, and over the first."""
    followed, preceded = shorter.copy(), shorter.copy()
    followed[..., _EOS] = preceded[_BOS] = 0
    return np.array_equal(counts.sum(axis=-1), followed) and np.array_equal(counts.sum(axis=0), preceded)


def _has_cut_tail(manifest: Manifest) -> bool:
    """Return whether the last windows were dropped where they were not full, instead of padded."""
    return manifest.options.get("tail") == "drop"
