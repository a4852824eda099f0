"""Gzip files that are read whole: unpacked up to a bound, since a kilobyte may unpack to a megabyte."""

from __future__ import annotations

import gzip
import io
import zlib

from protperf.formats import FormatError
from protperf.formats.bounded import read_within

LARGEST_UNPACKED = 256 << 20
"""Bytes of text out of a compressed file that is read whole; the largest table of ProteinGym has half as many."""

GZIP_MAGIC = b"\x1f\x8b"


def unpacked(data: bytes, place: str, *, most: int = LARGEST_UNPACKED) -> bytes:
    """Return what gzip data hold, all members, or other data as they are.

    Args:
        data: a whole file.
        place: its name, for messages.
        most: bytes that they may unpack to.

    Raises:
        FormatError: damaged, or more bytes unpacked.
    """
    if not data.startswith(GZIP_MAGIC):
        return data
    too_large = (
        f"{place}: {len(data):,} bytes of gzip unpack to more than {most >> 20} MiB; unpack it first (gzip -d) "
        "if that is meant to be"
    )
    try:
        return read_within(most, gzip.GzipFile(fileobj=io.BytesIO(data)), refusal=too_large)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise FormatError(f"{place}: damaged gzip file ({error}); copy or download it again") from error
