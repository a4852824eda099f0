"""Windows from shards to batches: `questions` are made of windows, `order` says whose turn it is, `windows` are the loaders."""

from protperf.data.order import MIX_BLOCK, Position, TrainingOrder, mix, mix_quotas
from protperf.data.questions import NO_WINDOW, QuestionDataset, ReadingError, SentBatch, WindowKey
from protperf.data.windows import WindowData, evaluation_keys

__all__ = [
    "MIX_BLOCK",
    "NO_WINDOW",
    "Position",
    "QuestionDataset",
    "ReadingError",
    "SentBatch",
    "TrainingOrder",
    "WindowData",
    "WindowKey",
    "evaluation_keys",
    "mix",
    "mix_quotas",
]
