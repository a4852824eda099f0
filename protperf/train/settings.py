"""From a composed configuration to typed and checked settings; from Hydra's errors to one line."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, cast

from hydra.errors import OverrideParseException
from omegaconf import DictConfig, OmegaConf

from protperf.config import (
    DataConfig,
    LoggerConfig,
    ModelConfig,
    ObjectiveConfig,
    OptimConfig,
    TrainerConfig,
    from_section,
)

SECTIONS: dict[str, type] = {
    "model": ModelConfig,
    "objective": ObjectiveConfig,
    "data": DataConfig,
    "optim": OptimConfig,
    "trainer": TrainerConfig,
    "logger": LoggerConfig,
}
"""Section of the configuration -> the dataclass that types and checks it."""


@dataclass(frozen=True)
class Settings:
    """A whole configuration, typed and checked."""

    model: ModelConfig
    objective: ObjectiveConfig
    data: DataConfig
    optim: OptimConfig
    trainer: TrainerConfig
    logger: LoggerConfig
    name: str
    run_dir: Path
    resume: bool

    @property
    def checkpoint_dir(self) -> Path:
        """Where the run's checkpoints lie."""
        return self.run_dir / "checkpoints"


def read_settings(config: DictConfig) -> Settings:
    """Type and check a composed configuration.

    Raises:
        ValueError: a value is missing or not allowed.
    """
    missing = OmegaConf.missing_keys(config)
    if missing:
        key = min(missing)
        raise ValueError(f"{key} is not set; give {key}=VALUE")
    values = cast(dict[str, Any], OmegaConf.to_container(config, resolve=True))
    _check_top(values)
    sections: dict[str, Any] = {
        name: from_section(SECTIONS[name], values[name])
        for name in ("trainer", *SECTIONS)  # first, as others take values of it
    }
    if "train" in sections["data"].valid_sets:
        raise ValueError(
            f"data.valid_sets is {list(sections['data'].valid_sets)}; allowed: valid, test, ood (train/... are the metrics of "
            "training)"
        )
    return Settings(
        **sections, name=str(values["name"]), run_dir=Path(values["run_dir"]), resume=values["resume"]
    )


def _check_top(values: dict[str, Any]) -> None:
    """Check the keys that stand in no section."""
    unknown = values.keys() - SECTIONS.keys() - {"name", "run_dir", "resume"}
    if unknown:
        raise ValueError(
            f"no key {min(unknown)!r} in the configuration; `protperf train --cfg job` lists the keys"
        )
    if not isinstance(values["resume"], bool):
        raise ValueError(f"resume is {values['resume']!r}; allowed: true, false")
    name = str(values["name"] or "")
    if not values["run_dir"]:
        raise ValueError("run_dir is empty; give run_dir=PATH, or name=NAME alone")
    if name in ("", ".") or Path(name).is_absolute() or ".." in Path(name).parts:
        raise ValueError(
            f"name is {name!r}; give name=NAME: it names the run's folder (run_dir=PATH puts it anywhere)"
        )


def explain(error: Exception) -> str:
    """Turn an error of Hydra or OmegaConf into one line, with the nearest key where one was mistyped."""
    text = " ".join(part.strip() for part in str(error).splitlines() if part.strip())
    if isinstance(error, OverrideParseException):
        return f"{error.override}: {text}; a value with special characters needs quotes: \"name='a=b'\""
    words = text.split("'")
    if "Could not override" in text and len(words) > 1:
        keys = [f"{name}.{field.name}" for name, section in SECTIONS.items() for field in fields(section)]
        near = difflib.get_close_matches(words[1], [*keys, *SECTIONS, "name", "run_dir", "resume"], n=1)
        hint = f"did you mean {near[0]!r}?" if near else "`protperf train --cfg job` lists the keys"
        return f"no key {words[1]!r} in the configuration; {hint}"
    return text
