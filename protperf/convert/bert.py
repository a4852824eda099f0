"""BERT and RoBERTa as transformers saves them with their head of masked language models.

Axis letters: `D` model width, `P` positions.
"""

from __future__ import annotations

from dataclasses import dataclass

from protperf.config import ModelConfig
from protperf.convert.layouts import Converted, HeadNames, Source, check_transformers, take_head
from protperf.convert.settings import Settings
from protperf.convert.tensors import BlockNames, Tensors, take_block
from protperf.convert.tokens import map_tokens

_BLOCK = BlockNames(
    query="attention.self.query",
    key="attention.self.key",
    value="attention.self.value",
    out="attention.output.dense",
    attention_norm="attention.output.LayerNorm",
    into="intermediate.dense",
    feedforward_out="output.dense",
    feedforward_norm="output.LayerNorm",
)
_NORM_EPS = 1e-12


@dataclass(frozen=True)
class _Family:
    """What BERT and RoBERTa have otherwise.

    Attributes:
        base: what the names of the encoder begin with.
        head: names of the head's parts.
        ignored: names of what has no part in the scores of tokens.
        skips_padding: whether the position of the first token is the number of the padding token and one.
    """

    base: str
    head: HeadNames
    ignored: str
    skips_padding: bool


_BERT = _Family(
    base="bert.",
    head=HeadNames(
        dense="cls.predictions.transform.dense",
        norm="cls.predictions.transform.LayerNorm",
        matrix="cls.predictions.decoder.weight",
        bias=("cls.predictions.decoder.bias", "cls.predictions.bias"),
    ),
    ignored=r"bert\.pooler\..*|bert\.embeddings\.(position|token_type)_ids|cls\.(?!predictions\.).*",
    skips_padding=False,
)
_ROBERTA = _Family(
    base="roberta.",
    head=HeadNames(
        dense="lm_head.dense",
        norm="lm_head.layer_norm",
        matrix="lm_head.decoder.weight",
        bias=("lm_head.decoder.bias", "lm_head.bias"),
    ),
    ignored=r"roberta\.pooler\..*|roberta\.embeddings\.(position|token_type)_ids",
    skips_padding=True,
)


def convert_bert(source: Source, *, heads: int | None = None) -> Converted:
    """Convert what `BertForMaskedLM` or `BertForPreTraining` saved.

    Args:
        source: with its config.
        heads: what the user says.

    Raises:
        FormatError: something is missing, left over or does not fit; the message names it.
    """
    return _convert(source, _BERT, heads)


def convert_roberta(source: Source, *, heads: int | None = None) -> Converted:
    """Convert what `RobertaForMaskedLM` saved; arguments and errors as for `convert_bert`."""
    return _convert(source, _ROBERTA, heads)


def _convert(source: Source, family: _Family, heads: int | None) -> Converted:
    tensors = Tensors(source.tensors, str(source.weights_path))
    settings = Settings(source.config, source.config_place)
    width, inner = settings.size("hidden_size"), settings.size("intermediate_size")
    layers, base = settings.size("num_hidden_layers"), family.base
    words = tensors.take(f"{base}embeddings.word_embeddings.weight", None, width)
    tokens = map_tokens(source.vocabulary, num_rows=len(words), place=source.vocabulary_place)
    check_transformers(settings, num_rows=len(words))
    settings.only("position_embedding_type", "absolute")
    first = 0
    if family.skips_padding:
        settings.only("pad_token_id", tokens.padding)
        first = tokens.padding + 1
    places = tensors.take(
        f"{base}embeddings.position_embeddings.weight", settings.size("max_position_embeddings"), width
    )
    kinds = tensors.take(
        f"{base}embeddings.token_type_embeddings.weight", settings.size("type_vocab_size"), width
    )
    state = {
        "embedding.weight": tokens.pick(words),
        "position_embedding.weight": places[first:] + kinds[0],  # every token is of the first kind
        **tensors.linear(f"{base}embeddings.LayerNorm", "embedding_norm", width),
    }
    for layer in range(layers):
        name = f"{base}encoder.layer.{layer}."
        state |= take_block(tensors, name, f"blocks.{layer}.", _BLOCK, width=width, inner=inner)
    tied = settings.flag("tie_word_embeddings", default=True)
    state |= take_head(tensors, family.head, embedding=words, tokens=tokens, tied=tied)
    tensors.ignore(family.ignored)
    tensors.check_empty()
    config = ModelConfig(
        attention="softmax",
        num_layers=layers,
        num_heads=settings.heads("num_attention_heads", asked=heads, width=width),
        model_dim=width,
        feedforward_dim=inner,
        positions="learned",
        max_positions=len(places) - first,
        embedding_norm=True,
        norm="post",
        norm_eps=settings.number("layer_norm_eps", _NORM_EPS),
        biases=True,
        head="dense",
        tied_head="head_matrix" not in state,
    )
    return Converted(config, state, tokens, tuple(tensors.ignored))
