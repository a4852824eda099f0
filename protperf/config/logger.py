"""The `logger` group: where metrics go."""

from __future__ import annotations

from dataclasses import dataclass

from protperf.config.checks import check_choice


@dataclass(frozen=True)
class LoggerConfig:
    """Where metrics go besides the run folder's metrics.csv."""

    kind: str = "none"
    """none or wandb (offline unless an API key is there and the server answers)."""
    project: str = "protperf"
    """W&B's project."""
    entity: str | None = None
    """W&B's team or user; null for the key's own."""

    def __post_init__(self) -> None:
        """Check values."""
        check_choice(self, "kind", ("none", "wandb"))
