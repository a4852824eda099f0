"""Dataclasses out of JSON and attributes: each field of its type, since a file may hold any."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

_T = TypeVar("_T")


def build(cls: type[_T], data: Any) -> _T:
    """Return a dataclass from the keys of `data` that are its fields; keys that it does not know are passed over.

    A field that is a dataclass, or a list or a dict of some, is built likewise.

    Raises:
        ValueError: `data` is no mapping, a field is missing that has no default, or one is of another type.
    """
    if not isinstance(data, Mapping):
        raise ValueError(f"{cls.__name__} is {str(data)[:60]!r}")
    kinds = typing.get_type_hints(cls)
    found = {}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]  # every caller gives a dataclass
        if field.name in data:
            found[field.name] = _as(data[field.name], kinds[field.name], f"{field.name} of {cls.__name__}")
        elif field.default is field.default_factory is dataclasses.MISSING:
            raise ValueError(f"no {field.name} of {cls.__name__}")
    return cls(**found)


def _as(value: Any, kind: Any, name: str) -> Any:
    """Return a value as the type that a field says; true is no number."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return build(kind, value)
    if origin is list and isinstance(value, list):
        return [_as(each, inner[0], name) for each in value]
    if origin is dict and isinstance(value, dict):
        return {key: _as(each, inner[1], name) for key, each in value.items()}
    if origin in (list, dict) or not any(type(value) is each for each in inner or (kind,)):
        raise ValueError(f"{name} is {str(value)[:60]!r}")
    return value
