"""What is kept of each protein, and which file it goes to.

Axis letters: `L` residues of a protein, `D` model width, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from protperf.inference.embedding import ProteinEmbedding

LAYERED = ("mean", "max", "cls", "per_tok", "bos")
"""Kinds that each layer has; logits and contacts belong to the whole model."""


SHARD_WORD = r"shard-(\d+)-of-(\d+)"
"""What the names of a shard's files hold."""


class Part(NamedTuple):
    """One thing that is kept of each protein.

    Attributes:
        kind: `mean`, `max`, `cls`, `per_tok`, `bos`, `logits` or `contacts`.
        layer: counted from 0; `None` for what has no layer.
    """

    kind: str
    layer: int | None

    @property
    def name(self) -> str:
        """The kind, and the layer if it has one."""
        return self.kind if self.layer is None else f"{self.kind} of layer {self.layer}"

    def of(self, embedding: ProteinEmbedding) -> np.ndarray | None:
        """Return this part of an embedding (contacts are not in one)."""
        if self.layer is None:
            return embedding.logits
        if self.kind == "per_tok":
            return embedding.layers[self.layer]
        if self.kind == "bos":
            return embedding.bos[self.layer]
        return embedding.pooled(self.kind, self.layer)

    def num_values(self, residues: float, proteins: float, model_dim: int, vocabulary: int) -> float:
        """Return how many numbers it is for so many proteins of so many residues together, about."""
        if self.kind == "contacts":
            return residues**2 / max(1.0, proteins)
        if self.kind == "logits":
            return residues * vocabulary
        return model_dim * (residues if self.kind == "per_tok" else proteins)


def plan_parts(include: Sequence[str], pool: str, layers: Sequence[int]) -> tuple[Part, ...]:
    """Return the parts that are asked, in the order asked.

    >>> plan_parts(["mean", "logits"], "max", [4, 0])
    (Part(kind='max', layer=4), Part(kind='max', layer=0), Part(kind='logits', layer=None))

    Args:
        include: `mean` (pooled as `pool` says), `per_tok`, `bos`, `logits`, `contacts`.
        pool: `mean`, `max` or `cls`.
        layers: counted from 0.
    """
    kinds = [pool if kind == "mean" else kind for kind in dict.fromkeys(include)]
    return tuple(Part(kind, layer) for kind in kinds for layer in (layers if kind in LAYERED else [None]))


def plan_paths(out: Path, parts: Sequence[Part], shard: tuple[int, int] | None = None) -> list[Path]:
    """Return the file of each part: `out` itself for a single one, else its name with kind and layer in it.

    >>> [str(path) for path in plan_paths(Path("a.h5"), [Part("mean", 4), Part("per_tok", 4)], (2, 8))]
    ['a.mean.shard-2-of-8.h5', 'a.per_tok.shard-2-of-8.h5']

    Args:
        out: as the user named it.
        parts: what goes into files.
        shard: number (from 1) and how many, if this is one of several runs.
    """
    num_kinds = len({part.kind for part in parts})
    num_layers = len({part.layer for part in parts if part.layer is not None})
    paths = []
    for part in parts:
        words = [part.kind] if num_kinds > 1 else []
        words += [f"layer{part.layer}"] if num_layers > 1 and part.layer is not None else []
        words += [f"shard-{shard[0]}-of-{shard[1]}"] if shard else []
        paths.append(out.with_suffix("".join(f".{word}" for word in words) + out.suffix))
    return paths
