"""What lies on disk: FASTA in, training shards, embedding files out (numpy and h5py only)."""

_LONGEST_LINE = 2000


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
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
