"""Checkpoints: plain dicts that open with `torch.load(weights_only=True)` and rebuild their model without Hydra."""

from __future__ import annotations

import re
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from protperf import __version__
from protperf.batches import is_out_of_memory
from protperf.config import ModelConfig, ObjectiveConfig, to_dict
from protperf.formats import FormatError
from protperf.model import ProteinModel
from protperf.vocab import VOCABULARY, check_fingerprint

FORMAT_VERSION = 1
BEST_NAME = "best.ckpt"

ENTRY = "protperf"
"""The entry of a checkpoint's dict that describes its model."""

_MAY_CHANGE = ("dropout", "activation_checkpointing")
"""Keys of the model that may differ when a run goes on: they are no part of what was learned."""
_ENTRIES = ("state_dict", "global_step", ENTRY)
_OF_TRAINING = ("optimizer_states", "lr_schedulers", "callbacks", "loops")
_DESCRIPTION = (
    "format_version",
    "model",
    "objective",
    "attend_across_documents",
    "dataset_digest",
    "fingerprint",
)
_MODEL_PREFIX = "model."
_STEP_NAME = re.compile(r"step=(\d+)\.ckpt")


@dataclass(frozen=True)
class TrainedModel:
    """A model out of a checkpoint.

    Attributes:
        model: in evaluation mode, on the CPU.
        objective: what it was trained to answer.
        attend_across_documents: whether packed proteins saw each other in training.
        path: the checkpoint file.
        step: optimizer steps it was trained for.
        dataset_digest: hash of the dataset it was trained on.
    """

    model: ProteinModel
    objective: ObjectiveConfig
    attend_across_documents: bool
    path: Path
    step: int
    dataset_digest: str


def describe(
    config: ModelConfig,
    objective: ObjectiveConfig,
    *,
    attend_across_documents: bool,
    dataset_digest: str,
) -> dict[str, Any]:
    """Return what a checkpoint says of its model besides the weights: plain values only."""
    return {
        "format_version": FORMAT_VERSION,
        "protperf_version": __version__,
        "model": to_dict(config),
        "objective": to_dict(objective),
        "attend_across_documents": attend_across_documents,
        "dataset_digest": dataset_digest,
        "vocabulary": list(VOCABULARY.tokens),
        "fingerprint": VOCABULARY.fingerprint,
    }


def step_name(step: int) -> str:
    """Return the file name of the checkpoint after `step` optimizer steps.

    >>> step_name(200)
    'step=00000200.ckpt'
    """
    return f"step={step:08d}.ckpt"


def step_checkpoints(checkpoint_dir: Path) -> list[Path]:
    """Return the checkpoints of a folder by step, the latest last."""
    found = [
        path
        for path in checkpoint_dir.glob("step=*.ckpt")
        if _STEP_NAME.fullmatch(path.name) and path.is_file()
    ]
    return sorted(found, key=step_of)


def remove_unfinished(checkpoint_dir: Path) -> None:
    """Remove what killed processes left half-written; call it where no other process writes there."""
    for pattern in (".step=*.ckpt.*.tmp", f".{BEST_NAME}.*.tmp"):
        for path in checkpoint_dir.glob(pattern):
            path.unlink(missing_ok=True)


def find_checkpoint(path: Path) -> Path:
    """Return the checkpoint file meant by `path`: itself, or a run folder's best (else latest) one.

    Raises:
        ValueError: there is none.
    """
    if path.is_file():
        return path
    if not path.exists():
        raise ValueError(f"{path}: no such file or folder; give a .ckpt file or the folder of a run")
    for folder in (path, path / "checkpoints"):
        candidates = [*step_checkpoints(folder)[-1:], folder / BEST_NAME]
        existing = [candidate for candidate in candidates if candidate.is_file()]
        if existing:
            return existing[-1]
    raise ValueError(
        f"{path}: holds no checkpoint ({BEST_NAME} or step=N.ckpt); did the run reach its first one?"
    )


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Return the dict of a checkpoint; nothing in it can run code.

    Raises:
        FormatError: damaged, or not one of ours.
        ValueError: of another vocabulary.
    """
    with path.open("rb") as file:
        try:
            damaged = zipfile.ZipFile(file).testzip()  # torch does not compare the checksums
            content: Any = None
            if not damaged:  # mapped: a rank that only asks for an entry need not hold the weights
                content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # on foreign bytes the unpickler fails in any way
            if is_out_of_memory(error):
                raise
            raise FormatError(
                f"{path}: not a checkpoint of `protperf train`, or cut short; give another one"
            ) from error
    if damaged:
        raise FormatError(f"{path}: damaged (the checksum of {damaged} is wrong); give another one")
    _check_entries(path, content, _ENTRIES)
    _check_entries(path, content[ENTRY], _DESCRIPTION)
    version = content[ENTRY]["format_version"]
    if version > FORMAT_VERSION:
        raise FormatError(
            f"{path}: checkpoint format {version}, this protperf reads up to {FORMAT_VERSION}: update protperf"
        )
    check_fingerprint(content[ENTRY]["fingerprint"], str(path))
    return content


def _check_entries(path: Path, content: Any, names: tuple[str, ...]) -> None:
    """Raise unless `content` is a dict with these keys."""
    missing = [name for name in names if not isinstance(content, dict) or name not in content]
    if missing:
        raise FormatError(
            f"{path}: not a checkpoint of `protperf train` (it lacks {missing[0]!r}); give another one"
        )


def load_model(path: Path | str, *, projections: str = "load") -> TrainedModel:
    """Rebuild a trained model from a checkpoint file or a run folder.

    Args:
        path: see `find_checkpoint`.
        projections: see `ProteinModel.load_weights`.

    Raises:
        ValueError: no checkpoint there, another vocabulary, or weights that do not fit.
        FormatError: a damaged or foreign file.
    """
    file = find_checkpoint(Path(path))
    content = read_checkpoint(file)
    about = content[ENTRY]
    try:
        config, objective = ModelConfig(**about["model"]), ObjectiveConfig(**about["objective"])
    except (TypeError, ValueError) as error:
        raise FormatError(f"{file}: not a model of this protperf ({error}); update protperf") from error
    model = ProteinModel(config, causal=objective.kind == "causal")
    weights = {
        name.removeprefix(_MODEL_PREFIX): value
        for name, value in content["state_dict"].items()
        if name.startswith(_MODEL_PREFIX)
    }
    model.load_weights(weights, place=str(file), projections=projections)
    if not torch.nn.utils.get_total_norm(model.parameters()).isfinite():
        raise FormatError(f"{file}: holds weights that are no finite numbers; give another checkpoint")
    return TrainedModel(
        model.eval(),
        objective,
        about["attend_across_documents"],
        file,
        content["global_step"],
        about["dataset_digest"],
    )


def check_resumable(path: Path, description: dict[str, Any]) -> None:
    """Refuse to go on from a checkpoint of another model, or of one that was asked something else.

    Args:
        path: the checkpoint.
        description: of the run that wants to go on, from `describe`.

    Raises:
        ValueError: a key that differs, by name, or another vocabulary.
        FormatError: a damaged or foreign file.
    """
    content = read_checkpoint(path)
    _check_entries(path, content, _OF_TRAINING)
    _check_entries(path, content["callbacks"], ("Position", "Checkpoints"))
    found, own = (_fixed_keys(about) for about in (content[ENTRY], description))
    for key, value in own.items():
        if found.get(key) != value:
            raise ValueError(
                f"{path}: cannot resume: it was trained with {key} {found.get(key)}, this run has {value}; "
                "give the same, or another name for a new run"
            )


def _fixed_keys(about: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of a description that may not change in the course of a run, as the command line names them.

    A key younger than the description has its default, which is what was done before there was a choice.
    """
    model = to_dict(ModelConfig()) | about["model"]
    objective = to_dict(ObjectiveConfig()) | about["objective"]
    keys = {f"model.{key}": value for key, value in model.items() if key not in _MAY_CHANGE}
    keys |= {f"objective.{key}": value for key, value in objective.items()}
    keys["data.attend_across_documents"] = about["attend_across_documents"]
    return keys


def step_of(path: Path) -> int:
    """Return the number of optimizer steps in the name of a checkpoint."""
    match = _STEP_NAME.fullmatch(path.name)
    assert match
    return int(match[1])
