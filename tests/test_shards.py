"""Shards, manifest and n-gram counts: what is written is what is read, and damage is always seen."""

from __future__ import annotations

import errno
import hashlib
import json
import multiprocessing
import os
import pickle
import resource
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from protperf.formats import FormatError, manifest, ngrams
from protperf.formats.hdf5_reading import Hdf5File
from protperf.formats.joined_shards import JoinedShards
from protperf.formats.manifest import Manifest, RecordCounts, SplitStats, read_manifest, write_manifest
from protperf.formats.ngrams import NgramCounter, read_ngrams, write_ngrams
from protperf.formats.open_files import OpenFiles
from protperf.formats.shard_writer import shard_name, write_shard
from protperf.formats.shards import ShardSet
from protperf.vocab import VOCABULARY

WINDOW = 16


def random_windows(num_windows: int, seed: int, window: int = WINDOW) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 26, (num_windows, window), np.uint8)


def make_dataset(
    folder: Path, shard_sizes: list[int], split: str = "train", window: int = WINDOW
) -> np.ndarray:
    """Write a dataset of random windows; return them all, `uint8 (N, W)`."""
    folder.mkdir(exist_ok=True)
    parts = [random_windows(size, seed, window) for seed, size in enumerate(shard_sizes)]
    names = [shard_name(split, index, len(parts)) for index in range(len(parts))]
    entries = [
        write_shard(folder / name, part, split=split, index=index, num_shards=len(parts))
        for index, (name, part) in enumerate(zip(names, parts, strict=True))
    ]
    windows = np.concatenate(parts)
    stats = SplitStats(1, windows.size - 2, windows.size, len(windows), {"1": 1})
    written = Manifest(
        protperf_version="0",
        window=window,
        seed=0,
        release="",
        options={},
        inputs=[],
        counts=RecordCounts(1, 1, 1, {}, {}, 0, 0, 0, 0, 0),
        splits={split: stats},
        residue_counts={},
        shards=entries,
        ngrams=write_ngrams(folder / "ngrams.h5", NgramCounter().counts()),
        digest=manifest.dataset_digest(entries),
    )
    write_manifest(folder, written)
    return windows


def edit_manifest(folder: Path, **changes: object) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_shard_is_an_ordinary_hdf5_file(tmp_path: Path):
    windows = random_windows(5, seed=1)
    path = tmp_path / shard_name("valid", 2, 7)
    entry = write_shard(path, windows, split="valid", index=2, num_shards=7)
    assert path.name == "valid-00002-of-00007.h5"
    with h5py.File(path) as file:
        tokens = file["tokens"]
        np.testing.assert_array_equal(tokens[:], windows)
        assert tokens.dtype == np.uint8
        assert tokens.chunks is None
        assert tokens.compression is None
        assert tokens.id.get_offset() == entry.offset
        attributes = dict(file.attrs)
    assert attributes["vocabulary"].split() == list(VOCABULARY.tokens)
    assert attributes["fingerprint"] == VOCABULARY.fingerprint
    assert (attributes["format"], attributes["format_version"]) == ("protperf-shard", 1)
    assert (attributes["split"], attributes["shard"], attributes["num_shards"]) == ("valid", 2, 7)
    assert attributes["window"] == WINDOW


def test_entry_describes_the_bytes(tmp_path: Path):
    windows = random_windows(5, seed=1)
    entry = write_shard(tmp_path / "a.h5", windows, split="train", index=0, num_shards=1)
    data = (tmp_path / "a.h5").read_bytes()
    assert data[entry.offset : entry.offset + windows.size] == windows.tobytes()
    assert (entry.file, entry.windows, entry.bytes) == ("a.h5", 5, len(data))
    assert entry.sha256 == hashlib.sha256(data).hexdigest()


def test_equal_windows_give_equal_bytes(tmp_path: Path):
    for name in ("a.h5", "b.h5"):
        write_shard(tmp_path / name, random_windows(9, seed=3), split="train", index=0, num_shards=1)
    assert (tmp_path / "a.h5").read_bytes() == (tmp_path / "b.h5").read_bytes()


def test_disk_that_takes_no_more_leaves_nothing_and_names_the_file(tmp_path: Path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 15, limits[1]))
    try:
        with pytest.raises(OSError, match=r"full\.h5") as error:
            write_shard(
                tmp_path / "full.h5", random_windows(4096, seed=3), split="train", index=0, num_shards=1
            )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert error.value.errno == errno.EFBIG
    assert list(tmp_path.iterdir()) == []


def test_set_reads_every_window_in_shard_order(tmp_path: Path):
    windows = make_dataset(tmp_path, [3, 1, 5])
    shard_set = ShardSet(tmp_path, "train")
    assert len(shard_set) == 9
    assert shard_set.window == WINDOW
    for index, window in enumerate(windows):
        read = shard_set.read(index)
        assert read.dtype == np.uint8
        assert read.flags.writeable
        np.testing.assert_array_equal(read, window)
    order = np.array([8, 0, 3, 3, 4, 2])
    np.testing.assert_array_equal(shard_set.read_many(order), windows[order])
    shard_set.verify()


@pytest.mark.parametrize("index", [-1, 9, 10**9])
def test_window_out_of_range_is_an_index_error(tmp_path: Path, index: int):
    make_dataset(tmp_path, [3, 1, 5])
    with pytest.raises(IndexError, match=str(index)):
        ShardSet(tmp_path, "train").read(index)


@pytest.mark.parametrize("length", [1, 2, 4, 8, 16])
def test_shorter_windows_tile_the_stored_ones(tmp_path: Path, length: int):
    windows = make_dataset(tmp_path, [3, 1, 5])
    shard_set = ShardSet(tmp_path, "train", window=length)
    assert shard_set.window == length
    assert len(shard_set) == 9 * WINDOW // length
    pieces = windows.reshape(-1, length)
    np.testing.assert_array_equal(shard_set.read_many(range(len(shard_set))), pieces)
    order = np.random.default_rng(0).permutation(len(shard_set))
    np.testing.assert_array_equal(shard_set.read_many(order), pieces[order])
    with pytest.raises(IndexError):
        shard_set.read(len(shard_set))
    shard_set.verify()


@pytest.mark.parametrize("length", [3, 15, 17, 32])
def test_windows_that_do_not_tile_are_refused_in_one_line(tmp_path: Path, length: int):
    make_dataset(tmp_path, [1])
    with pytest.raises(
        ValueError, match=f"windows of 16 tokens cannot be cut into windows of {length}; allowed: .* 16$"
    ):
        ShardSet(tmp_path, "train", window=length)


def test_only_the_part_asked_for_is_read(tmp_path: Path):
    make_dataset(tmp_path, [3])
    (entry,) = ShardSet(tmp_path, "train").manifest.shards
    victim = tmp_path / entry.file
    content = bytearray(victim.read_bytes())
    content[entry.offset + 5] = 200
    victim.write_bytes(content)
    with pytest.raises(FormatError, match="window 1 holds 200"):
        ShardSet(tmp_path, "train", window=4).read(1)
    for index in (0, 2, 3):
        ShardSet(tmp_path, "train", window=4).read(index)


def test_sets_may_share_one_limit_of_open_files(tmp_path: Path):
    files = OpenFiles(limit=3)
    parts = [make_dataset(tmp_path / name, [1] * 5) for name in ("a", "b")]
    sets = [ShardSet(tmp_path / name, "train", files=files) for name in ("a", "b")]
    for _ in range(2):
        for index in range(5):
            for windows, shard_set in zip(parts, sets, strict=True):
                np.testing.assert_array_equal(shard_set.read(index), windows[index])
                assert len(files._descriptors) <= 3


def test_joined_sets_are_numbered_through(tmp_path: Path):
    parts = [make_dataset(tmp_path / str(n), sizes) for n, sizes in enumerate([[3, 1], [5], [2, 2, 1]])]
    joined = JoinedShards([ShardSet(tmp_path / str(n), "train") for n in range(3)])
    assert (len(joined), joined.sizes, joined.window) == (14, [4, 5, 5], WINDOW)
    windows = np.concatenate(parts)
    order = np.random.default_rng(0).permutation(14)
    np.testing.assert_array_equal(joined.read_many(order), windows[order])
    np.testing.assert_array_equal(joined.read_many([13, 0, 13]), windows[[13, 0, 13]])
    for index in (-1, 14):
        with pytest.raises(IndexError):
            joined.read_many([0, index])


def test_sets_of_two_windows_are_joined_when_cut_to_one(tmp_path: Path):
    parts = [make_dataset(tmp_path / "a", [3]), make_dataset(tmp_path / "b", [2], window=24)]
    with pytest.raises(ValueError, match=r"b: windows of 24 .*/a have 16; .* data.context_length=8$"):
        JoinedShards([ShardSet(tmp_path / name, "train") for name in "ab"])
    joined = JoinedShards([ShardSet(tmp_path / name, "train", window=8) for name in "ab"])
    pieces = np.concatenate([part.reshape(-1, 8) for part in parts])
    np.testing.assert_array_equal(joined.read_many(range(len(pieces))), pieces)


def _read_all(shard_set: ShardSet) -> bytes:
    return shard_set.read_many(range(len(shard_set))).tobytes()


def _send_all(shard_set: ShardSet, connection: object) -> None:
    connection.send_bytes(_read_all(shard_set))


# forking is what is tested; Python 3.12 warns of it wherever some other test has left a thread
@pytest.mark.filterwarnings("ignore:This process.*multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_another_process_reads_the_same(tmp_path: Path, method: str):
    windows = make_dataset(tmp_path, [3, 1, 5])
    shard_set = ShardSet(tmp_path, "train")
    shard_set.read(0)
    context = multiprocessing.get_context(method)
    ours, theirs = context.Pipe()
    process = context.Process(target=_send_all, args=(shard_set, theirs))
    process.start()
    assert ours.recv_bytes() == windows.tobytes()
    process.join()
    assert process.exitcode == 0
    assert _read_all(shard_set) == windows.tobytes()


def test_pickle_carries_no_open_file(tmp_path: Path):
    windows = make_dataset(tmp_path, [2])
    shard_set = ShardSet(tmp_path, "train")
    shard_set.read(0)
    copy = pickle.loads(pickle.dumps(shard_set))
    shard_set.close()
    np.testing.assert_array_equal(copy.read(1), windows[1])


def test_short_shard_is_refused_before_use(tmp_path: Path):
    make_dataset(tmp_path, [3, 4])
    victim = tmp_path / shard_name("train", 1, 2)
    os.truncate(victim, victim.stat().st_size - 1)
    with pytest.raises(FormatError, match=rf"{victim.name}: \d+ bytes, the manifest says \d+"):
        ShardSet(tmp_path, "train")


def test_missing_shard_is_refused_before_use(tmp_path: Path):
    make_dataset(tmp_path, [3, 4])
    (tmp_path / shard_name("train", 1, 2)).unlink()
    with pytest.raises(FormatError, match=r"train-00001-of-00002\.h5: missing"):
        ShardSet(tmp_path, "train")


def test_shard_cut_while_in_use_is_an_error_and_never_wrong_tokens(tmp_path: Path):
    make_dataset(tmp_path, [3])
    shard_set = ShardSet(tmp_path, "train")
    shard_set.read(0)
    victim = tmp_path / shard_name("train", 0, 1)
    os.truncate(victim, victim.stat().st_size - 5)
    shard_set.read(1)
    with pytest.raises(FormatError, match="ends inside window 2 "):
        shard_set.read(2)


def test_verify_sees_one_changed_bit(tmp_path: Path):
    make_dataset(tmp_path, [3, 4])
    victim = tmp_path / shard_name("train", 1, 2)
    data = bytearray(victim.read_bytes())
    data[-1] ^= 1
    victim.write_bytes(data)
    with pytest.raises(FormatError, match=r"train-00001-of-00002\.h5: its SHA-256"):
        ShardSet(tmp_path, "train").verify()


def test_verify_sees_a_shard_of_another_split(tmp_path: Path):
    make_dataset(tmp_path, [3])
    shards_of_manifest = json.loads((tmp_path / "manifest.json").read_text())["shards"]
    edit_manifest(tmp_path, shards=[{**shards_of_manifest[0], "split": "valid"}])
    with pytest.raises(FormatError, match="train"):
        ShardSet(tmp_path, "valid").verify()


@pytest.mark.parametrize(
    "stored",
    [{"dtype": "i1"}, {"dtype": "<i4"}, {"chunks": (1, WINDOW)}, {"chunks": True, "shuffle": True}],
    ids=str,
)
def test_verify_sees_tokens_that_are_stored_otherwise(tmp_path: Path, stored: dict[str, Any]):
    """Windows are read as the bytes at their place, so what HDF5 would turn into the same numbers will not do."""
    make_dataset(tmp_path, [3])
    path = tmp_path / shard_name("train", 0, 1)
    with h5py.File(path) as file:
        attributes, tokens = dict(file.attrs), file["tokens"][:]
    with h5py.File(path, "w", libver=("earliest", "v108")) as file:
        file.attrs.update(attributes)
        file.create_dataset("tokens", data=tokens, **({"dtype": "u1"} | stored))
    with Hdf5File(path, unreadable="", remedy="") as read:
        offset = read.dataset("tokens").address
    data = path.read_bytes()
    [entry] = read_manifest(tmp_path).shards
    entry = replace(entry, offset=offset, bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    edit_manifest(tmp_path, shards=[asdict(entry)], digest=manifest.dataset_digest([entry]))
    with pytest.raises(
        FormatError, match=r"train-00000-of-00001\.h5: its tokens are stored as .* prepare it again"
    ):
        ShardSet(tmp_path, "train").verify()


@pytest.mark.parametrize("name", ["format", "split"])
def test_a_shard_that_calls_itself_by_an_array_is_refused(tmp_path: Path, name: str):
    make_dataset(tmp_path, [3])
    path = tmp_path / "train-00000-of-00001.h5"
    with h5py.File(path, "r+") as file:
        del file.attrs[name]
        file.attrs[name] = np.arange(3)
    entry = read_manifest(tmp_path).shards[0]
    data = path.read_bytes()
    entry = replace(entry, bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    edit_manifest(tmp_path, shards=[asdict(entry)], digest=manifest.dataset_digest([entry]))
    with pytest.raises(FormatError, match=r"train-00000-of-00001\.h5: holds .*None.*; the manifest says"):
        ShardSet(tmp_path, "train").verify()


def test_split_without_proteins_is_said_with_those_there_are(tmp_path: Path):
    make_dataset(tmp_path, [3])
    with pytest.raises(ValueError, match="'valid' holds no protein; there are: train"):
        ShardSet(tmp_path, "valid")


def test_missing_folder_and_unfinished_dataset_are_told_apart(tmp_path: Path):
    with pytest.raises(FormatError, match="no such dataset folder"):
        read_manifest(tmp_path / "nowhere")
    with pytest.raises(FormatError, match=r"no manifest\.json"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"format": "other"}', '{"shards": []}', "\xff"])
def test_foreign_manifest_is_refused_in_one_line(tmp_path: Path, text: str):
    (tmp_path / "manifest.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(FormatError) as caught:
        read_manifest(tmp_path)
    assert "\n" not in str(caught.value)
    assert str(tmp_path / "manifest.json") in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format_version": 2}, "version 2; this protperf reads 1 to 1"),
        ({"format_version": "1"}, "version '1'"),
        ({"fingerprint": "0" * 64}, "another vocabulary"),
        ({"counts": {}}, "damaged manifest"),
        ({"shards": [{"file": "train-00000-of-00001.h5"}]}, "damaged manifest"),
        ({"splits": []}, "damaged manifest"),
    ],
)
def test_manifest_that_does_not_fit_is_refused(tmp_path: Path, change: dict[str, object], message: str):
    make_dataset(tmp_path, [1])
    edit_manifest(tmp_path, **change)
    with pytest.raises(ValueError, match=message):
        read_manifest(tmp_path)


def test_manifest_survives_the_round_trip_and_keys_of_later_versions(tmp_path: Path):
    make_dataset(tmp_path, [2, 1])
    before = read_manifest(tmp_path)
    edit_manifest(tmp_path, invented_later=1)
    assert read_manifest(tmp_path) == before
    again = tmp_path / "again"
    again.mkdir()
    write_manifest(again, before)
    assert read_manifest(again) == before


def test_digest_is_the_hash_of_a_sha256sum_listing(tmp_path: Path):
    make_dataset(tmp_path, [2, 1])
    names = sorted(path.name for path in tmp_path.glob("train-*.h5"))
    listing = "".join(
        f"{hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()}  {name}\n" for name in names
    )
    assert read_manifest(tmp_path).digest == hashlib.sha256(listing.encode()).hexdigest()


def protein(residues: str) -> np.ndarray:
    return np.array([VOCABULARY.bos, *VOCABULARY.encode(residues), VOCABULARY.eos], np.uint8)


def test_ngrams_of_two_proteins_counted_by_hand():
    counter = NgramCounter()
    counter.add(np.concatenate([protein("MKK"), protein("M")]))
    counts = counter.counts()
    m, k = VOCABULARY.encode("MK").tolist()
    bos, eos = VOCABULARY.bos, VOCABULARY.eos
    expected = {
        1: {(bos,): 2, (m,): 2, (k,): 2, (eos,): 2},
        2: {(bos, m): 2, (m, k): 1, (k, k): 1, (k, eos): 1, (m, eos): 1},
        3: {(bos, m, k): 1, (m, k, k): 1, (k, k, eos): 1, (bos, m, eos): 1},
        4: {(bos, m, k, k): 1, (m, k, k, eos): 1},
    }
    for order, entries in expected.items():
        found = {
            place: int(counts.orders[order][place])
            for place in zip(*counts.orders[order].nonzero(), strict=True)
        }
        assert found == entries


@pytest.mark.parametrize("block", [1, 2, 3, 4, 5, 64, 1 << 20])
def test_ngrams_do_not_depend_on_blocks(block: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ngrams, "_BLOCK_TOKENS", block)
    generator = np.random.default_rng(0)
    proteins = ["".join(generator.choice(list("ACDX"), length)) for length in (1, 2, 3, 40, 1, 1, 17)]
    stream = np.concatenate([protein(residues) for residues in proteins])
    counter = NgramCounter()
    counter.add(stream)
    counts = counter.counts()
    for order in ngrams.ORDERS:
        expected: Counter[tuple[int, ...]] = Counter()
        for residues in proteins:
            tokens = protein(residues).tolist()
            expected.update(tuple(tokens[i : i + order]) for i in range(len(tokens) - order + 1))
        found = {
            place: int(counts.orders[order][place])
            for place in zip(*counts.orders[order].nonzero(), strict=True)
        }
        assert found == dict(expected)


def test_ngram_file_comes_back_and_is_refused_when_damaged(tmp_path: Path):
    counter = NgramCounter()
    counter.add(protein("MKWVTFISLL"))
    counts = counter.counts()
    path = tmp_path / "ngrams.h5"
    entry = write_ngrams(path, counts)
    assert entry.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    for order, array in read_ngrams(path).orders.items():
        np.testing.assert_array_equal(array, counts.orders[order])
    os.truncate(path, entry.bytes // 2)
    with pytest.raises(FormatError, match=r"ngrams\.h5"):
        read_ngrams(path)
    with pytest.raises(FormatError, match="absent"):
        read_ngrams(tmp_path / "absent.h5")
    write_shard(path, random_windows(1, seed=0), split="train", index=0, num_shards=1)
    with pytest.raises(FormatError, match="protperf-shard"):
        read_ngrams(path)


@pytest.mark.parametrize(
    "stored", [{}, {"chunks": True}, {"compression": "gzip"}, {"chunks": (5,), "compression": 9}], ids=str
)
def test_counts_are_read_however_they_are_stored(tmp_path: Path, stored: dict[str, object]):
    counter = NgramCounter()
    counter.add(protein("MKWVTFISLL"))
    counts, path = counter.counts(), tmp_path / "ngrams.h5"
    write_ngrams(path, counts)
    with h5py.File(path, "r+") as file:
        for order, array in counts.orders.items():
            del file[f"order{order}"]
            chunks = stored.get("chunks")
            file.create_dataset(
                f"order{order}",
                data=array,
                **stored | ({"chunks": chunks * order} if isinstance(chunks, tuple) else {}),
            )
    for order, array in read_ngrams(path).orders.items():
        np.testing.assert_array_equal(array, counts.orders[order])
    with h5py.File(path, "r+") as file:
        del file["order2"]
        file.create_dataset("order2", data=counts.orders[2], fletcher32=True)
    with pytest.raises(FormatError, match=r"entry 'order2' is packed by filters \(3,\)"):
        read_ngrams(path)


def test_a_byte_that_is_no_token_is_named_by_window(tmp_path: Path):
    make_dataset(tmp_path, [3])
    windows = ShardSet(tmp_path, "train")
    (entry,) = windows.manifest.shards_of("train")
    path = tmp_path / entry.file
    content = bytearray(path.read_bytes())
    content[entry.offset + windows.window + 2] = 200
    path.write_bytes(content)
    windows.read(0)
    with pytest.raises(FormatError, match=rf"{entry.file}: window 1 holds 200, which is no token: damaged"):
        windows.read(1)
