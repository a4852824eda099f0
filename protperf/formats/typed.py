"""Dataclasses out of files: each field of its type, since a file may hold any."""

from __future__ import annotations

import functools
import typing
from collections.abc import Mapping
from types import UnionType
from typing import Any, TypeVar

_T = TypeVar("_T")


def build(cls: type[_T], data: Mapping[str, Any]) -> _T:
    """Return a dataclass from the keys of `data` that are its fields; keys that it does not know are passed over.

    Raises:
        TypeError: one is missing that has no default, or is of another type.
    """
    kinds = _kinds_of(cls)  # type: ignore[arg-type]  # a class is hashable
    found = {name: data[name] for name in kinds if name in data}
    _check(cls, found, kinds)
    return cls(**found)


def check_types(made: Any) -> None:
    """Raise a `TypeError` unless all values of a dataclass have the types of their fields."""
    kinds = _kinds_of(type(made))  # type: ignore[arg-type]
    _check(type(made), {name: getattr(made, name) for name in kinds}, kinds)


@functools.cache
def _kinds_of(cls: type) -> dict[str, Any]:
    """Return the types of a dataclass's fields; looking them up takes longer than all the rest, and a manifest has many entries."""
    return typing.get_type_hints(cls)


def _check(cls: type, values: Mapping[str, Any], kinds: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if not _is_of(value, kinds[name]):
            kind = kinds[name].__name__ if isinstance(kinds[name], type) else kinds[name]
            raise TypeError(f"{cls.__name__}.{name} is {repr(value)[:60]}, not of type {kind}")


def _is_of(value: Any, kind: Any) -> bool:
    """Return whether a value is of the type that a field says: a whole number will do for a float, true for no number."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return True
    if origin in (typing.Union, UnionType):
        return any(_is_of(value, each) for each in inner)
    if origin is dict:
        return type(value) is dict and all(_is_of(each, inner[1]) for each in value.values())
    if origin in (list, tuple):  # of one type, tuple[int, ...]
        return type(value) is origin and all(_is_of(each, inner[0]) for each in value)
    return type(value) in ((int, float) if kind is float else (kind,))
