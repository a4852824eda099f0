"""The configuration of training: one flat frozen dataclass a Hydra group, in a file of the group's name, checked where it is built.

A key's way: `conf/GROUP/NAME.yaml` -> Hydra -> `from_section` -> a field here -> the line that uses it.
"""

from collections.abc import Mapping

from protperf.config import logger, model, objective, optim, trainer
from protperf.config.checks import from_section, to_dict
from protperf.config.data import DataConfig
from protperf.config.logger import LoggerConfig
from protperf.config.model import ModelConfig
from protperf.config.objective import ObjectiveConfig
from protperf.config.optim import OptimConfig
from protperf.config.trainer import TrainerConfig

__all__ = [
    "CHOICES",
    "SECTIONS",
    "DataConfig",
    "LoggerConfig",
    "ModelConfig",
    "ObjectiveConfig",
    "OptimConfig",
    "TrainerConfig",
    "from_section",
    "to_dict",
]

SECTIONS: dict[str, type] = {
    "model": ModelConfig,
    "objective": ObjectiveConfig,
    "data": DataConfig,
    "optim": OptimConfig,
    "trainer": TrainerConfig,
    "logger": LoggerConfig,
}
"""Section of the configuration -> the dataclass that types and checks it."""

CHOICES: dict[str, Mapping[str, tuple[str, ...]]] = {
    "model": model.CHOICES,
    "objective": objective.CHOICES,
    "data": {},
    "optim": optim.CHOICES,
    "trainer": trainer.CHOICES,
    "logger": logger.CHOICES,
}
"""Section -> field -> the values that it may have, where they are a few words."""
