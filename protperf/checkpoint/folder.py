"""The folder that people share: `config.json`, `model.safetensors` and `model_card.md`, without pickle.

`config.json` comes last, so a folder that holds one is whole. `docs/formats.md` is its specification.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from protperf.batches import is_out_of_memory
from protperf.formats import FormatError, shown
from protperf.formats.commit import commit_bytes, temporary_path
from protperf.formats.json_files import read_json
from protperf.vocab import check_fingerprint

FORMAT = "protperf-model"
FORMAT_VERSION = 1
CONFIG_NAME = "config.json"
WEIGHTS_NAME = "model.safetensors"
CARD_NAME = "model_card.md"
INDEX_NAME = "model.safetensors.index.json"
"""What transformers writes where it cuts weights into several files."""

LARGEST_HEADER = 16 << 20
"""Bytes of what describes the tensors in a `model.safetensors`: those of 36 layers take 50,000."""

PREFIX = "model."
"""What the names of a model's weights begin with, in these folders as in checkpoints."""

MODEL_TYPE = "protperf"
ARCHITECTURES = {"masked": "ProtperfForMaskedLM", "causal": "ProtperfForCausalLM"}
"""Objective -> class of `protperf.hf`, named in `config.json` for transformers."""

_ENTRIES = {
    "model": dict,
    "objective": dict,
    "attend_across_documents": bool,
    "dataset_digest": str,
    "step": int,
    "fingerprint": str,
}
_DIGEST = "protperf_sha256"


def folder_config(description: dict[str, Any], *, step: int) -> dict[str, Any]:
    """Return the content of `config.json`: plain values only.

    Args:
        description: from `describe`.
        step: optimizer steps that the weights were trained for.
    """
    return {
        "model_type": MODEL_TYPE,
        "architectures": [ARCHITECTURES[description["objective"]["kind"]]],
        "format": FORMAT,
        **description,
        "format_version": FORMAT_VERSION,
        "step": step,
    }


def check_folder(folder: Path, *, force: bool) -> None:
    """Refuse, before any work, a folder that must not be written to.

    Raises:
        ValueError: it is a file, or holds something and `force` is false.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder}: is a file; give the name of a folder")
    if folder.is_dir() and any(folder.iterdir()) and not force:
        raise ValueError(
            f"{folder}: exists already and is not empty; give another name, or --force to replace the model in it"
        )


def write_folder(folder: Path, *, config: dict[str, Any], weights: dict[str, Tensor], card: str) -> None:
    """Write a model's folder; one that is there has its three files replaced, whatever else it holds stays.

    Args:
        folder: made if need be.
        config: from `folder_config`.
        weights: the state dict of a `ProteinModel`.
        card: text of the model card.

    Raises:
        OSError: it cannot be written; a model that is there stays, unless only the last two small files failed.
    """
    named = {f"{PREFIX}{name}": value.detach().cpu().contiguous() for name, value in weights.items()}
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(f".{WEIGHTS_NAME}.*.tmp"):  # by a process that was killed
        left.unlink(missing_ok=True)
    paths = [folder / name for name in (CONFIG_NAME, CARD_NAME, WEIGHTS_NAME)]
    is_new = not paths[2].exists()
    made = temporary_path(paths[2])
    try:
        commit_bytes(made, save(named, {"format": "pt", _DIGEST: digest_of(named)}))
        paths[0].unlink(missing_ok=True)  # a folder that has one is whole
        os.replace(made, paths[2])
        commit_bytes(paths[1], card.encode())
        commit_bytes(paths[0], (json.dumps(config, indent=1) + "\n").encode())
    except BaseException as error:
        with contextlib.suppress(OSError):
            for path in (made, *(paths if is_new else ())):
                path.unlink(missing_ok=True)
            folder.rmdir()
        if isinstance(error, OSError) and error.filename == str(made):
            raise OSError(error.errno, error.strerror, str(paths[2])) from error
        raise


def digest_of(weights: dict[str, Tensor]) -> str:
    """Return the hex SHA-256 over the tensors in the order of their names: safetensors has no checksum of its own."""
    digest = hashlib.sha256()
    for name, value in sorted(weights.items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def read_folder(weights_path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the checked content of `config.json`, and the weights by the names of a `ProteinModel`.

    Args:
        weights_path: the folder's `model.safetensors`.

    Raises:
        FormatError: damaged, foreign, newer, or not whole.
        ValueError: of another vocabulary.
    """
    config = read_config(weights_path.parent / CONFIG_NAME)
    weights = read_weights(weights_path)
    twice = [name for name in weights if f"{PREFIX}{name}" in weights]
    if twice:
        raise FormatError(
            f"{weights_path}: holds both {twice[0]} and {PREFIX}{twice[0]}, which are one weight; give another folder"
        )
    return config, {name.removeprefix(PREFIX): value for name, value in weights.items()}


def read_weights(weights_path: Path) -> dict[str, Tensor]:
    """Return the weights of a `model.safetensors` by the names in it, after comparing their checksum if there is one.

    Raises:
        FormatError: damaged, or not whole.
    """
    with open(weights_path, "rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
    if header_bytes > LARGEST_HEADER:
        raise FormatError(
            f"{weights_path}: not a whole safetensors file (a header of {header_bytes:,} bytes); give another one"
        )
    try:
        with safe_open(weights_path, framework="pt", device="cpu") as opened:
            weights = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - it is no dict
            expected = (opened.metadata() or {}).get(_DIGEST)
        is_damaged = expected is not None and digest_of(weights) != expected
    except OSError:
        raise
    except Exception as error:  # a type that torch does not have, a shape that it does not take
        if is_out_of_memory(error):
            raise
        raise FormatError(
            f"{weights_path}: not a whole safetensors file ({error}); give another one"
        ) from error
    if is_damaged:
        raise FormatError(f"{weights_path}: damaged (the checksum of the weights is wrong); give another one")
    return weights


def read_config(path: Path) -> dict[str, Any]:
    """Return the content of a `config.json`, after checking that it describes a model of this protperf.

    Raises:
        FormatError: missing, damaged, foreign or newer.
        ValueError: of another vocabulary.
    """
    try:
        config = read_json(path, remedy="give another folder")
    except FileNotFoundError:
        raise FormatError(
            f"{path.parent}: holds {WEIGHTS_NAME} but no {CONFIG_NAME}; give the whole folder"
        ) from None
    check_config(config, place=str(path))
    return dict(config)


def check_config(config: Any, *, place: str) -> None:
    """Refuse what does not describe a model of this protperf.

    Args:
        config: the content of a `config.json`.
        place: its name, for messages.

    Raises:
        FormatError: foreign, newer, or an entry is missing or of another type.
        ValueError: of another vocabulary.
    """
    found = config.get("format") if isinstance(config, dict) else type(config).__name__
    if found != FORMAT:
        raise FormatError(
            f"{place}: not of a protperf model (format {shown(found)}, not {FORMAT!r}); `protperf convert` writes such folders"
        )
    version = config.get("format_version")
    if not isinstance(version, int) or not 1 <= version <= FORMAT_VERSION:
        raise FormatError(
            f"{place}: model format {shown(version)}, this protperf reads 1 to {FORMAT_VERSION}: update protperf"
        )
    for name, kind in _ENTRIES.items():
        if not isinstance(config.get(name), kind):
            raise FormatError(
                f"{place}: {name!r} is {shown(config.get(name))}, not of type {kind.__name__}; convert the checkpoint again"
            )
    check_fingerprint(config["fingerprint"], place)
