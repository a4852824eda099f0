"""protperf: protein language models on long sequences.

>>> import protperf
>>> model = protperf.load("runs/demo")  # doctest: +SKIP
>>> [protein.mean.shape for protein in model.embed(["MKTAYIAKQR"])]  # doctest: +SKIP
[(128,)]
"""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from protperf.language_model import LanguageModel

__all__ = ["__version__", "load"]

__version__ = version("protperf")


def load(path: Path | str, *, device: str = "auto", precision: str = "fp32") -> LanguageModel:
    """Load a trained model: see `protperf.language_model.load`. Torch is imported here and not before."""
    from protperf.language_model import load

    return load(path, device=device, precision=precision)
