"""What `protperf bench model` trains, and on what: a preset of `conf/model`, and one batch of masked questions.

Axis letters: `B` batch, `L` length in tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import Tensor

from protperf.batches import Batch, documents_of
from protperf.bench.contestants import cut
from protperf.config import ModelConfig, ObjectiveConfig, from_section
from protperf.objectives import ask, question_generator
from protperf.vocab import VOCABULARY


@dataclass(frozen=True)
class Question:
    """A batch to train on.

    Attributes:
        batch: inputs and targets, `(B, L)`.
        documents: int32 `(B, L)`; `None`: one document a row, which lets exact attention take its fastest kernel.
    """

    batch: Batch
    documents: Tensor | None

    def document_lengths(self) -> list[list[int]]:
        """Return the tokens of each document of each row."""
        if self.documents is None:
            return [[row.numel()] for row in self.batch.inputs]
        return [row.unique_consecutive(return_counts=True)[1].tolist() for row in self.documents]


def read_preset(name: str, overrides: Sequence[str], *, num_layers: int | None) -> ModelConfig:
    """Return a model's configuration from `conf/model`, with `key=value` on top.

    Raises:
        ValueError: no such preset, no such key, or a value that is not allowed.
    """
    folder = resources.files("protperf.conf") / "model"
    names = sorted(
        path.name.removesuffix(".yaml") for path in folder.iterdir() if path.name.endswith(".yaml")
    )
    if name not in names:
        raise ValueError(f"--preset {name}: not there; allowed: {', '.join(names)}")
    preset = OmegaConf.create((folder / f"{name}.yaml").read_text())
    assert isinstance(preset, DictConfig)
    preset.pop("defaults", None)  # tiny: the fields' own
    try:
        given = OmegaConf.from_dotlist([text.removeprefix("model.") for text in overrides])
        config = from_section(ModelConfig, OmegaConf.merge(preset, given))  # type: ignore[arg-type]
    except OmegaConfBaseException as error:
        raise ValueError(f"{' '.join(overrides)}: {str(error).splitlines()[0]}") from error
    return replace(config, num_layers=num_layers) if num_layers else config


def draw_question(*, batch: int, length: int, packed: int, seed: int, device: torch.device) -> Question:
    """Return questions about random residues.

    Args:
        batch: B.
        length: L.
        packed: proteins of random lengths in each window; 0: one document that fills it, without `<bos>`.
        seed: of residues, lengths and masks.
        device: where the batch goes.
    """
    generator = np.random.default_rng(seed)
    windows = generator.integers(VOCABULARY.num_standard, size=(batch, length), dtype=np.uint8)
    if not packed:
        return Question(_ask_all(windows, seed, device), None)
    for row, window in enumerate(windows):
        ends = np.cumsum(cut(length, packed, seed=seed + row))
        window[ends - 1] = VOCABULARY.eos
        window[np.append(0, ends[:-1])] = VOCABULARY.bos
    return _with_documents(windows, seed, device)


def read_question(dataset_dir: Path, *, batch: int, seed: int, device: torch.device) -> Question:
    """Return questions about the first windows of a dataset's training split.

    Raises:
        ValueError: no dataset, or fewer windows than the batch asks for.
    """
    from protperf.formats.shards import ShardSet

    shards = ShardSet(dataset_dir, "train")
    if batch > len(shards):
        raise ValueError(f"--batch {batch}: {dataset_dir} holds {len(shards)} windows to train on")
    return _with_documents(np.stack(list(shards.read_many(range(batch)))), seed, device)


def _with_documents(windows: np.ndarray, seed: int, device: torch.device) -> Question:
    """Return questions in which proteins that share a window do not see each other, as in training."""
    batch = _ask_all(windows, seed, device)
    return Question(batch, documents_of(batch.inputs))


def _ask_all(windows: np.ndarray, seed: int, device: torch.device) -> Batch:
    questions = [
        ask(window, ObjectiveConfig(), question_generator(seed, epoch=0, window=row))
        for row, window in enumerate(windows)
    ]
    inputs, targets = (torch.from_numpy(np.stack(part)) for part in zip(*questions, strict=True))
    return Batch(inputs.to(device), targets.to(device))
