"""What the tests of embedding files share: proteins with hostile names, and one way to write any format."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from protperf.formats.embedding_merge import WRITERS
from protperf.formats.embeddings import Embedding, EmbeddingInfo

HOSTILE_IDS = [
    "a/b",
    ".",
    "..",
    "A.B/..",
    "x:y",
    "x" * 300,
    "prot\u00e9ine\u2014\U0001f9ec",
    "",
    "0",
    "nul\0id",
    "a",
    "a",
    "A",
]
DIM = 4


def describe(kind: str = "mean", **others: Any) -> EmbeddingInfo:
    return replace(EmbeddingInfo(kind, DIM, "best.ckpt", "0" * 64, "masked"), **others)


def make(number: int, info: EmbeddingInfo) -> Embedding:
    """Return a protein that follows from its number alone."""
    generator = np.random.default_rng(number)
    length = int(generator.integers(1, 30))
    name = HOSTILE_IDS[number % len(HOSTILE_IDS)]
    array = generator.standard_normal(info.shape(length), np.float32)
    return Embedding(name, f"{name} protein {number}" if number % 2 else name, length, array)


def write(
    path: Path,
    name: str,
    info: EmbeddingInfo,
    numbers: Iterable[int],
    *,
    commit_every: int = 3,
    run: dict[str, Any] | None = None,
    before_each: Callable[[int], None] = lambda number: None,
    anew: bool = False,
) -> int:
    """Write proteins in a format, or the rest of them; return how many were there."""
    writer: Any
    if name == "pt":  # imported here: the others need no torch
        from protperf.tensor_folder import TensorFolder

        writer = TensorFolder(path, [info], run, anew=anew)
    else:
        writer = WRITERS[name](path, info, run, anew=anew)
    with writer:
        done = (writer.committed or {"done": 0})["done"]
        for place, number in enumerate(numbers):
            if place < done:
                continue
            before_each(number)
            embedding = make(number, info)
            writer.add(number, [embedding] if name == "pt" else embedding)
            if place % commit_every == commit_every - 1:
                writer.commit({"done": place + 1})
    return done


def content(path: Path) -> dict[str, bytes]:
    """Return all bytes of a file or a folder."""
    if path.is_dir():
        return {file.name: file.read_bytes() for file in path.iterdir()}
    return {"": path.read_bytes()}
