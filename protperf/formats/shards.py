"""Training shards: HDF5 files with one contiguous array of windows, read by `pread` at the offset in the manifest.

A protein is `<bos> residues <eos>`; proteins follow one another and the stream is cut every `window` tokens, so a
protein may run on into the next window. `docs/formats.md` is the specification.

Axes: `N` windows, `W` tokens per window.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np

from protperf.formats import FormatError
from protperf.formats.hdf5_reading import Hdf5File
from protperf.formats.manifest import SPLITS, Manifest, ShardEntry, read_manifest
from protperf.formats.open_files import OpenFiles
from protperf.formats.shard_writer import FORMAT, FORMAT_VERSION
from protperf.formats.sizes import hash_file
from protperf.vocab import VOCABULARY, check_fingerprint

_AS_THEY_ARE = ("|u1", (), ())
"""How tokens are stored: a window is read as the bytes that lie at its place."""


class ShardSet:
    """The windows of one split, in the order of its shards.

    Files are opened when first read, in each process anew: an instance may be pickled or forked. One instance serves
    one thread.

    Args:
        dataset_dir: the folder that `protperf prepare` wrote.
        split: name of the split.
        window: tokens per window W, which must divide the dataset's: each of its windows is then read as several,
            one after the other; 0 is the dataset's own.
        files: the open files, where several sets share one limit.

    Raises:
        FormatError: no dataset, or a shard is missing or has another size.
        ValueError: another vocabulary, no such split, or a window that does not divide the dataset's.

    Attributes:
        manifest: the dataset's manifest.
        split: name of the split.
        window: tokens per window, W.
    """

    def __init__(
        self, dataset_dir: Path | str, split: str, *, window: int = 0, files: OpenFiles | None = None
    ) -> None:
        self.dataset_dir = Path(dataset_dir)
        self.split = split
        self.manifest: Manifest = read_manifest(self.dataset_dir)
        self.window = window or self.manifest.window
        self._files = files or OpenFiles()
        self._shards = self.manifest.shards_of(split)
        self._check_split()
        if self.manifest.window % self.window:
            raise ValueError(
                f"{self.dataset_dir}: its windows of {self.manifest.window} tokens cannot be cut into windows of "
                f"{self.window}; allowed: what divides {self.manifest.window}"
            )
        for shard in self._shards:
            self._check_size(shard)
        # windows of a shard lie side by side, so shorter ones are simply more of them
        pieces = self.manifest.window // self.window
        self._paths = [str(self.dataset_dir / shard.file) for shard in self._shards]
        self._ends = list(accumulate(shard.windows * pieces for shard in self._shards))
        self._starts = [0, *self._ends[:-1]]
        self._origins = [
            shard.offset - start * self.window
            for shard, start in zip(self._shards, self._starts, strict=True)
        ]

    def __len__(self) -> int:
        """Return the number of windows."""
        return self._ends[-1]

    def read(self, index: int) -> np.ndarray:
        """Return one window, `uint8 (W,)`; errors as `read_many`."""
        return self.read_many([index])[0]

    def read_many(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return windows in the order asked, `uint8 (N, W)`.

        Raises:
            IndexError: no such window.
            FormatError: a shard is shorter than the manifest says, or holds a byte that is no token.
            OSError: a shard cannot be read.
        """
        # one by one, Python's own integers are faster than those of an array
        places = indices.tolist() if isinstance(indices, np.ndarray) else indices
        ends, width = self._ends, self.window
        for index in places:
            if not 0 <= index < ends[-1]:
                raise IndexError(
                    f"{self.dataset_dir}: no window {index} in {self.split!r}; it has {len(self)}"
                )
        windows = np.empty((len(places), width), np.uint8)
        numbers = [bisect_right(ends, index) for index in places]
        offsets = [
            self._origins[number] + index * width for number, index in zip(numbers, places, strict=True)
        ]
        done = self._files.read([self._paths[number] for number in numbers], offsets, windows)
        if done < len(places):
            raise self._damage(places[done], f"ends inside window {{}} of {width} tokens")
        if windows.size and windows.max() >= len(VOCABULARY):
            worst = int(windows.max(1).argmax())
            raise self._damage(places[worst], f"window {{}} holds {windows[worst].max()}, which is no token")
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
            _check_attributes(path, shard, self.manifest.window)

    def close(self) -> None:
        """Close the open files; a later read opens them again."""
        self._files.close()

    def _damage(self, index: int, fault: str) -> FormatError:
        """Return the error for a fault in window `index`; `{}` in its text becomes the window's place in its shard."""
        number = bisect_right(self._ends, index)
        place = fault.format(index - self._starts[number])
        return FormatError(f"{self._paths[number]}: {place}: damaged; copy it or prepare it again")

    def _check_split(self) -> None:
        """Raise unless the split has windows."""
        if not self._shards:
            present = [name for name, stats in self.manifest.splits.items() if stats.windows]
            known = self.split in SPLITS
            state = "holds no protein" if known else "is not known"
            remedy = "; prepare with a larger fraction for it" if known else ""
            raise ValueError(
                f"{self.dataset_dir}: split {self.split!r} {state}; there are: {' '.join(present)}{remedy}"
            )

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


def _check_attributes(path: Path, shard: ShardEntry, window: int) -> None:
    """Raise unless the HDF5 file itself says what the manifest says of it."""
    with Hdf5File(path, unreadable="no readable shard", remedy="copy it or prepare it again") as file:
        about, tokens = file.attributes(), file.dataset("tokens")
        texts = {name: value for name, value in about.items() if isinstance(value, str)}
        found = (texts.get("format"), texts.get("split"), tokens.shape)
        version, offset = about.get("format_version", 0), tokens.address
        stored = (tokens.dtype, tokens.chunks, tokens.filters)
        check_fingerprint(str(texts.get("fingerprint")), str(path))
    expected = (FORMAT, shard.split, (shard.windows, window))
    if found != expected or offset != shard.offset:
        raise FormatError(
            f"{path}: holds {found} at offset {offset}; the manifest says {expected} at {shard.offset}"
        )
    if stored != _AS_THEY_ARE:
        raise FormatError(
            f"{path}: its tokens are stored as (type, chunks, filters) {stored}; it must be {_AS_THEY_ARE}: prepare it again"
        )
    if type(version) is not int or version > FORMAT_VERSION:
        raise FormatError(
            f"{path}: shard format version {version}; this protperf reads up to {FORMAT_VERSION}: upgrade"
        )
