"""The systems that the paper compares, by its names for them."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping

from protperf import attention
from protperf.bench.paper.settings import model_shape
from protperf.config import ModelConfig
from protperf.model import ProteinModel

OBJECTIVES = ("masked", "causal")

ATTENTIONS = {
    "Transformer": "softmax",
    "Performer-ReLU": "relu",
    "Performer-softmax": "favor",
    "Linear Transformer": "elu",
    "RFA": "rfa",
    "Linformer": "linformer",
    "Reformer": "reformer",
}
"""Name in the paper -> attention; `Performer` alone means ReLU there. RFA (Peng et al. 2021) is younger than the paper."""

REFORMER = {"lsh_rounds": 2, "lsh_buckets": 16, "lsh_window": 32}
"""In windows of 512 tokens a bucket has 32 of them at most, about, so that this sees all of it; more rounds cost in proportion."""

BIDIRECTIONAL = tuple(name for name, kind in ATTENTIONS.items() if kind in attention.BIDIRECTIONAL)
"""Those without a causal form."""


def attention_of(name: str, *, window: int, features: int) -> dict[str, object]:
    """Return what a system is in the configuration, besides the shape that all share.

    Args:
        name: a key of `ATTENTIONS`.
        window: tokens.
        features: M, of random features; as many pooled tokens has Linformer.
    """
    overrides: dict[str, object] = {"model.attention": ATTENTIONS[name]}
    if name == "Linformer":
        overrides |= {"model.linformer_length": window, "model.linformer_rank": features}
    if name == "Reformer":
        overrides |= {f"model.{key}": value for key, value in REFORMER.items()}
    return overrides


def parameters_of(options: Namespace, overrides: Mapping[str, object], *, causal: bool) -> int:
    """Return the number of weights of a model that the options and overrides describe."""
    given = {
        key.removeprefix("model."): value for key, value in overrides.items() if key.startswith("model.")
    }
    config = ModelConfig(**{**model_shape(options), **given})  # type: ignore[arg-type]
    return sum(parameter.numel() for parameter in ProteinModel(config, causal=causal).parameters())
