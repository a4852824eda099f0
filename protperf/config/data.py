"""The `data` group: which windows are read, and how many at once."""

from __future__ import annotations

from dataclasses import dataclass

from protperf.config.checks import check_range


@dataclass(frozen=True)
class DataConfig:
    """Where windows come from and how they are put together."""

    path: str = "???"
    """The folder that `protperf prepare` wrote."""
    more_paths: tuple[str, ...] = ()
    """Other such folders, whose training windows are mixed in; validation sets are those of `path` alone."""
    weights: tuple[float, ...] = ()
    """Shares of the training windows, one number for `path` and each of `more_paths`; empty: by their windows."""
    context_length: int = 0
    """Tokens that the model sees at once; must divide the folder's window, which is cut into such; 0: the whole window."""
    batch_size: int = 8
    """Windows in one batch of all ranks together, a multiple of their number; each rank takes its share."""
    num_workers: int = 2
    """Processes that read windows for one rank; 0 reads in the training process."""
    attend_across_documents: bool = False
    """Whether proteins packed into one window see each other."""
    valid_sets: tuple[str, ...] = ("valid",)
    """Splits to validate on; ones that the folder does not have are an error."""
    valid_windows: int = 0
    """At most so many windows of each validation set while training; 0 is all."""
    test_sets: tuple[str, ...] = ("test",)
    """Splits that the best checkpoint is tested on, all their windows, when training ends; empty ones are left out."""

    def __post_init__(self) -> None:
        """Check values."""
        check_range(self, "batch_size", 1)
        check_range(self, "num_workers", 0)
        check_range(self, "valid_windows", 0)
        check_range(self, "context_length", 0)
        self._check_mix()
        if not self.valid_sets or len(set(self.valid_sets)) < len(self.valid_sets):
            raise ValueError(
                f"DataConfig.valid_sets is {list(self.valid_sets)}; allowed: at least one split, each named once"
            )
        unknown = set(self.test_sets) - {"test", "ood", "valid"}
        if unknown or len(set(self.test_sets)) < len(self.test_sets):
            raise ValueError(
                f"DataConfig.test_sets is {list(self.test_sets)}; allowed: test, ood, valid, each once, or none"
            )

    def _check_mix(self) -> None:
        """Refuse weights that do not fit the folders."""
        paths = [self.path, *self.more_paths]
        if len(set(paths)) < len(paths):
            raise ValueError(
                f"DataConfig.more_paths is {list(self.more_paths)}, with path {self.path!r}; allowed: each folder once, "
                "weights say how much is read of it"
            )
        if self.weights and len(self.weights) != len(paths):
            raise ValueError(
                f"DataConfig.weights is {list(self.weights)}; allowed: none, or {len(paths)}, one for path and each of "
                "more_paths"
            )
        if not all(0 < weight < float("inf") for weight in self.weights):
            raise ValueError(f"DataConfig.weights is {list(self.weights)}; allowed: numbers above 0")
