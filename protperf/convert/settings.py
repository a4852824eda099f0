"""The config of a source: read key by key, each with its type; what the model cannot do is refused here."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from protperf.formats import FormatError


class Settings:
    """The content of a source's config.

    Args:
        content: of the JSON object.
        place: the file's name, for messages.
    """

    def __init__(self, content: Mapping[str, Any], place: str) -> None:
        self.place = place
        self._content = content

    def get(self, name: str) -> Any:
        """Return the value of a key; `None` where it is missing."""
        return self._content.get(name)

    def size(self, name: str) -> int:
        """Return a whole number of at least 1 that must be there."""
        value = self.get(name)
        if type(value) is not int or value < 1:
            raise self.error(name, "a whole number of at least 1")
        return value

    def number(self, name: str, default: float) -> float:
        """Return a number that is not negative."""
        value = default if self.get(name) is None else self.get(name)
        if type(value) not in (int, float) or not 0 <= value <= sys.float_info.max:
            raise self.error(name, "a number of at least 0")
        return float(value)

    def flag(self, name: str, *, default: bool) -> bool:
        """Return true or false."""
        value = default if self.get(name) is None else self.get(name)
        if type(value) is not bool:
            raise self.error(name, "true or false")
        return value

    def heads(self, name: str, *, asked: int | None, width: int) -> int:
        """Return the number of heads: no shape among the weights depends on it, so that somebody must say it.

        Args:
            name: of the key.
            asked: what the user says.
            width: of the model.

        Raises:
            FormatError: nobody says it, the config and the user differ, or heads of equal width do not fill the model's.
        """
        if self.get(name) is None and asked is None:
            raise FormatError(
                f"{self.place}: no {name}, and weights do not tell the number of heads; give --heads N"
            )
        heads = asked if self.get(name) is None else self.size(name)
        assert heads is not None
        if asked not in (None, heads):
            raise FormatError(f"{self.place}: {name} is {heads}, --heads says {asked}; leave --heads out")
        if width % heads:
            raise FormatError(
                f"{self.place}: {heads} heads do not divide the width {width}; give the right number"
            )
        return heads

    def only(self, name: str, *allowed: Any) -> None:
        """Refuse a key whose value would make the model compute something else; one that is missing is allowed.

        Args:
            name: of the key.
            allowed: its values.
        """
        if self.get(name) is not None and self.get(name) not in allowed:
            raise self.error(name, ", ".join(repr(value) for value in allowed))

    def error(self, name: str, allowed: str) -> FormatError:
        """Return the error of a key that has not an allowed value."""
        return FormatError(f"{self.place}: {name} is {self.get(name)!r}; allowed: {allowed}")
