"""RoBERTa as fairseq names its parts: Sapiens.

Axis letters: `D` model width, `P` positions.
"""

from __future__ import annotations

from protperf.config import ModelConfig
from protperf.convert.layouts import Converted, HeadNames, Source, take_head
from protperf.convert.settings import Settings
from protperf.convert.tensors import BlockNames, Tensors, take_block
from protperf.convert.tokens import map_tokens

_ENCODERS = ("decoder.sentence_encoder.", "encoder.sentence_encoder.")
_BLOCK = BlockNames(
    query="self_attn.q_proj",
    key="self_attn.k_proj",
    value="self_attn.v_proj",
    out="self_attn.out_proj",
    attention_norm="self_attn_layer_norm",
    into="fc1",
    feedforward_out="fc2",
    feedforward_norm="final_layer_norm",
)
_NORM_EPS = 1e-5


def encoder_of(source: Source) -> str | None:
    """Return what the names of a source's encoder begin with; `None` if it is not of this layout."""
    there = (name for name in _ENCODERS if f"{name}embed_tokens.weight" in source.tensors)
    return next(there, None)


def convert_fairseq(source: Source, *, heads: int | None = None) -> Converted:
    """Convert weights with fairseq's names of RoBERTa.

    Args:
        source: its config, if there is one, has `layers`, `heads`, `dim`, `ffn`, `layernorm_eps` and `vocab`.
        heads: what the user says; the weights do not tell it.

    Raises:
        FormatError: something is missing, left over or does not fit; the message names it.
    """
    tensors = Tensors(source.tensors, str(source.weights_path))
    settings = Settings(source.config, source.config_place)
    encoder = encoder_of(source)
    assert encoder is not None
    base = encoder.removesuffix("sentence_encoder.")
    num_rows, width = tensors.shape(f"{encoder}embed_tokens.weight")
    tokens = map_tokens(source.vocabulary, num_rows=num_rows, place=source.vocabulary_place)
    settings.only("activation_fn", "gelu")
    layers = len(tensors.names(rf"{encoder}layers\.\d+\.fc1\.weight"))
    inner = tensors.shape(f"{encoder}layers.0.fc1.weight")[0]
    for key, found in (("layers", layers), ("dim", width), ("ffn", inner)):
        settings.only(key, found)
    words = tensors.take(f"{encoder}embed_tokens.weight", num_rows, width)
    positions = tensors.take(f"{encoder}embed_positions.weight", None, width)[tokens.padding + 1 :]
    state = {
        "embedding.weight": tokens.pick(words),
        "position_embedding.weight": positions,
        **tensors.linear(f"{encoder}emb_layer_norm", "embedding_norm", width),
    }
    for layer in range(layers):
        name = f"{encoder}layers.{layer}."
        state |= take_block(tensors, name, f"blocks.{layer}.", _BLOCK, width=width, inner=inner)
    names = HeadNames(
        dense=f"{base}lm_head.dense",
        norm=f"{base}lm_head.layer_norm",
        matrix=f"{base}lm_head.weight",
        bias=(f"{base}lm_head.bias",),
    )
    state |= take_head(tensors, names, embedding=words, tokens=tokens, tied=None)
    tensors.ignore(r".*\.version|.*\._float_tensor|classification_heads\..*")
    tensors.check_empty()
    config = ModelConfig(
        attention="softmax",
        num_layers=layers,
        num_heads=settings.heads("heads", asked=heads, width=width),
        model_dim=width,
        feedforward_dim=inner,
        positions="learned",
        max_positions=len(positions),
        embedding_norm=True,
        norm="post",
        norm_eps=settings.number("layernorm_eps", _NORM_EPS),
        biases=True,
        head="dense",
        tied_head="head_matrix" not in state,
    )
    return Converted(config, state, tokens, tuple(tensors.ignored))
