"""Cut FASTA into records line by line: the plain form, obviously right, that `blocks` falls back on for odd records."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator

from protperf.formats import FormatError
from protperf.formats.headers import WHITE_SPACE
from protperf.formats.records import RawRecord, Skipped, decoded, quoted, shortened

_SPECIAL_STARTS = ">;#\xef"
_BYTE_ORDER_MARK = "\xef\xbb\xbf"

Repair = Callable[[str, str], None]
"""Called with the name of a repair (a key of `REPAIRS`) and the place."""


def raw_records(
    lines: Iterable[str], path: str, repair: Repair, *, first_line: int = 1
) -> Iterator[RawRecord | Skipped]:
    """Cut lines into records; comment lines (`;`, `#`) are dropped and counted.

    Args:
        lines: lines ended by LF, each character one byte (Latin-1).
        path: the file's name in messages.
        repair: told each comment line.
        first_line: number of the first of the lines.

    Yields:
        Records; text before the first header comes as one `Skipped`.

    Raises:
        FormatError: there is text but no header.
    """
    header, start = "", 0
    body, numbers = bytearray(), array("q")  # a line may be one letter: lists of them take 70 times its room
    for number, line in enumerate(lines, first_line):
        if line[0] in _SPECIAL_STARTS:
            line = line.removeprefix(_BYTE_ORDER_MARK)
            if line.startswith(">"):
                yield from _finished(path, header, start, body, numbers)
                header, start, body, numbers = line, number, bytearray(), array("q")
                continue
            if line.startswith((";", "#")):
                repair("comment_line", f"{path}:{number}")
                continue
        # of text before the first header only the first line is kept, so that memory stays flat
        if header or (not body and line.strip(WHITE_SPACE)):
            body += line.encode("latin-1")
            numbers.append(number)
    if body and not header:
        raise FormatError(
            f"{path}:{numbers[0]}: no '>' header; not FASTA (found {quoted(body.decode('latin-1').strip())}); "
            "allowed: '>' and a name before each sequence"
        )
    yield from _finished(path, header, start, body, numbers)


def _finished(
    path: str, header: str, line: int, body: bytearray, numbers: array[int]
) -> Iterator[RawRecord | Skipped]:
    text = bytes(body)
    if header:
        yield RawRecord(path, line, header[1:].encode("latin-1"), text, numbers)
    elif text:
        yield Skipped(path, numbers[0], "", None, "text_before_header", shortened(decoded(text)[0].strip()))
