"""The `optim` group: how weights move."""

from __future__ import annotations

from dataclasses import dataclass

from protperf.config.checks import check_choices, check_range

CHOICES = {
    "kind": ("adamw", "adam"),
    "decayed": ("matrices", "all"),
    "schedule": ("constant", "cosine", "inverse_sqrt", "warmup_stable_decay"),
}
"""Field -> the values that it may have."""


@dataclass(frozen=True)
class OptimConfig:
    """The optimizer, and its learning rate as a function of the optimizer step."""

    kind: str = "adamw"
    """adamw (weights decay by themselves) or adam (weight decay is a part of the gradient)."""
    decayed: str = "matrices"
    """What weight decay acts on: matrices (not norms, biases or embeddings) or all (as the paper's released code)."""
    schedule: str = "cosine"
    """cosine, constant, inverse_sqrt or warmup_stable_decay; each after a linear warm-up."""
    learning_rate: float = 1e-3
    """The peak, reached after warm-up."""
    warmup_steps: int = 100
    """Optimizer steps over which the learning rate rises linearly; 0: none."""
    decay_steps: int = 1000
    """Optimizer steps from the start of the run to the end of the decay, constant after that; unused by constant and
    inverse_sqrt, which have no end."""
    cooldown_steps: int = 0
    """warmup_stable_decay, and of it alone: the last so many of decay_steps, over which the learning rate falls."""
    final_fraction: float = 0.1
    """The learning rate at decay_steps, as a share of the peak; unused by constant and inverse_sqrt."""
    weight_decay: float = 0.1
    """How fast weights decay."""
    beta1: float = 0.9
    """Decay of the mean gradient."""
    beta2: float = 0.98
    """Decay of the mean squared gradient."""
    eps: float = 1e-9
    """Guard against division by zero."""

    def __post_init__(self) -> None:
        """Check values."""
        check_choices(self, CHOICES)
        check_range(self, "learning_rate", 0.0)
        check_range(self, "warmup_steps", 0)
        check_range(self, "decay_steps", 1)
        check_range(self, "cooldown_steps", 0)
        check_range(self, "final_fraction", 0.0, 1.0)
        check_range(self, "weight_decay", 0.0)
        check_range(self, "eps", 0.0)
        for field in ("beta1", "beta2"):
            check_range(self, field, 0.0)
            if getattr(self, field) >= 1:
                raise ValueError(
                    f"OptimConfig.{field} is {getattr(self, field)}; allowed: at least 0, below 1"
                )
        self._check_cooldown()

    def _check_cooldown(self) -> None:
        """Refuse a cool-down that the schedule does not have, or has no room for."""
        if self.schedule != "warmup_stable_decay":
            if self.cooldown_steps:
                raise ValueError(
                    f"OptimConfig.cooldown_steps is {self.cooldown_steps}; allowed with schedule {self.schedule!r}: 0, "
                    "or set schedule to warmup_stable_decay"
                )
            return
        room = self.decay_steps - self.warmup_steps
        if not 1 <= self.cooldown_steps <= room:
            raise ValueError(
                f"OptimConfig.cooldown_steps is {self.cooldown_steps}; allowed with schedule 'warmup_stable_decay': "
                f"1 to decay_steps - warmup_steps, {self.decay_steps} - {self.warmup_steps} here"
            )
