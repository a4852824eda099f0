"""A record, what is done with odd ones, and how one that is left out is named.

The whole policy on odd residues lives in `judge`: every command that reads sequences asks it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from protperf.formats import escaped
from protperf.formats.cutting import LONGEST_RECORD
from protperf.formats.headers import WHITE_SPACE, first_word, parse_header
from protperf.vocab import INVALID, VOCABULARY

REASONS = {
    "gap": "--gaps drop removes '-' and '.'",
    "inner_stop": "--unknown x reads it as X",
    "digit": "--unknown x reads it as X",
    "other_character": "--unknown x reads it as X",
    "mask_token": "only `protperf embed` and `protperf generate --fill` take it, as one mask token",
    "header_mark": "a line end is missing before '>'",
    "tag": "a name in brackets is never read as residues",
    "too_much_text": "no protein is so long: give the proteins of a contig, or get the file again",
    "empty": "",
    "no_name": "",
    "text_before_header": "",
}
"""Why a record is left out, and what to do about it."""

REPAIRS = {
    "comment_line": "';' and '#' comment lines dropped",
    "final_stop": "final '*' dropped",
    "gap": "gaps '-' and '.' dropped (--gaps drop)",
    "inner_stop": "inner '*' read as X (--unknown x)",
    "digit": "digits read as X (--unknown x)",
    "other_character": "other characters read as X (--unknown x)",
    "mask_token": "<mask> taken as one mask token",
    "header_encoding": "headers that are not UTF-8 read as Latin-1",
    "very_long": "records of more than 100,000 residues: longer than any known protein (a translated contig?)",
    "like_nucleotides": "files that look like nucleotides (only A C G T U N), read as proteins",
}
"""What was changed or is worth a look in what was read, in the summary's words."""

_INVALID_BYTE = bytes([INVALID])
_MASK_MARK = "<"  # stands for one mask token in a text whose own '<' have all been judged
_TABLE = bytes(VOCABULARY.table)
_TABLE_WITH_MASK = bytes(
    VOCABULARY.mask if byte == ord(_MASK_MARK) else token for byte, token in enumerate(_TABLE)
)
_ODD = re.compile(
    r"(?P<white_space>[ \t\n\r\v\f]+)"
    r"|(?P<tag>[<\[][\w.\- \t\n\r\v\f]{1,30}[>\]])"
    r"|(?P<header_mark>>)"
    r"|(?P<gap>[-.])"
    r"|(?P<inner_stop>\*)"
    r"|(?P<digit>[0-9])"
    r"|(?P<other_character>[^A-Za-z])",
    re.ASCII,
)
_MASK = re.compile(r"<[-.\s]*m[-.\s]*a[-.\s]*s[-.\s]*k[-.\s]*>", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True)
class Policy:
    """What to do with odd records; the default leaves every bad one out.

    Attributes:
        gaps: `refuse` leaves a record with `-` or `.` out, `drop` removes these characters.
        unknown: `refuse` leaves a record with an inner `*`, a digit or another odd character out, `x` reads each as X.
        mask_token: `<mask>` is taken as one mask token; otherwise its record is left out.
        strict: the first bad record is a `FormatError`.
    """

    gaps: str = "refuse"
    unknown: str = "refuse"
    mask_token: bool = False
    strict: bool = False

    def __post_init__(self) -> None:
        """Check the names."""
        if self.gaps not in ("refuse", "drop"):
            raise ValueError(f"--gaps {self.gaps}: no such choice; allowed: refuse, drop")
        if self.unknown not in ("refuse", "x"):
            raise ValueError(f"--unknown {self.unknown}: no such choice; allowed: refuse, x")

    @cached_property
    def readings(self) -> dict[str, str]:
        """What each allowed kind of odd text is read as; a kind that is not here is refused."""
        readings = {"white_space": "", "final_stop": ""}
        if self.gaps == "drop":
            readings["gap"] = ""
        if self.unknown == "x":
            readings |= dict.fromkeys(("inner_stop", "digit", "other_character"), "X")
        if self.mask_token:
            readings["mask_token"] = _MASK_MARK
        return readings


@dataclass(frozen=True, eq=False)
class Record:
    """One accepted protein.

    Attributes:
        id: first word of the header, exactly as written.
        header: the whole header without `>`.
        tokens: residue tokens, `uint8 (L,)`, L >= 1 (and mask tokens where the policy takes them).
        path: the file's name in messages.
        line: line of the header; in a UniProt or GenBank file the number of the entry.
        unit: what `line` counts: `line` or `entry`.
    """

    id: str
    header: str
    tokens: np.ndarray
    path: str
    line: int
    unit: str = "line"

    @property
    def accession(self) -> str:
        """The database's identifier, or the id where the header names none."""
        return parse_header(self.header).accession


@dataclass(frozen=True)
class Skipped:
    """One record that was left out.

    Attributes:
        path: the file's name in messages.
        line: line of what was found, from 1; in a UniProt or GenBank file the number of the entry.
        id: the record's id, `""` where it has none.
        column: place in that line (in an entry: residue), from 1; None where the whole record is meant.
        reason: one of `REASONS`.
        found: what was found, as it stands in the file (long text is cut).
        unit: what `line` counts: `line` or `entry`.
    """

    path: str
    line: int
    id: str
    column: int | None
    reason: str
    found: str
    unit: str = "line"

    @property
    def place(self) -> str:
        """File and line, or file and entry."""
        return place_text(self.path, self.line, self.unit)

    @property
    def message(self) -> str:
        """One line: where, what was found, what is allowed, what to do."""
        record = f"{self.place}: record {quoted(self.id)}"
        if self.reason == "text_before_header":
            return (
                f"{self.place}: text before the first '>' header: {quoted(self.found)}; "
                "allowed there: blank lines, ';' and '#' comments"
            )
        if self.reason == "no_name":
            return f"{self.place}: header without a name (found {quoted(self.found)}); allowed: an id and a description"
        if self.reason == "empty":
            found = f" (found {quoted(self.found)})" if self.found else ""
            return f"{record} is empty{found}; allowed: at least one residue"
        if self.reason == "too_much_text":
            return f"{record} has {self.found}; allowed: {LONGEST_RECORD >> 20} MiB; {REASONS[self.reason]}"
        where = "column" if self.unit == "line" else "residue"
        return (
            f"{record} has {quoted(self.found)} at {where} {self.column}; "
            f"allowed: letters A-Z (a final '*' is dropped); {REASONS[self.reason]}"
        )


@dataclass(frozen=True)
class RawRecord:
    """A record as it stands in a file, not yet judged.

    Attributes:
        path: the file's name in messages.
        line: line of the header, or number of the entry.
        header: the header without `>`, UTF-8 or else Latin-1.
        body: residues with the line ends between them.
        numbers: the line number of each line of `body`; for an entry its number.
        unit: what the numbers count: `line` or `entry`.
    """

    path: str
    line: int
    header: bytes
    body: bytes
    numbers: Sequence[int]
    unit: str = "line"

    @property
    def place(self) -> str:
        """File and line, or file and entry."""
        return place_text(self.path, self.line, self.unit)

    def place_of(self, offset: int) -> tuple[int, int]:
        """Return line and column (from 1) of a character of the body's text."""
        text = decoded(self.body)[0]
        return self.numbers[text.count("\n", 0, offset)], offset - text.rfind("\n", 0, offset)

    def skipped(self, record_id: str, verdict: Verdict) -> Skipped:
        """Say why this record is left out and where the fault is."""
        line, column = (self.line, None) if verdict.offset is None else self.place_of(verdict.offset)
        return Skipped(self.path, line, record_id, column, verdict.reason, verdict.found, self.unit)

    def too_long(self, size: int) -> Skipped:
        """Leave this record out, of whose text of so many bytes only the header is there."""
        record_id = first_word(decoded(self.header)[0].strip(WHITE_SPACE))
        return Skipped(
            self.path, self.line, record_id, None, "too_much_text", f"{size:,} bytes of text", self.unit
        )


@dataclass(frozen=True)
class Verdict:
    """What `judge` found: tokens `uint8 (L,)`, or a reason, what was found and its offset in the body's text."""

    tokens: np.ndarray | None = None
    repaired: Counter[str] = field(default_factory=Counter)
    reason: str = ""
    found: str = ""
    offset: int | None = None


def judge(body: bytes, policy: Policy) -> Verdict:
    """Turn a record's residues into tokens, or say what keeps it out.

    Args:
        body: residues, white space allowed anywhere.
        policy: what is allowed beside letters.
    """
    tokens = bytearray(body).translate(_TABLE, WHITE_SPACE.encode())
    if tokens and _INVALID_BYTE not in tokens:
        return Verdict(np.frombuffer(tokens, np.uint8))
    return _judge_odd(decoded(body)[0], policy)


def _judge_odd(text: str, policy: Policy) -> Verdict:
    """Judge a text character by character (UTF-8 is decoded: one odd character is one X)."""
    droppable = WHITE_SPACE + ("-." if policy.gaps == "drop" else "")
    final = len(text.rstrip(droppable)) - 1
    letters = bytearray()
    repaired: Counter[str] = Counter()
    start = 0
    for match in _ODD.finditer(text):
        kind, found = str(match.lastgroup), match.group()
        if kind == "inner_stop" and match.start() == final:
            kind = "final_stop"
        elif kind == "tag" and _MASK.fullmatch(found):
            kind = "mask_token"
        reading = policy.readings.get(kind)
        if reading is None:
            return Verdict(reason=kind, found=found, offset=match.start())
        letters += (text[start : match.start()] + reading).encode("ascii")  # what is none has been judged
        start = match.end()
        if kind != "white_space":
            repaired[kind] += 1
    letters += text[start:].encode("ascii")
    if not letters:
        return Verdict(reason="empty", found=shortened(text.strip(WHITE_SPACE)))
    tokens = letters.translate(_TABLE_WITH_MASK)
    return Verdict(np.frombuffer(tokens, np.uint8), repaired)


def decoded(data: bytes) -> tuple[str, bool]:
    """Return bytes as text and whether they are UTF-8; what is not is read as Latin-1, which loses nothing."""
    try:
        return data.decode("utf-8"), True
    except UnicodeDecodeError:
        return data.decode("latin-1"), False


def place_text(path: str, number: int, unit: str) -> str:
    """Return a place as messages name it: `FILE:LINE` or `FILE: entry NUMBER`."""
    return f"{path}:{number}" if unit == "line" else f"{path}: entry {number}"


def num_residues(body: bytes) -> int:
    """Return the number of bytes that are not white space."""
    return len(body.translate(None, WHITE_SPACE.encode()))


def quoted(text: str, limit: int = 60) -> str:
    """Return text in quotes for a message, escaped, and cut where it is long."""
    return f"'{escaped(shortened(text, limit))}'"


def shortened(text: str, limit: int = 200) -> str:
    """Return text, cut where it is longer than `limit` characters."""
    return text if len(text) <= limit else text[:limit] + "..."
