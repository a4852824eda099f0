"""TensorBoard: event files in the run folder's `tensorboard`, one for each start of the run."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from omegaconf import OmegaConf

from protperf.loggers.guarded import GuardedLogger

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

FOLDER_NAME = "tensorboard"


class TensorBoard(GuardedLogger):
    """Writes what TensorBoard shows, flushed at each report, so that a kill loses nothing.

    A start that goes on from step N declares what an earlier start wrote from its own first report on as replaced, which
    TensorBoard then hides.

    Args:
        run_dir: the run's folder.
        settings: what the run was started with, as plain values; shown as text.

    Raises:
        ValueError: the package is not installed.
    """

    def __init__(self, run_dir: Path, *, settings: dict[str, Any]) -> None:
        super().__init__("TensorBoard")
        if find_spec("tensorboard") is None:
            raise ValueError(
                "logger.kind: the package tensorboard is not installed; pip install 'protperf[tensorboard]', or give "
                "logger=none or logger=wandb"
            )
        self._folder = run_dir / FOLDER_NAME
        self._settings = settings
        self._writer: SummaryWriter | None = None

    def _log(self, metrics: dict[str, float], step: int) -> None:
        writer = self._open(step)
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    def _log_images(self, key: str, images: list[np.ndarray], step: int) -> None:
        writer = self._open(step)
        for number, image in enumerate(images, start=1):
            writer.add_image(f"{key}/{number}", image, step, dataformats="HWC")
        writer.flush()

    def _close(self) -> None:
        if self._writer is not None:
            writer, self._writer = self._writer, None
            writer.close()

    def _open(self, step: int) -> SummaryWriter:
        """Return the writer of this start, opened at its first report."""
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            before = self._folder.is_dir() and any(self._folder.iterdir())
            self._writer = SummaryWriter(str(self._folder), purge_step=step if before else None)
            text = OmegaConf.to_yaml(OmegaConf.create(self._settings))
            self._writer.add_text("config", "".join(f"    {line}\n" for line in text.splitlines()), step)
        return self._writer
