"""Edits that make hostile files of whole ones: what a file claims is replaced by extremes more often than bits are flipped.

An edit is four numbers: what is done, where, with which value, how wide.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

Edit = tuple[int, int, int, int]
Input = tuple[int, list[Edit]]
PLACES = 1 << 32
"""What an edit says of where it is goes up to here, whatever the size of a file: see `at`."""

NUMBERS = [
    *(0, 1, 2, 3, 8, 127, 128, 255, 256, 32767, 32768, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1),
    *(2**40, 2**60, 2**63 - 1, 2**63, 2**64 - 1),
]
TEXTS = [
    *(
        "0",
        "-1",
        "1e308",
        "nan",
        "inf",
        "-0",
        "9" * 20,
        "9" * 5000,
        "1.5",
        "",
        "null",
        "true",
        "\0",
        "\n",
        "\r",
    ),
    *(
        ",",
        "\t",
        ";",
        '"',
        "'",
        ":",
        ">",
        "*",
        "-",
        "<mask>",
        "é",
        "\ud7ff",
        "\x1b[2J",
        " ",
        "x" * 70000,
        "{}",
        "[" * 3000,
    ),
]


def inputs(number: int) -> st.SearchStrategy[Input]:
    """Return the hostile inputs of a child, by its number: which whole file and how it is made, and the edits of it.

    Hypothesis draws a seed and nothing else. What it draws one by one is small or extreme more often than not: two in three
    places were in the first twentieth of a file.
    """
    return st.integers(0, 2**64 - 1).map(lambda drawn: draw_input(random.Random(number << 64 | drawn)))


def draw_input(chance: random.Random) -> Input:
    """Draw one to five edits, each number evenly over all that it may be; one edit most often, as a second may hide it."""
    kind, count = chance.randrange(1 << 16), max(1, chance.randint(-3, 5))
    return kind, [
        (chance.randrange(10), chance.randrange(PLACES), chance.randrange(256), chance.randrange(4))
        for _ in range(count)
    ]


def at(place: int, count: int) -> int:
    """Return which of so many things an edit is at."""
    return place * count // PLACES


def _other(place: int, value: int) -> int:
    """Return a second place of an edit, as even as the first."""
    return (place * 40503 + value * 257) % PLACES


def json_values() -> list[Any]:
    """Return what JSON values are replaced by: new ones each time, since what holds them may be edited too."""
    return [
        *(0, -1, 1, 1.5, 1e308, 2**31, 2**60, 2**63, 2**64, 10**30, 10**400, float("nan"), float("inf")),
        *(None, True, False, "", "x", "0", "../x", "/etc/passwd"),
        *("a\0b", "a\nb\x1b[31m", "\ud800", "é" * 5000),
        *([], {}, [[]], [1, 2], {"a": 1}, ["a"], [0] * 2000),
    ]


def edit_bytes(data: bytes, chosen: Sequence[Edit], words: Sequence[bytes] = ()) -> bytes:
    """Return data with bytes flipped, cut out, repeated or moved, and numbers or words written over them."""
    for kind, place, value, width in chosen:
        start = at(place, len(data))
        size = 1 << width
        if kind <= 2:  # a number of 1, 2, 4 or 8 bytes, where such numbers often lie
            start -= start % (size if kind else 1)
            number = NUMBERS[value % len(NUMBERS)] & (256**size - 1)
            data = data[:start] + number.to_bytes(size, "little") + data[start + size :]
        elif kind == 3:
            data = data[:start] + bytes([data[start] ^ 1 << value % 8]) + data[start + 1 :] if data else data
        elif kind == 4:
            data = data[:start] + data[start + value * size :]
        elif kind == 5:
            data = data[:start] + data[start : start + value] * (1 + size) + data[start + value :]
        elif kind == 6:
            data = data[:start] if width else data[start:]
        elif kind == 7 and words:
            word = words[value % len(words)]
            data = data[:start] + word + data[start + (len(word) if width < 2 else 0) :]
        elif kind == 8:
            other = at(_other(place, value), len(data))
            data = data[:start] + data[other : other + 8 * size] + data[start + 8 * size :]
        else:
            data = data[:start] + bytes([value]) * size + data[start + size :]
    return data


def edit_text(text: str, chosen: Sequence[Edit]) -> str:
    """Return text with its numbers, cells and lines replaced, repeated and removed."""
    for kind, place, value, width in chosen:
        pattern = (r"-?\d+(\.\d+)?", r"[^,\t\n;:]+", r"[^\n]+\n?", r"[A-Za-z]")[width]
        found = list(re.finditer(pattern, text))
        if not found:
            continue
        start, end = found[at(place, len(found))].span()
        piece = text[start:end]
        new = {
            0: TEXTS[value % len(TEXTS)],
            1: piece * (value % 4),
            2: piece.lower(),
            3: piece + TEXTS[value % len(TEXTS)],
        }
        text = text[:start] + new.get(kind, TEXTS[value % len(TEXTS)]) + text[end:]
    return text


def edit_json(content: object, chosen: Sequence[Edit]) -> object:
    """Return a copy of JSON values, some of them replaced, removed, or put in other places."""
    content = json.loads(json.dumps(content))
    for kind, place, value, width in chosen:
        leaves: list[tuple[object, object]] = []
        _collect(content, leaves)
        if not leaves:
            return content
        owner, key = leaves[at(place, len(leaves))]
        if kind == 0 and isinstance(owner, dict):
            del owner[key]
        elif kind == 1 and isinstance(owner, list):
            owner.extend(owner[: value % 3])
        elif kind == 2 and isinstance(owner, dict):
            owner[TEXTS[value % len(TEXTS)]] = owner[key]
        elif kind <= 4:
            other, name = leaves[at(_other(place, value), len(leaves))]
            owner[key] = other[name]  # type: ignore[index]
        else:
            values = json_values()
            owner[key] = values[(value + 256 * width) % len(values)]  # type: ignore[index]
    return content


def dump(content: object) -> bytes:
    """Return JSON as bytes; what holds itself is nothing."""
    try:
        return json.dumps(content).encode("utf-8", "surrogatepass")
    except (ValueError, RecursionError):
        return b"null"


def _collect(content: object, leaves: list[tuple[object, object]]) -> None:
    """Append every (container, key) of nested containers."""
    waiting = [content]
    while waiting and len(leaves) < 5000:
        owner = waiting.pop()
        keys = (
            list(owner) if isinstance(owner, dict) else range(len(owner)) if isinstance(owner, list) else ()
        )
        for key in keys:
            leaves.append((owner, key))
            waiting.append(owner[key])  # type: ignore[index]
