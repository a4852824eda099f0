"""Which device a command computes on, checked before work starts."""

from __future__ import annotations

import torch


def choose_device(name: str) -> torch.device:
    """Return the device meant by `auto`, `cpu`, `cuda`, `cuda:N` or `mps`; `auto` takes a GPU if there is one.

    Raises:
        ValueError: no such device here; one line that says what there is.
    """
    available = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    if torch.backends.mps.is_available():
        available.append("mps")
    if name == "auto":
        return torch.device(available[1] if len(available) > 1 else "cpu")
    wanted = "cuda:0" if name == "cuda" else name
    if wanted not in available:
        raise ValueError(f"--device {name}: not here; there is: {', '.join(available)}")
    return torch.device(wanted)
