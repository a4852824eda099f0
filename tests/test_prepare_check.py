"""The check of a dataset: a whole one passes, and every kind of damage is named in one line."""

from __future__ import annotations

import hashlib
import json
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from prepared import SAMPLE, random_records, read_fasta, read_proteins, write_fasta

from data_prep.check import check_dataset
from data_prep.check.scan import ShardScan
from data_prep.options import PrepareOptions
from data_prep.prepare import prepare
from protperf.formats import FormatError

RESIDUE, PAD, BOS, EOS, MASK = 0, 26, 27, 28, 29
"""Token numbers as docs/formats.md lists them; residue 0 is A."""


@pytest.fixture(scope="module")
def sample_dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sample in windows of 512 and several shards."""
    out = tmp_path_factory.mktemp("sample") / "data"
    prepare([str(SAMPLE)], out, PrepareOptions(window=512, shard_windows=500, valid=0.05, test=0.05))
    return out


@pytest.fixture(scope="module")
def even_dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """300 proteins of 30 residues, so that one may stand in another's place."""
    folder = tmp_path_factory.mktemp("even")
    fasta = write_fasta(folder / "a.fasta", random_records([30] * 300))
    prepare([fasta], folder / "data", PrepareOptions(window=64, shard_windows=40, valid=0.2, test=0.2))
    return folder / "data"


@pytest.fixture
def sample(sample_dataset: Path, tmp_path: Path) -> Path:
    return shutil.copytree(sample_dataset, tmp_path / "copy")


@pytest.fixture
def even(even_dataset: Path, tmp_path: Path) -> Path:
    return shutil.copytree(even_dataset, tmp_path / "copy")


def load(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "manifest.json").read_text())


def save(folder: Path, manifest: dict[str, Any]) -> None:
    """Write a manifest whose sizes, hashes and digest are those of the files, as docs/formats.md says."""
    for entry in [*manifest["shards"], manifest["ngrams"]]:
        data = (folder / entry["file"]).read_bytes()
        entry["bytes"], entry["sha256"] = len(data), hashlib.sha256(data).hexdigest()
    lines = sorted((entry["file"], entry["sha256"]) for entry in manifest["shards"])
    digest = hashlib.sha256("".join(f"{sha256}  {file}\n" for file, sha256 in lines).encode())
    manifest["digest"] = digest.hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest))


def first_shard(folder: Path, split: str = "train") -> Path:
    return folder / next(shard["file"] for shard in load(folder)["shards"] if shard["split"] == split)


def edit_tokens(folder: Path, edit: Callable[[np.ndarray], None], split: str = "train") -> None:
    """Change the tokens of a split's first shard, one flat array, and make hashes and sizes fit again."""
    with h5py.File(first_shard(folder, split), "r+") as file:
        tokens = file["tokens"][:]
        edit(tokens.reshape(-1))
        file["tokens"][:] = tokens
    save(folder, load(folder))


def refusal(folder: Path) -> str:
    """Return the one line with which the check refuses the dataset."""
    with pytest.raises(FormatError) as caught:
        check_dataset(folder)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"{folder}/")
    return message.removeprefix(f"{folder}/")


def test_whole_dataset_passes_and_is_counted(sample_dataset: Path):
    result = check_dataset(sample_dataset)
    proteins = read_proteins(sample_dataset)
    assert result.sequences == sum(map(len, proteins.values()))
    assert result.residues == sum(len(protein) for each in proteins.values() for protein in each)
    files = list(sample_dataset.glob("*.h5"))
    assert result.shards == len(files) - 1 > 4
    assert result.bytes == sum(path.stat().st_size for path in files)


@pytest.mark.parametrize("window", [1, 2, 16])
def test_any_window_passes(tmp_path: Path, window: int):
    fasta = write_fasta(tmp_path / "a.fasta", random_records([*range(1, 36), 160, 161]) * 2)
    for duplicates in ("drop", "keep"):
        out = tmp_path / duplicates
        prepare([fasta], out, PrepareOptions(window=window, shard_windows=64, duplicates=duplicates))
        check_dataset(out)


def test_only_split_passes(tmp_path: Path):
    fasta = write_fasta(tmp_path / "a.fasta", random_records([5] * 9))
    prepare([fasta], tmp_path / "out", PrepareOptions(window=16, valid=0.999999, test=0))
    assert check_dataset(tmp_path / "out").sequences == 9
    assert load(tmp_path / "out")["splits"]["train"]["sequences"] == 0


@pytest.mark.parametrize("block", [1, 2, 3, 29, 64, 1000, 1 << 20])
def test_scan_counts_the_same_whatever_the_blocks(sample_dataset: Path, block: int):
    with h5py.File(first_shard(sample_dataset, "valid")) as file:
        tokens = file["tokens"][:].reshape(-1)
    scan = ShardScan(512, cut_tail=False)
    for start in range(0, len(tokens), block):
        scan.add(tokens[start : start + block])
    scan.finish()
    proteins = read_proteins(sample_dataset)["valid"]
    assert scan.fault == ""
    digests = [
        hashlib.blake2b(bytes([BOS]) + bytes(encode(protein)), digest_size=16).digest()
        for protein in proteins
    ]
    assert scan.highs.tolist() == [int.from_bytes(digest[:8], "big") for digest in digests]
    assert scan.lows.tolist() == [int.from_bytes(digest[8:], "big") for digest in digests]
    assert scan.lengths.sum() == len(proteins)
    assert scan.counts.tolist() == np.bincount(tokens, minlength=36).tolist()


def encode(protein: str) -> list[int]:
    return ["ACDEFGHIKLMNPQRSTVWYBOUXZJ".index(letter) for letter in protein]


@pytest.mark.parametrize("name", ["train", "ngrams"])
def test_missing_file_is_named(sample: Path, name: str):
    path = first_shard(sample) if name == "train" else sample / "ngrams.h5"
    path.unlink()
    assert refusal(sample).startswith(f"{path.name}: missing")


@pytest.mark.parametrize("name", ["train", "ngrams"])
def test_truncated_file_is_named(sample: Path, name: str):
    path = first_shard(sample) if name == "train" else sample / "ngrams.h5"
    path.write_bytes(path.read_bytes()[:-1])
    assert refusal(sample).startswith(f"{path.name}: {path.stat().st_size} bytes, the manifest says")


@pytest.mark.parametrize("place", [0, 1500, -700_000, -1])
@pytest.mark.parametrize("name", ["train", "ngrams"])
def test_flipped_bit_is_named(sample: Path, name: str, place: int):
    path = first_shard(sample) if name == "train" else sample / "ngrams.h5"
    data = bytearray(path.read_bytes())
    data[place % len(data)] ^= 1
    path.write_bytes(data)
    assert refusal(sample).startswith(f"{path.name}: its SHA-256 is not the manifest's")


def test_first_foreign_token_of_a_damaged_shard_is_placed(sample: Path):
    path = first_shard(sample, "valid")
    offset = next(shard["offset"] for shard in load(sample)["shards"] if shard["file"] == path.name)
    data = bytearray(path.read_bytes())
    data[offset + 3 * 512 + 40] = 200
    path.write_bytes(data)
    assert "(first seen at window 3, token 40: 200 (no token) after " in refusal(sample)


def test_swapped_shards_are_named(sample: Path):
    one, two = first_shard(sample, "train"), first_shard(sample, "test")
    held = one.read_bytes()
    one.write_bytes(two.read_bytes().ljust(len(held), b"\0"))  # so that its windows may lie in it
    two.write_bytes(held)
    assert f"{one.stat().st_size} bytes" in refusal(sample)
    save(sample, load(sample))
    assert refusal(sample).startswith(f"{two.name}: its split is train, not test")


def test_shards_listed_out_of_order_are_named(sample: Path):
    manifest = load(sample)
    shards = manifest["shards"]
    shards[0], shards[1] = shards[1], shards[0]
    save(sample, manifest)
    assert f"{shards[1]['file']}: is shard 0 of" in refusal(sample)


def set_place(place: int, *values: int) -> Callable[[np.ndarray], None]:
    def edit(tokens: np.ndarray) -> None:
        tokens[place : place + len(values)] = values

    return edit


def set_second_start(*values: int) -> Callable[[np.ndarray], None]:
    """Put tokens from the place of the second `<bos>` on."""

    def edit(tokens: np.ndarray) -> None:
        place = np.flatnonzero(tokens == BOS)[1]
        tokens[place : place + len(values)] = values

    return edit


def start_at_the_end(tokens: np.ndarray) -> None:
    """Let a protein begin behind the padding."""
    tokens[-1] = BOS


def open_end(tokens: np.ndarray) -> None:
    """Lengthen the last protein to the end of its window."""
    tokens[np.flatnonzero(tokens == EOS)[-1] :] = RESIDUE


def empty_last_window(tokens: np.ndarray) -> None:
    """Let a protein end early, so that a whole window is padding."""
    tokens[-520] = EOS
    tokens[-519:] = PAD


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (set_place(0, RESIDUE), "begins with A, not <bos>"),
        (set_place(0, PAD), "begins with <pad>, not <bos>"),
        (set_place(512, PAD), "window 1, token 0: <pad> after "),
        (set_place(519, MASK), "window 1, token 7: <mask> after "),
        (set_place(519, 31), "window 1, token 7: <reserved1> after "),
        (set_place(519, 36), "window 1, token 7: 36 (no token) after "),
        (set_place(519, 255), "window 1, token 7: 255 (no token) after "),
        (set_place(519, BOS), "window 1, token 7: <bos> after "),
        (set_place(1, EOS), "window 0, token 1: <eos> after <bos>"),
        (set_place(1, BOS), "window 0, token 1: <bos> after <bos>"),
        (set_second_start(RESIDUE), ": A after <eos>"),
        (set_second_start(EOS), ": <eos> after <eos>"),
        (set_second_start(PAD, BOS), ": <bos> after <pad>"),
        (start_at_the_end, ": <bos> after <pad>"),
        (open_end, ": ends inside a protein"),
        (empty_last_window, " <pad>, a whole window (512) or more"),
    ],
)
def test_tokens_that_are_no_whole_proteins_are_placed(sample: Path, edit: Callable, message: str):
    edit_tokens(sample, edit)
    found = refusal(sample)
    assert found.startswith(f"{first_shard(sample).name}: ")
    assert message in found


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("counts.records", 2799),
        ("counts.accepted", 2801),
        ("counts.residues", 1),
        ("counts.duplicates", 0),
        ("counts.too_short", -1),
        ("counts.skipped", {"gap": 1}),
        ("counts.skipped", []),
        ("splits.train.sequences", "many"),
        ("splits.train.residues", 1_077_000),
        ("splits.valid.residues", 1),
        ("splits.test.tokens", 1),
        ("splits.valid.windows", 1),
        ("splits.valid.length_histogram", {"256": 1}),
        ("splits.train.length_histogram", {}),
        ("splits", {}),
        ("residue_counts", {"A": 1}),
        ("vocabulary", ["A"]),
        ("window", 0),
        ("window", 256),
        ("digest", "0" * 64),
        ("options", None),
        ("shards.0.windows", 1),
        ("shards.0.windows", 0),
        ("shards.0.windows", 10**9),
        ("shards.0.windows", 1.5),
        ("shards.0.offset", 0),
        ("shards.0.offset", 10**12),
        ("shards.0.bytes", 7),
        ("shards.0.sha256", "0" * 64),
        ("shards.0.split", "valid"),
        ("shards.0.split", "other"),
        ("shards.0.file", "../train-00000-of-00005.h5"),
        ("shards.0.file", "other.h5"),
        ("ngrams.sha256", "0" * 64),
        ("ngrams.bytes", 1),
    ],
)
def test_edited_manifest_is_refused(sample: Path, path: str, value: object):
    manifest = load(sample)
    *parents, last = [int(key) if key.isdigit() else key for key in path.split(".")]
    entry = manifest
    for key in parents:
        entry = entry[key]
    assert entry[last] != value
    entry[last] = value
    (sample / "manifest.json").write_text(json.dumps(manifest))
    assert refusal(sample)


@pytest.mark.parametrize(
    ("split", "name"), [("train", "sequences"), ("valid", "sequences"), ("train", "windows")]
)
def test_count_of_a_split_is_named_when_the_sums_agree(sample: Path, split: str, name: str):
    manifest = load(sample)
    manifest["splits"][split][name] += 1
    if name == "sequences":
        manifest["counts"]["duplicates"] -= 1
    (sample / "manifest.json").write_text(json.dumps(manifest))
    assert refusal(sample).startswith(f"manifest.json: splits.{split}.{name} is ")


@pytest.mark.parametrize("place", [(0,), (27, 10), (5, 6, 7), (27, 10, 5, 6), (0, 1, 2, 3), (35, 35, 35)])
def test_wrong_ngram_count_is_named_by_order(sample: Path, place: tuple[int, ...]):
    name = f"order{len(place)}"
    with h5py.File(sample / "ngrams.h5", "r+") as file:
        file[name][place] = file[name][place] + 1
    save(sample, load(sample))
    assert refusal(sample).startswith(f"ngrams.h5: {name} ")


def copy_protein(folder: Path, source: str, target: str, *, to: int) -> None:
    """Put the first protein of a split in the place of protein `to` of another, all of 30 residues."""
    with h5py.File(first_shard(folder, source)) as file:
        protein = file["tokens"][:].reshape(-1)[:32]
    edit_tokens(folder, set_place(32 * to, *protein), target)


@pytest.mark.parametrize(("source", "target"), [("train", "valid"), ("test", "valid"), ("valid", "test")])
def test_protein_in_two_splits_is_named(even: Path, source: str, target: str):
    copy_protein(even, source, target, to=3)
    found = refusal(even)
    assert "splits must be apart" in found
    if source == "train":  # the largest split is read last
        assert found.startswith(f"{first_shard(even).name}: protein 0 lies in the split 'valid' too")


def test_protein_twice_in_a_shard_is_named_unless_copies_are_kept(even: Path):
    copy_protein(even, "valid", "valid", to=1)
    assert refusal(even).startswith(f"{first_shard(even, 'valid').name}: proteins 0 and 1 are the same")
    manifest = load(even)
    manifest["options"]["duplicates"] = "keep"
    save(even, manifest)
    check_dataset(even)


def test_protein_out_of_its_place_is_named(even: Path):
    manifest = load(even)
    manifest["options"]["duplicates"] = "keep"
    save(even, manifest)
    copy_protein(even, "valid", "valid", to=7)
    name = first_shard(even, "valid").name
    assert refusal(even).startswith(f"{name}: protein 7 comes before protein 6 in the order of seed 0")


def test_another_seed_is_not_that_of_the_order(sample: Path):
    manifest = load(sample)
    manifest["seed"] = 1
    save(sample, manifest)
    assert "in the order of seed 1" in refusal(sample)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("format", "other"),
        ("format_version", 2),
        ("split", "test"),
        ("window", 7),
        ("vocabulary", "A C"),
        ("fingerprint", "0"),
        ("shard", 99),
        ("num_shards", 1000),
    ],
)
def test_frame_that_says_something_else_is_named(sample: Path, name: str, value: object):
    path = sample / load(sample)["shards"][1]["file"]
    with h5py.File(path, "r+") as file:
        file.attrs[name] = value
    manifest = load(sample)
    with h5py.File(path) as file:
        manifest["shards"][1]["offset"] = file["tokens"].id.get_offset()
    save(sample, manifest)
    assert refusal(sample).startswith(f"{path.name}: ")


@pytest.mark.parametrize("kind", [{"chunks": (1, 512)}, {"dtype": np.int8}])
def test_shard_that_cannot_be_read_without_hdf5_is_named(sample: Path, kind: dict[str, Any]):
    path = first_shard(sample, "valid")
    with h5py.File(path, "r+") as file:
        tokens = file["tokens"][:]
        del file["tokens"]
        file.create_dataset("tokens", data=tokens, **kind)
        offset = file["tokens"].id.get_offset() or 2048
    path.write_bytes(path.read_bytes() + b"\0" * 4096)
    manifest = load(sample)
    next(shard for shard in manifest["shards"] if shard["file"] == path.name)["offset"] = offset
    save(sample, manifest)
    assert refusal(sample).startswith(f"{path.name}: its layout is ")


def test_file_that_is_no_hdf5_is_named(sample: Path):
    path = first_shard(sample, "valid")
    data = bytearray(path.read_bytes())
    data[:8] = b"not HDF5"
    path.write_bytes(data)
    save(sample, load(sample))
    assert refusal(sample).startswith(f"{path.name}: no readable shard (")


def test_folder_that_is_no_dataset_is_refused(tmp_path: Path):
    with pytest.raises(FormatError, match=r"no manifest\.json"):
        check_dataset(tmp_path)


def test_dropped_tail_may_end_inside_a_protein_and_holds_no_padding():
    tokens = np.array([BOS, 5, 6, EOS, BOS, 7, 8, 9], np.uint8)
    for end in range(1, len(tokens) + 1):
        cut, padded = ShardScan(4, cut_tail=True), ShardScan(4, cut_tail=False)
        for scan in (cut, padded):
            scan.add(tokens[:end])
            scan.finish()
        assert cut.fault == ""
        assert bool(padded.fault) == (end != 4)
        assert int(cut.counts[BOS]) == (1 if end < 5 else 2)
    cut = ShardScan(4, cut_tail=True)
    cut.add(np.array([BOS, 5, EOS, PAD], np.uint8))
    cut.finish()
    assert "<pad>" in cut.fault


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_shards(tmp_path: Path):
    peaks = []
    for copies in (10, 60):
        fasta = write_fasta(tmp_path / "a.fasta", read_fasta(SAMPLE)[:1400] * copies)
        options = PrepareOptions(window=1024, shard_windows=1000, duplicates="keep", valid=0, test=0)
        prepare([fasta], tmp_path / str(copies), options)
        tracemalloc.start()
        result = check_dataset(tmp_path / str(copies))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert result.bytes > 30_000_000
    assert peaks[1] < 1.2 * peaks[0]
