"""ESM-2 and ESM-1b as transformers saves them with their head of masked language models.

Source: Lin et al. 2023, doi:10.1126/science.ade2574; Rives et al. 2021, doi:10.1073/pnas.2016239118. Axis letters: `D`
model width, `K` head width, `P` positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from protperf.config import ModelConfig
from protperf.convert.layouts import Converted, HeadNames, Source, check_transformers, take_head
from protperf.convert.settings import Settings
from protperf.convert.tensors import BlockNames, Tensors, take_block
from protperf.convert.tokens import TokenMap, map_tokens
from protperf.formats import FormatError
from protperf.positions import ROPE_BASE, rope_frequencies

_BLOCK = BlockNames(
    query="attention.self.query",
    key="attention.self.key",
    value="attention.self.value",
    out="attention.output.dense",
    attention_norm="attention.LayerNorm",
    into="intermediate.dense",
    feedforward_out="output.dense",
    feedforward_norm="LayerNorm",
)
_HEAD = HeadNames(
    dense="lm_head.dense",
    norm="lm_head.layer_norm",
    matrix="lm_head.decoder.weight",
    bias=("lm_head.bias",),
)
_IGNORED = r"esm\.pooler\..*|esm\.contact_head\..*|esm\.embeddings\.position_ids"
_POSITIONS = "esm.embeddings.position_embeddings.weight"
_FREQUENCIES = r"esm\.(encoder\.layer\.(\d+|\*)\.attention\.self\.)?rotary_embeddings\.inv_freq"
"""One for all layers or one for each; transformers 5 writes `layer.*` for the one."""
_NORM_EPS = 1e-12


def convert_esm(source: Source, *, heads: int | None = None) -> Converted:
    """Convert what `EsmForMaskedLM` saved.

    ESM scales queries before it turns them by their position: a factor of the logits either way.

    Args:
        source: with its config.
        heads: what the user says.

    Raises:
        FormatError: something is missing, left over or does not fit; the message names it.
    """
    tensors = Tensors(source.tensors, str(source.weights_path))
    settings = Settings(source.config, source.config_place)
    width, inner = settings.size("hidden_size"), settings.size("intermediate_size")
    num_heads = settings.heads("num_attention_heads", asked=heads, width=width)
    words = tensors.take("esm.embeddings.word_embeddings.weight", None, width)
    tokens = map_tokens(source.vocabulary, num_rows=len(words), place=source.vocabulary_place)
    check_transformers(settings, num_rows=len(words))
    settings.only("is_folding_model", False)
    settings.only("mask_token_id", tokens.mask)
    state = {
        "embedding.weight": tokens.pick(words),
        **tensors.linear("esm.encoder.emb_layer_norm_after", "norm", width),
    }
    embedding_norm = settings.flag("emb_layer_norm_before", default=False)
    if embedding_norm:
        state |= tensors.linear("esm.embeddings.layer_norm", "embedding_norm", width)
    layers = settings.size("num_hidden_layers")
    for layer in range(layers):
        name = f"esm.encoder.layer.{layer}."
        state |= take_block(tensors, name, f"blocks.{layer}.", _BLOCK, width=width, inner=inner)
    tied = settings.flag("tie_word_embeddings", default=True)
    state |= take_head(tensors, _HEAD, embedding=words, tokens=tokens, tied=tied)
    table, frequencies = _take_positions(tensors, settings, tokens, width=width, head_dim=width // num_heads)
    if table is not None:
        state["position_embedding.weight"] = table
    tensors.ignore(_IGNORED)
    tensors.check_empty()
    config = ModelConfig(
        attention="softmax",
        num_layers=layers,
        num_heads=num_heads,
        model_dim=width,
        feedforward_dim=inner,
        positions="rope" if table is None else "learned",
        max_positions=0 if table is None else len(table),
        rope_frequencies=frequencies,
        token_dropout=settings.flag("token_dropout", default=False),
        embedding_norm=embedding_norm,
        norm="pre",
        norm_eps=settings.number("layer_norm_eps", _NORM_EPS),
        biases=True,
        head="dense",
        tied_head="head_matrix" not in state,
    )
    return Converted(config, state, tokens, tuple(tensors.ignored))


def _take_positions(
    tensors: Tensors, settings: Settings, tokens: TokenMap, *, width: int, head_dim: int
) -> tuple[Tensor | None, str]:
    """Take what tells positions: a table, `(P, D)`, or rotations (`None`), and how exact their frequencies are."""
    settings.only("position_embedding_type", "absolute", "rotary")
    if settings.get("position_embedding_type") != "rotary":
        settings.only("pad_token_id", tokens.padding)
        rows = settings.size("max_position_embeddings")
        return tensors.take(_POSITIONS, rows, width)[tokens.padding + 1 :], "exact"
    _check_base(settings)
    tensors.ignore(_POSITIONS.replace(".", r"\."))
    found = [tensors.take(name, head_dim // 2) for name in tensors.names(_FREQUENCIES)]
    for kind in ("exact", "half"):
        own = rope_frequencies(head_dim, kind)
        if all(torch.allclose(each, own, rtol=1e-6, atol=0.0) for each in found):
            return None, kind
    raise FormatError(
        f"{tensors.place}: rotary_embeddings.inv_freq are other frequencies than {ROPE_BASE:.0f} ** (-2 i / {head_dim}), "
        "neither in float32 nor rounded to float16; give weights of ESM-2"
    )


def _check_base(settings: Settings) -> None:
    """Refuse rotations that are not those of ESM-2."""
    settings.only("rope_theta", ROPE_BASE)
    settings.only("rope_scaling", {})
    rope = settings.get("rope_parameters") or {}
    usual = {"rope_theta": ROPE_BASE, "rope_type": "default"}
    if not isinstance(rope, dict) or {**usual, **rope} != usual:
        raise settings.error("rope_parameters", f"rope_theta {ROPE_BASE} of rope_type 'default'")
