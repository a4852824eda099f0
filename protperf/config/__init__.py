"""The configuration of training: one flat frozen dataclass a Hydra group, in a file of the group's name, checked where it is built.

A key's way: `conf/GROUP/NAME.yaml` -> Hydra -> `from_section` -> a field here -> the line that uses it.
"""

from protperf.config.checks import check_types, from_section, to_dict
from protperf.config.data import DataConfig
from protperf.config.logger import LoggerConfig
from protperf.config.model import ModelConfig
from protperf.config.objective import ObjectiveConfig
from protperf.config.optim import OptimConfig
from protperf.config.record import read_record
from protperf.config.trainer import TrainerConfig

__all__ = [
    "DataConfig",
    "LoggerConfig",
    "ModelConfig",
    "ObjectiveConfig",
    "OptimConfig",
    "TrainerConfig",
    "check_types",
    "from_section",
    "read_record",
    "to_dict",
]
