"""The model: a pre-norm Transformer whose attention is chosen by name. Read it from top to bottom.

Axis letters: `B` batch, `L` length in tokens, `D` model width, `H` heads, `K` head width, `M` random features,
`V` vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, linear, normalize, silu
from torch.utils.checkpoint import checkpoint

from protperf.attention import (
    UNPROJECTED,
    attend,
    draw_projection,
    positions_in_documents,
    projection_generator,
)
from protperf.config import ModelConfig
from protperf.vocab import VOCABULARY

INIT_STD = 0.02
ROPE_BASE = 10_000.0
INIT_TEMPERATURE = 1.0
"""|q||k|/sqrt(K) of a new model with `qk_norm`: a weight estimated with 256 features is then off by 17 %, about."""


class QueryKeySums(NamedTuple):
    """How long queries and keys are: sums over tokens, which may be added over batches and ranks.

    Attributes:
        tokens: `()` number of tokens.
        lengths: `(layers, 2, H)` of |q| and |k|.
        squares: `(layers, 2, H)` of |q|^2 and |k|^2.
        vectors: `(layers, 2, H, K)` of q and k.
    """

    tokens: Tensor
    lengths: Tensor
    squares: Tensor
    vectors: Tensor

    def products(self) -> Tensor:
        """Return mean |q| times mean |k| over sqrt(K), `(layers, H)`: about the largest logit there is."""
        means = self.lengths / self.tokens
        return means.prod(1) * self.vectors.shape[-1] ** -0.5

    def pair_squares(self) -> Tensor:
        """Return the mean of |q' + k'|^2 over all pairs, x' = x / K^(1/4), `(layers, H)`.

        The relative variance of a random feature is the exponential of it.
        """
        means = self.vectors / self.tokens
        cross = 2 * (means[:, 0] * means[:, 1]).sum(-1)
        return (self.squares.sum(1) / self.tokens + cross) * self.vectors.shape[-1] ** -0.5


class ProteinModel(nn.Module):
    """Tokens in, hidden states out; `logits` turns hidden states into scores of the next or the masked token.

    Args:
        config: shape and parts.
        causal: whether a token sees only what stands before it; the objective decides that.
    """

    def __init__(self, config: ModelConfig, *, causal: bool) -> None:
        super().__init__()
        self.config = config
        self.causal = causal
        self.embedding = nn.Embedding(len(VOCABULARY), config.model_dim)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, causal=causal) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.model_dim)
        self.register_buffer("redraws", torch.zeros((), dtype=torch.int64))
        self._measured: list[QueryKeySums] | None = None
        self._draw_projections(0)
        self._initialise()

    def forward(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        """Return the hidden states after the final norm, `(B, L, D)`.

        Args:
            tokens: ids, any integer type, `(B, L)`.
            documents: int32 `(B, L)`; tokens with equal numbers (one contiguous run) see each other and positions
                restart in each run; -1 is padding. `None`: one document a row.
        """
        x, rotation = self._enter(tokens, documents)
        for block in self.blocks:
            if self.config.activation_checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, documents, rotation, use_reentrant=False)
            else:
                x = block(x, documents, rotation, self._measured)
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the scores of all tokens, `(..., V)` for `(..., D)`; the head is the embedding's matrix."""
        return linear(hidden, self.embedding.weight)

    @torch.no_grad()
    def query_key_sums(self, tokens: Tensor, documents: Tensor | None = None) -> QueryKeySums:
        """Measure queries and keys as they enter attention in every layer, without dropout.

        A forward pass like any other, since sharded weights are only whole inside one.

        Args:
            tokens: as in `forward`.
            documents: as in `forward`; padding is left out.
        """
        training = self.training
        self.eval()
        measured: list[QueryKeySums] = []
        self._measured = measured
        try:
            with torch.compiler.set_stance("force_eager"):
                self(tokens, documents)
        finally:
            self._measured = None
            self.train(training)
        tokens_seen = measured[0].tokens
        return QueryKeySums(
            tokens_seen, *(torch.cat(parts) for parts in zip(*(m[1:] for m in measured), strict=True))
        )

    @property
    def head_dim(self) -> int:
        """Width K of one head."""
        return self.config.model_dim // self.config.num_heads

    def redraw_projections(self, redraw: int) -> None:
        """Replace every layer's projection by number `redraw` of its series (0 is the first).

        Call it between optimizer steps: never inside a forward pass, never in evaluation.
        """
        if self.redraws.item() != redraw:  # type: ignore[operator]
            self._draw_projections(redraw)

    def load_weights(self, weights: dict[str, Tensor], *, place: str, projections: str = "load") -> None:
        """Load a state dict, all of it.

        Args:
            weights: what `state_dict` gave.
            place: the file's name, for messages.
            projections: `load` takes the stored projections; `draw` keeps this model's own, for weights that were
                trained with another number of features.

        Raises:
            ValueError: a key is missing, unknown or of another shape; the message names it.
        """
        own = self.state_dict()
        if projections == "draw":
            drawn = {name: own[name] for name in own if _is_projection(name)}
            weights = {name: value for name, value in weights.items() if not _is_projection(name)} | drawn
        for name in sorted(own.keys() | weights.keys()):
            if name not in own or name not in weights:
                where = "the model" if name in weights else "the file"
                raise ValueError(f"{place}: {name} is not in {where}; was it saved by another model?")
            if own[name].shape != weights[name].shape:
                remedy = "; projections='draw' draws new ones" if _is_projection(name) else ""
                raise ValueError(
                    f"{place}: {name} is {tuple(weights[name].shape)}, this model has {tuple(own[name].shape)}{remedy}"
                )
        self.load_state_dict(weights)

    def set_pair_squares(self, pair_squares: Tensor) -> None:
        """Tell `oprf` what norms to expect, `(layers, H)`; like a redraw, between optimizer steps."""
        for block, value in zip(self.blocks, pair_squares, strict=True):
            block.attention.pair_square.copy_(value)  # type: ignore[union-attr, operator]

    def _enter(self, tokens: Tensor, documents: Tensor | None) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """Return what enters the first block, `(B, L, D)`, and the rotations of positions."""
        x = self.embedding(tokens.long())
        places = self._positions(tokens, documents)
        if self.config.positions == "absolute":
            x = x + sinusoids(places, self.config.model_dim).to(x.dtype)
        rotation = rotations(places, self.head_dim) if self.config.positions == "rope" else None
        return self.dropout(x), rotation

    def _positions(self, tokens: Tensor, documents: Tensor | None) -> Tensor:
        if documents is None:
            return torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)
        return positions_in_documents(documents)

    def _draw_projections(self, redraw: int) -> None:
        if not _is_projected(self.config.attention):
            return
        for layer, block in enumerate(self.blocks):
            generator = projection_generator(self.config.projection_seed, layer=layer, redraw=redraw)
            drawn = draw_projection(
                self.config.num_features,
                self.head_dim,
                coupling=self.config.projection,
                norms=self.config.projection_norms,
                generator=generator,
            )
            block.attention.projection.copy_(drawn)  # type: ignore[union-attr, operator]
        self.redraws.fill_(redraw)  # type: ignore[operator]

    def _initialise(self) -> None:
        """Draw weights from N(0, 0.02^2); what ends in a residual sum is narrower by sqrt(2 layers)."""
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                narrower = (2 * self.config.num_layers) ** 0.5 if name.endswith("out.weight") else 1.0
                nn.init.normal_(parameter, std=INIT_STD / narrower)


class Block(nn.Module):
    """One layer: attention, then feed-forward, each on normed input and added to the residual."""

    def __init__(self, config: ModelConfig, *, causal: bool) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.model_dim)
        self.attention = SelfAttention(config, causal=causal)
        self.feedforward_norm = nn.LayerNorm(config.model_dim)
        self.feedforward = FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        x: Tensor,
        documents: Tensor | None,
        rotation: tuple[Tensor, Tensor] | None,
        measured: list[QueryKeySums] | None = None,
    ) -> Tensor:
        """Return `(B, L, D)`; a layer that is `measured` adds its sums to that list."""
        x = x + self.dropout(self.attention(self.attention_norm(x), documents, rotation, measured))
        return x + self.dropout(self.feedforward(self.feedforward_norm(x)))


class SelfAttention(nn.Module):
    """Multi-head attention; its random projection is a float32 buffer and stays one."""

    projection: Tensor
    pair_square: Tensor

    def __init__(self, config: ModelConfig, *, causal: bool) -> None:
        super().__init__()
        self.kind = config.attention
        self.causal = causal
        self.num_heads = config.num_heads
        head_dim = config.model_dim // config.num_heads
        self.qkv = nn.Linear(config.model_dim, 3 * config.model_dim, bias=False)
        self.out = nn.Linear(config.model_dim, config.model_dim, bias=False)
        self.log_temperature: nn.Parameter | None = None
        if config.qk_norm:
            self.log_temperature = nn.Parameter(torch.full((config.num_heads,), math.log(INIT_TEMPERATURE)))
        if _is_projected(config.attention):
            shape = (config.num_features, head_dim)
            self.register_buffer("projection", torch.empty(shape, dtype=torch.float32))
        if config.attention == "oprf":
            self.register_buffer("pair_square", torch.zeros(config.num_heads, dtype=torch.float32))

    def forward(
        self,
        x: Tensor,
        documents: Tensor | None,
        rotation: tuple[Tensor, Tensor] | None,
        measured: list[QueryKeySums] | None = None,
    ) -> Tensor:
        """Return `(B, L, D)`."""
        q, k, v = self.queries_keys_values(x, rotation)
        if measured is not None:
            measured.append(sum_queries_keys(q, k, documents))
        out = attend(
            q,
            k,
            v,
            documents,
            kind=self.kind,
            causal=self.causal,
            projection=self._buffers.get("projection"),
            pair_square=self._buffers.get("pair_square"),
        )
        return self.out(out.transpose(1, 2).flatten(2))

    def queries_keys_values(
        self, x: Tensor, rotation: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v, each `(B, H, L, K)`, normalised and turned by position as they enter attention."""
        qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, -1))  # (B, L, 3, H, K)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (B, H, L, K)
        if self.log_temperature is not None:
            q, k = (with_temperature(y, self.log_temperature) for y in (q, k))
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
        return q, k, v

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Move the buffers with the module, but never change their type (`.half()`, `.to(bfloat16)`)."""
        exact = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, buffer in exact.items():
            moved = self._buffers[name]
            if buffer is not None and moved is not None and moved.dtype != torch.float32:
                self._buffers[name] = buffer.to(moved.device)
        return self


class FeedForward(nn.Module):
    """Two matrices and a nonlinearity between them; `swiglu` gates it with a third."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gated = config.feedforward == "swiglu"
        inner = config.feedforward_dim
        self.into = nn.Linear(config.model_dim, 2 * inner if self.gated else inner, bias=False)
        self.out = nn.Linear(inner, config.model_dim, bias=False)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return `(B, L, D)`."""
        x = self.into(x)
        if self.gated:
            x, gate = x.chunk(2, dim=-1)
            return self.out(self.dropout(x * silu(gate)))
        return self.out(self.dropout(gelu(x)))


def sum_queries_keys(q: Tensor, k: Tensor, documents: Tensor | None) -> QueryKeySums:
    """Return the sums of one layer's queries and keys `(B, H, L, K)`, padding left out."""
    real = torch.ones_like(q[:, 0, :, 0], dtype=torch.bool) if documents is None else documents >= 0
    both = torch.stack([y.transpose(1, 2)[real] for y in (q, k)]).float()  # (2, tokens, H, K)
    sums = both.norm(dim=-1).sum(1), both.square().sum((1, -1)), both.sum(1)
    return QueryKeySums(real.sum().clamp_min(1).float(), *(each.unsqueeze(0) for each in sums))


def with_temperature(x: Tensor, log_temperature: Tensor) -> Tensor:
    """Give queries or keys `(B, H, L, K)` the length sqrt(t) K^(1/4), so that q.k / sqrt(K) = t cos(q, k).

    Source: Henry et al. 2020, "Query-key normalization for transformers", arXiv:2010.04245; here with one learned
    temperature a head, whose square root both sides get: |q'| = |k'| = sqrt(t) bounds the variance of random features.

    Args:
        x: queries or keys.
        log_temperature: log t, `(H,)`.
    """
    length = torch.exp(log_temperature.float() / 2)[:, None, None] * x.shape[-1] ** 0.25
    return (normalize(x.float(), dim=-1, eps=1e-6) * length).to(x.dtype)


def rotations(places: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of the rotary angles, float32 `(B, 1, L, K / 2)` each.

    Source: Su et al. 2021, RoFormer, arXiv:2104.09864, Eq. 15; here feature i turns with feature i + K / 2.

    Args:
        places: position of each token in its document, int64 `(B, L)`.
        head_dim: K, even.
    """
    frequencies = ROPE_BASE ** (-torch.arange(0, head_dim, 2, device=places.device) / head_dim)
    angles = places.unsqueeze(-1) * frequencies
    return angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Turn queries or keys `(B, H, L, K)` by their position; norms stay, so feature maps keep their variance."""
    cosine, sine = rotation
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)
    return turned.to(x.dtype)


def sinusoids(places: Tensor, model_dim: int) -> Tensor:
    """Return sinusoidal position embeddings, float32 `(B, L, D)`, for any length.

    Source: Vaswani et al. 2017, section 3.5, arXiv:1706.03762.
    """
    even = torch.arange(0, model_dim, 2, device=places.device)
    angles = places.unsqueeze(-1) * ROPE_BASE ** (-even / model_dim)
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2)[..., :model_dim]


def _is_projected(attention: str) -> bool:
    return attention != "softmax" and attention not in UNPROJECTED


def _is_projection(name: str) -> bool:
    return name.endswith(".projection") or name == "redraws"
