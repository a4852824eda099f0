"""Write training shards: HDF5 files with one contiguous array of windows; `shards` reads them.

Axes: `N` windows, `W` tokens per window.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator
from pathlib import Path

import h5py
import numpy as np

from protperf.formats.commit import commit_file, temporary_path, write_all
from protperf.formats.manifest import ShardEntry
from protperf.formats.sizes import hash_file
from protperf.vocab import VOCABULARY

FORMAT = "protperf-shard"
FORMAT_VERSION = 1


def shard_name(split: str, index: int, num_shards: int) -> str:
    """Return a shard's file name.

    >>> shard_name("train", 7, 64)
    'train-00007-of-00064.h5'
    """
    return f"{split}-{index:05d}-of-{num_shards:05d}.h5"


def write_shard(path: Path, windows: np.ndarray, *, split: str, index: int, num_shards: int) -> ShardEntry:
    """Write windows as a shard; equal arguments give equal bytes.

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
    with ShardWriter(path, windows.shape[1], split=split, index=index, num_shards=num_shards) as writer:
        writer.append(np.ascontiguousarray(windows).data)
        entry = writer.finish(tail="pad")
    assert entry is not None
    return entry


class ShardWriter:
    """Writes a shard from a stream of tokens in flat memory; the file appears when `finish` is called.

    The tokens are written as plain bytes behind the place of the HDF5 header, which is put there at the end: a full disk
    is then an ordinary error, whereas HDF5's own writer leaves a file that opens with its full shape. A context manager:
    leaving it without `finish` leaves nothing.

    Args:
        path: the file.
        window: tokens per window, W.
        split: name of the split.
        index: place of the shard among the `num_shards` key ranges of its split.
        num_shards: number of key ranges of the split.

    Attributes:
        num_tokens: tokens appended so far.
        tail: the tokens that `finish` dropped.
    """

    def __init__(self, path: Path, window: int, *, split: str, index: int, num_shards: int) -> None:
        self.path = path
        self.num_tokens = 0
        self.tail = b""
        self._window = window
        self._split = split
        self._attributes = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "split": split,
            "shard": index,
            "num_shards": num_shards,
            "window": window,
            "vocabulary": " ".join(VOCABULARY.tokens),
            "fingerprint": VOCABULARY.fingerprint,
        }
        self._temporary = temporary_path(path)
        self._offset = len(self._header(1))
        self._file: io.FileIO | None = None

    def __enter__(self) -> ShardWriter:
        """Open the temporary file."""
        self._file = open(self._temporary, "wb", buffering=0)
        self._file.seek(self._offset)
        return self

    def append(self, tokens: bytes | memoryview) -> None:
        """Write tokens, one byte each, behind those that are there.

        Raises:
            OSError: the disk is full, or the file cannot be written; the message names it.
        """
        assert self._file is not None
        data = memoryview(tokens).cast("B")
        self.num_tokens += len(data)
        with _naming(self.path):
            write_all(self._file.fileno(), data)

    def finish(self, *, tail: str) -> ShardEntry | None:
        """Complete the last window, write the header and let the file appear.

        Args:
            tail: `pad` fills the last window with `<pad>`, `drop` drops it unless it is full.

        Returns:
            What the manifest says of the shard; None, and no file, if it has no window.
        """
        assert self._file is not None
        surplus = self.num_tokens % self._window
        if surplus and tail == "pad":
            self.append(bytes([VOCABULARY.pad]) * (self._window - surplus))
        elif surplus:
            self._drop(surplus)
        num_windows = self.num_tokens // self._window
        if not num_windows:
            return None
        header = self._header(num_windows)
        assert len(header) == self._offset
        with _naming(self.path):
            self._file.seek(0)
            self._file.write(header)
            commit_file(self._temporary, self.path)
        digest, size = hash_file(self.path)
        return ShardEntry(self.path.name, self._split, num_windows, self._offset, size, digest)

    def _drop(self, surplus: int) -> None:
        """Cut the last tokens off and keep them as `tail`."""
        self.num_tokens -= surplus
        with open(self._temporary, "rb") as file:
            file.seek(self._offset + self.num_tokens)
            self.tail = file.read()
        os.truncate(self._temporary, self._offset + self.num_tokens)

    def _header(self, num_windows: int) -> bytes:
        """Return the bytes of the HDF5 file before its first token.

        `("earliest", "v110")` is what every HDF5 since 1.8 reads; `latest` is not.
        """
        path = self._temporary.with_suffix(".header")
        creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        creation.set_layout(h5py.h5d.CONTIGUOUS)
        creation.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        creation.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        creation.set_obj_track_times(False)
        space = h5py.h5s.create_simple((num_windows, self._window))
        try:
            with h5py.File(path, "w", libver=("earliest", "v110"), track_order=False, locking=False) as file:
                file.attrs.update(self._attributes)
                dataset = h5py.h5d.create(file.id, b"tokens", h5py.h5t.NATIVE_UINT8, space, creation)
                offset = dataset.get_offset()
            with open(path, "rb") as whole:
                return whole.read(offset)
        finally:
            path.unlink(missing_ok=True)

    def __exit__(self, *error: object) -> None:
        """Close and remove what is unfinished."""
        if self._file is not None:
            self._file.close()
        self._temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Let an error of the operating system name the file that was to be written."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, os.strerror(error.errno or 0), str(path)) from error
