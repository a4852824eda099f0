"""The configuration of training: one flat frozen dataclass a Hydra group, checked where it is built.

A key's way: `conf/GROUP/NAME.yaml` -> Hydra -> `from_section` -> a field here -> the line that uses it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

ConfigT = TypeVar("ConfigT")


def from_section(config_class: type[ConfigT], section: DictConfig | dict[str, Any]) -> ConfigT:
    """Turn one section of a configuration into its dataclass, with types and values checked.

    Raises:
        ValueError: a key that the class does not have, or a value that it does not allow.
    """
    try:
        merged = OmegaConf.merge(OmegaConf.structured(config_class), section)
        return cast(ConfigT, OmegaConf.to_object(merged))
    except OmegaConfBaseException as error:
        names = ", ".join(field.name for field in fields(config_class))  # type: ignore[arg-type]
        reason = str(error).splitlines()[0]
        raise ValueError(f"{config_class.__name__}: {reason}; allowed keys: {names}") from error


def to_dict(config: Any) -> dict[str, Any]:
    """Return a configuration dataclass as a plain dict, as checkpoints hold it."""
    return asdict(config)


def _check_choice(config: Any, field: str, allowed: tuple[str, ...]) -> None:
    value = getattr(config, field)
    if value not in allowed:
        raise ValueError(f"{type(config).__name__}.{field} is {value!r}; allowed: {', '.join(allowed)}")


def _check_range(config: Any, field: str, low: float, high: float = float("inf")) -> None:
    value = getattr(config, field)
    if not low <= value <= high:
        limits = f"at least {low}" if high == float("inf") else f"{low} to {high}"
        raise ValueError(f"{type(config).__name__}.{field} is {value}; allowed: {limits}")


_ATTENTIONS = (
    "favor",
    "favor_hyperbolic",
    "oprf",
    "relu",
    "relu_unprojected",
    "elu",
    "trig",
    "rfa",
    "softmax",
)


@dataclass(frozen=True)
class ModelConfig:
    """Shape and parts of the model."""

    attention: str = "relu"
    """favor, favor_hyperbolic, oprf, relu, relu_unprojected, elu, trig, rfa (linear in length) or softmax (exact)."""
    num_layers: int = 4
    """Blocks of attention and feed-forward."""
    num_heads: int = 4
    """Heads of each attention."""
    model_dim: int = 128
    """Width D of the hidden states; each head is D / num_heads wide."""
    feedforward_dim: int = 256
    """Width between the two matrices of the feed-forward part."""
    num_features: int = 64
    """Rows M of the random projection (unused by softmax, elu and relu_unprojected)."""
    projection: str = "orthogonal"
    """How rows are coupled: orthogonal, iid or simplex."""
    projection_norms: str = "chi"
    """How long rows are: chi (as Gaussian vectors) or regularised (all sqrt(K))."""
    projection_seed: int = 0
    """The projection is a function of (this seed, layer, redraw) alone."""
    qk_norm: bool = False
    """Normalise queries and keys, with a learned temperature a head: bounds the variance of random features."""
    positions: str = "rope"
    """rope (relative, by rotation), absolute (sinusoids) or none."""
    feedforward: str = "gelu"
    """gelu or swiglu."""
    dropout: float = 0.0
    """Share of values zeroed in training: embeddings, feed-forward, and what each part adds to the residual."""
    activation_checkpointing: bool = False
    """Recompute each block in the backward pass: memory of one block instead of all."""

    def __post_init__(self) -> None:
        """Check values."""
        _check_choice(self, "attention", _ATTENTIONS)
        if self.projection == "regularised":
            raise ValueError(
                "ModelConfig.projection is 'regularised'; that is projection_norms=regularised now"
            )
        _check_choice(self, "projection", ("iid", "orthogonal", "simplex"))
        _check_choice(self, "projection_norms", ("chi", "regularised"))
        _check_choice(self, "positions", ("rope", "absolute", "none"))
        _check_choice(self, "feedforward", ("gelu", "swiglu"))
        for field in ("num_layers", "num_heads", "model_dim", "feedforward_dim", "num_features"):
            _check_range(self, field, 1)
        _check_range(self, "dropout", 0.0, 0.99)
        if self.model_dim % self.num_heads:
            raise ValueError(
                f"ModelConfig.model_dim is {self.model_dim}, not a multiple of num_heads {self.num_heads}"
            )
        if self.positions == "rope" and self.model_dim // self.num_heads % 2:
            raise ValueError(
                f"ModelConfig.model_dim is {self.model_dim}: heads are {self.model_dim // self.num_heads} wide, "
                "positions=rope needs an even width"
            )
        self._check_domain()

    def _check_domain(self) -> None:
        """Refuse feature maps outside of what they are good for."""
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


@dataclass(frozen=True)
class ObjectiveConfig:
    """What the model is asked."""

    kind: str = "masked"
    """masked (some residues, from both sides) or causal (the next token)."""
    mask_fraction: float = 0.15
    """masked, training: the chance that a residue is asked; evaluation asks 15 % whatever this says."""
    shown_as_mask: float = 0.8
    """masked, training: the share of asked residues shown as <mask>."""
    shown_as_random: float = 0.1
    """masked, training: the share shown as a random amino acid; the rest is shown as it is."""

    def __post_init__(self) -> None:
        """Check values."""
        _check_choice(self, "kind", ("masked", "causal"))
        for field in ("mask_fraction", "shown_as_mask", "shown_as_random"):
            _check_range(self, field, 0.0, 1.0)
        if self.shown_as_mask + self.shown_as_random > 1:
            raise ValueError("ObjectiveConfig: shown_as_mask + shown_as_random is above 1")
        if self.kind == "masked" and self.mask_fraction == 0:
            raise ValueError(
                "ObjectiveConfig.mask_fraction is 0: nothing would be asked; allowed: above 0 to 1"
            )


@dataclass(frozen=True)
class DataConfig:
    """Where windows come from and how they are put together."""

    path: str = "???"
    """The folder that `protperf prepare` wrote."""
    more_paths: tuple[str, ...] = ()
    """Other such folders, whose training windows are mixed in; validation sets are those of `path` alone."""
    weights: tuple[float, ...] = ()
    """Shares of the training windows, one number for `path` and each of `more_paths`; empty: by their windows."""
    context_length: int = 0
    """Tokens that the model sees at once; must divide the folder's window, which is cut into such; 0: the whole window."""
    batch_size: int = 8
    """Windows in one batch of one rank."""
    num_workers: int = 2
    """Processes that read windows for one rank; 0 reads in the training process."""
    attend_across_documents: bool = False
    """Whether proteins packed into one window see each other."""
    valid_sets: tuple[str, ...] = ("valid",)
    """Splits to validate on; ones that the folder does not have are an error."""
    valid_windows: int = 0
    """At most so many windows of each validation set while training; 0 is all."""

    def __post_init__(self) -> None:
        """Check values."""
        _check_range(self, "batch_size", 1)
        _check_range(self, "num_workers", 0)
        _check_range(self, "valid_windows", 0)
        _check_range(self, "context_length", 0)
        self._check_mix()
        if not self.valid_sets or len(set(self.valid_sets)) < len(self.valid_sets):
            raise ValueError(
                f"DataConfig.valid_sets is {list(self.valid_sets)}; allowed: at least one split, each named once"
            )

    def _check_mix(self) -> None:
        """Refuse weights that do not fit the folders."""
        paths = [self.path, *self.more_paths]
        if len(set(paths)) < len(paths):
            raise ValueError(
                f"DataConfig.more_paths is {list(self.more_paths)}, with path {self.path!r}; allowed: each folder once, "
                "weights say how much is read of it"
            )
        if self.weights and len(self.weights) != len(paths):
            raise ValueError(
                f"DataConfig.weights is {list(self.weights)}; allowed: none, or {len(paths)}, one for path and each of "
                "more_paths"
            )
        if not all(0 < weight < float("inf") for weight in self.weights):
            raise ValueError(f"DataConfig.weights is {list(self.weights)}; allowed: numbers above 0")


@dataclass(frozen=True)
class OptimConfig:
    """AdamW, linear warm-up, cosine decay."""

    learning_rate: float = 1e-3
    """The peak, reached after warm-up."""
    warmup_steps: int = 100
    """Optimizer steps over which the learning rate rises linearly."""
    decay_steps: int = 1000
    """Optimizer steps from the start to the end of the cosine; constant after that."""
    final_fraction: float = 0.1
    """The learning rate at the end, as a share of the peak."""
    weight_decay: float = 0.1
    """On matrices only, not on norms, biases or embeddings."""
    beta1: float = 0.9
    """AdamW's decay of the mean gradient."""
    beta2: float = 0.98
    """AdamW's decay of the mean squared gradient."""
    eps: float = 1e-9
    """AdamW's guard against division by zero."""

    def __post_init__(self) -> None:
        """Check values."""
        _check_range(self, "learning_rate", 0.0)
        _check_range(self, "warmup_steps", 0)
        _check_range(self, "decay_steps", 1)
        _check_range(self, "final_fraction", 0.0, 1.0)
        _check_range(self, "weight_decay", 0.0)
        _check_range(self, "eps", 0.0)
        for field in ("beta1", "beta2"):
            _check_range(self, field, 0.0)
            if getattr(self, field) >= 1:
                raise ValueError(
                    f"OptimConfig.{field} is {getattr(self, field)}; allowed: at least 0, below 1"
                )


@dataclass(frozen=True)
class TrainerConfig:
    """How long, on what, and how often something is done; all in optimizer steps."""

    max_steps: int = 1000
    """Train until this step, counted from the start of the run."""
    accelerator: str = "auto"
    """cpu, gpu or mps; auto is gpu if there is one for CUDA, else cpu."""
    devices: int = 1
    """Processes on each node."""
    num_nodes: int = 1
    """Machines."""
    strategy: str = "auto"
    """auto or ddp."""
    precision: str = "32-true"
    """32-true, bf16-mixed or 16-mixed; linear attention computes in float32 whatever this says."""
    accumulate_batches: int = 1
    """Batches whose gradients make one optimizer step."""
    gradient_clip: float = 0.5
    """Largest norm of the gradient; 0 does not clip."""
    redraw_every: int = 1000
    """Draw the random projections anew every so many steps; 0 never does."""
    validate_every: int = 500
    """Validate every so many steps, and after the last one."""
    checkpoint_every: int = 500
    """Write a checkpoint every so many steps, and after the last one."""
    keep_checkpoints: int = 2
    """How many of the latest checkpoints stay, besides the best one."""
    log_every: int = 50
    """Report training metrics every so many steps, and after the last one."""
    seed: int = 0
    """Initial weights, masks, order of windows and dropout follow from it."""

    def __post_init__(self) -> None:
        """Check values."""
        _check_choice(self, "accelerator", ("auto", "cpu", "gpu", "mps"))
        _check_choice(self, "strategy", ("auto", "ddp"))
        _check_choice(self, "precision", ("32-true", "bf16-mixed", "16-mixed"))
        positive = ("max_steps", "devices", "num_nodes", "accumulate_batches", "validate_every")
        for field in (*positive, "checkpoint_every", "keep_checkpoints", "log_every"):
            _check_range(self, field, 1)
        for field in ("gradient_clip", "redraw_every"):
            _check_range(self, field, 0)
        _check_range(self, "seed", 0, 2**32 - 1)


@dataclass(frozen=True)
class LoggerConfig:
    """Where metrics go besides the run folder's metrics.csv."""

    kind: str = "none"
    """none or wandb (offline unless an API key is there and the server answers)."""
    project: str = "protperf"
    """W&B's project."""
    entity: str | None = None
    """W&B's team or user; null for the key's own."""

    def __post_init__(self) -> None:
        """Check values."""
        _check_choice(self, "kind", ("none", "wandb"))
