"""The file of `protperf evaluate --json`: what a model and the floors beside it got on splits of a dataset."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protperf.formats.commit import commit_bytes
from protperf.formats.json_files import read_json
from protperf.formats.typed import build

MODEL = "model"
AGAINST = "against"
"""Predictors that are models; the others of a split are floors."""

FLOORS = {"unigram": 1, "trigram": 3, "4-gram": 4}
"""Name -> order of the n-gram models that stand beside a model."""

TRAINING_SPLIT = "train"
"""The split that is not held out."""

OTHER = "other"
"""Name of the residues that are none of the 20 standard ones, taken together, in `by_residue`."""

Scores = dict[str, dict[str, dict[str, Any]]]
"""Split -> predictor -> `loss`, `perplexity`, `accuracy`, `asked`, and more (see docs/formats.md)."""


@dataclass(frozen=True)
class _Score:
    """What is asked of a predictor's entries when they are read; older files have fewer."""

    perplexity: float
    accuracy: float = math.nan
    checkpoint: str = ""
    step: int = 0
    objective: str = ""
    weights_sha256: str = ""
    dataset_digest: str = ""


def write_scores(path: Path, scores: Scores) -> None:
    """Write scores by rename."""
    commit_bytes(path, (json.dumps(scores, indent=1) + "\n").encode())


def read_scores(path: Path) -> Scores:
    """Read what `write_scores` wrote.

    Raises:
        ValueError: no such file, or something else.
    """
    try:
        scores = read_json(path, remedy="give what `protperf evaluate --json` wrote")
        for predictors in scores.values():
            for score in predictors.values():
                found = build(_Score, score)
                for name in ("perplexity", "accuracy"):
                    score[name] = float(getattr(found, name))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(
            f"{path}: not what `protperf evaluate --json` writes ({type(error).__name__})"
        ) from error
    return dict(scores)


def floors_of(predictors: dict[str, dict[str, Any]]) -> list[str]:
    """Return the names of the predictors of a split that are floors, in the order of the file."""
    return [name for name in predictors if name not in (MODEL, AGAINST)]
