"""Checkpoints: `files` reads them (without Lightning), `saving` writes them while training, `folder` is what is shared."""

from protperf.checkpoint.files import (
    BEST_NAME,
    check_resumable,
    describe,
    read_checkpoint,
    remove_unfinished,
    step_checkpoints,
    step_name,
    step_of,
)
from protperf.checkpoint.loading import MODEL_DIR, TrainedModel, find_checkpoint, load_model, model_files

__all__ = [
    "BEST_NAME",
    "MODEL_DIR",
    "TrainedModel",
    "check_resumable",
    "describe",
    "find_checkpoint",
    "load_model",
    "model_files",
    "read_checkpoint",
    "remove_unfinished",
    "step_checkpoints",
    "step_name",
    "step_of",
]
