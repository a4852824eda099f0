"""N-gram counts of the training split: what the evaluation's floors are computed from.

Orders 1 to 4 over all 36 tokens. An n-gram lies inside one protein with its `<bos>` and `<eos>`: none crosses from one
protein into the next, and a protein cut by a window's edge still counts whole.
"""

from __future__ import annotations

import hashlib
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from protperf.formats import FormatError
from protperf.formats.commit import commit_bytes
from protperf.formats.hdf5_reading import Hdf5File
from protperf.formats.manifest import NgramEntry
from protperf.vocab import VOCABULARY, check_fingerprint

FORMAT = "protperf-ngrams"
FORMAT_VERSION = 1
NGRAMS_NAME = "ngrams.h5"
ORDERS = (1, 2, 3, 4)

_BLOCK_TOKENS = 1 << 18
_BASE = VOCABULARY.eos + 1
"""Proteins hold residues, `<bos>` and `<eos>` alone; smaller tables stay in a core's cache."""


@dataclass(frozen=True, eq=False)
class NgramCounts:
    """Counts of n-grams.

    Attributes:
        orders: for each order n of `ORDERS` the counts, int64 with n axes of 36; axis i is the i-th token.
    """

    orders: dict[int, np.ndarray]


class NgramCounter:
    """Counts n-grams: those of order 4, and the two tokens before each `<eos>`, determine all the others."""

    def __init__(self) -> None:
        self._fours = np.zeros(
            (_BASE,) * 4, np.int64
        )  # of any 4 tokens in a row, over the ends of proteins too
        self._lasts = np.zeros((len(VOCABULARY),) * 2, np.int64)

    def counts(self) -> NgramCounts:
        """Return the counts so far."""
        fours = np.zeros((len(VOCABULARY),) * 4, np.int64)
        fours[:_BASE, :_BASE, :_BASE, :_BASE] = self._fours
        for axis in (
            1,
            2,
            3,
        ):  # what holds a <bos> behind its first token crosses from one protein into the next
            np.moveaxis(fours, axis, 0)[VOCABULARY.bos] = 0
        orders, lasts = {4: fours}, self._lasts
        for order in (3, 2, 1):
            # a shorter n-gram is the start of one that is longer by a token, or it ends with <eos>
            orders[order] = orders[order + 1].sum(-1)
            orders[order][..., VOCABULARY.eos] += lasts
            lasts = lasts.sum(0)
        return NgramCounts(dict(sorted(orders.items())))

    def add(self, stream: np.ndarray) -> None:
        """Count the n-grams of whole proteins.

        Args:
            stream: `uint8 (T,)`, proteins as `<bos> residues <eos>` one after the other, no padding.
        """
        for start in range(0, len(stream), _BLOCK_TOKENS):
            np.add.at(self._fours.reshape(-1), _code_fours(stream[start : start + _BLOCK_TOKENS + 3]), 1)
        ends = np.flatnonzero(stream == VOCABULARY.eos)
        pairs = stream[ends - 2].astype(np.intp) * len(VOCABULARY) + stream[ends - 1]
        self._lasts += np.bincount(pairs, minlength=self._lasts.size).reshape(self._lasts.shape)

    def save(self, path: Path) -> None:
        """Write the counts that are not 0, for `merge`."""
        places = np.flatnonzero(self._fours)
        buffer = io.BytesIO()
        counts = self._fours.flat[places]
        np.savez_compressed(buffer, places=places.astype(np.int32), counts=counts, lasts=self._lasts)
        commit_bytes(path, buffer.getvalue())

    def merge(self, path: Path) -> None:
        """Add the counts that `save` wrote."""
        with np.load(path) as saved:
            self._fours.reshape(-1)[saved["places"]] += saved["counts"]
            self._lasts += saved["lasts"]


def _code_fours(tokens: np.ndarray) -> np.ndarray:
    """Return 4 tokens in a row as a number to the base `_BASE`, int64 `(T - 3,)`; `tokens` is uint8 `(T,)`."""
    wide = tokens.astype(np.uint16)
    pairs = wide[:-1] * np.uint16(_BASE) + wide[1:]
    codes = np.multiply(pairs[:-2], _BASE**2, dtype=np.int64)
    codes += pairs[2:]
    return codes


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
    orders = {order: np.empty((len(VOCABULARY),) * order, np.int64) for order in ORDERS}
    unreadable, remedy = "no readable n-gram counts", "prepare the dataset again"
    try:
        opened = Hdf5File(path, unreadable=unreadable, remedy=remedy)
    except OSError as error:
        raise FormatError(f"{path}: {unreadable} ({error.strerror}); {remedy}") from None
    with opened as file:
        _check_attributes(path, file.attributes())
        for order, array in orders.items():
            file.fill(file.dataset(f"order{order}"), array)
    return NgramCounts(orders)


def _check_attributes(path: Path, attributes: dict[str, Any]) -> None:
    """Raise unless the file is an n-gram count file of this vocabulary and of a version read here."""
    found, version = attributes.get("format"), attributes.get("format_version", 0)
    if found != FORMAT or type(version) is not int or not 1 <= version <= FORMAT_VERSION:
        raise FormatError(
            f"{path}: format {found!r} version {version}; this protperf reads {FORMAT!r} 1 to {FORMAT_VERSION}"
        )
    check_fingerprint(str(attributes.get("fingerprint")), str(path))
