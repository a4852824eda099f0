"""The `optim` group: how weights move."""

from __future__ import annotations

from dataclasses import dataclass

from protperf.config.checks import check_range


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
        check_range(self, "learning_rate", 0.0)
        check_range(self, "warmup_steps", 0)
        check_range(self, "decay_steps", 1)
        check_range(self, "final_fraction", 0.0, 1.0)
        check_range(self, "weight_decay", 0.0)
        check_range(self, "eps", 0.0)
        for field in ("beta1", "beta2"):
            check_range(self, field, 0.0)
            if getattr(self, field) >= 1:
                raise ValueError(
                    f"OptimConfig.{field} is {getattr(self, field)}; allowed: at least 0, below 1"
                )
