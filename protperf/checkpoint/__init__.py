"""Checkpoints: `files` reads them (without Lightning), `saving` writes them while training."""

from protperf.checkpoint.files import (
    BEST_NAME,
    TrainedModel,
    check_resumable,
    describe,
    find_checkpoint,
    load_model,
    read_checkpoint,
    remove_unfinished,
    step_checkpoints,
    step_name,
    step_of,
)

__all__ = [
    "BEST_NAME",
    "TrainedModel",
    "check_resumable",
    "describe",
    "find_checkpoint",
    "load_model",
    "read_checkpoint",
    "remove_unfinished",
    "step_checkpoints",
    "step_name",
    "step_of",
]
