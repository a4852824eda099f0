"""Small models with weights so wide that attention decides what they say, and checkpoints of them."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from protperf.checkpoint import describe
from protperf.config import ModelConfig, ObjectiveConfig
from protperf.model import ProteinModel
from protperf.vocab import VOCABULARY


def wide_model(attention: str, *, causal: bool = True, **shape: object) -> ProteinModel:
    """Return a model with wide weights, in its attention's domain of use."""
    settings = {"num_features": 128, "qk_norm": attention == "trig", **shape}
    config = ModelConfig(
        attention=attention, num_layers=2, num_heads=2, model_dim=16, feedforward_dim=32, **settings
    )
    model = ProteinModel(config, causal=causal).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.2 if name.endswith("qkv.weight") else 0.4, generator=generator)
    if attention == "oprf":
        model.set_pair_squares(torch.tensor([[1.0, 2.0], [3.0, 0.5]]))
    return model


def random_tokens(length: int, *, batch: int = 1, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY.num_standard, (batch, length), generator=generator)
    tokens[:, 0] = VOCABULARY.bos
    return tokens


def save_checkpoint(model: ProteinModel, path: Path, *, ask_eos: bool = True) -> Path:
    """Write a checkpoint as training does."""
    objective = ObjectiveConfig(kind="causal" if model.causal else "masked", ask_eos=ask_eos)
    about = describe(model.config, objective, attend_across_documents=False, dataset_digest="")
    state = {f"model.{name}": value for name, value in model.state_dict().items()}
    torch.save({"protperf": about, "state_dict": state, "global_step": 7}, path)
    return path
