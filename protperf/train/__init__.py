"""`protperf train`: `settings` are read, `runs` are built of them, `trainers` is Lightning's part, `__main__` runs one."""

from protperf.train.runs import Run, build_run
from protperf.train.settings import Settings, read_settings

__all__ = ["Run", "Settings", "build_run", "read_settings"]
