"""N-gram counts of the training split: what the evaluation's floors are computed from.

Orders 1 to 4 over all 36 tokens. An n-gram lies inside one protein with its `<bos>` and `<eos>`: none crosses from one
protein into the next, and a protein cut by a window's edge still counts whole.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import h5py
import numpy as np

from protperf.formats import FormatError
from protperf.formats.commit import commit_bytes
from protperf.formats.manifest import NgramEntry
from protperf.vocab import VOCABULARY, check_fingerprint

FORMAT = "protperf-ngrams"
FORMAT_VERSION = 1
NGRAMS_NAME = "ngrams.h5"
ORDERS = (1, 2, 3, 4)

_BLOCK_TOKENS = 1 << 22


class NgramCounts:
    """Counts of n-grams.

    Attributes:
        orders: for each order n of `ORDERS` the counts, `int64` with n axes of 36; axis i is the i-th token.
    """

    def __init__(self) -> None:
        self.orders = {order: np.zeros((len(VOCABULARY),) * order, np.int64) for order in ORDERS}

    def add(self, stream: np.ndarray) -> None:
        """Count the n-grams of whole proteins.

        Args:
            stream: `uint8 (T,)`, proteins as `<bos> residues <eos>` one after the other, no padding.
        """
        overlap = max(ORDERS) - 1
        for start in range(0, len(stream), _BLOCK_TOKENS):
            block = stream[start : start + _BLOCK_TOKENS + overlap].astype(np.int64)
            for order in ORDERS:
                self._add_block(block, order)

    def _add_block(self, block: np.ndarray, order: int) -> None:
        """Count the n-grams of one order that start in the first `_BLOCK_TOKENS` of `block`, `int64 (T,)`."""
        num_starts = min(len(block) - order + 1, _BLOCK_TOKENS)
        if num_starts <= 0:
            return
        codes = block[:num_starts].copy()
        inside = np.ones(num_starts, bool)
        for place in range(1, order):
            token = block[place : place + num_starts]
            codes = codes * len(VOCABULARY) + token
            inside &= token != VOCABULARY.bos
        counts = self.orders[order]
        counts += np.bincount(codes[inside], minlength=counts.size).reshape(counts.shape)


def write_ngrams(path: Path, counts: NgramCounts) -> NgramEntry:
    """Write the counts by rename.

    Raises:
        OSError: the file cannot be written; nothing is left under `path`.
    """
    with h5py.File("ngrams", "w", driver="core", backing_store=False, libver=("earliest", "v110")) as file:
        file.attrs["format"] = FORMAT
        file.attrs["format_version"] = FORMAT_VERSION
        file.attrs["vocabulary"] = " ".join(VOCABULARY.tokens)
        file.attrs["fingerprint"] = VOCABULARY.fingerprint
        for order, array in counts.orders.items():
            file.create_dataset(f"order{order}", data=array, compression="gzip", track_times=False)
        file.flush()
        image = file.id.get_file_image()
    commit_bytes(path, image)
    return NgramEntry(path.name, len(image), hashlib.sha256(image).hexdigest())


def read_ngrams(path: Path) -> NgramCounts:
    """Read the counts that `write_ngrams` wrote.

    Raises:
        FormatError: missing, damaged, foreign or newer.
        ValueError: made with another vocabulary.
    """
    counts = NgramCounts()
    try:
        with h5py.File(path, "r", locking=False) as file:
            _check_attributes(path, file.attrs)
            for order, array in counts.orders.items():
                file[f"order{order}"].read_direct(array)
    except (OSError, KeyError, TypeError) as error:
        raise FormatError(f"{path}: no readable n-gram counts ({error}); prepare the dataset again") from None
    return counts


def _check_attributes(path: Path, attributes: h5py.AttributeManager) -> None:
    """Raise unless the file is an n-gram count file of this vocabulary and of a version read here."""
    found, version = attributes.get("format"), int(attributes.get("format_version", 0))
    if found != FORMAT or not 1 <= version <= FORMAT_VERSION:
        raise FormatError(
            f"{path}: format {found!r} version {version}; this protperf reads {FORMAT!r} 1 to {FORMAT_VERSION}"
        )
    check_fingerprint(str(attributes.get("fingerprint")), str(path))
