"""The model: a Transformer whose attention is chosen by name. Read it from top to bottom, then `layers`.

Axis letters: `B` batch, `L` length in tokens, `D` model width, `H` heads, `K` head width, `M` random features,
`V` vocabulary, `P` learned positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from protperf.attention import (
    State,
    draw_projection,
    positions_in_documents,
    projection_generator,
    share_in_documents,
)
from protperf.attention.norms import QueryKeySums, sum_queries_keys
from protperf.config import ModelConfig
from protperf.formats import FormatError
from protperf.layers import INIT_GATE, Block, Head, Look
from protperf.positions import rotations, sinusoids
from protperf.vocab import PADDING_DOCUMENT, VOCABULARY

INIT_STD = 0.02
EXPECTED_MASKED = 0.15 * 0.8
"""The share of tokens that stood as `<mask>` where ESM-2 was trained: what `token_dropout` reckons with."""


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
        self.position_embedding: nn.Embedding | None = None
        if config.positions == "learned":
            self.position_embedding = nn.Embedding(config.max_positions, config.model_dim)
        self.embedding_norm = _norm(config) if config.embedding_norm else nn.Identity()
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(
            Block(config, causal=causal, layer=layer) for layer in range(config.num_layers)
        )
        self.norm = _norm(config) if config.norm == "pre" else nn.Identity()
        self.head = Head(config) if config.head == "dense" else None
        self.head_matrix: nn.Parameter | None = None
        if not config.tied_head:
            self.head_matrix = nn.Parameter(torch.empty(len(VOCABULARY), config.model_dim))
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
        x, rotation = self._enter(tokens, self._positions(tokens, documents), documents)
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
        """Return the scores of all tokens, `(..., V)` for `(..., D)`; the matrix is the embedding's unless untied."""
        matrix = self.embedding.weight if self.head_matrix is None else self.head_matrix
        return linear(hidden, matrix) if self.head is None else self.head(hidden, matrix)

    def query_key_sums(self, tokens: Tensor, documents: Tensor | None = None) -> QueryKeySums:
        """Measure queries and keys as they enter attention in every layer, without dropout.

        Args:
            tokens: as in `forward`.
            documents: as in `forward`; padding is left out.
        """
        sums: list[QueryKeySums] = []
        self.watch(tokens, documents, lambda q, k, _, seen, __: sums.append(sum_queries_keys(q, k, seen)))
        by_layer = zip(*(layer[1:] for layer in sums), strict=True)
        return QueryKeySums(sums[0].tokens, *(torch.cat(parts) for parts in by_layer))

    @torch.no_grad()
    def watch(self, tokens: Tensor, documents: Tensor | None, look: Look) -> None:
        """Show `look` the queries, keys and values of every layer in turn, without dropout or gradients.

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
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.embedding.weight.device

    @property
    def max_length(self) -> int | None:
        """Most tokens of a document, `<bos>` and `<eos>` included; `None`: any number."""
        return self.config.max_length

    @property
    def max_residues(self) -> int | None:
        """Most residues of a protein between `<bos>` and `<eos>`; `None`: any number."""
        return None if self.max_length is None else self.max_length - 2

    @property
    def head_dim(self) -> int:
        """Width K of one head."""
        return self.config.model_dim // self.config.num_heads

    def redraw_projections(self, redraw: int) -> None:
        """Replace every layer's projection by number `redraw` of its series (0 is the first).

        Call it between optimizer steps: never inside a forward pass, never in evaluation. Learned features stay.
        """
        if self.config.features == "drawn" and self.redraws.item() != redraw:  # type: ignore[operator]
            self._draw_projections(redraw)

    def load_weights(self, weights: dict[str, Tensor], *, place: str, projections: str = "load") -> None:
        """Load a state dict, all of it.

        Args:
            weights: what `state_dict` gave.
            place: the file's name, for messages.
            projections: `load` takes the stored projections; `draw` keeps this model's own and what else belongs to
                its features, for weights that were trained with other features or with exact attention.

        Raises:
            FormatError: a key is missing, unknown or of another shape; the message names it.
        """
        own = self.state_dict()
        if projections == "draw":
            drawn = {name: own[name] for name in own if _is_projection(name)}
            weights = {name: value for name, value in weights.items() if not _is_projection(name)} | drawn
        for name in sorted(own.keys() | weights.keys()):
            if name not in own or name not in weights:
                where = "the model" if name in weights else "the file"
                raise FormatError(f"{place}: {name} is not in {where}; was it saved by another model?")
            if own[name].shape != weights[name].shape:
                remedy = "; projections='draw' draws new ones" if _is_projection(name) else ""
                raise FormatError(
                    f"{place}: {name} is {tuple(weights[name].shape)}, this model has {tuple(own[name].shape)}{remedy}"
                )
        self.load_state_dict(weights)

    def set_pair_squares(self, pair_squares: Tensor) -> None:
        """Tell the layers of `oprf` what norms to expect, `(layers, H)`; like a redraw, between optimizer steps."""
        for block, value in zip(self.blocks, pair_squares, strict=True):
            own: Tensor | None = block.attention.pair_square  # type: ignore[union-attr, assignment]
            if own is not None:  # a layer may keep exact attention
                own.copy_(value)

    def _enter(
        self, tokens: Tensor, places: Tensor, documents: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """Return what enters the first block, `(B, L, D)`, and the rotations of the tokens' places in their proteins."""
        x = self.embedding(tokens.long())
        if self.config.token_dropout:
            masked = tokens == VOCABULARY.mask
            share = share_in_documents(masked, documents)
            # a rest of a protein may be all masked
            scale = torch.where(share < 1, (1 - EXPECTED_MASKED) / (1 - share), 0.0)
            x = x.masked_fill(masked.unsqueeze(-1), 0.0) * scale.to(x.dtype).unsqueeze(-1)
        if self.position_embedding is not None:
            self._check_places(places)
            x = x + self.position_embedding(places)
        if self.config.positions == "absolute":
            x = x + sinusoids(places, self.config.model_dim).to(x.dtype)
        rotation = None
        if self.config.positions == "rope":
            rotation = rotations(places, self.head_dim, self.config.rope_frequencies)
        return self.dropout(self.embedding_norm(x)), rotation

    def _check_places(self, places: Tensor) -> None:
        """Refuse a protein that is longer than the table of learned positions."""
        most = self.config.max_positions
        if places.shape[1] > most and int(places.max()) >= most:
            raise ValueError(
                f"a protein of {int(places.max()) + 1:,} tokens; this model has learned {most:,} positions: "
                f"at most {most - 2:,} residues"
            )

    def _positions(self, tokens: Tensor, documents: Tensor | None) -> Tensor:
        if documents is None:
            return torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)
        # padding has no place: more of it than there are learned positions is no protein that is too long
        return positions_in_documents(documents).masked_fill(documents.eq(PADDING_DOCUMENT), 0)

    def _draw_projections(self, redraw: int) -> None:
        for layer, block in enumerate(self.blocks):
            projection: Tensor | None = block.attention.projection  # type: ignore[union-attr, assignment]
            if projection is None:
                continue
            generator = projection_generator(self.config.projection_seed, layer=layer, redraw=redraw)
            drawn = draw_projection(
                projection.shape[-2],
                self.head_dim,
                coupling=self.config.projection,
                norms=self.config.projection_norms,
                generator=generator,
            )
            projection.data.copy_(drawn)
        self.redraws.fill_(redraw)  # type: ignore[operator]

    def _initialise(self) -> None:
        """Draw weights from N(0, 0.02^2), biases zero; what ends in a residual sum is narrower by sqrt(2 layers).

        Pooling is drawn from N(0, 1 / P), so that a mixture of P tokens is as long as one of them.
        """
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.constant_(parameter, INIT_GATE if name.endswith("gate.bias") else 0.0)
            if name.endswith("pooling"):
                nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
            if parameter.dim() == 2:
                narrower = (2 * self.config.num_layers) ** 0.5 if name.endswith("out.weight") else 1.0
                nn.init.normal_(parameter, std=INIT_STD / narrower)


def _norm(config: ModelConfig) -> nn.LayerNorm:
    return nn.LayerNorm(config.model_dim, config.norm_eps)


def _is_projection(name: str) -> bool:
    """Return whether a weight belongs to a kind of attention, so that another kind does not have it."""
    own = (".projection", ".pair_square", ".log_factor", ".pooling", ".gate.weight", ".gate.bias")
    return name.endswith(own) or name == "redraws"
