"""Tasks for the tests of executors: workers import this module, as they import those of data_prep."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import NoReturn


class OddError(Exception):
    """An exception that does not come back from pickle."""

    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


def square(number: int) -> int:
    return number * number


def square_late(number: int, seconds: float) -> int:
    time.sleep(seconds)
    return number * number


def say_pid(folder: str, seconds: float) -> int:
    (Path(folder) / f"{os.getpid()}.pid").touch()
    time.sleep(seconds)
    return os.getpid()


def die_first(folder: str, number: int, times: int = 1) -> int:
    """Note each try in a file; die by the own pid in the first tries of number 3."""
    with open(Path(folder) / f"{number}.tries", "a") as file:
        file.write("x")
    if number == 3 and (Path(folder) / "3.tries").stat().st_size <= times:
        os.kill(os.getpid(), signal.SIGKILL)
    return number * number


def refuse(number: int) -> int:
    if number == 3:
        raise ValueError("seqs.fasta:7: number 3 is refused")
    return number


def refuse_oddly() -> NoReturn:
    raise OddError("this", "that")


def return_a_lock() -> object:
    import threading

    return threading.Lock()


def fail_on_the_disk(folder: str, times: int) -> int:
    """Note each try; fail in the first ones as a network disk does."""
    path = Path(folder) / "tries"
    with open(path, "a") as file:
        file.write("x")
    if path.stat().st_size <= times:
        raise OSError(116, "Stale file handle", "part-7")
    return path.stat().st_size
