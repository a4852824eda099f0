"""From windows to questions, in the processes that read.

Axis letters: `B` batch, `W` window length in tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from protperf.batches import Batch
from protperf.config import ObjectiveConfig
from protperf.formats import FormatError
from protperf.formats.joined_shards import JoinedShards
from protperf.formats.shards import ShardSet
from protperf.objectives import NOT_ASKED, ask, question_generator
from protperf.vocab import VOCABULARY

WindowKey = tuple[int, int]
"""(epoch, window): all that a question depends on besides the seed. Windows of mixed datasets are numbered through."""

NO_WINDOW = -1
"""The window of a key that stands for nothing: padding that asks nothing, so that all ranks have as many batches."""


class ReadingError(FormatError):
    """What was wrong with a dataset while it was read, in one line.

    Where a worker process raises it, torch builds it again from the text of the whole traceback: all but the
    message, which comes last, is dropped.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text.rpartition(f"{type(self).__name__}: ")[2].strip())


class QuestionDataset(Dataset[Batch]):
    """Turns the keys of a batch into its questions.

    Args:
        shards: the windows of one split.
        objective: what is asked.
        seed: of the run.
        evaluation: whether answers are compared with floors.
    """

    def __init__(
        self, shards: ShardSet | JoinedShards, objective: ObjectiveConfig, *, seed: int, evaluation: bool
    ) -> None:
        self.shards = shards
        self.objective = objective
        self.seed = seed
        self.evaluation = evaluation

    def __getitem__(self, keys: Sequence[WindowKey]) -> Batch:
        """Return the questions of some windows, each in its epoch: uint8 `(B, W)`, widened only on the device.

        Raises:
            ReadingError: a shard is damaged or cannot be read.
        """
        real = [place for place, (_, window) in enumerate(keys) if window != NO_WINDOW]
        try:
            rows = self.shards.read_many([keys[place][1] for place in real])
        except (ValueError, OSError) as error:
            raise ReadingError(str(error)) from error
        inputs = np.full((len(keys), self.shards.window), VOCABULARY.pad, np.uint8)
        targets = np.full_like(inputs, NOT_ASKED)
        for place, row in zip(real, rows, strict=True):
            epoch, window = keys[place]
            generator = question_generator(self.seed, epoch=epoch, window=window)
            inputs[place], targets[place] = ask(row, self.objective, generator, evaluation=self.evaluation)
        return SentBatch(torch.from_numpy(inputs), torch.from_numpy(targets))


class SentBatch(Batch):
    """A batch that workers send as plain bytes.

    Torch would share memory instead, which for batches this small takes longer, and fails where `/dev/shm` is small,
    as in most containers.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return _receive, (self.inputs.numpy(), self.targets.numpy())


def _receive(inputs: np.ndarray, targets: np.ndarray) -> Batch:
    return Batch(torch.from_numpy(inputs), torch.from_numpy(targets))
