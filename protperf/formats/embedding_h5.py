"""The writer of embedding files in HDF5: one dataset a protein."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from protperf.formats.embedding_writers import KEY_DIGITS, EmbeddingWriter, Value, encoded
from protperf.formats.embeddings import VECTORS
from protperf.formats.hdf5_bytes import SUPERBLOCK_BYTES, Attribute, PlacedArray, write_datasets, write_root
from protperf.formats.hdf5_links import LinkWriter

MOST_OPAQUE = 60_000
"""Bytes of a text with a NUL."""


class H5Writer(EmbeddingWriter):
    """Write an embedding file in HDF5; see `EmbeddingWriter`."""

    format = "h5"

    def can_name(self, record_id: str, header: str) -> bool:
        """Return whether a file can hold these texts: one with a NUL is stored as bytes, which HDF5 takes up to 64 kB of."""
        if not super().can_name(record_id, header):
            return False
        return all(len(encoded(text)) <= MOST_OPAQUE for text in (record_id, header) if "\0" in text)

    def _begin(self) -> None:
        self._partial.append(bytes(SUPERBLOCK_BYTES))

    def _append(self, index: int, array: np.ndarray) -> tuple[int, int]:
        return self._partial.append(array.data.cast("B")), 0

    def _end(self, attributes: Mapping[str, Value]) -> None:
        ordered = self.info.keys == "sequence"
        links = LinkWriter(self._partial, ordered=ordered)
        dtype = np.dtype(self.info.dtype).newbyteorder("<").str
        for name, address in write_datasets(self._partial, self._datasets(), dtype):
            links.add(name, address)
        found: dict[str, Attribute] = dict(attributes)
        if self.info.kind in VECTORS:
            found["num_residues"] = np.fromiter((entry.num_residues for entry in self.entries()), np.uint32)
        write_root(self._partial, links.finish(), found, ordered=ordered)
        self._partial.flush()

    def _datasets(self) -> Iterator[PlacedArray]:
        """Yield the datasets; of equal sequences all but the first have their number behind the key."""
        seen: set[str] = set()
        for entry in self.entries():
            texts = {"original_id": entry.id}
            if entry.header != entry.id:
                texts["header"] = entry.header
            name = number = f"{entry.number:0{KEY_DIGITS}d}"
            if self.info.keys == "sequence":
                texts["number"] = number
                name = f"{entry.key}_{number}" if entry.key in seen else entry.key
                seen.add(entry.key)
            yield PlacedArray(name.encode(), entry.address, self.info.shape(entry.num_residues), texts)
