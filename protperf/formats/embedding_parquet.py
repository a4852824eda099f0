"""Embedding files as Parquet tables, for pandas, polars and Arrow: a row a protein.

Parquet cannot be gone on with, so the arrays wait beside the output until all are there; then the table is made of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from protperf.formats.commit import sync_file
from protperf.formats.embedding_writers import EmbeddingWriter, Entry, Value
from protperf.formats.embeddings import VECTORS, Embedding, EmbeddingInfo, checked_length, info_from
from protperf.formats.foreign import as_format_error, foreign_bytes
from protperf.formats.partial_output import named

if TYPE_CHECKING:
    import pyarrow

GROUP_ROWS = 8192
"""Rows in a row group at most."""
GROUP_BYTES = 1 << 25
"""Bytes of numbers after which a row group ends."""

_METADATA = b"protperf"


class ParquetWriter(EmbeddingWriter):
    """Write an embedding file in Parquet; see `EmbeddingWriter`. While it works it takes twice the room at its end.

    Raises:
        ValueError: pyarrow is not installed.
    """

    format = "parquet"

    def __init__(
        self, path: Path, info: EmbeddingInfo, run: Mapping[str, Any] | None = None, *, anew: bool = False
    ) -> None:
        import_pyarrow()
        super().__init__(path, info, run, anew=anew)

    def _begin(self) -> None:
        pass

    def _append(self, index: int, array: np.ndarray) -> tuple[int, int]:
        return self._partial.append(array.data.cast("B")), 0

    def _end(self, attributes: Mapping[str, Value]) -> None:
        pq = import_pyarrow()
        schema = schema_of(self.info).with_metadata({_METADATA: json.dumps(dict(attributes))})
        texts = {"id": "zstd", "header": "zstd", "num_residues": "zstd", "number": "zstd"}
        try:
            with pq.ParquetWriter(
                self._partial.made_path,
                schema,
                compression=texts,
                use_dictionary=["id", "header"],
                write_statistics=["id", "num_residues", "number"],
            ) as writer:
                for group in self._groups():
                    writer.write_table(self._table(group, schema), row_group_size=len(group))
            sync_file(self._partial.made_path)
        except OSError as error:
            raise named(error, self.path) from error

    def _groups(self) -> Iterator[list[Entry]]:
        """Yield the proteins of each row group."""
        group: list[Entry] = []
        size = 0
        for entry in self.entries():
            group.append(entry)
            size += self._bytes_of(entry)
            if len(group) == GROUP_ROWS or size >= GROUP_BYTES:
                yield group
                group, size = [], 0
        if group:
            yield group

    def _bytes_of(self, entry: Entry) -> int:
        return (
            int(np.prod(self.info.shape(entry.num_residues), dtype=np.int64))
            * np.dtype(self.info.dtype).itemsize
        )

    def _table(self, group: list[Entry], schema: pyarrow.Schema) -> pyarrow.Table:
        import pyarrow

        start = group[0].address
        data = self._partial.read(start, group[-1].address + self._bytes_of(group[-1]) - start)
        numbers = pyarrow.array(np.frombuffer(data, np.dtype(self.info.dtype).newbyteorder("<")))
        lengths = np.array([entry.num_residues for entry in group])
        columns = [
            pyarrow.array([entry.id for entry in group], pyarrow.string()),
            pyarrow.array([entry.header for entry in group], pyarrow.string()),
            pyarrow.array(lengths, pyarrow.uint32()),
            pyarrow.array([entry.number for entry in group], pyarrow.uint64()),
            nested(numbers, lengths, self.info),
        ]
        return pyarrow.Table.from_arrays(columns, schema=schema)


def nested(numbers: pyarrow.Array, lengths: np.ndarray, info: EmbeddingInfo) -> pyarrow.Array:
    """Return the numbers of some proteins as one value each; see `schema_of`."""
    import pyarrow

    if info.kind in VECTORS:
        return pyarrow.FixedSizeListArray.from_arrays(numbers, info.model_dim)
    if info.kind == "contacts":
        inner = np.concatenate(([0], np.cumsum(np.repeat(lengths, lengths))))
        rows = pyarrow.LargeListArray.from_arrays(pyarrow.array(inner, pyarrow.int64()), numbers)
    else:
        rows = pyarrow.FixedSizeListArray.from_arrays(numbers, info.shape(1)[1])
    outer = np.concatenate(([0], np.cumsum(lengths)))
    return pyarrow.LargeListArray.from_arrays(pyarrow.array(outer, pyarrow.int64()), rows)


def schema_of(info: EmbeddingInfo) -> pyarrow.Schema:
    """Return the columns: a list of D numbers for a vector, a list of rows else."""
    import pyarrow

    number = pyarrow.float16() if info.dtype == "float16" else pyarrow.float32()
    if info.kind in VECTORS:
        kind = pyarrow.list_(number, info.model_dim)
    elif info.kind == "contacts":
        kind = pyarrow.large_list(pyarrow.large_list(number))
    else:
        kind = pyarrow.large_list(pyarrow.list_(number, info.shape(1)[1]))
    return pyarrow.schema(
        [
            ("id", pyarrow.string()),
            ("header", pyarrow.string()),
            ("num_residues", pyarrow.uint32()),
            ("number", pyarrow.uint64()),
            ("embedding", kind),
        ]
    )


class ParquetFile:
    """An embedding file in Parquet for reading, in order; as `EmbeddingFile` without access by number.

    Attributes:
        info: what the numbers are.
        attributes: all that the file says of itself.

    Raises:
        ValueError: no such file, made with another vocabulary, or pyarrow is not installed.
        FormatError: damaged, foreign or newer; also of what reads later.
        OSError: the system cannot read it.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise ValueError(f"{path}: no such file; give what `protperf embed` wrote")
        pq = import_pyarrow()
        with as_format_error(f"{path}: no readable embedding file"):
            with foreign_bytes():
                self._file = pq.ParquetFile(self.path)
                metadata = self._file.schema_arrow.metadata or {}
            self.attributes = json.loads(metadata.get(_METADATA, b"null"))
        self.info = info_from(self.attributes, self.path)

    def __len__(self) -> int:
        return int(self._file.metadata.num_rows)

    def __iter__(self) -> Iterator[Embedding]:
        return (embedding for _, embedding in self.numbered())

    def __enter__(self) -> ParquetFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def numbered(self) -> Iterator[tuple[int, Embedding]]:
        """Yield the number of each protein in the whole input, and the protein."""
        for group in range(self._file.num_row_groups):
            damaged = f"{self.path}: row group {group} is damaged"
            with as_format_error(damaged), foreign_bytes():
                table = self._file.read_row_group(group)
                texts = [table[name].to_pylist() for name in ("id", "header", "num_residues", "number")]
            for row, (record_id, header, length, number) in enumerate(zip(*texts, strict=True)):
                with as_format_error(damaged):
                    if [type(each) for each in (record_id, header, length, number)] != [str, str, int, int]:
                        raise ValueError(f"what row {row} says of its protein is of other types")
                    with foreign_bytes():
                        numbers = _numbers_of(table["embedding"][row], self.info.dtype)
                    array = numbers.reshape(self.info.shape(checked_length(length)))
                yield number, Embedding(record_id, header, length, array)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _numbers_of(value: Any, dtype: str) -> np.ndarray:
    """Return the numbers of lists, or of lists of lists, in one row."""
    value = getattr(value, "values", None)
    while hasattr(value, "flatten") and value.type.num_fields:
        value = value.flatten()
    if value is None:
        raise ValueError("no numbers")
    return value.to_numpy(zero_copy_only=False).astype(dtype, copy=False)


def import_pyarrow() -> Any:
    """Return `pyarrow.parquet`.

    Raises:
        ValueError: it is not installed.
    """
    try:
        import pyarrow.parquet
    except ImportError:
        raise ValueError(
            "Parquet needs pyarrow: pip install 'protperf[parquet]', or take --format h5"
        ) from None
    return pyarrow.parquet
