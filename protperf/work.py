"""Closed forms of the arithmetic that is asked for, in floating-point operations (a multiply and an add are two).

Only products of matrices are counted: exponentials, sums and norms are a few per cent of them. One head of length L,
width K and F features, two operations for each of L x F x K, in every product:

    bidirectional, forward     W q, W k, phi(k)^T v, phi(q) S                                4 products    8 L F K
    backward                   d phi(k) = v dS^T, dv = phi(k) dS, d phi(q) = do S^T,
                               dS = phi(q)^T do, dq = du W, dk = du W (W is not learned)     6 products   12 L F K
    computed again             W q, W k: features are not kept for the backward pass         2 products    4 L F K

    causal                     the same 8, 12 and 4 L F K for the states, and inside chunks of C tokens the lower
                               triangle of C (C + 1) / 2 pairs, for each pair 2 F for the weight phi(q_i).phi(k_j)
                               and 2 K for its value: L (C + 1) (F + K) forward, twice that backward, and the
                               weights' L (C + 1) F again

    softmax                    P pairs (L^2, or L (L + 1) / 2 causal, summed over documents): 2 K for the weight and
                               2 K for its value, 4 P K forward, 8 P K backward, 2 P K for the weights again

    linformer                  E k, F v, q k'^T and weights v' for F pooled tokens: 4 products, 8 L F K forward, twice
                               that backward, for E and F are learned, and q k'^T again

    reformer                   as softmax for all pairs that the windows of all rounds can hold (what buckets leave out is
                               not known before), and R x in each round's hash, which has no gradient

A map without a projection has F = K and no products with W. Packing changes the pairs of softmax and, of a linear form,
nothing. The counts are those of the task: work that an implementation adds is not arithmetic done for the user.

Axis letters: `L` length in tokens, `D` model width, `H` heads, `K` head width, `M` rows of the projection, `F` features,
`C` chunk, `V` vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache
from itertools import product
from typing import NamedTuple

import torch

from protperf.attention import Hashing
from protperf.attention.features import FEATURE_MAPS, UNPROJECTED
from protperf.config import ModelConfig
from protperf.vocab import VOCABULARY

CHUNK = 64
"""C of the causal count, whatever an implementation takes."""


class Work(NamedTuple):
    """Floating-point operations.

    Attributes:
        forward: of the forward pass.
        backward: of the gradients.
        again: of the backward pass, for what it computes a second time because it was not kept.
    """

    forward: int
    backward: int
    again: int

    def times(self, count: int) -> Work:
        """Return the work of so many."""
        return Work(*(count * part for part in self))

    def plus(self, other: Work) -> Work:
        """Return the work of both."""
        return Work(*(one + two for one, two in zip(self, other, strict=True)))


@cache
def features_of(kind: str, rows: int, head_dim: int) -> int:
    """Return F of a feature map with M rows."""
    return FEATURE_MAPS[kind](torch.zeros(rows, head_dim), head_dim=head_dim).weights.shape[-2]


def rows_for(kind: str, num_features: int, head_dim: int) -> int:
    """Return M, so that maps with two features for each row have as many features as the others.

    >>> rows_for("favor", 256, 64), rows_for("favor_hyperbolic", 256, 64)
    (256, 128)
    """
    if kind not in FEATURE_MAPS or kind in UNPROJECTED:
        return num_features
    return 2 * num_features // features_of(kind, 2, head_dim)


def attention_work(
    kind: str,
    *,
    causal: bool,
    documents: Sequence[int],
    head_dim: int,
    rows: int,
    hashing: Hashing | None = None,
) -> Work:
    """Return the work of one head over one window.

    Args:
        kind: an attention's name.
        causal: the direction.
        documents: tokens of each document of the window.
        head_dim: K.
        rows: M (unused by `softmax`, `reformer` and maps without a projection); the pooled tokens of `linformer`.
        hashing: of `reformer`.
    """
    length, pair = sum(documents), Work(4 * head_dim, 8 * head_dim, 2 * head_dim)
    if kind == "softmax":
        return pair.times(sum(tokens * (tokens + 1) // 2 if causal else tokens**2 for tokens in documents))
    if kind == "linformer":
        return Work(8 * rows * head_dim, 16 * rows * head_dim, 2 * rows * head_dim).times(length)
    if kind == "reformer":
        assert hashing is not None
        sides = sum(_earlier_in_window(tokens, hashing.window) for tokens in documents)
        hashed = Work(2 * hashing.num_rows * head_dim, 0, 0).times(length)
        return pair.times(hashing.rounds * sides * (1 if causal else 2)).plus(hashed)
    num_features = features_of(kind, rows, head_dim)
    product = 2 * num_features * head_dim
    mapped = 0 if kind in UNPROJECTED else 2 * product
    forward, backward, again = mapped + 2 * product, mapped + 4 * product, mapped
    if causal:
        inside = (CHUNK + 1) * (num_features + head_dim)
        forward, backward, again = forward + inside, backward + 2 * inside, again + (CHUNK + 1) * num_features
    return Work(forward, backward, again).times(length)


def _earlier_in_window(tokens: int, window: int) -> int:
    """Return the pairs of a token and one of at most so many before it, in a document of some tokens.

    >>> _earlier_in_window(5, 2)
    7
    """
    full = max(0, tokens - window)
    return full * window + (tokens - full) * (tokens - full - 1) // 2


def layers_work(
    *,
    num_layers: int,
    model_dim: int,
    feedforward_dim: int,
    gated: bool,
    num_tokens: int,
    num_keyless: int = 0,
) -> Work:
    """Return the work of the weight matrices of all blocks: q, k, v, out, and two or (gated) three of the feed-forward.

    `num_keyless` blocks have no matrix of k: their queries are their keys.
    """
    matrices = 4 * model_dim**2 + (3 if gated else 2) * model_dim * feedforward_dim
    forward = 2 * num_tokens * (num_layers * matrices - num_keyless * model_dim**2)
    return Work(forward, 2 * forward, 0)


def head_work(*, model_dim: int, vocabulary: int, num_asked: int, dense: bool = False) -> Work:
    """Return the work of the scores of all V tokens at the asked positions; a `dense` head has a D x D matrix besides."""
    forward = 2 * num_asked * model_dim * (vocabulary + (model_dim if dense else 0))
    return Work(forward, 2 * forward, 0)


def training_work(
    config: ModelConfig, *, causal: bool, documents: Sequence[Sequence[int]], num_asked: int
) -> Work:
    """Return the work of one forward and backward pass of a whole model: weights, attention and the asked scores.

    A model's FLOP utilisation counts `forward + backward`; `again` is what is computed a second time, with
    `activation_checkpointing` every block's forward pass but its last product, which no gradient needs.

    8 tokens times 2 x 28 of the weights, and 4 x 2 for each of 16 + 4 + 4 pairs:

    >>> shape = ModelConfig("softmax", num_layers=1, num_heads=1, model_dim=2, feedforward_dim=3)
    >>> training_work(shape, causal=False, documents=[[4], [2, 2]], num_asked=0).forward
    640

    Args:
        config: shape of the model.
        causal: the direction.
        documents: of each window, the tokens of each document; feature maps depend on their sum alone.
        num_asked: tokens that are asked, in all windows together.
    """
    return weights_work(config, num_tokens=sum(map(sum, documents)), num_asked=num_asked).plus(
        _attentions_work(config, _layers_by_attention(config), causal=causal, documents=documents)
    )


def weights_work(config: ModelConfig, *, num_tokens: int, num_asked: int) -> Work:
    """Return the work of a whole model without that of attention between q, k, v and its output: of weights alone."""
    layers = layers_work(
        num_layers=config.num_layers,
        model_dim=config.model_dim,
        feedforward_dim=config.feedforward_dim,
        gated=config.feedforward == "swiglu",
        num_tokens=num_tokens,
        num_keyless=sum(config.attention_of(layer) == "reformer" for layer in range(config.num_layers)),
    )
    if config.activation_checkpointing:
        last = 2 * config.num_layers * num_tokens * config.model_dim * config.feedforward_dim
        layers = layers._replace(again=layers.forward - last)
    head = head_work(
        model_dim=config.model_dim,
        vocabulary=len(VOCABULARY),
        num_asked=num_asked,
        dense=config.head == "dense",
    )
    return layers.plus(head)


def float32_work(config: ModelConfig, *, causal: bool, documents: Sequence[Sequence[int]]) -> Work:
    """Return the part of `training_work` that is computed in float32 whatever the precision: all attention but `softmax`."""
    kinds = _layers_by_attention(config)
    del kinds["softmax"]
    return _attentions_work(config, kinds, causal=causal, documents=documents)


def _layers_by_attention(config: ModelConfig) -> Counter[str]:
    return Counter(config.attention_of(layer) for layer in range(config.num_layers))


def _attentions_work(
    config: ModelConfig, kinds: Counter[str], *, causal: bool, documents: Sequence[Sequence[int]]
) -> Work:
    """Return the work of all heads of so many layers of each kind over all windows."""
    work = Work(0, 0, 0)
    for lengths, (kind, num_layers) in product(documents, kinds.items()):
        head = attention_work(
            kind,
            causal=causal,
            documents=lengths,
            head_dim=config.model_dim // config.num_heads,
            rows=config.linformer_rank if kind == "linformer" else config.num_features,
            hashing=Hashing(config.lsh_rounds, config.lsh_buckets, config.lsh_window),
        )
        work = work.plus(head.times(num_layers * config.num_heads))
    if config.activation_checkpointing:
        work = work._replace(again=work.again + work.forward)
    return work
