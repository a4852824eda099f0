"""From a composed configuration to typed and checked settings; from Hydra's errors to one line."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, cast

from hydra.errors import OverrideParseException
from omegaconf import DictConfig, OmegaConf

from protperf.checkpoint import load_model
from protperf.config import (
    SECTIONS,
    DataConfig,
    LoggerConfig,
    ModelConfig,
    ObjectiveConfig,
    OptimConfig,
    TrainerConfig,
    from_section,
    to_dict,
)

TOP = ("name", "run_dir", "resume", "init_from")
"""Keys that stand in no section."""


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
    init_from: str = ""

    @property
    def checkpoint_dir(self) -> Path:
        """Where the run's checkpoints lie."""
        return self.run_dir / "checkpoints"


def read_settings(config: DictConfig, overrides: Sequence[str] = ()) -> Settings:
    """Type and check a composed configuration.

    Args:
        config: composed by Hydra.
        overrides: what the command line gave; with `init_from` it decides which keys of `model` are the user's.

    Raises:
        ValueError: a value is missing or not allowed.
    """
    missing = OmegaConf.missing_keys(config)
    if missing:
        key = min(missing)
        raise ValueError(f"{key} is not set; give {key}=VALUE")
    values = cast(dict[str, Any], OmegaConf.to_container(config, resolve=True))
    _check_top(values)
    if values["init_from"]:
        values["model"] = _model_of(values["init_from"], values["model"], overrides)
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
        **sections,
        name=str(values["name"]),
        run_dir=Path(values["run_dir"]),
        resume=values["resume"],
        init_from=values["init_from"],
    )


def _model_of(init_from: str, given: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return the `model` section of a run that begins with the weights of a trained model.

    Args:
        init_from: where those are.
        given: the composed section.
        overrides: of the command line.

    Raises:
        ValueError: no model there, or a preset besides.
    """
    preset = next((text for text in overrides if text.startswith("model=")), None)
    if preset:
        raise ValueError(
            f"{preset} besides init_from={init_from}, which says what the model is; leave {preset} out "
            "(model.KEY=VALUE changes a key)"
        )
    keys = {text.split("=")[0].lstrip("+").removeprefix("model.") for text in overrides if "model." in text}
    own = {key: given[key] for key in keys if key in given}
    return to_dict(load_model(init_from).model.config) | own


def _check_top(values: dict[str, Any]) -> None:
    """Check the keys that stand in no section."""
    unknown = values.keys() - SECTIONS.keys() - {*TOP}
    if unknown:
        raise ValueError(
            f"no key {min(unknown)!r} in the configuration; `protperf train --cfg job` lists the keys"
        )
    if not isinstance(values["resume"], bool):
        raise ValueError(f"resume is {values['resume']!r}; allowed: true, false")
    if not isinstance(values["init_from"], str):
        raise ValueError(f"init_from is {values['init_from']!r}; allowed: a path, or '' for new weights")
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
        near = difflib.get_close_matches(words[1], [*keys, *SECTIONS, *TOP], n=1)
        hint = f"did you mean {near[0]!r}?" if near else "`protperf train --cfg job` lists the keys"
        return f"no key {words[1]!r} in the configuration; {hint}"
    return text
