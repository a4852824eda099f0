"""A trained model out of whatever holds one: a checkpoint, the folder of a run, or a folder made to be shared."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from protperf.checkpoint.files import BEFORE, BEST_NAME, ENTRY, describe, read_checkpoint, step_checkpoints
from protperf.checkpoint.folder import (
    CONFIG_NAME,
    INDEX_NAME,
    PREFIX,
    WEIGHTS_NAME,
    digest_of,
    read_config,
    read_folder,
    read_weights,
)
from protperf.config import ModelConfig, ObjectiveConfig
from protperf.formats import FormatError, one_line
from protperf.formats.typed import check_types
from protperf.model import ProteinModel
from protperf.weights import num_weights

MODEL_DIR = "model"
"""Name of the folder inside a run's in which its best model is written to be shared."""

_FACTOR, _FREE = 2, 1 << 24
"""A model may be so much larger than its file, and so many numbers besides: what does not fit is then named by its key."""
_TENSORS_OF_A_LAYER, _FREE_LAYERS = 8, 64
"""Each has at least so many: a layer of hardly any numbers takes 40 kB of memory and a millisecond too."""


@dataclass(frozen=True)
class TrainedModel:
    """A model out of a checkpoint.

    Attributes:
        model: in evaluation mode, on the CPU.
        objective: what it was trained to answer.
        attend_across_documents: whether packed proteins saw each other in training.
        path: the file that holds the weights.
        step: optimizer steps it was trained for.
        dataset_digest: hash of the dataset it was trained on.
        origin: of weights that did not begin with chance, for people; empty otherwise.
    """

    model: ProteinModel
    objective: ObjectiveConfig
    attend_across_documents: bool
    path: Path
    step: int
    dataset_digest: str
    origin: str = ""

    def describe(self) -> dict[str, Any]:
        """Return what a file says of this model besides the weights: plain values only."""
        return describe(
            self.model.config,
            self.objective,
            attend_across_documents=self.attend_across_documents,
            dataset_digest=self.dataset_digest,
            origin=self.origin,
        )

    def weights_digest(self) -> str:
        """Return the hex SHA-256 of the weights: the `protperf_sha256` of a folder made to be shared, whatever file holds them."""
        return digest_of(
            {f"{PREFIX}{name}": value.detach().cpu() for name, value in self.model.state_dict().items()}
        )


def find_checkpoint(path: Path) -> Path:
    """Return the file with the weights meant by `path`: itself, or a folder's best (else latest, else shared) one.

    Raises:
        ValueError: there is none.
    """
    if path.is_file():
        return path.with_name(WEIGHTS_NAME) if path.name == CONFIG_NAME else path
    if not path.exists():
        raise ValueError(
            f"{path}: no such file or folder; give a .ckpt file, or the folder of a run or a model"
        )
    for folder in (path, path / "checkpoints"):
        candidates = [*step_checkpoints(folder)[-1:], folder / BEST_NAME]
        existing = [candidate for candidate in candidates if candidate.is_file()]
        if existing:
            return existing[-1]
    for folder in (path, path / MODEL_DIR):
        if (folder / WEIGHTS_NAME).is_file():
            return folder / WEIGHTS_NAME
        if (folder / INDEX_NAME).is_file():
            raise ValueError(
                f"{folder}: its weights are cut into several files; save them as one (max_shard_size='100GB')"
            )
    raise ValueError(
        f"{path}: holds no checkpoint ({BEST_NAME} or step=N.ckpt) and no {WEIGHTS_NAME}; "
        "did the run reach its first one?"
    )


def model_files(path: Path | str) -> list[Path]:
    """Return the files that `load_model` reads: what no output may replace.

    Raises:
        ValueError: there is none.
    """
    file = find_checkpoint(Path(path))
    return [file, file.with_name(CONFIG_NAME)] if file.suffix == ".safetensors" else [file]


def load_model(path: Path | str, *, projections: str = "load") -> TrainedModel:
    """Rebuild a trained model from a checkpoint file, a run folder, or a folder with `model.safetensors`.

    Args:
        path: see `find_checkpoint`.
        projections: see `ProteinModel.load_weights`.

    Raises:
        ValueError: no checkpoint there, another vocabulary, or weights that do not fit.
        FormatError: a damaged or foreign file.
    """
    file = find_checkpoint(Path(path))
    about, weights = read_folder(file) if file.suffix == ".safetensors" else _read_weights(file)
    _check_numbers(weights, place=str(file))
    shapes = [weight.shape for weight in weights.values()]
    check_description(about, shapes=shapes, place=str(file))
    model, objective = build_model(about, place=str(file))
    model.load_weights(weights, place=str(file), projections=projections)
    check_finite(model.state_dict(), place=str(file))
    origin = about.get("origin", "")
    return TrainedModel(
        model.eval(),
        objective,
        about["attend_across_documents"],
        file,
        about["step"],
        about["dataset_digest"],
        one_line(origin) if type(origin) is str else "",
    )


def _check_numbers(weights: dict[str, Tensor], *, place: str) -> None:
    """Refuse weights that are no dense real numbers."""
    for name, value in weights.items():
        if value.layout != torch.strided or value.is_complex():
            raise FormatError(
                f"{place}: {name} is of type {value.dtype}, {value.layout}; allowed: dense real numbers"
            )


def check_shared(folder: Path) -> None:
    """Refuse a folder's weights before another program takes them: damaged, infinite, or too few for its `config.json`.

    Args:
        folder: with `model.safetensors`, or with several files into which transformers cut it.

    Raises:
        FormatError: they are.
    """
    whole, described = folder / WEIGHTS_NAME, folder / CONFIG_NAME
    is_whole, shapes = whole.is_file(), []
    for path in [whole] if is_whole else sorted(folder.glob("*.safetensors")):
        weights = read_weights(path)
        check_finite(weights, place=str(path))
        shapes += [weight.shape for weight in weights.values()]
    if described.is_file():
        check_description(read_config(described), shapes=shapes, place=str(whole if is_whole else folder))


def check_finite(weights: dict[str, Tensor], *, place: str) -> None:
    """Refuse weights that are no numbers.

    Args:
        weights: by name.
        place: the file's name, for the message.

    Raises:
        FormatError: one is infinite or not a number.
    """
    for name, value in weights.items():
        if not value.isfinite().all():
            raise FormatError(f"{place}: {name} holds what is no finite number; give another checkpoint")


def build_model(about: dict[str, Any], *, place: str) -> tuple[ProteinModel, ObjectiveConfig]:
    """Build the model that a description names, with new weights, and what it is asked.

    Args:
        about: from `describe`.
        place: the file's name, for messages.

    Raises:
        FormatError: of a model that this protperf does not know.
    """
    config, objective = _configs_of(about, place=place)
    try:
        return ProteinModel(config, causal=objective.kind == "causal"), objective
    except ValueError as error:
        raise FormatError(f"{place}: not a model of this protperf ({error})") from error


def check_description(about: dict[str, Any], *, shapes: Sequence[torch.Size], place: str) -> None:
    """Refuse a description that asks for very much more than there are weights for, before anything is made of it.

    Args:
        about: from `describe`.
        shapes: of the weights.
        place: the file's name, for messages.

    Raises:
        FormatError: of a model that this protperf does not know, or that these weights cannot fill.
    """
    config, objective = _configs_of(about, place=place)
    asked = num_weights(config, causal=objective.kind == "causal")
    found = sum(math.prod(shape) for shape in shapes)  # of Python's numbers: a file may claim any
    if asked > _FACTOR * found + _FREE:
        raise FormatError(
            f"{place}: its configuration asks for {asked:,} numbers, the file holds {found:,}; give the configuration of these weights"
        )
    if config.num_layers > len(shapes) // _TENSORS_OF_A_LAYER + _FREE_LAYERS:
        raise FormatError(
            f"{place}: its configuration asks for {config.num_layers:,} layers, the file holds {len(shapes):,} tensors; "
            "give the configuration of these weights"
        )


def _configs_of(about: dict[str, Any], *, place: str) -> tuple[ModelConfig, ObjectiveConfig]:
    """Return the configuration of a model and what it is asked."""
    try:
        config, objective = ModelConfig(**{**BEFORE, **about["model"]}), ObjectiveConfig(**about["objective"])
        check_types(config)
        check_types(objective)
    except (TypeError, ValueError) as error:
        raise FormatError(f"{place}: not a model of this protperf ({error}); update protperf") from error
    return config, objective


def _read_weights(file: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return what a checkpoint says of its model, and the model's weights."""
    content = read_checkpoint(file)
    weights: dict[str, torch.Tensor] = {
        name.removeprefix(PREFIX): value
        for name, value in content["state_dict"].items()
        if name.startswith(PREFIX)
    }
    return {**content[ENTRY], "step": content["global_step"]}, weights
