"""What the tests of hostile files share: how such files are made, and a bound of memory for who reads them."""

from __future__ import annotations

import json
import re
import resource
import struct
import zipfile
from pathlib import Path
from typing import Any


def limit_memory(more: int) -> None:
    """Let this process take so many bytes more than it has, and no more."""
    size = int(re.findall(r"VmSize:\s+(\d+) kB", Path("/proc/self/status").read_text())[0]) * 1024
    resource.setrlimit(resource.RLIMIT_AS, (size + more, size + more))


def archive(path: Path, members: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", method) as made:
        for name, data in members.items():
            made.writestr(f"m/{name}", data)
    return path


def pickled(call: bytes, argument: bytes) -> bytes:
    """Return a pickle of a checkpoint in which a name is called."""
    return b"\x80\x02}X\x0a\x00\x00\x00state_dictc" + call + b"\n" + argument + b"\x85Rs."


CALLS = {
    "code": (b"posix\nsystem", b"X\x0c\x00\x00\x00touch HACKED"),
    "evaluation": (b"builtins\neval", b"X\x01\x00\x00\x001"),
    "a terabyte of bytes": (b"builtins\nbytearray", b"\x8a\x06\x00\x00\x00\x00\x00\x01"),
    "a terabyte of numbers": (b"torch\nFloatTensor", b"\x8a\x06\x00\x00\x00\x00\x00\x01"),
    "a storage": (b"torch.storage\nUntypedStorage", b"\x8a\x06\x00\x00\x00\x00\x00\x01"),
}


def edit_manifest(folder: Path, path: str, value: Any) -> None:
    manifest = json.loads((folder / "manifest.json").read_bytes())
    *parents, last = [int(key) if key.isdigit() else key for key in path.split(".")]
    entry = manifest
    for key in parents:
        entry = entry[key]
    entry[last] = value
    (folder / "manifest.json").write_text(json.dumps(manifest))


def write_safetensors(path: Path, header: Any, data: bytes = b"") -> None:
    text = json.dumps(header).encode() if not isinstance(header, bytes) else header
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
