"""What lies on disk: FASTA in, training shards, embedding files out (numpy and h5py only)."""

from typing import Any

_LONGEST_LINE, _LONGEST_VALUE, _MOST_BITS = 2000, 200, 1024


class FormatError(ValueError):
    """A file that is damaged or is not what it should be; the message is one printable line that says what to do.

    What a message quotes of a file may hold anything: control characters, which a terminal would obey, are escaped, and
    what is very long is cut in its middle.
    """

    def __init__(self, text: str) -> None:
        super().__init__(one_line(text))


def one_line(text: str) -> str:
    r"""Return text as one printable line of bounded length.

    >>> print(one_line("a\nb"))
    a\nb
    """
    if len(text) > _LONGEST_LINE:
        half = _LONGEST_LINE // 2
        text = f"{text[:half]} ... {text[-half:]}"
    return escaped(text)


def escaped(text: str) -> str:
    """Return text for one line of a report: control and unprintable characters as escapes."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def shown(value: Any) -> str:
    r"""Return what a message says of a foreign value: words and numbers as they are written, of anything else its type.

    Containers may hold each other many times, or be nested deeper than Python writes out: a few bytes, and gigabytes of text.

    >>> print(shown("a\nb"), shown(1.5), shown({}))
    'a\nb' 1.5 of type dict
    """
    if type(value) is str:
        return repr(value[:_LONGEST_VALUE])
    is_number = type(value) in (bool, float) or (type(value) is int and value.bit_length() <= _MOST_BITS)
    return repr(value) if value is None or is_number else f"of type {type(value).__name__}"
