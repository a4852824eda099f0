"""The `trainer` group: how long, on what, and how often something is done."""

from __future__ import annotations

from dataclasses import dataclass

from protperf.config.checks import check_choices, check_range

CHOICES = {
    "accelerator": ("auto", "cpu", "gpu"),
    "strategy": ("auto", "ddp", "fsdp"),
    "precision": ("auto", "32-true", "bf16-mixed", "16-mixed"),
}
"""Field -> the values that it may have."""


@dataclass(frozen=True)
class TrainerConfig:
    """How long, on what, and how often something is done; all in optimizer steps."""

    max_steps: int = 1000
    """Train until this step, counted from the start of the run."""
    accelerator: str = "auto"
    """cpu or gpu; auto is gpu if there is one for CUDA, else cpu."""
    devices: int = 1
    """Processes on each node; 0: as many as torchrun or SLURM started there, else all GPUs, at least one."""
    num_nodes: int = 1
    """Machines; 0: as many as torchrun or SLURM started."""
    strategy: str = "auto"
    """auto (ddp with several processes), ddp (each rank holds the model) or fsdp (ranks hold shards of it, FSDP2)."""
    precision: str = "auto"
    """32-true, bf16-mixed or 16-mixed; auto is bf16-mixed on GPUs that have it, else 32-true. Linear attention computes
    in float32 whatever this says."""
    compile: bool = False
    """Whether torch.compile takes the model's blocks: slower to start, faster steps."""
    deterministic: bool = False
    """Whether torch refuses operations that give other bits each time; on a CPU a run is repeatable without it."""
    windows_at_once: int = 0
    """Windows that a rank computes at once: its share of a batch goes through in such pieces, whose gradients add up to that
    of the whole share, so memory is saved and nothing else changes; 0: the whole share."""
    gradient_clip: float = 0.5
    """Largest norm of the gradient; 0 does not clip."""
    redraw_every: int = 1000
    """Draw the random projections anew every so many steps; 0 never does."""
    validate_every: int = 500
    """Validate every so many steps, and after the last one."""
    early_stop_after: int = 0
    """End after so many validations in a row without a better loss of the first validation set; 0 never does."""
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
        check_choices(self, CHOICES)
        check_range(self, "max_steps", 1, 10**12)
        for field in ("validate_every", "checkpoint_every", "keep_checkpoints", "log_every"):
            check_range(self, field, 1)
        for field in (
            "devices",
            "num_nodes",
            "windows_at_once",
            "gradient_clip",
            "redraw_every",
            "early_stop_after",
        ):
            check_range(self, field, 0)
        check_range(self, "seed", 0, 2**32 - 1)
