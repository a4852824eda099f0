"""A logger whose failures are no failures of the run."""

from __future__ import annotations

import logging
from abc import abstractmethod
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from pytorch_lightning.loggers import Logger
from pytorch_lightning.utilities import rank_zero_only

log = logging.getLogger("protperf")


class GuardedLogger(Logger):
    """Logs to a service that may fail: the first failure is warned of, later ones are silent, the run goes on.

    Only the first rank logs. What is logged stands in metrics.csv too, so nothing is lost.

    Args:
        title: the service's name, for messages.
    """

    def __init__(self, title: str) -> None:
        super().__init__()
        self._title = title
        self._has_failed = False

    @property
    def name(self) -> str:
        """Return the logger's name."""
        return self._title

    @property
    def version(self) -> str:
        """Return an empty version: a run has one of each logger."""
        return ""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Log values at an optimizer step."""
        with self._guarded():
            self._log(metrics, step or 0)

    @rank_zero_only
    def log_image(self, key: str, images: list[np.ndarray], step: int) -> None:
        """Log images at an optimizer step.

        Args:
            key: their name.
            images: uint8 `(height, width, 3)` each.
            step: the optimizer step.
        """
        with self._guarded():
            self._log_images(key, images, step)

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Do nothing: loggers get the configuration when they are built."""

    @rank_zero_only
    def close(self) -> None:
        """End what was begun."""
        with self._guarded():
            self._close()

    @abstractmethod
    def _log(self, metrics: dict[str, float], step: int) -> None: ...

    @abstractmethod
    def _log_images(self, key: str, images: list[np.ndarray], step: int) -> None: ...

    @abstractmethod
    def _close(self) -> None: ...

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if not self._has_failed:
                said = " ".join(f"{type(error).__name__}: {error}".split())
                log.warning("%s failed (%s); training and metrics.csv go on without it", self._title, said)
            self._has_failed = True
