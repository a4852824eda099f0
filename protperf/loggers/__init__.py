"""Where metrics go: always the run folder's metrics.csv; Weights & Biases and TensorBoard if asked for.

All but the file may fail without harm to the run: `guarded` says how.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pytorch_lightning.loggers import Logger

from protperf.config import LoggerConfig
from protperf.loggers.file import MetricsFile
from protperf.loggers.guarded import GuardedLogger
from protperf.loggers.tensorboard import TensorBoard
from protperf.loggers.versions import versions
from protperf.loggers.wandb_run import WandbRun, has_wandb_key, reaches_wandb

__all__ = [
    "CheckpointSender",
    "MetricsFile",
    "TensorBoard",
    "WandbRun",
    "build_loggers",
    "close_loggers",
    "has_wandb_key",
    "reaches_wandb",
]


def build_loggers(
    config: LoggerConfig, *, run_dir: Path, name: str, settings: dict[str, Any]
) -> list[Logger]:
    """Return the loggers of a run; nothing is started or imported before the first rank logs.

    Args:
        config: what was asked for.
        run_dir: the run's folder.
        name: of the run.
        settings: what the run was started with, as plain values, for whoever compares runs; `versions` joins them.

    Raises:
        ValueError: a package that was asked for is missing.
    """
    loggers: list[Logger] = [MetricsFile(run_dir)]
    if config.kind == "none":
        return loggers
    settings = {**settings, "versions": versions()}
    if config.kind in ("wandb", "both"):
        loggers.append(WandbRun(config, run_dir=run_dir, name=name, settings=settings))
    if config.kind in ("tensorboard", "both"):
        loggers.append(TensorBoard(run_dir, settings=settings))
    return loggers


def close_loggers(loggers: Iterable[Logger]) -> None:
    """End what the loggers began; call it when nothing more will be logged, inside the handling of any exception."""
    for logger in loggers:
        if isinstance(logger, GuardedLogger):
            logger.close()


class CheckpointSender:
    """Offers each checkpoint that was written to the loggers.

    Args:
        loggers: of the run.
    """

    def __init__(self, loggers: Iterable[Logger]) -> None:
        self._runs = [logger for logger in loggers if isinstance(logger, WandbRun)]

    def __call__(self, path: Path, is_best: bool) -> None:
        """Send a whole checkpoint file; on the first rank, others do nothing."""
        for run in self._runs:
            run.log_checkpoint(path, is_best=is_best)
