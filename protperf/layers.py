"""The layers of the model: attention and feed-forward, each with a norm and a residual around it.

Axis letters: `B` batch, `L` length in tokens, `D` model width, `H` heads, `K` head width, `M` random features,
`V` vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, linear, silu

from protperf.attention import BIDIRECTIONAL, PROJECTED, Hashing, State, attend, attend_onward
from protperf.attention.norms import with_temperature
from protperf.config import ModelConfig
from protperf.positions import rotate
from protperf.vocab import VOCABULARY

INIT_TEMPERATURE = 1.0
"""|q||k|/sqrt(K) of a new model with `qk_norm`: a weight estimated with 256 features is then off by 17 %, about."""

INIT_GATE = 6.0
"""Logit of a new gate: 1 - sigmoid(6) = 1/404, so that a token remembers about a protein's length; a gate that starts in
the middle forgets all but the last few, and no gradient would tell it of the rest."""

Look = Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor | None], None]
"""What `ProteinModel.watch` calls in each layer: with q, k and v `(B, H, L, K)` as they enter attention, documents, and the
logits of gates `(B, H, L)` where there are any."""


class Block(nn.Module):
    """One layer: attention, then feed-forward, each added to the residual.

    `norm: pre` norms what enters a part, `post` what leaves it together with the residual (BERT's order).
    """

    def __init__(self, config: ModelConfig, *, causal: bool, layer: int) -> None:
        super().__init__()
        self.post = config.norm == "post"
        self.attention_norm = nn.LayerNorm(config.model_dim, config.norm_eps)
        self.attention = SelfAttention(config, causal=causal, layer=layer)
        self.feedforward_norm = nn.LayerNorm(config.model_dim, config.norm_eps)
        self.feedforward = FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        x: Tensor,
        documents: Tensor | None,
        rotation: tuple[Tensor, Tensor] | None,
        look: Look | None = None,
    ) -> Tensor:
        """Return `(B, L, D)`; `look`, if there is one, is shown queries, keys and values."""
        gathered = self.attention(x if self.post else self.attention_norm(x), documents, rotation, look)
        return self._add(x, gathered)

    def onward(
        self, x: Tensor, rotation: tuple[Tensor, Tensor] | None, state: State | None
    ) -> tuple[Tensor, State]:
        """Return `(B, L, D)` for the next tokens, and the state after them."""
        gathered, state = self.attention.onward(x if self.post else self.attention_norm(x), rotation, state)
        return self._add(x, gathered), state

    def _add(self, x: Tensor, gathered: Tensor) -> Tensor:
        """Add to the residual what attention gathered, then what feed-forward makes of the sum."""
        x = x + self.dropout(gathered)
        if self.post:
            x = self.attention_norm(x)
            return self.feedforward_norm(x + self.dropout(self.feedforward(x)))
        return x + self.dropout(self.feedforward(self.feedforward_norm(x)))


class SelfAttention(nn.Module):
    """Multi-head attention.

    Its random projection is a float32 buffer `(M, K)` and stays one; with `features: learned` it is a parameter
    `(H, M, K)` of its own for each head, beside a learned factor of each head's logits. Queries of `reformer` are its keys.
    """

    projection: Tensor | None
    pair_square: Tensor | None
    pooling: nn.Parameter | None

    def __init__(self, config: ModelConfig, *, causal: bool, layer: int) -> None:
        super().__init__()
        self.kind = config.attention_of(layer)
        if causal and self.kind in BIDIRECTIONAL:
            raise ValueError(
                f"model.attention is {self.kind!r}, which has no causal form; allowed: another attention, or objective=masked"
            )
        self.causal = causal
        self.num_heads = config.num_heads
        head_dim = config.model_dim // config.num_heads
        self.parts = 2 if self.kind == "reformer" else 3
        self.qkv = nn.Linear(config.model_dim, self.parts * config.model_dim, bias=config.biases)
        self.out = nn.Linear(config.model_dim, config.model_dim, bias=config.biases)
        self.log_temperature: nn.Parameter | None = None
        self.log_factor: nn.Parameter | None = None
        if config.qk_norm:
            self.log_temperature = nn.Parameter(torch.full((config.num_heads,), math.log(INIT_TEMPERATURE)))
        self.gate = None
        if self.kind == "rfa" and causal and config.rfa_gate:
            self.gate = nn.Linear(config.model_dim, config.num_heads)
        self.hashing = Hashing(config.lsh_rounds, config.lsh_buckets, config.lsh_window)
        pooled = (2, config.linformer_rank, config.linformer_length) if self.kind == "linformer" else None
        self.register_parameter("pooling", None if pooled is None else nn.Parameter(torch.empty(pooled)))
        drawn, rows = None, self.hashing.num_rows if self.kind == "reformer" else config.num_features
        if self.kind in PROJECTED and rows:
            drawn = torch.empty(rows, head_dim, dtype=torch.float32)
        if drawn is not None and config.features == "learned":
            self.log_factor = nn.Parameter(torch.zeros(config.num_heads))
            self.register_parameter("projection", nn.Parameter(drawn.repeat(config.num_heads, 1, 1)))
        else:
            self.register_buffer("projection", drawn)
        pair_square = torch.zeros(config.num_heads, dtype=torch.float32) if self.kind == "oprf" else None
        self.register_buffer("pair_square", pair_square)

    def forward(
        self,
        x: Tensor,
        documents: Tensor | None,
        rotation: tuple[Tensor, Tensor] | None,
        look: Look | None = None,
    ) -> Tensor:
        """Return `(B, L, D)`."""
        q, k, v = self.queries_keys_values(x, rotation)
        gate = self._gate_logits(x)
        if look is not None:
            look(q, k, v, documents, gate)
        return self.out(self.gather(q, k, v, documents, gate).transpose(1, 2).flatten(2))

    def gather(
        self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, gate: Tensor | None = None
    ) -> Tensor:
        """Let every token gather values, `(B, H, L, K)`, from q, k, v and gates as they enter attention."""
        return attend(
            q,
            k,
            v,
            documents,
            causal=self.causal,
            gate=gate,
            **self.choices(),
        )

    def onward(
        self, x: Tensor, rotation: tuple[Tensor, Tensor] | None, state: State | None
    ) -> tuple[Tensor, State]:
        """Return `(B, L, D)` for the next tokens, and the state after them."""
        q, k, v = self.queries_keys_values(x, rotation)
        out, state = attend_onward(
            q,
            k,
            v,
            gate=self._gate_logits(x),
            state=state,
            **self.choices(),
        )
        return self.out(out.transpose(1, 2).flatten(2)), state

    def choices(self) -> dict[str, Any]:
        """Return what `attend` and its relatives must know of this layer, but for the direction and the gate."""
        return {
            "kind": self.kind,
            "projection": self.projection,
            "pair_square": self.pair_square,
            "pooling": self.pooling,
            "hashing": self.hashing,
        }

    def _gate_logits(self, x: Tensor) -> Tensor | None:
        """Return the logits of gates, `(B, H, L)`, if there are any."""
        return None if self.gate is None else self.gate(x).transpose(1, 2)

    def queries_keys_values(
        self, x: Tensor, rotation: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v, each `(B, H, L, K)`, normalised and turned by position as they enter attention."""
        qkv = self.qkv(x).unflatten(-1, (self.parts, self.num_heads, -1))  # (B, L, 3 or 2, H, K)
        q, *_, v = parts = qkv.permute(2, 0, 3, 1, 4).unbind()  # each (B, H, L, K)
        k = parts[-2]
        if self.log_temperature is not None:
            q, k = (with_temperature(y, self.log_temperature) for y in (q, k))
        q, k = self.with_factor(q, k)
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
        return q, k, v

    def with_factor(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Return q and k `(B, H, L, K)` with the learned factor of each head's logits, if there is one."""
        if self.log_factor is None:
            return q, k
        factor = torch.exp(self.log_factor / 2)[:, None, None].to(q.dtype)
        return q * factor, k * factor

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
        self.into = nn.Linear(config.model_dim, 2 * inner if self.gated else inner, bias=config.biases)
        self.out = nn.Linear(inner, config.model_dim, bias=config.biases)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return `(B, L, D)`."""
        x = self.into(x)
        if self.gated:
            x, gate = x.chunk(2, dim=-1)
            return self.out(self.dropout(x * silu(gate)))
        return self.out(self.dropout(gelu(x)))


class Head(nn.Module):
    """The head of BERT: a matrix, GELU and a norm, then the scores of all tokens, with a bias each.

    Source: Devlin et al. 2019, arXiv:1810.04805, and the code released with it.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.model_dim, config.model_dim)
        self.norm = nn.LayerNorm(config.model_dim, config.norm_eps)
        self.bias = nn.Parameter(torch.zeros(len(VOCABULARY)))

    def forward(self, hidden: Tensor, matrix: Tensor) -> Tensor:
        """Return scores `(..., V)` for hidden states `(..., D)`; `matrix` is `(V, D)`."""
        return linear(self.norm(gelu(self.dense(hidden))), matrix, self.bias)
