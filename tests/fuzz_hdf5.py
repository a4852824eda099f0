"""Whole datasets and embedding files, and edits of them that reach what lies behind checksums."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

import h5py
import numpy as np
from fuzz_edits import PLACES, Edit, at, dump, edit_bytes, edit_json

from protperf.formats.embedding_merge import WRITERS
from protperf.formats.embeddings import Embedding, EmbeddingInfo
from protperf.formats.hdf5_checksum import lookup3_of
from protperf.formats.manifest import Manifest, RecordCounts, SplitStats, dataset_digest, write_manifest
from protperf.formats.ngrams import NgramCounter, write_ngrams
from protperf.formats.shard_writer import shard_name, write_shard
from protperf.vocab import VOCABULARY

KEPT = Path(__file__).parent / "kept"
HDF5_WORDS = (
    *(
        b"OHDR\2\0",
        b"TREE\0\0",
        b"SNOD\1\0",
        b"HEAP\0",
        b"GCOL\1",
        b"FRHP\0",
        b"BTHD\0",
        b"OCHK",
        b"\xff" * 8,
        bytes(8),
    ),
    b"\x19\1\1\0\x10\0\0\0",  # a text of variable length
    b"\x10\x08\0\0\x08\0\0\0",  # an integer of 8 bytes
    b"\x40\0\0\0\0\0",  # an external link
)
_CHECKED = (b"\x89HDF\r\n\x1a\n\2", b"FRHP", b"BTHD", b"BTLF", b"BTIN", b"FHIB", b"OHDR\2")

WINDOWS_TEXT = "MKTAYI MSDNQL ACDEFGHIKLMNP"
_STREAM = b"".join(
    bytes([VOCABULARY.bos, *VOCABULARY.encode(text), VOCABULARY.eos]) for text in WINDOWS_TEXT.split()
)
WINDOWS = np.frombuffer(_STREAM.ljust(48, bytes([VOCABULARY.pad])), np.uint8).reshape(3, 16)
"""Of each of the two shards."""


def whole_dataset(folder: Path) -> Path:
    """Write a dataset of two shards that `prepare --check` takes, but for the order of its proteins."""
    folder.mkdir(parents=True)
    counter = NgramCounter()
    counter.add(np.frombuffer(_STREAM * 2, np.uint8))
    entries = [
        write_shard(folder / shard_name("train", index, 2), WINDOWS, split="train", index=index, num_shards=2)
        for index in (0, 1)
    ]
    empty = {split: SplitStats(0, 0, 0, 0, {}) for split in ("valid", "test", "ood")}
    stats = SplitStats(6, 50, 62, 6, {"6": 4, "12": 2})
    letters = VOCABULARY.tokens[: VOCABULARY.num_residues]
    tokens = np.bincount(np.frombuffer(_STREAM * 2, np.uint8), minlength=36).tolist()
    write_manifest(
        folder,
        Manifest(
            protperf_version="0",
            window=16,
            seed=0,
            release="r",
            options={"duplicates": "keep", "tail": "pad"},
            inputs=[],
            counts=RecordCounts(6, 6, 50, {}, {}, 0, 0, 0, 0, 0),
            splits={"train": stats, **empty},
            residue_counts=dict(zip(letters, tokens, strict=False)),
            shards=entries,
            ngrams=write_ngrams(folder / "ngrams.h5", counter.counts()),
            digest=dataset_digest(entries),
        ),
    )
    return folder


def whole_embeddings(folder: Path) -> list[Path]:
    """Write embedding files of several kinds, small ones as two shards; return them and the kept ones of version 1."""
    folder.mkdir(parents=True)
    made = []
    for form, kind, keys, count, shards in (
        ("h5", "per_tok", "number", 6, 2),
        ("h5", "mean", "sequence", 6, 2),
        ("h5", "mean", "number", 400, 1),
        ("npz", "per_tok", "number", 6, 2),
        ("npz", "mean", "number", 6, 2),
    ):
        for shard in range(shards):
            info = EmbeddingInfo(
                kind, 4, "best.ckpt", "0" * 64, "masked", keys=keys, shard=shard, num_shards=shards
            )
            path = folder / f"{kind}_{keys}_{shard}_of_{shards}.{form}"
            with WRITERS[form](path, info) as writer:
                for number in range(shard, count, shards):
                    name = "nul\0id" if number == 1 and form == "h5" else f"p{number}"
                    array = np.full(info.shape(number % 5 + 1), number, np.float32)
                    each = Embedding(name, f"{name} a protein", number % 5 + 1, array, f"{number:064x}_5")
                    writer.add(number, each)
            made.append(path)
    return [*made, *sorted(KEPT.glob("embeddings_v1_*.h5"))]


def other_shards(path: Path) -> list[Path]:
    """Return the other of two shards, none of a whole file."""
    begin, _, end = path.name.rpartition("_of_2")
    return [path.with_name(f"{begin[:-1]}{1 - int(begin[-1])}_of_2{end}")] if begin else []


def edit_hdf5(data: bytes, chosen: Sequence[Edit]) -> bytes:
    """Edit a file and set the checksums right: of most hostile files they are.

    Half of the edits are of bytes that are not 0: nine in ten bytes of a small file are, most of them of no use.
    """
    used = np.flatnonzero(np.frombuffer(data, np.uint8))
    placed = [
        (kind, place if place & 1 else place_of(int(used[at(place, len(used))]), len(data)), value, width)
        for kind, place, value, width in chosen
    ]
    edited = edit_bytes(data, placed, HDF5_WORDS)
    if len(edited) == len(data) and chosen[0][3]:
        edited = _with_right_checksums(data, edited)
    return edited


def edit_shards(whole: Path, seed: int, chosen: Sequence[Edit], folder: Path) -> None:
    """Copy a dataset with a shard, the n-gram counts, or the manifest edited, and the manifest made to fit."""
    for path in whole.iterdir():
        shutil.copyfile(path, folder / path.name)
    manifest = json.loads((folder / "manifest.json").read_bytes())
    entry = ([*manifest["shards"], manifest["ngrams"]])[seed // 2 % 3]
    path = folder / entry["file"]
    if seed & 16 or seed & 32:
        data = edit_hdf5(path.read_bytes(), chosen)
        path.write_bytes(data)
        if seed & 64:
            entry["bytes"], entry["sha256"] = len(data), hashlib.sha256(data).hexdigest()
            manifest["digest"] = _digest_of(manifest)
    if seed & 32 or not seed & 16:
        manifest = edit_json(manifest, chosen)
    text = dump(manifest)
    (folder / "manifest.json").write_bytes(edit_bytes(text, chosen) if seed & 240 == 0 else text)


def hostile_hdf5(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield embedding files with what HDF5 allows and ours never hold: each says a name and lies in the folder."""
    (folder / "other").mkdir(parents=True)
    secret = folder / "other" / "secret.h5"
    with h5py.File(secret, "w") as file:
        file.create_dataset("0000000000", data=np.ones(4, np.float32)).attrs.update(
            {"original_id": "s", "num_residues": 1}
        )
    (folder / "other" / "raw").write_bytes(bytes(range(16)))
    whole = KEPT / "embeddings_v1_mean.h5"
    float32 = np.float32

    def external(file: h5py.File) -> None:
        file["0000000000"] = h5py.ExternalLink(str(secret), "/0000000000")

    def soft(file: h5py.File) -> None:
        file["0000000000"] = h5py.SoftLink("/0000000000")

    def storage(file: h5py.File) -> None:
        file.create_dataset("0000000000", (3,), float32, external=[(str(folder / "other" / "raw"), 0, 12)])

    def virtual(file: h5py.File) -> None:
        layout = h5py.VirtualLayout((3,), float32)
        layout[:] = h5py.VirtualSource(str(secret), "0000000000", (4,))[:3]
        file.create_virtual_dataset("0000000000", layout)

    def terabytes(file: h5py.File) -> None:
        file.create_dataset("0000000000", (1 << 40,), float32)

    def packed(file: h5py.File) -> None:
        file.create_dataset("0000000000", (1 << 28,), float32, chunks=(1 << 28,), compression="gzip")

    def group(file: h5py.File) -> None:
        file.create_group("0000000000")

    for change in (external, soft, storage, virtual, terabytes, packed, group):
        path = folder / f"{change.__name__}.h5"
        shutil.copyfile(whole, path)
        with h5py.File(path, "a") as file:
            about = dict(file["0000000000"].attrs)
            del file["0000000000"]
            change(file)
            if "0000000000" in file and change not in (external, soft):
                file["0000000000"].attrs.update(about)
                file["0000000000"].attrs["original_id"] = "x"
        yield change.__name__, path


def place_of(index: int, count: int) -> int:
    """Return the first place of an edit that is at a thing; see `at`."""
    return -(-index * PLACES // count)


def _digest_of(manifest: dict) -> str:
    lines = sorted((shard["file"], shard["sha256"]) for shard in manifest["shards"])
    return hashlib.sha256("".join(f"{digest}  {file}\n" for file, digest in lines).encode()).hexdigest()


def _with_right_checksums(whole: bytes, edited: bytes) -> bytes:
    data = bytearray(edited)
    for start, end in _checked_parts(whole):
        if data[start : end + 4] == whole[start : end + 4]:
            continue
        data[end : end + 4] = lookup3_of(bytes(data[start:end])).to_bytes(4, "little")
    return bytes(data)


@lru_cache(maxsize=32)
def _checked_parts(whole: bytes) -> list[tuple[int, int]]:
    """Return start and end of all that has a checksum behind it."""
    found = []
    for mark in _CHECKED:
        start = whole.find(mark)
        while start >= 0:
            found += [(start, end) for end in [_end_of(whole, start)] if end]
            start = whole.find(mark, start + 1)
    return found


def _end_of(whole: bytes, start: int) -> int:
    """Return where the checksum of a structure stands, 0 where it has none."""
    for size in _sizes_of(whole[start : start + 32]):
        if (
            lookup3_of(whole[start : start + size]).to_bytes(4, "little")
            == whole[start + size : start + size + 4]
        ):
            return start + size
    return 0


def _sizes_of(head: bytes) -> Sequence[int]:
    """Return the sizes that a structure may have, by its first bytes."""
    mark = head[:4]
    if mark == b"OHDR":
        place = 6 + 16 * bool(head[5] & 0x20) + 4 * bool(head[5] & 0x10)
        width = 1 << (head[5] & 3)
        return [place + width + int.from_bytes(head[place : place + width], "little")]
    if mark in (b"BTLF", b"FHIB"):
        return range(17, 2048, 11) if mark == b"BTLF" else range(17, 1024, 8)
    return {b"FRHP": [142], b"BTHD": [34], b"BTIN": range(16, 2048)}.get(mark, [44])
