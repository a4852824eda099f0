"""Checkpoint files: plain dicts that open with `torch.load(weights_only=True)` and rebuild their model without Hydra."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from torch import Tensor

from protperf import __version__
from protperf.checkpoint.pickles import Refusal, read_tensors
from protperf.config import ModelConfig, ObjectiveConfig, to_dict
from protperf.formats import FormatError, shown
from protperf.vocab import VOCABULARY, check_fingerprint

FORMAT_VERSION = 1
BEST_NAME = "best.ckpt"

ENTRY = "protperf"
"""The entry of a checkpoint's dict that describes its model."""

BEFORE = {"rfa_gate": False}
"""What a description says of the model by leaving a younger key out, where that is not the key's default."""

_MAY_CHANGE = ("dropout", "activation_checkpointing")
"""Keys of the model that may differ when a run goes on: they are no part of what was learned."""
_ENTRIES = {"state_dict": dict, "global_step": int, ENTRY: dict}
_OF_TRAINING = ("optimizer_states", "lr_schedulers", "callbacks", "loops")
_DESCRIPTION = {
    "format_version": int,
    "model": dict,
    "objective": dict,
    "attend_across_documents": bool,
    "dataset_digest": str,
    "fingerprint": str,
}
_MOST_LISTED = 10_000
_STEP_NAME = re.compile(r"step=(\d+)\.ckpt")


def describe(
    config: ModelConfig,
    objective: ObjectiveConfig,
    *,
    attend_across_documents: bool,
    dataset_digest: str,
    origin: str = "",
) -> dict[str, Any]:
    """Return what a checkpoint says of its model besides the weights: plain values only.

    Args:
        config: of the model.
        objective: what it is asked.
        attend_across_documents: whether packed proteins see each other in training.
        dataset_digest: hash of the dataset that it is trained on.
        origin: of weights that did not begin with chance, for people; empty otherwise.
    """
    return {
        "format_version": FORMAT_VERSION,
        "protperf_version": __version__,
        "model": to_dict(config),
        "objective": to_dict(objective),
        "attend_across_documents": attend_across_documents,
        "dataset_digest": dataset_digest,
        "origin": origin,
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


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Return the dict of a checkpoint; nothing in it can run code.

    Raises:
        FormatError: damaged, or not one of ours.
        ValueError: of another vocabulary.
    """
    foreign = Refusal("not a checkpoint of `protperf train`, or cut short", "give another one")
    content: dict[str, Any] = read_tensors(path, cut=foreign, objects=foreign)
    _check_entries(path, content, tuple(_ENTRIES))
    _check_entries(path, content[ENTRY], tuple(_DESCRIPTION))
    _check_types(path, content)
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


def _check_types(path: Path, content: dict[str, Any]) -> None:
    """Raise unless all that is asked of a checkpoint is of its type: a pickle may hold any, also lists without end."""
    about = content[ENTRY]
    kinds = [(name, content[name], kind) for name, kind in _ENTRIES.items()]
    kinds += [(f"{ENTRY}.{name}", about[name], kind) for name, kind in _DESCRIPTION.items()]
    wrong = [name for name, value, kind in kinds if type(value) is not kind]
    if not wrong:
        wrong += [
            f"{ENTRY}.{section}.{_key(name)}"
            for section in ("model", "objective")
            for name, value in about[section].items()
            if not (_is_plain(name) and _is_plain(value))
        ]
        weights = content["state_dict"].items()
        wrong += [
            f"state_dict.{_key(name)}"
            for name, value in weights
            if type(name) is not str or not isinstance(value, Tensor)
        ]
    if wrong:
        raise FormatError(
            f"{path}: not a checkpoint of `protperf train` ({wrong[0]} is of another type); give another one"
        )


def _key(name: Any) -> str:
    """Return what a message calls the key of a foreign dict; one that is no word is never written out."""
    return f"{name:.60}" if type(name) is str else f"(a key {shown(name)})"


def _is_plain(value: Any) -> bool:
    """Return whether a value is a word, a number or a list of numbers."""
    if type(value) in (list, tuple):
        return len(value) <= _MOST_LISTED and all(type(each) in (int, float) for each in value)
    return value is None or type(value) in (str, int, float, bool)


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

    A key younger than the description says what was done before there was a choice: its default, or what `BEFORE` has.
    """
    model = to_dict(ModelConfig()) | BEFORE | about["model"]
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
