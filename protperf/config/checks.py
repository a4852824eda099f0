"""How a section of the configuration becomes its dataclass, and how a dataclass checks its values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any, TypeVar, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

ConfigT = TypeVar("ConfigT")


def from_section(config_class: type[ConfigT], section: DictConfig | dict[str, Any]) -> ConfigT:
    """Turn one section of a configuration into its dataclass, with types and values checked.

    Raises:
        ValueError: a key that the class does not have, or a value that it does not allow.
    """
    try:
        merged = OmegaConf.merge(OmegaConf.structured(config_class), section)
        return cast(ConfigT, OmegaConf.to_object(merged))
    except OmegaConfBaseException as error:
        names = ", ".join(field.name for field in fields(config_class))  # type: ignore[arg-type]
        reason = f"{error.full_key}: {str(error).splitlines()[0]}".removeprefix(": ").removeprefix("None: ")
        raise ValueError(f"{config_class.__name__}: {reason}; allowed keys: {names}") from error


def to_dict(config: Any) -> dict[str, Any]:
    """Return a configuration dataclass as a plain dict, as checkpoints hold it."""
    return asdict(config)


def check_choices(config: Any, choices: Mapping[str, tuple[str, ...]]) -> None:
    """Raise a `ValueError` unless each of these fields has one of the values that it may have."""
    for field, allowed in choices.items():
        value = getattr(config, field)
        if value not in allowed:
            raise ValueError(f"{type(config).__name__}.{field} is {value!r}; allowed: {', '.join(allowed)}")


def check_range(config: Any, field: str, low: float, high: float = float("inf")) -> None:
    """Raise a `ValueError` unless a field's value lies in `low` to `high`."""
    value = getattr(config, field)
    if not (low <= value <= high and (isinstance(value, int) or math.isfinite(value))):
        limits = f"at least {low}" if high == float("inf") else f"{low} to {high}"
        raise ValueError(f"{type(config).__name__}.{field} is {value}; allowed: {limits}")
