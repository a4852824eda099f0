"""The numbers of a model are known from its configuration, before any memory is taken for them."""

from __future__ import annotations

from typing import Any

import pytest

from protperf.attention import ATTENTIONS
from protperf.config import ModelConfig
from protperf.model import ProteinModel
from protperf.weights import num_weights

SHAPES: dict[str, dict[str, Any]] = {
    **{kind: {"attention": kind, "num_features": 128, "qk_norm": kind == "trig"} for kind in ATTENTIONS},
    "plain": {},
    "learned": {"attention": "favor", "features": "learned"},
    "gated": {"attention": "rfa", "num_features": 128},
    "expected": {"attention": "oprf", "qk_norm": True},
    "pooled": {"attention": "linformer", "linformer_rank": 3, "linformer_length": 7},
    "hashed": {"attention": "reformer", "lsh_rounds": 3, "lsh_buckets": 6},
    "unhashed": {"attention": "reformer", "lsh_buckets": 1},
    "exact": {"attention": "softmax", "feedforward": "swiglu", "biases": True},
    "mixed": {"attention": "favor", "softmax_layers": (1,), "positions": "none"},
    "BERT's": {
        "attention": "softmax",
        "positions": "learned",
        "max_positions": 9,
        "norm": "post",
        "embedding_norm": True,
        "head": "dense",
        "tied_head": False,
        "biases": True,
    },
}


@pytest.mark.parametrize(
    ("name", "causal"),
    [
        (name, causal)
        for name, shape in SHAPES.items()
        for causal in (False, True)
        if not (causal and shape.get("attention") == "linformer")
    ],
)
def test_the_numbers_of_a_model_are_known_from_its_configuration(name: str, causal: bool):
    config = ModelConfig(
        **{"num_layers": 3, "num_heads": 2, "model_dim": 8, "feedforward_dim": 12, "num_features": 5}
        | SHAPES[name]
    )
    found = sum(value.numel() for value in ProteinModel(config, causal=causal).state_dict().values())
    assert num_weights(config, causal=causal) == found
