"""Open a sequence file: plain, gzip, bzip2 or xz, from disk or stdin, known by its first bytes and never by its name.

What comes out is one stream of decompressed bytes and the kind of text in it. Every damage a compressed file can
have (cut short, wrong checksum, bytes after its end) is an error here: a damaged file is never read as a shorter one.
"""

from __future__ import annotations

import bz2
import contextlib
import hashlib
import io
import lzma
import queue
import re
import sys
import threading
import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import IO, Any

from protperf.formats import FormatError

try:  # Intel's inflate is about three times as fast as zlib's; `pip install protperf[fast]`
    from isal import isal_zlib

    _inflater: Callable[..., Any] = isal_zlib.decompressobj
    _inflate_error: Any = isal_zlib.error
except ImportError:
    _inflater, _inflate_error = zlib.decompressobj, zlib.error

Advance = Callable[[int], Any]
"""Called with the number of stored (compressed) bytes just read."""

STDIN = "-"
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
HEAD_SIZE = 1 << 16
PIECE_SIZE = 1 << 17
OUTPUT_LIMIT = 1 << 22
PIECES_AHEAD = 8
"""Decompressed pieces that a reading thread keeps ready: a few MB."""

COMPRESSIONS = {
    "gzip": re.compile(rb"\x1f\x8b"),
    "bzip2": re.compile(rb"BZh[1-9](?:1AY&SY|\x17rE8P\x90)"),
    "xz": re.compile(rb"\xfd7zXZ\x00"),
}
REFUSED = {
    b"\x28\xb5\x2f\xfd": ("zstd-compressed", "decompress it first: zstd -d"),
    b"PK\x03\x04": ("a zip archive", "unpack it first: unzip"),
    b"PK\x05\x06": ("a zip archive", "unpack it first: unzip"),
    b"7z\xbc\xaf\x27\x1c": ("a 7z archive", "unpack it first: 7z x"),
    b"\x1f\x9d": ("compressed by compress (.Z)", "decompress it first: gzip -d"),
    b"\x04\x22\x4d\x18": ("lz4-compressed", "decompress it first: lz4 -d"),
    b"\xff\xfe": ("UTF-16 text", "save it as UTF-8: iconv -f UTF-16 -t UTF-8"),
    b"\xfe\xff": ("UTF-16 text", "save it as UTF-8: iconv -f UTF-16 -t UTF-8"),
}
_DOCTYPE = b"<!DOCTYPE"
XZ_MEMORY = 128 << 20
"""Bytes that a file may ask for to be unpacked; `xz -9` takes 65 MiB, and a header may claim 4 GiB."""
READABLE = "FASTA (plain, gzip, bzip2 or xz), UniProt .dat or XML, GenBank"


def place_of(path: str | Path) -> str:
    """Return how messages name an input: its path, or `<stdin>` for `-`."""
    return "<stdin>" if str(path) == STDIN else str(path)


def standard_input() -> IO[bytes]:
    """Return what `-` names.

    Raises:
        ValueError: the program was started without it (`<&-`).
    """
    if sys.stdin is None:
        raise ValueError(f"{place_of(STDIN)}: is closed; give a file, or something to read on stdin")
    return sys.stdin.buffer


def check_inputs(paths: Sequence[str | Path]) -> None:
    """Refuse inputs that cannot be read, before any work starts.

    Raises:
        ValueError: no input at all, a missing file, a folder, or stdin named twice.
    """
    if not paths:
        raise ValueError("no input: give at least one sequence file, or - for stdin")
    names = [str(path) for path in paths]
    if names.count(STDIN) > 1:
        raise ValueError("<stdin>: '-' was given more than once; stdin can be read only once")
    for name in names:
        if name != STDIN and Path(name).is_dir():
            raise ValueError(
                f"{name}: is a folder; give the sequence files in it ({name.rstrip('/')}/*.fasta)"
            )
        if name != STDIN and not Path(name).exists():
            raise ValueError(f"{name}: no such file; give the path of a sequence file, or - for stdin")


@contextlib.contextmanager
def progress_bar(paths: Sequence[str | Path], *, shown: bool) -> Iterator[Advance]:
    """Show the position in the stored bytes of all inputs; silent where stderr is no terminal."""
    if not (shown and sys.stderr.isatty()):
        yield lambda num_bytes: None
        return
    from tqdm import tqdm

    sizes = [Path(path).stat().st_size if Path(path).is_file() else None for path in paths]
    known = [size for size in sizes if size is not None]
    total = sum(known) if len(known) == len(sizes) else None
    with tqdm(total=total, unit="B", unit_scale=True, desc="reading") as bar:
        yield bar.update


class SequenceStream(io.RawIOBase):
    """Decompressed bytes of one input.

    Attributes:
        place: the input's name in messages.
        kind: `fasta`, or the name of a `Bio.SeqIO` format: `swiss`, `uniprot-xml`, `genbank`, `genbank-cds`.
        tail: the last bytes handed out so far.

    Raises:
        FormatError: the first bytes say that this is no sequence text (binary, zstd, an HTML page, ...).
    """

    def __init__(self, pieces: Iterator[bytes], place: str) -> None:
        super().__init__()
        head, rest = _with_head(pieces)
        head = head.removeprefix(BYTE_ORDER_MARK)
        self.place = place
        self.kind = _kind_of(head, place)
        self.tail = b""
        self._entry, self._entry_bytes = 0, 0
        self._most, self._marks, self._most_marks = sys.maxsize, 0, sys.maxsize
        self._marking: tuple[bytes, ...] = ()
        pieces = chain([head], rest)
        self._pieces = _without_doctype(pieces, place) if self.kind == "uniprot-xml" else pieces
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        """Return True: the stream can be read."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill `buffer` with the next bytes and return their number, 0 at the end."""
        while not self._rest:
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            self._rest = memoryview(piece)
            self.tail = (self.tail + piece[-64:])[-64:]
        size = min(len(buffer), len(self._rest))
        self._count(bytes(self._rest[:size]))
        buffer[:size] = self._rest[:size]
        self._rest = self._rest[size:]
        return size

    def begin_entry(
        self, number: int, *, most: int, marks: tuple[bytes, ...] = (), most_marks: int = sys.maxsize
    ) -> None:
        """Say which entry is read from here on; one that is too large is a `FormatError`.

        Args:
            number: of the entry, from 1.
            most: bytes of text.
            marks: what ends a line, or begins a tag: a parser keeps a hundred bytes for each.
            most_marks: so many of them together.
        """
        self._entry, self._entry_bytes, self._most = number, 0, most
        self._marks, self._marking, self._most_marks = 0, marks, most_marks

    def too_large(self, found: str) -> FormatError:
        """Return the error for an entry that has too much of something."""
        return FormatError(
            f"{self.place}: entry {self._entry} has more than {found}, which no protein has; "
            "get the file again, or take this entry out"
        )

    def _count(self, data: bytes) -> None:
        """Count what belongs to the entry; raise where that is too much."""
        self._entry_bytes += len(data)
        self._marks += sum(map(data.count, self._marking))
        if self._entry_bytes > self._most:
            raise self.too_large(f"{self._most >> 20} MiB of text")
        if self._marks > self._most_marks:
            raise self.too_large(f"{self._most_marks:,} lines, tags or attributes")

    def pieces(self) -> Iterator[bytes]:
        """Iterate over the bytes as they come, without a copy."""
        return self._pieces

    def text(self) -> io.TextIOWrapper:
        """Return the stream as lines ended by LF, CRLF or CR, each character one byte (Latin-1)."""
        return io.TextIOWrapper(io.BufferedReader(self, PIECE_SIZE), encoding="latin-1", newline=None)


@contextlib.contextmanager
def open_stream(
    path: str | Path, advance: Advance, *, ahead: bool = False, digest: hashlib._Hash | None = None
) -> Iterator[SequenceStream]:
    """Open one input for reading.

    Args:
        path: a file (a pipe will do), or `-` for stdin.
        advance: called with the number of stored bytes at each read.
        ahead: read and decompress in a thread of its own, a few pieces ahead.
        digest: is updated with the stored bytes.

    Raises:
        FormatError: the file is damaged or no sequence text.
        ValueError: it cannot be opened or read.
    """
    place = place_of(path)
    with contextlib.ExitStack() as stack:
        if str(path) == STDIN:
            file: Any = standard_input()
        else:
            try:
                file = stack.enter_context(open(path, "rb", buffering=0))
            except OSError as error:
                raise ValueError(f"{place}: cannot be opened: {error.strerror}") from error
        head, rest = _with_head(_stored_pieces(file, advance, place, digest))
        pieces: Iterator[bytes] = chain([head], rest)
        for compression, magic in COMPRESSIONS.items():
            if magic.match(head):
                pieces = _decompressed(pieces, compression, place)
        if ahead:
            pieces = stack.enter_context(contextlib.closing(_read_ahead(pieces)))
        yield SequenceStream(pieces, place)


def _read_ahead(pieces: Iterator[bytes]) -> Generator[bytes, None, None]:
    """Yield the pieces that a thread takes from `pieces`; its errors come out here, closing ends it."""
    ready: queue.Queue[bytes | BaseException | None] = queue.Queue(PIECES_AHEAD)
    closed = threading.Event()

    def put(item: bytes | BaseException | None) -> None:
        while not closed.is_set():
            with contextlib.suppress(queue.Full):
                return ready.put(item, timeout=0.1)

    def read() -> None:
        try:
            for piece in pieces:
                put(piece)
                if closed.is_set():
                    return
            put(None)
        except BaseException as error:
            put(error)

    thread = threading.Thread(target=read, name="protperf-reading", daemon=True)
    thread.start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        closed.set()
        thread.join()


def _stored_pieces(file: Any, advance: Advance, place: str, digest: hashlib._Hash | None) -> Iterator[bytes]:
    while True:
        try:
            piece = file.read(PIECE_SIZE)
        except OSError as error:
            raise ValueError(f"{place}: cannot be read: {error.strerror}") from error
        if not piece:
            return
        advance(len(piece))
        if digest is not None:
            digest.update(piece)
        yield piece


def _with_head(pieces: Iterator[bytes]) -> tuple[bytes, Iterator[bytes]]:
    """Return the first bytes (all of a short input) and the pieces that follow them."""
    held: list[bytes] = []
    size = 0
    for piece in pieces:
        held.append(piece)
        size += len(piece)
        if size >= HEAD_SIZE:
            break
    return b"".join(held), pieces


class _Gzip:
    """A gzip member's decoder with the interface of bz2's and lzma's; checks the CRC and the length.

    Attributes:
        needs_input: whether all output of the input so far has been handed out.
    """

    def __init__(self) -> None:
        self._decoder = _inflater(wbits=31)
        self.needs_input = True

    def decompress(self, data: bytes, max_length: int) -> bytes:
        output: bytes = self._decoder.decompress(self._decoder.unconsumed_tail + data, max_length)
        self.needs_input = len(output) < max_length and not self._decoder.unconsumed_tail
        return output

    @property
    def eof(self) -> bool:
        return self._decoder.eof

    @property
    def unused_data(self) -> bytes:
        return self._decoder.unused_data


_DECODERS: dict[str, Callable[[], Any]] = {
    "gzip": _Gzip,
    "bzip2": bz2.BZ2Decompressor,
    "xz": lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=XZ_MEMORY),
}


def _decompressed(pieces: Iterator[bytes], compression: str, place: str) -> Iterator[bytes]:
    """Yield the decompressed bytes of all members; NUL padding between and after them is allowed."""
    decoder = _DECODERS[compression]()
    try:
        for piece in pieces:
            while piece:
                if decoder.eof:
                    piece = piece.lstrip(b"\0")
                    if not piece:
                        break
                    decoder = _DECODERS[compression]()
                yield decoder.decompress(piece, OUTPUT_LIMIT)
                while not (decoder.eof or decoder.needs_input):
                    yield decoder.decompress(b"", OUTPUT_LIMIT)
                piece = decoder.unused_data if decoder.eof else b""
    except (zlib.error, _inflate_error, lzma.LZMAError, OSError, EOFError) as error:
        if "memory usage limit" in str(error).lower():
            raise FormatError(
                f"{place}: its xz data ask for more than {XZ_MEMORY >> 20} MiB to be unpacked; unpack it first: xz -d {place}"
            ) from error
        raise FormatError(
            f"{place}: damaged {compression} data or a wrong checksum (CRC): {error}; get the file again"
        ) from error
    if not decoder.eof:
        raise FormatError(
            f"{place}: the {compression} data are truncated: they end too early; get the file again"
        )


def _without_doctype(pieces: Iterator[bytes], place: str) -> Iterator[bytes]:
    """Yield pieces of XML; refuse the declaration that entities and default values would need, of which a few bytes become many."""
    last, most = b"", len(_DOCTYPE) - 1
    for piece in pieces:
        if _DOCTYPE in piece or _DOCTYPE in last + piece[:most]:  # it may be cut in two
            raise FormatError(f"{place}: XML with a DOCTYPE, which UniProt's has not; get the file again")
        last = (last + piece[-most:])[-most:]
        yield piece


def _kind_of(head: bytes, place: str) -> str:
    for magic, (what, advice) in REFUSED.items():
        if head.startswith(magic):
            raise FormatError(f"{place}: {what}, which is not read here; {advice} {place}")
    for compression, pattern in COMPRESSIONS.items():
        if pattern.match(head):
            raise FormatError(f"{place}: compressed twice ({compression} inside); decompress it once")
    first_line = head.split(b"\n", 1)[0]
    if head.lstrip().startswith(b"<"):
        return _kind_of_markup(head, place)
    if head.startswith(b"ID   "):
        if first_line.rstrip().endswith(b"BP."):
            raise FormatError(f"{place}: an EMBL nucleotide file; give its proteins as FASTA")
        return "swiss"
    if head.startswith(b"LOCUS  "):
        return "genbank-cds" if re.search(rb" \d+ bp\b", first_line) else "genbank"
    header = re.search(rb"(?:\A|[\r\n])>", head)
    nul = head.find(b"\0", 0, header.start() if header else len(head))
    if nul >= 0:
        raise FormatError(f"{place}: binary data (a NUL byte at offset {nul}); allowed: {READABLE}")
    return "fasta"


def _kind_of_markup(head: bytes, place: str) -> str:
    root = re.search(rb"<([A-Za-z_][\w:.-]*)", head)
    name = root.group(1).decode("ascii", "replace") if root else ""
    if name == "uniprot":
        return "uniprot-xml"
    if name.startswith("UniRef"):
        raise FormatError(f"{place}: UniRef XML is not read here; take the FASTA file of the same release")
    if name.lower() == "html" or head.lstrip()[:9].lower() == b"<!doctype":
        raise FormatError(
            f"{place}: an HTML page, not sequences (a download that failed?); allowed: {READABLE}"
        )
    raise FormatError(f"{place}: XML with the root element <{name}>; allowed: {READABLE}")
