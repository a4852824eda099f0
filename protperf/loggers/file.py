"""The run folder's metrics.csv, which every run has."""

from __future__ import annotations

import logging
from argparse import Namespace
from pathlib import Path
from typing import Any

from pytorch_lightning.loggers import Logger
from pytorch_lightning.utilities import rank_zero_only

from protperf.formats.metrics_file import METRICS_NAME, Report, append_metrics, check_metrics_file

log = logging.getLogger("protperf")


class MetricsFile(Logger):
    """Appends to `metrics.csv`; unlike Lightning's CSVLogger it never deletes what an earlier start wrote.

    Reports that a full disk refuses wait in memory and are written with the next one that it takes.

    Args:
        run_dir: the run's folder.

    Raises:
        FormatError: what is there is no metrics file.
    """

    def __init__(self, run_dir: Path) -> None:
        super().__init__()
        self.path = run_dir / METRICS_NAME
        check_metrics_file(self.path)
        self._waiting: list[Report] = []
        self._is_refused = False

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
        """Append values at an optimizer step, after those that wait."""
        self._waiting.append((step or 0, dict(metrics)))
        self._write()

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the run folder's config.yaml holds the configuration."""

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Try once more to write what waits; say what cannot be."""
        self._write()
        if self._waiting:
            log.warning("%s: %s reports could not be written", self.path, f"{len(self._waiting):,}")

    def _write(self) -> None:
        if not self._waiting:
            return
        try:
            append_metrics(self.path, self._waiting)
        except OSError as error:
            if not self._is_refused:
                reason = error.strerror or error
                log.warning("%s: %s; reports wait in memory until it can be written", self.path, reason)
            self._is_refused = True
            return
        if self._is_refused:
            log.info(
                "%s: written again, with the %s reports that waited", self.path, f"{len(self._waiting):,}"
            )
        self._is_refused = False
        self._waiting.clear()
