"""What the layouts of pretrained weights share: what they are given, what they give, the head of BERT.

Axis letters: `D` model width, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from protperf.config import ModelConfig
from protperf.convert.settings import Settings
from protperf.convert.tensors import Tensors
from protperf.convert.tokens import TokenMap
from protperf.formats import FormatError


@dataclass(frozen=True)
class Source:
    """Pretrained weights as they lie on the disk.

    Attributes:
        tensors: by their names in the file.
        weights_path: that file.
        config: content of the JSON object beside it; empty where there is none.
        config_place: its name, for messages.
        vocabulary: the tokens in the order of their numbers; empty where nothing tells them.
        vocabulary_place: the name of their file, for messages.
    """

    tensors: Mapping[str, Tensor]
    weights_path: Path
    config: Mapping[str, Any]
    config_place: str
    vocabulary: tuple[str, ...]
    vocabulary_place: str


@dataclass(frozen=True)
class Converted:
    """What a layout makes of a source.

    Attributes:
        config: of our model, with exact attention.
        state: its weights, by our names.
        tokens: how the vocabularies go together.
        ignored: names of tensors that have no part in the scores of tokens.
    """

    config: ModelConfig
    state: dict[str, Tensor]
    tokens: TokenMap
    ignored: tuple[str, ...]


@dataclass(frozen=True)
class HeadNames:
    """What a layout calls the parts of the head; the bias may stand there under several names, of which the first counts."""

    dense: str
    norm: str
    matrix: str
    bias: tuple[str, ...]


def check_transformers(settings: Settings, *, num_rows: int) -> None:
    """Refuse what a config of transformers may ask for and our model does not do.

    Args:
        settings: the config.
        num_rows: of the embedding.

    Raises:
        FormatError: the key, what it is, what is allowed.
    """
    settings.only("vocab_size", num_rows)
    settings.only("hidden_act", "gelu")
    settings.only("is_decoder", False)
    settings.only("add_cross_attention", False)


def take_head(
    tensors: Tensors, names: HeadNames, *, embedding: Tensor, tokens: TokenMap, tied: bool | None
) -> dict[str, Tensor]:
    """Take the head of BERT; `head_matrix` is among what is returned if it is not the embedding.

    Args:
        tensors: of the source.
        names: of the parts.
        embedding: of the source's tokens, `(rows, D)`.
        tokens: how the vocabularies go together.
        tied: whether the source's program takes the embedding for the matrix whatever the file holds; `None`: it takes
            what is in the file.

    Raises:
        FormatError: the file's matrix is not the embedding, though the config says so.
    """
    num_rows, width = embedding.shape
    state = {
        **tensors.linear(names.dense, "head.dense", width, width),
        **tensors.linear(names.norm, "head.norm", width),
        "head.bias": tokens.pick_bias(tensors.first_of(names.bias, num_rows, tied=tied is not False)),
    }
    if tied and names.matrix not in tensors:
        return state
    matrix = tensors.take(names.matrix, num_rows, width)
    if matrix.equal(embedding):
        return state
    if tied:
        raise FormatError(
            f"{tensors.place}: {names.matrix} is not the embedding, but the config ties them (tie_word_embeddings); "
            "set it to false to take the matrix of the file"
        )
    return {**state, "head_matrix": tokens.pick(matrix)}
