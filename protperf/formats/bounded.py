"""Files that are read whole, up to a bound."""

from __future__ import annotations

from typing import Protocol

from protperf.formats import FormatError


class Readable(Protocol):
    """Anything that bytes are read from."""

    def read(self, size: int, /) -> bytes:
        """Return so many bytes, or those up to the end."""
        ...


def read_within(most: int, file: Readable, *, refusal: str) -> bytes:
    """Return the rest of a file.

    Args:
        most: bytes that it may have.
        file: open.
        refusal: what to say of a larger one.

    Raises:
        FormatError: it is larger; other errors as the file has them.
    """
    data = file.read(most + 1)  # one more, so that nothing is cut off in silence
    if len(data) > most:
        raise FormatError(refusal)
    return data
