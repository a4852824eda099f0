"""How many weights a model has, from its configuration alone: asked before a file's claims become memory.

Axis letters: `D` model width, `F` feed-forward width, `H` heads, `K` head width, `V` vocabulary.
"""

from __future__ import annotations

from protperf.attention import PROJECTED, Hashing
from protperf.config import ModelConfig
from protperf.vocab import VOCABULARY


def num_weights(config: ModelConfig, *, causal: bool) -> int:
    """Return how many numbers the state dict of a `ProteinModel` holds: its parameters, drawn projections, the count of redraws."""
    dim, vocabulary = config.model_dim, len(VOCABULARY)
    found = vocabulary * dim + 1  # the embedding, and the number of the redraw
    found += config.max_positions * dim if config.positions == "learned" else 0
    found += 2 * dim * (config.embedding_norm + (config.norm == "pre"))
    found += dim * dim + 3 * dim + vocabulary if config.head == "dense" else 0
    found += 0 if config.tied_head else vocabulary * dim
    num_exact = len(config.softmax_layers)
    blocks = (config.num_layers - num_exact) * _of_attention(config, config.attention, causal=causal)
    blocks += num_exact * _of_attention(config, "softmax", causal=causal)
    return found + blocks + config.num_layers * _beside_attention(config)


def _of_attention(config: ModelConfig, kind: str, *, causal: bool) -> int:
    """Return the numbers of one layer's attention."""
    dim, heads = config.model_dim, config.num_heads
    parts = 2 if kind == "reformer" else 3
    found = (parts + 1) * (dim * dim + dim * config.biases) + heads * config.qk_norm
    if kind == "rfa" and causal and config.rfa_gate:
        found += dim * heads + heads
    if kind == "linformer":
        found += 2 * config.linformer_rank * config.linformer_length
    if kind == "oprf":
        found += heads
    rows = config.num_features
    if kind == "reformer":
        rows = Hashing(config.lsh_rounds, config.lsh_buckets, config.lsh_window).num_rows
    if kind in PROJECTED and rows:
        projection = rows * (dim // heads)
        found += heads * (projection + 1) if config.features == "learned" else projection
    return found


def _beside_attention(config: ModelConfig) -> int:
    """Return the numbers of one layer's norms and feed-forward part."""
    dim, inner = config.model_dim, config.feedforward_dim
    into = 2 * inner if config.feedforward == "swiglu" else inner
    return 4 * dim + into * dim + inner * dim + (into + dim) * config.biases
