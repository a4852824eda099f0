"""Where metrics go: always the run folder's metrics.csv; Weights & Biases if asked for."""

from __future__ import annotations

import netrc
import os
import secrets
import socket
from argparse import Namespace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pytorch_lightning.loggers import Logger, WandbLogger
from pytorch_lightning.utilities import rank_zero_only

from protperf.config import LoggerConfig
from protperf.formats.metrics_file import METRICS_NAME, append_metrics

_WANDB_ID_NAME = "wandb_id"
_WANDB_SECONDS = 5


class MetricsFile(Logger):
    """Appends to `metrics.csv`; unlike Lightning's CSVLogger it never deletes what an earlier start wrote."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__()
        self.path = run_dir / METRICS_NAME

    @property
    def name(self) -> str:
        """Return the logger's name."""
        return "metrics_file"

    @property
    def version(self) -> str:
        """Return an empty version: a run has one file."""
        return ""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Append values at an optimizer step."""
        append_metrics(self.path, step or 0, metrics)

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the run folder's config.yaml holds the configuration."""


def build_loggers(
    config: LoggerConfig, *, run_dir: Path, name: str, settings: dict[str, Any]
) -> list[Logger]:
    """Return the loggers of a run.

    Args:
        config: what was asked for.
        run_dir: the run's folder.
        name: of the run.
        settings: the whole configuration as a plain dict, for W&B's table of runs.
    """
    loggers: list[Logger] = [MetricsFile(run_dir)]
    if config.kind == "wandb":
        wandb = WandbLogger(
            name=name,
            project=config.project,
            entity=config.entity,
            id=_run_id(run_dir),
            save_dir=run_dir,
            offline=not (has_wandb_key() and reaches_wandb()),
        )
        wandb.log_hyperparams(settings)
        loggers.append(wandb)
    return loggers


def has_wandb_key() -> bool:
    """Tell whether W&B can log in without asking: a key in the environment or in netrc."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(_wandb_address()[0]) is not None
    except (FileNotFoundError, netrc.NetrcParseError):
        return False


def reaches_wandb() -> bool:
    """Tell whether W&B's server answers; without it a run is kept offline, for `wandb sync` later."""
    try:
        socket.create_connection(_wandb_address(), timeout=_WANDB_SECONDS).close()
    except OSError:
        return False
    return True


def _wandb_address() -> tuple[str, int]:
    url = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai"))
    return url.hostname or "", url.port or (80 if url.scheme == "http" else 443)


@rank_zero_only
def _run_id(run_dir: Path) -> str:
    """Return the run's W&B id, kept in its folder so that every start continues the same run."""
    path = run_dir / _WANDB_ID_NAME
    if not path.exists():
        path.write_text(secrets.token_hex(4))
    return path.read_text()
