"""Fetch a UniProt release file over HTTP: resumable, checked against the published size and MD5, renamed when whole.

What is being fetched lies in `NAME.part`; `NAME.part.json` beside it says which file of which server it is the beginning
of, so that parts of two releases never meet in one file.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from http.client import PARTIAL_CONTENT, HTTPResponse
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from xml.etree import ElementTree

from data_prep.download.fetch import (
    PATIENCE,
    BadRange,
    Dropped,
    Patience,
    Tries,
    open_address,
    read_pieces,
    validator_of,
)
from data_prep.download.progress import Progress
from protperf.formats import FormatError
from protperf.formats.commit import FULL_DISK, commit_bytes, commit_file, lock_folder
from protperf.formats.sizes import in_units

BASE = "https://ftp.uniprot.org/pub/databases/uniprot/current_release"
BASE_VARIABLE = "PROTPERF_UNIPROT_BASE"
SOURCES = {
    "trembl": "knowledgebase/complete/uniprot_trembl.fasta.gz",
    "sprot": "knowledgebase/complete/uniprot_sprot.fasta.gz",
    "uniref50": "uniref/uniref50/uniref50.fasta.gz",
    "uniref90": "uniref/uniref90/uniref90.fasta.gz",
}
METALINK_NAME = "RELEASE.metalink"

_BASE_FORM = re.compile(r'https?://[\w.:\[\]-]+(/[!"$->@-~]*)?', re.ASCII | re.IGNORECASE)
_RELEASE_FORM = re.compile(r"[\w.-]{1,40}", re.ASCII)
_RANGE_FORM = re.compile(r"bytes (\d+)-\d+/(\d+|\*)")
_METALINK_LIMIT = 16 << 20
_PIECE_BYTES = 1 << 20


@dataclass(frozen=True)
class Published:
    """What the release's metalink says of a file: the release, the size in bytes, the MD5 in lower-case hex."""

    release: str
    size: int
    md5: str


def download(
    name: str,
    folder: Path,
    *,
    base: str | None = None,
    say: Callable[[str], None],
    patience: Patience = PATIENCE,
) -> Path:
    """Fetch one of `SOURCES` into `folder`; go on where an earlier try was stopped.

    Args:
        name: `trembl`, `sprot`, `uniref50` or `uniref90`.
        folder: where to put the file, under UniProt's own name; made if it is not there.
        base: address of a folder laid out as UniProt's `current_release`; default: the environment variable
            `PROTPERF_UNIPROT_BASE`, else UniProt's.
        say: writes one line of log.
        patience: how long to wait for what.

    Returns:
        The path of the file: its size and MD5 are those of the release.

    Raises:
        ValueError: an unknown name or address, a missing file, another file of that name, another download at work.
        FormatError: what came is not what the release says; a metalink that is none.
        OSError: the server stayed out of reach (`ConnectionError`), or there is no room. What had come is kept.
    """
    url = address_of(name, base)
    path = folder / url.rsplit("/", 1)[1]
    folder.mkdir(parents=True, exist_ok=True)
    busy = f"{path}: another `protperf prepare --download` is fetching it; wait for it"
    with lock_folder(folder / f".{path.name}.lock", busy=busy):
        published = read_published(url, say=say, patience=patience)
        if path.exists():
            _check_finished(path, published, say=say, patience=patience)
            return path
        part = _Part(url, path, published, say=say, patience=patience)
        with _explain_full_disk(part.path):
            part.complete()
        part.publish()
    return path


def address_of(name: str, base: str | None = None) -> str:
    """Return the address of one of `SOURCES`; `base` as in `download`.

    Raises:
        ValueError: no such name, or `base` is no address to begin with.
    """
    if name not in SOURCES:
        raise ValueError(f"{name}: no such database; there are: {', '.join(SOURCES)}")
    base = (base or os.environ.get(BASE_VARIABLE) or BASE).rstrip("/")
    with contextlib.suppress(ValueError):  # of a port or an IPv6 host that is none
        if _BASE_FORM.fullmatch(base) and urlsplit(base).port != 0:
            return f"{base}/{SOURCES[name]}"
    raise ValueError(
        f"--download-base or {BASE_VARIABLE}: not an address to fetch from; allowed: http://HOST/FOLDER or "
        "https://HOST/FOLDER, without a user name"
    )


def read_published(url: str, *, say: Callable[[str], None], patience: Patience) -> Published:
    """Return what the metalink beside `url` says of it.

    Raises:
        ValueError: there is no metalink.
        FormatError: it does not name the file with size and MD5.
        ConnectionError: the server stayed out of reach.
    """
    folder, name = url.rsplit("/", 1)
    place = f"{folder}/{METALINK_NAME}"
    tries = Tries(place, say=say, patience=patience)
    while True:
        try:
            with open_address(place, {}, patience.timeout_s) as response:
                text = b"".join(read_pieces(response, _METALINK_LIMIT))
            return _parse_metalink(text, name, place)
        except Dropped as error:
            tries.count_failure(str(error))


def _parse_metalink(text: bytes, name: str, place: str) -> Published:
    """Return what a metalink (version 3 or 4, any namespace) says of the file `name`."""
    try:
        root = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise FormatError(f"{place}: not a metalink ({error}); is the base address right?") from None
    release = (root.findtext("{*}version") or "").strip()
    for entry in root.iterfind(".//{*}file"):
        if entry.get("name") == name:
            size = (entry.findtext("{*}size") or "").strip()
            md5 = (entry.findtext(".//{*}hash[@type='md5']") or "").strip().lower()
            if not (_RELEASE_FORM.fullmatch(release) and re.fullmatch(r"[1-9]\d{0,17}", size, re.ASCII)):
                break
            if not re.fullmatch(r"[0-9a-f]{32}", md5):
                break
            return Published(release, int(size), md5)
    raise FormatError(f"{place}: does not give release, size and MD5 of {name}; nothing was downloaded")


class _Part:
    """A file on its way, from its first byte to its name.

    Attributes:
        path: where the bytes lie that have come so far.
    """

    def __init__(
        self, url: str, target: Path, published: Published, *, say: Callable[[str], None], patience: Patience
    ) -> None:
        self.path = target.with_name(f"{target.name}.part")
        self._origin_path = target.with_name(f"{target.name}.part.json")
        self._url = url
        self._target = target
        self._published = published
        self._say = say
        self._patience = patience

    def complete(self) -> None:
        """Fetch what is missing.

        Raises:
            FormatError: the server's file is not the published one.
            OSError: no room, or the server stayed out of reach.
        """
        self._begin()
        size = self._published.size
        tries = Tries(self._url, say=self._say, patience=self._patience)
        with Progress(
            f"download {self._target.name}", size, say=self._say, every_s=self._patience.report_s
        ) as progress:
            while (offset := self._num_bytes()) < size:
                progress.move_to(offset)
                try:
                    self._fetch(offset, progress)
                except Dropped as error:
                    tries.count_failure(str(error), self._num_bytes())

    def publish(self) -> None:
        """Check the whole part and give it its name.

        Raises:
            FormatError: its MD5 is not the published one; the part is gone.
        """
        published = self._published
        found = _hash_md5(self.path, published.size, say=self._say, patience=self._patience)
        if found != published.md5:
            self._forget()
            why = self._describe_change() or "damaged on its way"
            raise FormatError(
                f"{self.path}: MD5 is {found}, of release {published.release} it is {published.md5} ({why}); "
                "the part was removed: run the same command again"
            )
        commit_file(self.path, self._target)
        self._origin_path.unlink(missing_ok=True)
        self._say(
            f"{self._target}: release {published.release}, {in_units(published.size)}, MD5 as published"
        )
        if change := self._describe_change():
            self._say(f"{change}; {self._target.name} is release {published.release}, whole")

    def _begin(self) -> None:
        """Look at what an earlier try left, and at the room."""
        offset, published = self._num_bytes(), self._published
        if self.path.exists() and (self._origin().get("md5") != published.md5 or offset > published.size):
            self._say(f"{self.path}: is of another release than {published.release}: starts anew")
            self._forget()
            offset = 0
        free, missing = shutil.disk_usage(self.path.parent).free, published.size - offset
        if free < missing:
            raise OSError(
                f"{self.path.parent}: {in_units(missing)} are needed for {self._target.name}, "
                f"{in_units(free)} are free: make room or choose another folder"
            )
        begun = f", {in_units(offset)} are here already" if offset else ""
        self._say(f"{self._url}: release {published.release}, {in_units(published.size)}{begun}")

    def _fetch(self, offset: int, progress: Progress) -> None:
        """Ask for everything from `offset` on and append what comes."""
        headers = {}
        if offset:
            headers["Range"] = f"bytes={offset}-"
            origin = self._origin()
            if origin.get("url") == self._url and origin.get("validator"):
                headers["If-Range"] = str(origin["validator"])
        try:
            with open_address(self._url, headers, self._patience.timeout_s) as response:
                if response.status == PARTIAL_CONTENT:
                    self._check_range(response, offset)
                else:
                    offset = self._start_anew(response, offset)
                self._append(response, offset, progress)
        except BadRange:
            self._forget()
            raise

    def _check_range(self, response: HTTPResponse, offset: int) -> None:
        """Refuse a partial answer that does not continue the part."""
        given = response.headers.get("Content-Range", "")
        match = _RANGE_FORM.fullmatch(given.strip())
        if not match or int(match[1]) != offset or match[2] not in ("*", str(self._published.size)):
            raise BadRange(f"asked for bytes from {offset} on, the server answered {given!r}: starts anew")

    def _start_anew(self, response: HTTPResponse, offset: int) -> int:
        """Make room for a whole file that comes; return the offset of its first byte, 0.

        Raises:
            FormatError: it has another size than published.
        """
        length, size = response.headers.get("Content-Length"), self._published.size
        if length is not None and length.strip() != str(size):
            change = self._describe_change()
            raise FormatError(
                f"{self._url}: the server offers {length.strip()} bytes, release {self._published.release} has {size}; "
                f"{f'{change}: ' if change else ''}run the same command again, later if the server is being updated"
            )
        validator = validator_of(response)
        if offset:
            same = validator and validator == self._origin().get("validator")
            why = "it does not send parts of a file" if same else "its file is another one than before"
            self._say(f"{self._url}: the server sends the whole file ({why}): starts anew")
        self._forget()  # first: the old bytes must never lie beside the new origin
        origin = {"url": self._url, "md5": self._published.md5, "validator": validator}
        commit_bytes(self._origin_path, json.dumps(origin).encode())
        return 0

    def _append(self, response: HTTPResponse, offset: int, progress: Progress) -> None:
        """Write what comes to the end of the part."""
        missing = self._published.size - offset
        progress.move_to(offset)
        with open(self.path, "ab") as file:
            for piece in read_pieces(response, missing):
                file.write(piece)
                offset += len(piece)
                progress.move_to(offset)
        if offset < self._published.size:
            raise Dropped("the connection was dropped")

    def _describe_change(self) -> str:
        """Return how the metalink differs from what it said before the download; empty if it does not."""
        try:
            now = read_published(self._url, say=self._say, patience=replace(self._patience, tries=1))
        except (OSError, ValueError):
            return f"{METALINK_NAME} cannot be read any more: the server may be changing to a newer release"
        if now == self._published:
            return ""
        return f"the server changed from release {self._published.release} to {now.release} meanwhile"

    def _origin(self) -> dict[str, Any]:
        """Return where the part comes from; empty if that is not known."""
        try:
            origin = json.loads(self._origin_path.read_bytes())
        except (FileNotFoundError, ValueError):
            return {}
        return origin if isinstance(origin, dict) else {}

    def _num_bytes(self) -> int:
        """Return the size of the part."""
        return self.path.stat().st_size if self.path.exists() else 0

    def _forget(self) -> None:
        """Remove the part, then its origin."""
        self.path.unlink(missing_ok=True)
        self._origin_path.unlink(missing_ok=True)


def _check_finished(
    path: Path, published: Published, *, say: Callable[[str], None], patience: Patience
) -> None:
    """Refuse a file that is there already unless it is the published one."""
    size = path.stat().st_size
    same = size == published.size and path.is_file()
    if not same or _hash_md5(path, size, say=say, patience=patience) != published.md5:
        raise ValueError(
            f"{path}: is there already and is not {path.name} of release {published.release} (another size or MD5); "
            "it was left as it is: move it away or choose another folder"
        )
    say(f"{path}: is there already: release {published.release}, {in_units(size)}, MD5 as published")


def _hash_md5(path: Path, size: int, *, say: Callable[[str], None], patience: Patience) -> str:
    """Return the hex MD5 of a file of `size` bytes."""
    digest = hashlib.md5(usedforsecurity=False)
    with (
        open(path, "rb") as file,
        Progress(f"check {path.name}", size, say=say, every_s=patience.report_s) as progress,
    ):
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
            progress.move_to(file.tell())
    return digest.hexdigest()


@contextlib.contextmanager
def _explain_full_disk(part: Path) -> Iterator[None]:
    """Turn a full disk or quota into one line that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL_DISK:
            raise
        raise OSError(
            f"{part}: {os.strerror(error.errno or 0)}; what had come is kept: make room and run the same command again"
        ) from error
