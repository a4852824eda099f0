"""The swap: a model with exact attention becomes one of another attention, its weights as they are."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from protperf.attention.norms import QueryKeySums
from protperf.model import ProteinModel


def swap_attention(
    exact: ProteinModel,
    *,
    attention: str,
    num_features: int,
    projection_seed: int,
    softmax_layers: tuple[int, ...],
    features: str,
) -> ProteinModel:
    """Return a model of another attention with the same weights, in evaluation mode; the two share no memory.

    Args:
        exact: with exact attention in all layers.
        attention: one of `swap_options.SWAPS`.
        num_features: rows of the projection.
        projection_seed: of its draw.
        softmax_layers: which layers keep exact attention, from 0.
        features: `drawn`, or `learned`: then they begin as the drawn ones.

    Raises:
        ValueError: there is no such layer, or the model has no exact attention to swap.
    """
    layers = exact.config.num_layers
    if any(exact.config.attention_of(layer) != "softmax" for layer in range(layers)):
        raise ValueError(
            f"--attention {attention}: this model has attention {exact.config.attention!r}; "
            "only exact attention (softmax) can be swapped"
        )
    for layer in softmax_layers:
        if not 0 <= layer < layers:
            raise ValueError(f"--keep-softmax {layer}: no such layer; allowed: 0 to {layers - 1}")
    config = replace(
        exact.config,
        attention=attention,
        num_features=num_features,
        projection_seed=projection_seed,
        softmax_layers=softmax_layers,
        features=features,
    )
    model = ProteinModel(config, causal=exact.causal).to(exact.device).eval()
    own = model.state_dict()
    weights = {name: value for name, value in exact.state_dict().items() if name != "redraws"}
    model.load_weights({**own, **weights}, place="the model")
    return model


@torch.no_grad()
def measure_pair_squares(
    exact: ProteinModel, model: ProteinModel, batches: Iterable[tuple[Tensor, Tensor]]
) -> None:
    """Tell the layers of `oprf` what norms the queries and keys of the exact model have.

    Args:
        exact: the model that was swapped.
        model: with attention `oprf`.
        batches: tokens as shown, `(B, L)`, and documents, int32 `(B, L)`.
    """
    sums: QueryKeySums | None = None
    for tokens, documents in batches:
        found = exact.query_key_sums(tokens, documents)
        sums = (
            found
            if sums is None
            else QueryKeySums(*(one + two for one, two in zip(sums, found, strict=True)))
        )
    assert sums is not None, "nothing to measure on"
    model.set_pair_squares(sums.pair_squares())
