"""Small checkpoints for the tests of what a trained model is asked."""

from __future__ import annotations

from pathlib import Path

import torch

from protperf.checkpoint import describe
from protperf.config import ModelConfig, ObjectiveConfig
from protperf.model import ProteinModel


def make_checkpoint(path: Path, *, attention: str = "favor", kind: str = "masked") -> Path:
    """Write a checkpoint with weights so wide that attention decides the states."""
    config = ModelConfig(
        attention=attention, num_layers=2, num_heads=2, model_dim=16, feedforward_dim=32, num_features=16
    )
    objective = ObjectiveConfig(kind=kind)
    model = ProteinModel(config, causal=kind == "causal")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.4, generator=generator)
    about = describe(config, objective, attend_across_documents=False, dataset_digest="")
    state = {f"model.{name}": value for name, value in model.state_dict().items()}
    torch.save({"protperf": about, "state_dict": state, "global_step": 7}, path)
    return path
