"""A trained model into a folder that people share."""

from __future__ import annotations

from pathlib import Path

from protperf.checkpoint.card import CardDetails, write_card
from protperf.checkpoint.facts import RunFacts, collect_facts
from protperf.checkpoint.folder import folder_config, write_folder
from protperf.checkpoint.loading import TrainedModel


def export_model(
    trained: TrainedModel, folder: Path, details: CardDetails | None = None, *, facts: RunFacts | None = None
) -> None:
    """Write `config.json`, `model.safetensors` and `model_card.md`; the three are replaced if they are there.

    Args:
        trained: from `load_model`.
        folder: made if need be.
        details: what the card tells besides what is known of the model.
        facts: what is known of the run; `None`: what stands beside the file, whose weights these must be.

    Raises:
        OSError: it cannot be written; no `config.json` is there then.
    """
    card = write_card(trained, facts or collect_facts(trained), details or CardDetails())
    config = folder_config(trained.describe(), step=trained.step)
    write_folder(folder, config=config, weights=trained.model.state_dict(), card=card)
