"""Small models of transformers with random weights, saved as it saves them: what pretrained weights are compared with."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    EsmConfig,
    EsmForMaskedLM,
    RobertaConfig,
    RobertaForMaskedLM,
)

from protperf.vocab import VOCABULARY

BERT_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"LAGVESIKRDTPNQFYMHCWXUBZO", "|")
ROBERTA_TOKENS = ("<s>", "<pad>", "</s>", "<unk>", *"ACDEFGHIKLMNPQRSTVWY", "<mask>", ".", "-")
ESM_TOKENS = (
    "<cls>",
    "<pad>",
    "<eos>",
    "<unk>",
    *"LAGVSERTIDPKQNFYMHWCXBUZO",
    ".",
    "-",
    "<null_1>",
    "<mask>",
)

_OURS = {
    "<pad>": ("<pad>", "[PAD]"),
    "<bos>": ("<cls>", "[CLS]", "<s>"),
    "<eos>": ("<eos>", "[SEP]", "</s>"),
    "<mask>": ("<mask>", "[MASK]"),
    "<unk>": ("<unk>", "[UNK]"),
}
_SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}


def shared_tokens(vocabulary: Sequence[str]) -> dict[int, int]:
    """Return our number -> the source's number of each token that both have."""
    found = {}
    for number, token in enumerate(VOCABULARY.tokens):
        for name in _OURS.get(token, (token,)):
            if name in vocabulary:
                found[number] = list(vocabulary).index(name)
    return found


def make_bert(**changes: Any) -> nn.Module:
    config = BertConfig(
        **{**_SHAPE, "vocab_size": len(BERT_TOKENS), "max_position_embeddings": 40, **changes}
    )
    return widened(BertForMaskedLM(config))


def make_roberta(**changes: Any) -> nn.Module:
    settings = {**_SHAPE, "vocab_size": len(ROBERTA_TOKENS), "max_position_embeddings": 42, "pad_token_id": 1}
    return widened(RobertaForMaskedLM(RobertaConfig(**{**settings, "type_vocab_size": 1, **changes})))


def make_esm(**changes: Any) -> nn.Module:
    settings = {
        **_SHAPE,
        "vocab_size": len(ESM_TOKENS),
        "mask_token_id": 32,
        "pad_token_id": 1,
        "max_position_embeddings": 42,
        "position_embedding_type": "rotary",
        "layer_norm_eps": 1e-5,
        "token_dropout": True,
        "emb_layer_norm_before": False,
    }
    return widened(EsmForMaskedLM(EsmConfig(**{**settings, **changes})))


@torch.no_grad()
def widened(model: nn.Module) -> nn.Module:
    """Draw weights so wide that each part has a say in the scores."""
    generator = torch.Generator().manual_seed(7)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        scale = 1.0 if "embeddings" in name and parameter.dim() == 2 else 0.3
        is_norm = parameter.dim() == 1 and name.endswith("weight")
        parameter.copy_(noise * scale + float(is_norm))
    return model.eval()


def save(model: Any, folder: Path, *, form: str, vocabulary: Sequence[str] | None) -> Path:
    """Save a model as transformers does, as `safetensors`, or as `bin` its state dict."""
    if form == "safetensors":
        model.save_pretrained(folder)
    else:
        model.config.save_pretrained(folder)
        torch.save(model.state_dict(), folder / "pytorch_model.bin")
    if vocabulary is not None:
        (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n")
    return folder


def as_fairseq(model: nn.Module, folder: Path, *, name: str) -> Path:
    """Write a RoBERTa of transformers with fairseq's names; return the file."""
    renamed = {
        "roberta.embeddings.word_embeddings": "decoder.sentence_encoder.embed_tokens",
        "roberta.embeddings.position_embeddings": "decoder.sentence_encoder.embed_positions",
        "roberta.embeddings.LayerNorm": "decoder.sentence_encoder.emb_layer_norm",
        "roberta.encoder.layer": "decoder.sentence_encoder.layers",
        "attention.self.query": "self_attn.q_proj",
        "attention.self.key": "self_attn.k_proj",
        "attention.self.value": "self_attn.v_proj",
        "attention.output.dense": "self_attn.out_proj",
        "attention.output.LayerNorm": "self_attn_layer_norm",
        "intermediate.dense": "fc1",
        "output.dense": "fc2",
        "output.LayerNorm": "final_layer_norm",
        "lm_head.decoder": "lm_head",
    }
    found = dict(model.state_dict())
    kinds = found.pop("roberta.embeddings.token_type_embeddings.weight")
    places = "roberta.embeddings.position_embeddings.weight"
    found[places] = found[places] + kinds[0]
    found.pop("lm_head.bias")
    for each in list(found):
        new = each
        for old, other in renamed.items():
            new = new.replace(old, other)
        new = f"decoder.{new}" if new.startswith("lm_head") else new
        found[new] = found.pop(each).clone()
    folder.mkdir()
    save_file(found, folder / f"{name}.safetensors")
    settings = {
        "layers": 2,
        "heads": 4,
        "dim": 32,
        "ffn": 48,
        "layernorm_eps": 1e-12,
        "vocab": ROBERTA_TOKENS,
    }
    (folder / f"{name}_config.json").write_text(json.dumps(settings))
    return folder / f"{name}.safetensors"


@torch.no_grad()
def their_scores(model: Any, rows: Sequence[Tensor], vocabulary: Sequence[str]) -> list[Tensor]:
    """Return the source's scores of the shared tokens, `(L, shared)` for each row of our tokens, asked as one padded batch."""
    numbers = shared_tokens(vocabulary)
    padding = numbers[VOCABULARY.pad]
    length = max(map(len, rows))
    inputs = torch.full((len(rows), length), padding)
    mask = torch.zeros(len(rows), length, dtype=torch.long)
    for row, tokens in enumerate(rows):
        inputs[row, : len(tokens)] = torch.tensor([numbers[int(token)] for token in tokens])
        mask[row, : len(tokens)] = 1
    logits = model(input_ids=inputs, attention_mask=mask).logits[:, :, list(numbers.values())]
    return [logits[row, : len(tokens)] for row, tokens in enumerate(rows)]


CASES: dict[str, tuple[Callable[..., nn.Module], dict[str, Any], Sequence[str]]] = {
    "bert": (make_bert, {}, BERT_TOKENS),
    "bert, untied": (make_bert, {"tie_word_embeddings": False, "num_attention_heads": 2}, BERT_TOKENS),
    "roberta": (make_roberta, {}, ROBERTA_TOKENS),
    "esm-2": (make_esm, {}, ESM_TOKENS),
    "esm-2, heads of 24": (make_esm, {"hidden_size": 48, "num_attention_heads": 2}, ESM_TOKENS),
    "esm-1b": (make_esm, {"position_embedding_type": "absolute", "emb_layer_norm_before": True}, ESM_TOKENS),
    "esm without token dropout": (make_esm, {"token_dropout": False}, ESM_TOKENS),
}
