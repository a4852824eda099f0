"""Dataclasses out of JSON and attributes: each field of its type, since a file may hold any."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from typing import Any, TypeVar

_T = TypeVar("_T")


def build(cls: type[_T], data: Mapping[str, Any]) -> _T:
    """Return a dataclass from the keys of `data` that are its fields; keys that it does not know are passed over.

    Raises:
        TypeError: one is missing that has no default, or is of another type.
    """
    kinds = typing.get_type_hints(cls)
    found = {name: data[name] for name in kinds if name in data}
    for name, value in found.items():
        if not _is_of(value, kinds[name]):
            raise TypeError(f"{name} of {cls.__name__} is {str(value)[:60]!r}")
    return cls(**found)


def _is_of(value: Any, kind: Any) -> bool:
    """Return whether a value is of the type that a field says; true is no number."""
    if kind is Any:
        return True
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is list:
        return isinstance(value, list) and all(_is_of(each, inner[0]) for each in value)
    if origin is dict:
        return isinstance(value, dict) and all(_is_of(each, inner[1]) for each in value.values())
    return any(type(value) is each for each in inner or (kind,))
