"""The `logger` group: where metrics go."""

from __future__ import annotations

from dataclasses import dataclass

from protperf.config.checks import check_choices, check_range

CHOICES = {"kind": ("none", "wandb", "tensorboard", "both"), "artifacts": ("none", "best", "all")}
"""Field -> the values that it may have."""


@dataclass(frozen=True)
class LoggerConfig:
    """Where metrics go besides the run folder's metrics.csv."""

    kind: str = "none"
    """none, wandb (offline unless an API key is there and the server answers), tensorboard, or both."""
    project: str = "protperf"
    """W&B's project."""
    entity: str | None = None
    """W&B's team or user; null for the key's own."""
    artifacts: str = "none"
    """Checkpoints that W&B gets: none, best or all. It copies them to $WANDB_DATA_DIR until they are sent."""
    finish_seconds: float = 20
    """How long the end of a run waits for W&B to send the rest; `wandb sync` sends what is left."""
    attention_images_every: int = 0
    """Draw attention maps of a few proteins at every so many validations; 0 never does. Without a logger that takes
    images they are files in the run's folder."""

    def __post_init__(self) -> None:
        """Check values."""
        check_choices(self, CHOICES)
        check_range(self, "finish_seconds", 1)
        check_range(self, "attention_images_every", 0)
