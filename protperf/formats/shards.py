"""Training shards: HDF5 files with one contiguous array of windows, read by `pread` at the offset in the manifest.

A protein is `<bos> residues <eos>`; proteins follow one another and the stream is cut every `window` tokens, so a
protein may run on into the next window. `docs/formats.md` is the specification.

Axes: `N` windows, `W` tokens per window.
"""

from __future__ import annotations

import hashlib
import os
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from protperf.formats import FormatError
from protperf.formats.commit import commit_bytes
from protperf.formats.manifest import SPLITS, Manifest, ShardEntry, read_manifest
from protperf.formats.sizes import hash_file
from protperf.vocab import VOCABULARY, check_fingerprint

FORMAT = "protperf-shard"
FORMAT_VERSION = 1
MAX_OPEN_FILES = 64


def shard_name(split: str, index: int, num_shards: int) -> str:
    """Return a shard's file name.

    >>> shard_name("train", 7, 64)
    'train-00007-of-00064.h5'
    """
    return f"{split}-{index:05d}-of-{num_shards:05d}.h5"


def write_shard(path: Path, windows: np.ndarray, *, split: str, index: int, num_shards: int) -> ShardEntry:
    """Write windows as a shard; equal arguments give equal bytes.

    The file is built in memory and written as plain bytes: a full disk is then an ordinary error, whereas HDF5's own
    writer leaves a file that opens with its full shape.

    Args:
        path: the file, which appears only when it is whole.
        windows: token ids, `uint8 (N, W)`, N at least 1.
        split: name of the split.
        index: place of the shard among the `num_shards` key ranges of its split.
        num_shards: number of key ranges of the split.

    Raises:
        OSError: the file cannot be written; nothing is left under `path`.
    """
    assert windows.dtype == np.uint8
    assert windows.ndim == 2
    assert len(windows) > 0
    attributes = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "split": split,
        "shard": index,
        "num_shards": num_shards,
        "window": windows.shape[1],
        "vocabulary": " ".join(VOCABULARY.tokens),
        "fingerprint": VOCABULARY.fingerprint,
    }
    image, offset = _build_image(windows, attributes)
    commit_bytes(path, image)
    digest = hashlib.sha256(image).hexdigest()
    return ShardEntry(path.name, split, len(windows), offset, len(image), digest)


def _build_image(windows: np.ndarray, attributes: dict[str, Any]) -> tuple[bytes, int]:
    """Return the HDF5 file as bytes, and the offset of the first token in it.

    `("earliest", "v110")` is what every HDF5 since 1.8 reads; `latest` is not.
    """
    with h5py.File(
        "shard", "w", driver="core", backing_store=False, libver=("earliest", "v110"), track_order=False
    ) as file:
        file.attrs.update(attributes)
        dataset = file.create_dataset("tokens", data=windows, track_times=False)
        file.flush()
        return file.id.get_file_image(), dataset.id.get_offset()


class ShardSet:
    """The windows of one split, in the order of its shards.

    Files are opened when first read, at most `MAX_OPEN_FILES` at a time, and reopened in each process: an instance may
    be pickled or forked. One instance serves one thread.

    Attributes:
        manifest: the dataset's manifest.
        split: name of the split.
        window: tokens per window, W.
    """

    def __init__(self, dataset_dir: Path | str, split: str) -> None:
        """Read the manifest and check that each shard is there with its size.

        Raises:
            FormatError: no dataset, or a shard is missing or has another size.
            ValueError: another vocabulary, or no such split.
        """
        self._descriptors: OrderedDict[int, int] = OrderedDict()
        self._pid = os.getpid()
        self.dataset_dir = Path(dataset_dir)
        self.split = split
        self.manifest: Manifest = read_manifest(self.dataset_dir)
        self.window = self.manifest.window
        self._shards = self.manifest.shards_of(split)
        if not self._shards:
            present = [name for name, stats in self.manifest.splits.items() if stats.windows]
            known = split in SPLITS
            state = "holds no protein" if known else "is not known"
            remedy = "; prepare with a larger fraction for it" if known else ""
            raise ValueError(
                f"{self.dataset_dir}: split {split!r} {state}; there are: {' '.join(present)}{remedy}"
            )
        self._ends = np.cumsum([shard.windows for shard in self._shards])
        for shard in self._shards:
            self._check_size(shard)

    def __len__(self) -> int:
        """Return the number of windows."""
        return int(self._ends[-1])

    def read(self, index: int) -> np.ndarray:
        """Return one window, `uint8 (W,)`.

        Raises:
            IndexError: no such window.
            FormatError: the shard is shorter than the manifest says.
        """
        return self.read_many([index])[0]

    def read_many(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return windows in the order asked, `uint8 (N, W)`; errors as `read`."""
        windows = np.empty((len(indices), self.window), np.uint8)
        for index, row in zip(indices, windows, strict=True):
            self._read_into(int(index), row)
        return windows

    def verify(self) -> None:
        """Compare each shard's SHA-256 and attributes with the manifest, reading all bytes.

        Raises:
            FormatError: the first shard that differs, by name.
        """
        for shard in self._shards:
            path = self.dataset_dir / shard.file
            self._check_size(shard)
            if hash_file(path)[0] != shard.sha256:
                raise FormatError(
                    f"{path}: its SHA-256 is not the manifest's: damaged; copy it or prepare it again"
                )
            _check_attributes(path, shard, self.window)

    def close(self) -> None:
        """Close the open files; a later read opens them again."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def _read_into(self, index: int, row: np.ndarray) -> None:
        """Fill `row`, `uint8 (W,)`, with window `index`."""
        if not 0 <= index < len(self):
            raise IndexError(f"{self.dataset_dir}: no window {index} in {self.split!r}; it has {len(self)}")
        number = int(np.searchsorted(self._ends, index, side="right"))
        shard = self._shards[number]
        place = index - int(self._ends[number]) + shard.windows
        count = os.preadv(self._open(number), [row.data], shard.offset + place * self.window)
        if count != self.window:
            raise FormatError(
                f"{self.dataset_dir / shard.file}: ends inside window {place} ({count} of {self.window} tokens): damaged; copy it or prepare it again"
            )
        if row.max() >= len(VOCABULARY):
            raise FormatError(
                f"{self.dataset_dir / shard.file}: window {place} holds {row.max()}, which is no token: damaged; copy it or prepare it again"
            )

    def _open(self, number: int) -> int:
        """Return the descriptor of shard `number`, opened by this process."""
        if self._pid != os.getpid():
            self.close()
            self._pid = os.getpid()
        if number in self._descriptors:
            self._descriptors.move_to_end(number)
            return self._descriptors[number]
        if len(self._descriptors) >= MAX_OPEN_FILES:
            os.close(self._descriptors.popitem(last=False)[1])
        descriptor = os.open(self.dataset_dir / self._shards[number].file, os.O_RDONLY)
        self._descriptors[number] = descriptor
        return descriptor

    def _check_size(self, shard: ShardEntry) -> None:
        """Raise unless the shard is there with the manifest's size."""
        path = self.dataset_dir / shard.file
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            raise FormatError(
                f"{path}: missing, though the manifest names it; copy it or prepare it again"
            ) from None
        if size != shard.bytes:
            raise FormatError(
                f"{path}: {size} bytes, the manifest says {shard.bytes}: damaged; copy it or prepare it again"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_descriptors": OrderedDict()}

    def __del__(self) -> None:
        self.close()


def _check_attributes(path: Path, shard: ShardEntry, window: int) -> None:
    """Raise unless the HDF5 file itself says what the manifest says of it."""
    with h5py.File(path, "r", locking=False) as file:
        found = (file.attrs.get("format"), file.attrs.get("split"), file["tokens"].shape)
        version, offset = int(file.attrs.get("format_version", 0)), file["tokens"].id.get_offset()
        check_fingerprint(str(file.attrs.get("fingerprint")), str(path))
    expected = (FORMAT, shard.split, (shard.windows, window))
    if found != expected or offset != shard.offset:
        raise FormatError(
            f"{path}: holds {found} at offset {offset}; the manifest says {expected} at {shard.offset}"
        )
    if version > FORMAT_VERSION:
        raise FormatError(
            f"{path}: shard format version {version}; this protperf reads up to {FORMAT_VERSION}: upgrade"
        )
