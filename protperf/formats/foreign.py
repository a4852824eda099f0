"""Errors on foreign bytes become one line: those of libraries, which fail in any way, and those of our own code, which fails in few.

What the system could not read stays an `OSError`, a lack of memory a `MemoryError`, and a plain mistake in our own code what it is.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from protperf.formats import FormatError


@contextmanager
def foreign_bytes() -> Iterator[None]:
    """Make a `ValueError` of whatever a library raises; for as few calls as can be, since it would hide mistakes of ours."""
    try:
        yield
    except (ValueError, MemoryError):
        raise
    except Exception as error:
        if is_of_system(error):
            raise
        raise ValueError(first_line(error)) from error


@contextmanager
def as_format_error(text: str) -> Iterator[None]:
    """Make one line of what our own code says of foreign bytes; a line of ours passes.

    Args:
        text: beginning of the message.
    """
    try:
        yield
    except FormatError:
        raise
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{text} ({first_line(error)})") from error


def is_of_system(error: BaseException) -> bool:
    """Return whether the system failed to read: not a library, nor what a foreign offset led to."""
    return isinstance(error, OSError) and error.errno not in (None, errno.EINVAL)


def first_line(error: BaseException) -> str:
    """Return what an error says, in one line."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__
