"""Reads a W&B run's `.wandb` file back: what the real client wrote, without the client's own reader.

The file is a log in LevelDB's framing (github.com/google/leveldb/blob/main/doc/log_format.md) of protobuf records:
blocks of 32 KiB, the first behind a header of 7 bytes that it includes; in a block, fragments of checksum (4 bytes; here
zlib's CRC-32 of type and data, little-endian), length (2), type (1) and data; what is left of a block, less than 7 bytes, is
zeros.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HEADER = b":W&B"
HEADER_SIZE = 7
BLOCK = 32 * 1024
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def records(path: Path) -> Iterator[Any]:
    """Yield the records of a file up to its end, or to where a killed writer stopped."""
    from wandb.proto import wandb_internal_pb2

    data = path.read_bytes()
    assert data[:4] == HEADER, f"{path} is no W&B file"
    place, parts = HEADER_SIZE, b""
    while place + 7 <= len(data):
        left = BLOCK - place % BLOCK
        if left < 7:
            place += left
            continue
        checksum, length, kind = struct.unpack_from("<IHB", data, place)
        content = data[place + 7 : place + 7 + length]
        if len(content) < length or not kind:
            return
        assert zlib.crc32(content, zlib.crc32(bytes([kind]))) == checksum, f"{path}: damaged at {place}"
        assert bool(parts) == (kind in (MIDDLE, LAST)), f"{path}: a fragment out of order at {place}"
        parts += content
        place += 7 + length
        if kind in (FULL, LAST):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            parts = b""
            yield record


@dataclass
class WandbFile:
    """What one file holds."""

    run_id: str = ""
    name: str = ""
    project: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    x_axes: dict[str, str] = field(default_factory=dict)
    artifacts: list[Any] = field(default_factory=list)
    preempting: bool = False
    exit_code: int | None = None

    def series(self, name: str) -> dict[int, Any]:
        """Return a metric by optimizer step."""
        return {row["trainer/global_step"]: row[name] for row in self.history if name in row}


def read_wandb(run_dir: Path) -> list[WandbFile]:
    """Return what each start of a run wrote, in the order of their starts."""
    paths = run_dir.glob("wandb/*run-*/run-*.wandb")
    return [_read(path) for path in sorted(paths, key=lambda path: path.parent.name.removeprefix("offline-"))]


def _read(path: Path) -> WandbFile:
    found = WandbFile()
    for record in records(path):
        kind = record.WhichOneof("record_type")
        if kind == "run":
            found.run_id, found.project = record.run.run_id, record.run.project
            found.name = record.run.display_name
            _update(found.config, record.run.config)
        elif kind == "config":
            _update(found.config, record.config)
        elif kind == "history":
            found.history.append({_key(item): _value(item) for item in record.history.item})
        elif kind == "metric":
            found.x_axes[record.metric.name or record.metric.glob_name] = record.metric.step_metric
        elif kind == "artifact":
            found.artifacts.append(record.artifact)
        elif kind == "preempting":
            found.preempting = True
        elif kind == "exit":
            found.exit_code = record.exit.exit_code
    return found


def _update(config: dict[str, Any], record: Any) -> None:
    for item in record.update:
        config[_key(item)] = json.loads(item.value_json)


def _key(item: Any) -> str:
    return ".".join(item.nested_key) or item.key


def _value(item: Any) -> Any:
    kind = item.WhichOneof("value") or "value_json"
    return json.loads(getattr(item, kind)) if kind in ("value_json", "json") else getattr(item, kind)
