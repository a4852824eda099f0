"""Pretrained weights on the disk: which file holds them, the config beside them, the vocabulary. Nothing of them is run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from protperf.checkpoint import find_checkpoint
from protperf.checkpoint.folder import CONFIG_NAME, FORMAT, INDEX_NAME, MODEL_TYPE, WEIGHTS_NAME, read_weights
from protperf.checkpoint.pickles import Refusal, read_tensors
from protperf.convert.layouts import Source
from protperf.convert.tokens import ESM_ALPHABET
from protperf.formats import FormatError
from protperf.formats.bounded import read_within
from protperf.formats.json_files import read_json

LARGEST_VOCABULARY = 1 << 20
"""Bytes of text with a token a line: of proteins a few hundred, of words half as many."""

PICKLE_NAME = "pytorch_model.bin"
_PICKLES = (".bin", ".pt", ".pth")
_VOCABULARIES = ("vocab.txt", "tokenizer.json", "vocab.json")
_INDEXES = (INDEX_NAME, f"{PICKLE_NAME}.index.json")


def is_pretrained(path: Path) -> bool:
    """Return whether a path means weights of another program, not a model of protperf.

    Args:
        path: what the user gave; whatever is wrong with a model of protperf, `load_model` says.
    """
    if path.is_dir():
        try:
            found = find_checkpoint(path)
        except ValueError:
            return bool(_weights_in(path)) or _is_cut(path)
        if found.parent != path or found.suffix != ".safetensors":
            return False
        path = found
    if path.suffix not in (".safetensors", ".json", *_PICKLES) or not path.is_file():
        return False
    config = find_config(path)
    try:
        content = None if config is None else read_json(config, remedy="")
    except FormatError:
        content = None
    if not isinstance(content, dict):
        return path.name not in (WEIGHTS_NAME, CONFIG_NAME)
    return content.get("format") != FORMAT and content.get("model_type") != MODEL_TYPE


def read_source(path: Path, *, vocabulary: Path | None = None) -> Source:
    """Read pretrained weights, the config beside them and their vocabulary.

    Args:
        path: a folder, the file of weights in it, or the config beside one.
        vocabulary: a file that has it, instead of what lies in the folder.

    Raises:
        FormatError: something is missing, damaged or of a kind that is not read.
    """
    weights_path = find_weights(path)
    config_path = path if path.suffix == ".json" else find_config(weights_path)
    config = {} if config_path is None else _read_object(config_path)
    tokens, vocabulary_path = _find_vocabulary(weights_path.parent, config, config_path, vocabulary)
    read = read_weights if weights_path.suffix == ".safetensors" else read_pickle
    return Source(
        tensors=read(weights_path),
        weights_path=weights_path,
        config=config,
        config_place=str(config_path or weights_path),
        vocabulary=tokens,
        vocabulary_place=str(vocabulary_path or config_path or weights_path),
    )


def find_weights(path: Path) -> Path:
    """Return the file of weights that a path means.

    Raises:
        FormatError: there is none, or more than one.
    """
    if path.is_file() and path.suffix != ".json":
        return path
    folder = path if path.is_dir() else path.parent
    found = _weights_in(folder)
    if not found:
        if _is_cut(folder):
            raise FormatError(
                f"{folder}: its weights are cut into several files; save them as one (max_shard_size='100GB')"
            )
        raise FormatError(
            f"{folder}: holds no {WEIGHTS_NAME} and no {PICKLE_NAME}; give a folder with weights"
        )
    if len(found) > 1:
        raise FormatError(
            f"{folder}: holds {', '.join(file.name for file in found)}; give one of these files"
        )
    return found[0]


def find_config(path: Path) -> Path | None:
    """Return the config of a file: `config.json` beside it, or the only other file there whose name ends so.

    Raises:
        FormatError: there are several others.
    """
    if path.suffix == ".json":
        return path
    if (path.parent / CONFIG_NAME).is_file():
        return path.parent / CONFIG_NAME
    found = sorted(path.parent.glob(f"*{CONFIG_NAME}"))
    own = [
        file for file in found if file.name in (f"{path.stem}_{CONFIG_NAME}", f"{path.stem}.{CONFIG_NAME}")
    ]
    if len(own or found) > 1:
        raise FormatError(
            f"{path.parent}: {' and '.join(file.name for file in own or found)} may be the config of {path.name}; "
            f"name its own {path.stem}_{CONFIG_NAME}"
        )
    return next(iter(own or found), None)


def read_pickle(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file that `torch.save` wrote; nothing in it can run code.

    Raises:
        FormatError: damaged, of a torch before 1.6, or it holds something else than tensors.
    """
    content = read_tensors(
        path,
        cut=Refusal(
            "not a whole file of torch 1.6 or later",
            "save it anew: torch.save(torch.load(FILE, weights_only=True), FILE)",
        ),
        objects=Refusal(
            "holds more than plain values and tensors of usual types",
            "save its state dict alone, as safetensors, in float32",
        ),
    )
    if isinstance(content, dict) and isinstance(content.get("model"), dict):  # fairseq's checkpoints
        content = content["model"]
    entries = content.items() if isinstance(content, dict) else [(None, None)]
    if not all(isinstance(name, str) and isinstance(value, Tensor) for name, value in entries):
        raise FormatError(f"{path}: not a state dict (names and tensors); save the state dict alone")
    return dict(entries)


def read_vocabulary(path: Path) -> tuple[str, ...]:
    """Return the tokens of a file in the order of their numbers.

    Args:
        path: `vocab.txt` (a token a line), `tokenizer.json`, `vocab.json`, or a config with `vocab_list` or `vocab`.

    Raises:
        FormatError: it is none of these.
    """
    if path.suffix != ".json":
        try:
            with open(path, "rb") as file:
                too_large = (
                    f"{path}: more than {LARGEST_VOCABULARY >> 20} MiB; give a file with a token a line"
                )
                text = read_within(LARGEST_VOCABULARY, file, refusal=too_large).decode()
                return tuple(text.rstrip("\n").split("\n"))
        except UnicodeDecodeError as error:
            raise FormatError(f"{path}: not text ({error}); give a file with a token a line") from None
    content = _read_object(path)
    model = content.get("model")
    vocabulary: Any = model.get("vocab") if isinstance(model, dict) else vocabulary_of(content)
    if vocabulary is None and "model" not in content:
        vocabulary = content
    if isinstance(vocabulary, dict):
        vocabulary = _in_order([*vocabulary.items(), *_added_tokens(content)])
    is_list = isinstance(vocabulary, list) and len(vocabulary) > 0
    if not is_list or not all(isinstance(token, str) for token in vocabulary):
        raise FormatError(
            f"{path}: no vocabulary that gives each token its number; give a file with a token a line"
        )
    return tuple(vocabulary)


def vocabulary_of(config: Mapping[str, Any]) -> Any:
    """Return the vocabulary in a config; `None` if it has none."""
    return config.get("vocab_list") or config.get("vocab")


def _find_vocabulary(
    folder: Path, config: Mapping[str, Any], config_path: Path | None, asked: Path | None
) -> tuple[tuple[str, ...], Path | None]:
    """Return the tokens, and the file that has them: asked for, beside the weights, in the config, or ESM's own."""
    for path in [folder / name for name in _VOCABULARIES] if asked is None else [asked]:
        if asked is not None or path.is_file():
            return read_vocabulary(path), path
    if vocabulary_of(config):
        assert config_path is not None
        return read_vocabulary(config_path), config_path
    is_esm = config.get("model_type") == "esm" and config.get("vocab_size") in (None, len(ESM_ALPHABET))
    return (ESM_ALPHABET if is_esm else ()), config_path


def _weights_in(folder: Path) -> list[Path]:
    """Return the file of weights that has the usual name, else all that may be it; none where they are cut into several."""
    for name in (WEIGHTS_NAME, PICKLE_NAME):
        if (folder / name).is_file():
            return [folder / name]
    if _is_cut(folder):
        return []
    tensors = sorted(folder.glob("*.safetensors"))
    return tensors or sorted(path for suffix in _PICKLES for path in folder.glob(f"*{suffix}"))


def _is_cut(folder: Path) -> bool:
    return any((folder / name).exists() for name in _INDEXES)


def _read_object(path: Path) -> dict[str, Any]:
    content = read_json(path, remedy="give another one")
    if not isinstance(content, dict):
        raise FormatError(f"{path}: a {type(content).__name__}, not a JSON object; give another one")
    return content


def _added_tokens(content: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    """Return the tokens that `tokenizer.json` has beside its vocabulary, or once more, each with its number."""
    added = content.get("added_tokens")
    each = added if isinstance(added, list) else []
    return [(token.get("content"), token.get("id")) for token in each if isinstance(token, dict)]


def _in_order(numbered: Sequence[tuple[Any, Any]]) -> list[Any] | None:
    """Return the tokens by their numbers; `None` unless these are 0, 1, 2 and so on, each of one token."""
    if any(type(token) is not str or type(number) is not int for token, number in numbered):
        return None
    pairs = sorted({(number, token) for token, number in numbered})  # one may stand there twice
    return (
        [token for _, token in pairs] if [number for number, _ in pairs] == list(range(len(pairs))) else None
    )
