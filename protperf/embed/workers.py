"""Where blocks are computed: in this process, or in one process a device. Answers come in the order of the questions."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from protperf.batches import is_out_of_memory
from protperf.checkpoint import TrainedModel, load_model
from protperf.embed.outputs import Part
from protperf.formats.contact_head import ContactHead
from protperf.inference.contacts import predict_contacts
from protperf.inference.embedding import ProteinEmbedding, embed_proteins
from protperf.model import ProteinModel

T = TypeVar("T")

Arrays = list[np.ndarray]
"""What is kept of a protein: an array for each `Part`, in their order."""


@dataclass(frozen=True)
class Recipe:
    """How blocks are computed; plain values, since other processes get it too.

    Attributes:
        parts: what is kept of each protein.
        window: see `embed_proteins`.
        token_budget: see `embed_proteins`.
        precision: see `embed_proteins`.
        dtype: of the arrays, `float32` or `float16`.
        head: of contact prediction, or `None`.
    """

    parts: tuple[Part, ...]
    window: int
    token_budget: int
    precision: str
    dtype: str = "float32"
    head: ContactHead | None = None

    def compute(self, model: ProteinModel, proteins: Sequence[np.ndarray]) -> list[Arrays | None]:
        """Return the arrays of each protein; `None` for one that does not fit into memory even alone."""
        layers = sorted({part.layer for part in self.parts if part.layer is not None})
        found = embed_proteins(
            model,
            proteins,
            layers=layers or (-1,),
            logits=any(part.kind == "logits" for part in self.parts),
            window=self.window,
            token_budget=self.token_budget,
            precision=self.precision,
        )
        return [
            None if embedding is None else self._keep(model, tokens, embedding)
            for tokens, embedding in zip(proteins, found, strict=True)
        ]

    def _keep(self, model: ProteinModel, tokens: np.ndarray, embedding: ProteinEmbedding) -> Arrays | None:
        kept = []
        for part in self.parts:
            array = self._contacts(model, tokens) if part.kind == "contacts" else part.of(embedding)
            if array is None:
                return None
            with np.errstate(over="ignore"):  # what overflows is not finite, and found so where it is written
                kept.append(array.astype(self.dtype, copy=False))
        return kept

    def _contacts(self, model: ProteinModel, tokens: np.ndarray) -> np.ndarray | None:
        assert self.head is not None
        try:
            return predict_contacts(model, tokens, self.head, precision=self.precision)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return None


def in_this_process(
    trained: TrainedModel, recipe: Recipe, tasks: Iterable[tuple[T, list[np.ndarray]]]
) -> Iterator[tuple[T, list[Arrays | None]]]:
    """Yield each task's label with the arrays of its proteins.

    Args:
        trained: on the device to compute on.
        recipe: how.
        tasks: a label and the residue tokens of some proteins, `(L,)` each.
    """
    for label, proteins in tasks:
        yield label, recipe.compute(trained.model, proteins)


def in_processes(
    checkpoint: Path,
    devices: Sequence[str],
    recipe: Recipe,
    tasks: Iterable[tuple[T, list[np.ndarray]]],
) -> Iterator[tuple[T, list[Arrays | None]]]:
    """Do as `in_this_process`, in one process a device, with two blocks a device on their way.

    Args:
        checkpoint: what each process loads.
        devices: names as torch has them, one a process.
        recipe: how.
        tasks: as in `in_this_process`.

    Raises:
        ValueError: a process died.
    """
    context = multiprocessing.get_context("spawn")
    names = context.Queue()
    for name in devices:
        names.put(name)
    threads = max(1, torch.get_num_threads() // len(devices))
    pool = ProcessPoolExecutor(
        len(devices),
        mp_context=context,
        initializer=_start_worker,
        initargs=(names, str(checkpoint), threads, recipe),
    )
    waiting: deque[tuple[T, Future[list[Arrays | None]]]] = deque()
    try:
        for label, proteins in tasks:
            waiting.append((label, pool.submit(_compute, proteins)))
            if len(waiting) >= 2 * len(devices):
                yield _answer(waiting)
        while waiting:
            yield _answer(waiting)
    except BrokenProcessPool:
        raise ValueError(
            "a process of --devices ended before its work (out of memory?); the same command goes on, with fewer "
            "--devices if it must"
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _answer(waiting: deque[tuple[T, Future[list[Arrays | None]]]]) -> tuple[T, list[Arrays | None]]:
    label, future = waiting.popleft()
    return label, future.result()


_compute_here: Callable[[list[np.ndarray]], list[Arrays | None]] | None = None
"""What this process computes with, where it is one of several."""


def _start_worker(names: Any, checkpoint: str, threads: int, recipe: Recipe) -> None:
    global _compute_here
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    model = load_model(checkpoint).model.to(names.get())
    _compute_here = lambda proteins: recipe.compute(model, proteins)  # noqa: E731


def _end_with_parent() -> None:
    """End this process when the one that started it is no more: killed, it could not say so."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _compute(proteins: list[np.ndarray]) -> list[Arrays | None]:
    assert _compute_here is not None
    return _compute_here(proteins)
