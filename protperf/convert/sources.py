"""Pretrained weights of another program as a model of ours, which answers as theirs does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from protperf.checkpoint import TrainedModel
from protperf.config import ObjectiveConfig
from protperf.convert.bert import convert_bert, convert_roberta
from protperf.convert.esm import convert_esm
from protperf.convert.fairseq import convert_fairseq, encoder_of
from protperf.convert.files import read_source
from protperf.convert.layouts import Converted, Source
from protperf.formats import FormatError
from protperf.formats.sizes import hash_file
from protperf.model import ProteinModel

_FAIRSEQ = "fairseq RoBERTa"
LAYOUTS = {"bert": convert_bert, "roberta": convert_roberta, "esm": convert_esm, _FAIRSEQ: convert_fairseq}
"""`model_type` of a config -> what converts such weights; fairseq's have none."""


@dataclass(frozen=True)
class Pretrained:
    """A model made of pretrained weights.

    Attributes:
        trained: the model, with exact attention, and where its weights come from.
        lacking: our tokens that the source does not have: read as its unknown token, never predicted.
        left_out: the source's tokens that we do not have.
        ignored: names of tensors that have no part in the scores of tokens.
    """

    trained: TrainedModel
    lacking: tuple[str, ...]
    left_out: tuple[str, ...]
    ignored: tuple[str, ...]

    def notes(self) -> Iterator[str]:
        """Yield what the user should know, a line each."""
        if self.lacking:
            yield f"the source has no {' '.join(self.lacking)}: read as its unknown token, never predicted"
        if self.left_out:
            yield f"tokens of the source left out: {' '.join(self.left_out)}"
        if self.ignored:
            yield f"no part in the scores of tokens, left out: {', '.join(self.ignored)}"


def load_pretrained(path: Path, *, heads: int | None = None, vocabulary: Path | None = None) -> Pretrained:
    """Make a model of pretrained weights.

    Args:
        path: see `read_source`.
        heads: number of heads, for weights whose config does not say it.
        vocabulary: see `read_source`.

    Raises:
        FormatError: a layout that is not known, or whatever of it would make the model answer otherwise.
    """
    source = read_source(path, vocabulary=vocabulary)
    layout, converted = convert_source(source, heads=heads)
    model = ProteinModel(converted.config, causal=False).eval()
    weights = {**converted.state, "redraws": model.redraws}
    model.load_weights(weights, place=str(source.weights_path))  # type: ignore[arg-type]
    trained = TrainedModel(
        model,
        ObjectiveConfig(),
        attend_across_documents=False,
        path=source.weights_path,
        step=0,
        dataset_digest="",
        origin=f"{source.weights_path.name} (SHA-256 {hash_file(source.weights_path)[0]}, layout: {layout})",
    )
    return Pretrained(trained, converted.tokens.lacking, converted.tokens.left_out, converted.ignored)


def convert_source(source: Source, *, heads: int | None = None) -> tuple[str, Converted]:
    """Return the name of the layout of a source, and what it makes of it.

    Raises:
        FormatError: a layout that is not known, or something in it that would make the model answer otherwise.
    """
    kind = source.config.get("model_type")
    if kind is None and encoder_of(source):
        kind = _FAIRSEQ
    if not isinstance(kind, str) or kind not in LAYOUTS:
        raise FormatError(
            f"{source.config_place}: weights of model_type {kind!r}; allowed: {', '.join(LAYOUTS)} (Sapiens, told by its names)"
        )
    if not source.vocabulary:
        raise FormatError(
            f"{source.weights_path.parent}: no vocabulary (vocab.txt, tokenizer.json, vocab.json, or vocab_list in the config); "
            "give --vocab FILE"
        )
    try:
        return kind, LAYOUTS[kind](source, heads=heads)
    except FormatError:
        raise
    except ValueError as error:  # of a value that our model does not take
        raise FormatError(f"{source.config_place}: {error}") from error
