"""How far a long piece of work is: a bar on a terminal; in a log file, where a bar is litter, a line now and then."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType

from tqdm import tqdm

from protperf.formats.sizes import in_units


class Progress:
    """Context manager that shows how far a long piece of work is: a bar on a terminal, elsewhere a line now and then."""

    def __init__(self, what: str, total: int, *, say: Callable[[str], None], every_s: float) -> None:
        self._what = what
        self._total = total
        self._say = say
        self._every_s = every_s
        self._bar = tqdm(total=total, desc=what, unit="B", unit_scale=True, disable=None, leave=False)
        self._position = self._said_position = 0
        self._said_at = time.monotonic()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()

    def move_to(self, position: int) -> None:
        """Show that `position` bytes of the total are done; it may go back."""
        self._bar.update(position - self._position)
        self._position = position
        elapsed = time.monotonic() - self._said_at
        if self._bar.disable and elapsed >= self._every_s:
            speed = max(position - self._said_position, 0) / elapsed if elapsed else 0.0
            self._say(
                f"{self._what}: {in_units(position)} of {in_units(self._total)} ({position / self._total:.0%}), "
                f"{in_units(speed)} per second"
            )
            self._said_at, self._said_position = time.monotonic(), position
