"""Attention maps of a few proteins, drawn at an interval of validations.

Axis letters: `H` heads, `L` length in tokens, `W` window length in tokens.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback
from torch import Tensor

from protperf.batches import documents_of
from protperf.formats.commit import commit_bytes
from protperf.inference.attention_maps import attention_maps
from protperf.model import ProteinModel

log = logging.getLogger("protperf")

KEY = "attention/maps"
"""The images' name in loggers."""
NUM_PROTEINS = 3
MAX_TOKENS = 256

_MAX_LAYERS = 4
_MAX_HEADS = 8
_BRIGHTEST = 99  # percentile
_PANEL = 1.6  # inches
_DOTS_PER_INCH = 120


class AttentionImages(Callback):
    """Draws attention maps of a few proteins and sends them to every logger that takes images, else into files.

    All ranks compute them, since sharded weights are whole only in a forward pass that all ranks join; the first draws.
    Nothing of the training changes: evaluation mode draws no random numbers.

    Args:
        model: whose attention is shown.
        proteins: tokens of each, uint8 `(L,)`.
        every: optimizer steps between two drawings, a multiple of those between validations.
        folder: where files go.
    """

    def __init__(
        self, model: ProteinModel, proteins: Sequence[np.ndarray], *, every: int, folder: Path
    ) -> None:
        self._model = model
        self._proteins = proteins
        self._every = every
        self._folder = folder

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Draw if an interval is full, and after the last step."""
        step = trainer.global_step
        if trainer.state.fn != "fit" or (step % self._every and step != trainer.max_steps):
            return
        images = []
        for number, protein in enumerate(self._proteins, start=1):
            tokens = torch.from_numpy(protein).to(pl_module.device).unsqueeze(0)
            with trainer.precision_plugin.forward_context():
                maps = some_maps(self._model, tokens)
            if trainer.is_global_zero:
                title = f"protein {number}, {len(protein)} tokens, step {step:,}"
                images.append(draw_maps(maps, causal=self._model.causal, title=title))
        if trainer.is_global_zero:
            self._send(trainer, images)

    def _send(self, trainer: pl.Trainer, images: list[np.ndarray]) -> None:
        takers = [logger for logger in trainer.loggers if hasattr(logger, "log_image")]
        for logger in takers:
            logger.log_image(KEY, images, trainer.global_step)
        if not takers:
            path = self._folder / f"step={trainer.global_step:08d}.png"
            try:
                self._folder.mkdir(exist_ok=True)
                commit_bytes(path, as_png(images))
            except OSError as error:
                log.warning("%s: %s; no attention maps of this step", path, error.strerror or error)


def choose_proteins(windows: np.ndarray) -> list[np.ndarray]:
    """Return the longest protein of each window, or what the window holds of it, up to `MAX_TOKENS` tokens.

    Args:
        windows: tokens, uint8 `(B, W)`.
    """
    proteins = []
    for window in windows:
        documents = documents_of(torch.from_numpy(window).unsqueeze(0))[0].numpy()
        numbers, lengths = np.unique(documents[documents >= 0], return_counts=True)
        if len(numbers):
            proteins.append(window[documents == numbers[lengths.argmax()]][:MAX_TOKENS])
    return proteins


def some_maps(model: ProteinModel, tokens: Tensor) -> dict[int, Tensor]:
    """Return the attention matrices of up to four layers from first to last: layer -> float32 `(H, L, L)`, H up to eight.

    Args:
        model: left in the mode that it was in.
        tokens: one protein, `(1, L)`.
    """
    last, count = len(model.blocks) - 1, min(_MAX_LAYERS, len(model.blocks))
    layers = np.linspace(0, last, num=count).astype(int).tolist()
    heads = range(min(_MAX_HEADS, model.config.num_heads))
    return attention_maps(model, tokens, layers=layers, heads=heads)


def draw_maps(maps: dict[int, Tensor], *, causal: bool, title: str) -> np.ndarray:
    """Draw matrices `(H, L, L)` by layer, a row a layer, a column a head: an image, uint8 `(height, width, 3)`.

    Colours show weights times the number of tokens that the row sees: 1 is even attention, and the first rows of causal
    attention, whose weights are large because they see little, do not outshine the others.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = max(len(heads) for heads in maps.values())
    size = (_PANEL * max(columns, 3), _PANEL * len(maps) + 0.6)
    figure = Figure(figsize=size, dpi=_DOTS_PER_INCH, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    panels = figure.subplots(len(maps), columns, squeeze=False)
    for row, (layer, heads) in zip(panels, maps.items(), strict=True):
        for head, (axes, weights) in enumerate(zip(row, heads, strict=True)):
            length = len(weights)
            seen = np.arange(1, length + 1)[:, None] if causal else length
            relative = weights.float().cpu().numpy() * seen
            axes.imshow(relative, vmin=0, vmax=np.percentile(relative, _BRIGHTEST))
            axes.set_xticks([])
            axes.set_yticks([])
            axes.set_title(f"layer {layer} head {head}", fontsize=6)
    figure.suptitle(
        f"attention of {title}\nrows look at columns; dark to bright: 0 to the {_BRIGHTEST}th percentile",
        fontsize=7,
    )
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()


def as_png(images: list[np.ndarray]) -> bytes:
    """Return images of one width below each other as a PNG file."""
    from matplotlib.image import imsave

    file = io.BytesIO()
    imsave(file, np.concatenate(images), format="png")
    return file.getvalue()
