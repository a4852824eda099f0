"""The `model` group: shape and parts of the model."""

from __future__ import annotations

from dataclasses import dataclass

from protperf.config.checks import check_choices, check_range

CHOICES = {
    "attention": (
        "favor",
        "favor_hyperbolic",
        "oprf",
        "relu",
        "relu_unprojected",
        "elu",
        "trig",
        "rfa",
        "softmax",
        "linformer",
        "reformer",
    ),
    "projection": ("iid", "orthogonal", "simplex"),
    "projection_norms": ("chi", "regularised"),
    "positions": ("rope", "absolute", "learned", "none"),
    "rope_frequencies": ("exact", "half"),
    "feedforward": ("gelu", "swiglu"),
    "features": ("drawn", "learned"),
    "norm": ("pre", "post"),
    "head": ("matrix", "dense"),
}
"""Field -> the values that it may have."""

_MOST_LAYERS = 4096
"""A layer of hardly any numbers takes 40 kB of memory too."""
_MOST_ROUNDS = 1024
_LARGEST = 10**12
"""Of a size: beyond all machines, and messages write out products of them."""
_WITHOUT_FEATURES = ("softmax", "relu_unprojected", "elu", "linformer", "reformer")


@dataclass(frozen=True)
class ModelConfig:
    """Shape and parts of the model."""

    attention: str = "relu"
    """favor, favor_hyperbolic, oprf, relu, relu_unprojected, elu, trig, rfa (linear in length), softmax (exact),
    linformer (pooled; bidirectional only) or reformer (hashed into buckets)."""
    num_layers: int = 4
    """Blocks of attention and feed-forward."""
    num_heads: int = 4
    """Heads of each attention."""
    model_dim: int = 128
    """Width D of the hidden states; each head is D / num_heads wide."""
    feedforward_dim: int = 256
    """Width between the two matrices of the feed-forward part."""
    num_features: int = 64
    """Rows M of the random projection (unused by softmax, elu, relu_unprojected, linformer and reformer)."""
    projection: str = "orthogonal"
    """How rows are coupled: orthogonal, iid or simplex."""
    projection_norms: str = "chi"
    """How long rows are: chi (as Gaussian vectors) or regularised (all sqrt(K))."""
    projection_seed: int = 0
    """The projection is a function of (this seed, layer, redraw) alone."""
    features: str = "drawn"
    """drawn (by chance, the same for all heads) or learned (of each head, from that draw on, with a factor of its logits)."""
    rfa_gate: bool = True
    """Whether a causal rfa forgets by a learned gate of each head; a bidirectional one never does."""
    linformer_rank: int = 256
    """Pooled keys and values of linformer, whatever the length."""
    linformer_length: int = 1024
    """Most tokens of a document of linformer, `<bos>` and `<eos>` included: a layer has 2 * rank * length weights for it."""
    lsh_rounds: int = 4
    """Rounds of hashing of reformer."""
    lsh_buckets: int = 16
    """Buckets of a round of reformer: even, or 1 for none."""
    lsh_window: int = 64
    """Tokens of its bucket that a token of reformer sees, to each side that it may see."""
    softmax_layers: tuple[int, ...] = ()
    """Layers, from 0, that keep exact attention beside others that do not."""
    qk_norm: bool = False
    """Normalise queries and keys, with a learned temperature a head: bounds the variance of random features."""
    positions: str = "rope"
    """rope (relative, by rotation), absolute (sinusoids), learned (a table) or none."""
    rope_frequencies: str = "exact"
    """Of rope: exact, or half (rounded to float16, as in the weights of ESM-2: far tokens stand elsewhere)."""
    max_positions: int = 0
    """Rows of the table of learned positions: no protein may be longer, `<bos>` and `<eos>` included; 0 otherwise."""
    token_dropout: bool = False
    """Masked tokens enter as zeros and the others scaled by what ESM-2's training masked (12 %) against what is."""
    embedding_norm: bool = False
    """Norm what enters the first block."""
    norm: str = "pre"
    """Norm what enters a part of a block (pre) or what leaves it with the residual (post, BERT's)."""
    norm_eps: float = 1e-5
    """Added to the variance in each norm."""
    biases: bool = False
    """Whether attention and feed-forward add a bias after each matrix."""
    head: str = "matrix"
    """matrix (alone) or dense (before it another matrix, GELU and a norm, after it a bias: BERT's)."""
    tied_head: bool = True
    """Whether the head's matrix is the embedding's."""
    feedforward: str = "gelu"
    """gelu or swiglu."""
    dropout: float = 0.0
    """Share of values zeroed in training: embeddings, feed-forward, and what each part adds to the residual."""
    activation_checkpointing: bool = False
    """Recompute each block in the backward pass: memory of one block instead of all."""

    def __post_init__(self) -> None:
        """Check values."""
        if self.projection == "regularised":
            raise ValueError(
                "ModelConfig.projection is 'regularised'; that is projection_norms=regularised now"
            )
        check_choices(self, CHOICES)
        check_range(self, "num_layers", 1, _MOST_LAYERS)
        for field in ("num_heads", "model_dim", "feedforward_dim", "num_features"):
            check_range(self, field, 1, _LARGEST)
        for field in ("linformer_rank", "linformer_length", "lsh_buckets", "lsh_window"):
            check_range(self, field, 1, _LARGEST)
        check_range(self, "lsh_rounds", 1, _MOST_ROUNDS)
        check_range(self, "dropout", 0.0, 0.99)
        check_range(self, "norm_eps", 0.0, 1.0)
        if self.model_dim % self.num_heads:
            raise ValueError(
                f"ModelConfig.model_dim is {self.model_dim}, not a multiple of num_heads {self.num_heads}"
            )
        self._check_positions()
        self._check_layers()
        self._check_domain()

    def attention_of(self, layer: int) -> str:
        """Return the kind of attention of a layer, from 0."""
        return "softmax" if layer in self.softmax_layers else self.attention

    @property
    def max_length(self) -> int | None:
        """Most tokens of a document, `<bos>` and `<eos>` included; `None`: any number."""
        limits = [self.max_positions] if self.positions == "learned" else []
        if any(self.attention_of(layer) == "linformer" for layer in range(self.num_layers)):
            limits.append(self.linformer_length)
        return min(limits, default=None)

    @property
    def is_exact_somewhere(self) -> bool:
        """Whether a layer has exact attention: time and memory are quadratic in the length of a row."""
        return any(self.attention_of(layer) == "softmax" for layer in range(self.num_layers))

    def _check_positions(self) -> None:
        """Refuse what positions of another kind would ignore."""
        check_range(self, "max_positions", 1 if self.positions == "learned" else 0, _LARGEST)
        if self.max_positions and self.positions != "learned":
            raise ValueError(
                f"ModelConfig.max_positions is {self.max_positions}, but positions {self.positions!r} have no table; "
                "set it to 0, or positions to learned"
            )
        if self.rope_frequencies == "half" and self.positions != "rope":
            raise ValueError(
                f"ModelConfig.rope_frequencies is 'half', but positions {self.positions!r} rotate nothing; "
                "set it to exact, or positions to rope"
            )
        if self.positions == "rope" and self.model_dim // self.num_heads % 2:
            raise ValueError(
                f"ModelConfig.model_dim is {self.model_dim}: heads are {self.model_dim // self.num_heads} wide, "
                "positions=rope needs an even width"
            )

    def _check_layers(self) -> None:
        """Refuse layers that are not there; keep them sorted."""
        object.__setattr__(self, "softmax_layers", tuple(sorted(set(self.softmax_layers))))
        for layer in self.softmax_layers:
            if not 0 <= layer < self.num_layers:
                raise ValueError(
                    f"ModelConfig.softmax_layers names layer {layer}; allowed: 0 to {self.num_layers - 1}"
                )

    def _check_domain(self) -> None:
        """Refuse attentions outside of what they are good for."""
        if self.lsh_buckets % 2 and self.lsh_buckets != 1:
            raise ValueError(
                f"ModelConfig.lsh_buckets is {self.lsh_buckets}; allowed: even numbers, or 1 for no hashing"
            )
        if self.attention in _WITHOUT_FEATURES and self.features == "learned":
            raise ValueError(
                f"ModelConfig.features is 'learned', but attention {self.attention!r} has none that could learn; set it to drawn"
            )
        if self.attention == "trig" and not self.qk_norm:
            raise ValueError(
                "ModelConfig.attention is 'trig', whose rows may sum to zero unless norms are small; "
                "set qk_norm to true or choose favor"
            )
        if self.attention == "rfa" and self.num_features < 128:
            raise ValueError(
                f"ModelConfig.num_features is {self.num_features}; allowed with attention 'rfa': at least 128, "
                "with fewer its rows may sum to zero"
            )
        if self.attention == "rfa" and self.qk_norm:
            raise ValueError(
                "ModelConfig.qk_norm is true, but attention 'rfa' divides queries and keys by their norms itself; "
                "set qk_norm to false"
            )
        if self.attention == "oprf" and self.projection_norms == "regularised":
            raise ValueError(
                "ModelConfig.projection_norms is 'regularised', which makes attention 'oprf' estimate something "
                "other than softmax; allowed: chi"
            )
