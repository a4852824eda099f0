"""Start tests' training processes without scipy and transformers.

torchmetrics, which Lightning imports, imports both wherever they are installed: 2.5 seconds for each of some hundred processes
that need neither.
"""

from __future__ import annotations

import importlib.metadata
import sys
from importlib.machinery import ModuleSpec

HIDDEN = ("scipy", "transformers")


class Hider:
    """Finds no module of the hidden packages."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name.partition(".")[0] in HIDDEN:
            raise ModuleNotFoundError(f"No module named {name!r} in tests' training processes", name=name)
        return None


def from_name(name: str) -> importlib.metadata.Distribution:
    if name.lower() in HIDDEN:
        raise importlib.metadata.PackageNotFoundError(name)
    return found(name)


sys.meta_path.insert(0, Hider)  # type: ignore[arg-type]
found = importlib.metadata.Distribution.from_name
importlib.metadata.Distribution.from_name = staticmethod(from_name)  # type: ignore[assignment, method-assign]
