"""Libraries that read foreign bytes fail in any way: their errors become one line, those of the system stay what they are."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from protperf.formats import FormatError


@contextmanager
def foreign_bytes(text: str) -> Iterator[None]:
    """Make one line of whatever a library raises; for as few calls as can be, since it hides mistakes of ours too.

    Args:
        text: beginning of the message.

    Raises:
        FormatError: as said; one that is raised within passes as it is.
        MemoryError: raised within.
        OSError: the system could not read, see `is_of_system`.
    """
    try:
        yield
    except (FormatError, MemoryError):
        raise
    except Exception as error:
        if is_of_system(error):
            raise
        raise FormatError(f"{text} ({first_line(error)})") from error


def is_of_system(error: BaseException) -> bool:
    """Return whether the system failed to read: not a library, nor what a foreign offset led to."""
    return isinstance(error, OSError) and error.errno not in (None, errno.EINVAL)


def first_line(error: BaseException) -> str:
    """Return what an error says, in one line."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__
