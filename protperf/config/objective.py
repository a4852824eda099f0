"""The `objective` group: what the model is asked."""

from __future__ import annotations

from dataclasses import dataclass

from protperf.config.checks import check_choices, check_range

CHOICES = {"kind": ("masked", "causal")}
"""Field -> the values that it may have."""


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
    ask_eos: bool = True
    """causal, training: whether the end of a protein is asked; evaluation, and masked always, ask residues alone."""
    label_smoothing: float = 0.0
    """Training's gradient: the share of each target that is spread evenly over the residue tokens; reported losses are
    without it."""

    def __post_init__(self) -> None:
        """Check values."""
        check_choices(self, CHOICES)
        for field in ("mask_fraction", "shown_as_mask", "shown_as_random"):
            check_range(self, field, 0.0, 1.0)
        check_range(self, "label_smoothing", 0.0, 0.99)
        if self.shown_as_mask + self.shown_as_random > 1:
            raise ValueError("ObjectiveConfig: shown_as_mask + shown_as_random is above 1")
        if self.kind == "masked" and self.mask_fraction == 0:
            raise ValueError(
                "ObjectiveConfig.mask_fraction is 0: nothing would be asked; allowed: above 0 to 1"
            )
