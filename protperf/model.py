"""The model: a pre-norm Transformer whose attention is chosen by name. Read it from top to bottom.

Axis letters: `B` batch, `L` length in tokens, `D` model width, `H` heads, `K` head width, `M` random features,
`V` vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, linear, silu
from torch.utils.checkpoint import checkpoint

from protperf.attention import (
    UNPROJECTED,
    State,
    attend,
    attend_onward,
    draw_projection,
    positions_in_documents,
    projection_generator,
)
from protperf.attention.norms import QueryKeySums, sum_queries_keys, with_temperature
from protperf.config import ModelConfig
from protperf.positions import rotate, rotations, sinusoids
from protperf.vocab import VOCABULARY

INIT_STD = 0.02
INIT_TEMPERATURE = 1.0
"""|q||k|/sqrt(K) of a new model with `qk_norm`: a weight estimated with 256 features is then off by 17 %, about."""

Look = Callable[[Tensor, Tensor, Tensor | None], None]
"""What `ProteinModel.watch` calls in each layer: with q and k `(B, H, L, K)` as they enter attention, and documents."""


class ModelState(NamedTuple):
    """What a causal model keeps of the tokens it has read, row by row.

    Attributes:
        layers: the state of each layer's attention.
        position: int64 `(B,)` number of tokens read.
    """

    layers: tuple[State, ...]
    position: Tensor

    def of_rows(self, rows: Tensor) -> ModelState:
        """Return the state of some rows of the batch, int64 `(rows,)`; the others are let go."""
        return ModelState(tuple(layer.of_rows(rows) for layer in self.layers), self.position[rows])

    @staticmethod
    def join(states: Sequence[ModelState]) -> ModelState:
        """Put the rows of several states into one batch; they need not have read equally much."""
        by_layer = zip(*(state.layers for state in states), strict=True)
        layers = tuple(type(layer[0]).join(layer) for layer in by_layer)
        return ModelState(layers, torch.cat([state.position for state in states]))


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
        self._look: Look | None = None
        self._draw_projections(0)
        self._initialise()

    def forward(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        """Return the hidden states after the final norm, `(B, L, D)`.

        Args:
            tokens: ids, any integer type, `(B, L)`.
            documents: int32 `(B, L)`; tokens with equal numbers (one contiguous run) see each other and positions
                restart in each run; -1 is padding. `None`: one document a row.
        """
        return self.states(tokens, documents, layers=(self.config.num_layers,))[0]

    def states(
        self, tokens: Tensor, documents: Tensor | None = None, *, layers: Sequence[int]
    ) -> list[Tensor]:
        """Return the hidden states of chosen layers, `(B, L, D)` each.

        Args:
            tokens: as in `forward`.
            documents: as in `forward`.
            layers: 0 is what enters the first block, i what leaves block i, and the last (`num_layers`) that after the
                final norm.
        """
        x, rotation = self._enter(tokens, self._positions(tokens, documents))
        kept = {0: x} if 0 in layers else {}
        for layer, block in enumerate(self.blocks, start=1):
            if self.config.activation_checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, documents, rotation, use_reentrant=False)
            else:
                x = block(x, documents, rotation, self._look)
            if layer in layers:
                kept[layer] = self.norm(x) if layer == len(self.blocks) else x
        return [kept[layer] for layer in layers]

    def onward(self, tokens: Tensor, state: ModelState | None = None) -> tuple[Tensor, ModelState]:
        """Read the next tokens of proteins, one or many at a time: the hidden states equal those of one pass over all.

        For causal models. With linear attention neither the state nor the time per token grows; exact attention keeps
        keys and values of all tokens.

        Args:
            tokens: ids, any integer type, `(B, L)`, without padding; each row goes on with its own protein.
            state: what the call for the tokens before returned; `None` at the start.

        Returns:
            hidden states after the final norm, `(B, L, D)`, and the state after these tokens.
        """
        assert self.causal, "a masked model has no order to go on in"
        position = tokens.new_zeros(len(tokens), dtype=torch.int64) if state is None else state.position
        places = position.unsqueeze(1) + torch.arange(tokens.shape[1], device=tokens.device)
        x, rotation = self._enter(tokens, places)
        layers: list[State] = []
        for block, before in zip(
            self.blocks, state.layers if state else [None] * len(self.blocks), strict=True
        ):
            x, after = block.onward(x, rotation, before)  # type: ignore[operator]
            layers.append(after)
        return self.norm(x), ModelState(tuple(layers), position + tokens.shape[1])

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the scores of all tokens, `(..., V)` for `(..., D)`; the head is the embedding's matrix."""
        return linear(hidden, self.embedding.weight)

    def query_key_sums(self, tokens: Tensor, documents: Tensor | None = None) -> QueryKeySums:
        """Measure queries and keys as they enter attention in every layer, without dropout.

        Args:
            tokens: as in `forward`.
            documents: as in `forward`; padding is left out.
        """
        sums: list[QueryKeySums] = []
        self.watch(tokens, documents, lambda q, k, seen: sums.append(sum_queries_keys(q, k, seen)))
        by_layer = zip(*(layer[1:] for layer in sums), strict=True)
        return QueryKeySums(sums[0].tokens, *(torch.cat(parts) for parts in by_layer))

    @torch.no_grad()
    def watch(self, tokens: Tensor, documents: Tensor | None, look: Look) -> None:
        """Show `look` the queries and keys of every layer in turn, without dropout or gradients.

        A forward pass like any other, since sharded weights are only whole inside one. An error in `look` ends it.

        Args:
            tokens: as in `forward`.
            documents: as in `forward`.
            look: called once a layer, from first to last.
        """
        training = self.training
        self.eval()
        self._look = look
        try:
            with torch.compiler.set_stance("force_eager"):
                self(tokens, documents)
        finally:
            self._look = None
            self.train(training)

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

    def _enter(self, tokens: Tensor, places: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """Return what enters the first block, `(B, L, D)`, and the rotations of the tokens' places in their proteins."""
        x = self.embedding(tokens.long())
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
        look: Look | None = None,
    ) -> Tensor:
        """Return `(B, L, D)`; `look`, if there is one, is shown queries and keys."""
        x = x + self.dropout(self.attention(self.attention_norm(x), documents, rotation, look))
        return x + self.dropout(self.feedforward(self.feedforward_norm(x)))

    def onward(
        self, x: Tensor, rotation: tuple[Tensor, Tensor] | None, state: State | None
    ) -> tuple[Tensor, State]:
        """Return `(B, L, D)` for the next tokens, and the state after them."""
        gathered, state = self.attention.onward(self.attention_norm(x), rotation, state)
        x = x + self.dropout(gathered)
        return x + self.dropout(self.feedforward(self.feedforward_norm(x))), state


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
        look: Look | None = None,
    ) -> Tensor:
        """Return `(B, L, D)`."""
        q, k, v = self.queries_keys_values(x, rotation)
        if look is not None:
            look(q, k, documents)
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

    def onward(
        self, x: Tensor, rotation: tuple[Tensor, Tensor] | None, state: State | None
    ) -> tuple[Tensor, State]:
        """Return `(B, L, D)` for the next tokens, and the state after them."""
        q, k, v = self.queries_keys_values(x, rotation)
        out, state = attend_onward(
            q,
            k,
            v,
            kind=self.kind,
            projection=self._buffers.get("projection"),
            pair_square=self._buffers.get("pair_square"),
            state=state,
        )
        return self.out(out.transpose(1, 2).flatten(2)), state

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


def _is_projected(attention: str) -> bool:
    return attention != "softmax" and attention not in UNPROJECTED


def _is_projection(name: str) -> bool:
    return name.endswith(".projection") or name == "redraws"
