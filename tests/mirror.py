"""A real HTTP server laid out as UniProt's release folder, with the faults that servers and networks have; and how the tests fetch from it."""

from __future__ import annotations

import hashlib
import random
import re
import socket
import struct
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType

import pytest

from data_prep.download import download
from data_prep.download.fetch import Patience

SPROT = "knowledgebase/complete/uniprot_sprot.fasta.gz"
NAME = "uniprot_sprot.fasta.gz"
LOCK = f".{NAME}.lock"
QUICK = Patience(tries=4, first_delay_s=0.001, timeout_s=10)
DATA = random.Random(1).randbytes(1_500_000)
NEWER = random.Random(2).randbytes(1_400_000)

METALINK = """<?xml version="1.0" encoding="UTF-8"?>
<metalink version="3.0" xmlns="http://www.metalinker.org/" type="static">
 <publisher><name>UniProt Consortium</name></publisher>
 <version>{release}</version>
 <files>
  <file name="README"><size>7</size><verification><hash type="md5">{zeros}</hash></verification></file>
  <file name="{name}">
   <size>{size}</size>
   <verification><hash type="md5">{md5}</hash></verification>
   <resources><url location="ch" type="ftp">ftp://ftp.example.org/{name}</url></resources>
  </file>
 </files>
</metalink>
"""

Fault = Callable[["Handler", bytes], None]
"""Answers one request for a file in its own way; given the file's bytes."""


class Mirror:
    """Context manager around the server.

    Attributes:
        base: its address.
        files: the bytes at each path.
        validators: headers (ETag, Last-Modified) sent with each path.
        faults: what answers the coming requests for sequence files, one each; then all goes well.
        metalink_faults: the same for metalinks.
        asked: of each request the path, `Range` and `If-Range`.
        sent: bytes of sequence files sent so far.
        ranges: whether it understands `Range`.
    """

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.validators: dict[str, dict[str, str]] = {}
        self.faults: list[Fault] = []
        self.metalink_faults: list[Fault] = []
        self.asked: list[tuple[str, str | None, str | None]] = []
        self.sent = 0
        self.ranges = True
        self._server = _Server(("127.0.0.1", 0), Handler)
        self._server.mirror = self
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self.base = f"http://127.0.0.1:{self._server.server_address[1]}/current_release"

    def __enter__(self) -> Mirror:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def publish(self, path: str, data: bytes, *, release: str = "2026_01", etag: str | None = None) -> None:
        """Put a file there, with the metalink beside it."""
        folder, name = path.rsplit("/", 1)
        self.files[path] = data
        self.validators[path] = {"ETag": etag or f'"{hashlib.sha1(data).hexdigest()[:12]}"'}
        md5 = hashlib.md5(data).hexdigest()
        text = METALINK.format(release=release, name=name, size=len(data), md5=md5, zeros="0" * 32)
        self.files[f"{folder}/RELEASE.metalink"] = text.encode()

    def file_requests(self) -> list[tuple[str | None, str | None]]:
        """Return `Range` and `If-Range` of each request for a sequence file."""
        return [(wanted, only_if) for path, wanted, only_if in self.asked if path.endswith(".gz")]


class _Server(ThreadingHTTPServer):
    mirror: Mirror

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing of clients that went away."""


class Handler(BaseHTTPRequestHandler):
    """Answers GET, with `Range` and `If-Range` as RFC 9110 says."""

    protocol_version = "HTTP/1.1"
    server: _Server

    def do_GET(self) -> None:
        mirror, path = self.server.mirror, self.path.removeprefix("/current_release/")
        mirror.asked.append((path, self.headers["Range"], self.headers["If-Range"]))
        faults = mirror.faults if path.endswith(".gz") else mirror.metalink_faults
        data = mirror.files.get(path)
        if data is None:
            self.send_error(404)
        elif faults:
            faults.pop(0)(self, data)
        else:
            self.answer(data)

    def answer(self, data: bytes, *, stop_after: int | None = None) -> None:
        """Send the bytes that were asked for, `stop_after` of them at most."""
        mirror, path = self.server.mirror, self.path.removeprefix("/current_release/")
        validators = mirror.validators.get(path, {})
        match = re.fullmatch(r"bytes=(\d+)-", self.headers["Range"] or "")
        same = self.headers["If-Range"] in (None, *validators.values())
        first = int(match[1]) if match and mirror.ranges and same else 0
        if first and first >= len(data):
            self.send_error(416)
            return
        self.send_response(206 if first else 200)
        if first:
            self.send_header("Content-Range", f"bytes {first}-{len(data) - 1}/{len(data)}")
        for name, value in validators.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data) - first))
        self.end_headers()
        body = data[first:][:stop_after]
        self.wfile.write(body)
        mirror.sent += len(body) if path.endswith(".gz") else 0
        if stop_after is not None:
            self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


def drop_after(num_bytes: int) -> Fault:
    """Close the connection in order after so many bytes."""
    return lambda handler, data: handler.answer(data, stop_after=num_bytes)


def reset_after(num_bytes: int) -> Fault:
    """Reset the connection after so many bytes."""

    def fault(handler: Handler, data: bytes) -> None:
        handler.answer(data, stop_after=num_bytes)
        handler.wfile.flush()
        handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        handler.connection.close()

    return fault


def stall_after(num_bytes: int, until: threading.Event) -> Fault:
    """Send so many bytes, then nothing until the event."""

    def fault(handler: Handler, data: bytes) -> None:
        handler.answer(data, stop_after=num_bytes)
        until.wait(60)

    return fault


def status(code: int, **headers: str) -> Fault:
    """Answer with a status and no file."""

    def fault(handler: Handler, data: bytes) -> None:
        handler.send_response(code)
        for name, value in {**headers, "Content-Length": "0"}.items():
            handler.send_header(name, value)
        handler.end_headers()

    return fault


def wrong_range(handler: Handler, data: bytes) -> None:
    """Answer any question with the whole file, called a part of it."""
    handler.send_response(206)
    handler.send_header("Content-Range", f"bytes 0-{len(data) - 1}/{len(data)}")
    handler.send_header("Content-Length", str(len(data)))
    handler.end_headers()
    handler.wfile.write(data)


def fetch(mirror: Mirror, folder: Path, patience: Patience = QUICK) -> list[str]:
    """Download Swiss-Prot; return what was said."""
    said: list[str] = []
    path = download("sprot", folder, base=mirror.base, say=said.append, patience=patience)
    assert path == folder / NAME
    assert not any("\n" in line for line in said)
    return said


def refuse(mirror: Mirror, folder: Path, kind: type[Exception], text: str) -> None:
    """Download Swiss-Prot, which must fail in one line that holds `text`, and leave nothing that looks complete."""
    with pytest.raises(kind, match=text) as caught:
        fetch(mirror, folder)
    assert "\n" not in str(caught.value)
    assert not (folder / NAME).exists()


def begin(mirror: Mirror, folder: Path, num_bytes: int) -> None:
    """Leave the first bytes of a download, as a try that gave up does."""
    mirror.faults = [drop_after(num_bytes), *[status(503)] * (QUICK.tries - 1)]
    refuse(mirror, folder, ConnectionError, "the same command continues")
    assert (folder / f"{NAME}.part").stat().st_size == num_bytes
    mirror.asked.clear()
    mirror.sent = 0
