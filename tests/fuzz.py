"""Give hostile files to the four readers: `python tests/fuzz.py --inputs 200000` (`make fuzz`); each ends in a result or one clear line.

The files are whole ones with edits drawn from seeds of hypothesis (`fuzz_edits`). They are read in child processes that may take 1 GiB
beyond what they start with: a crash of a C library, an endless loop and a lack of memory are findings like any other.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fuzz_edits import Edit, Input, inputs
from hostile import limit_memory
from hypothesis import HealthCheck, Phase, given, seed, settings

import data_prep
import protperf
from protperf.formats import FormatError

MOST_MEMORY = 1 << 30
SECONDS_AN_INPUT = 20
MEMORY_DISK = "/dev/shm"
MISTAKES = (AttributeError, TypeError, NameError, AssertionError)
"""What no foreign byte leads to in code that checks before it uses."""
SOURCES = tuple(str(Path(module.__file__ or "").parent) + os.sep for module in (protperf, data_prep))
TRIED = {
    ("typed.py", "build"): "says with a `TypeError` that a value is of another type",
    ("typed.py", "_check"): "likewise",
    ("manifest.py", "_parse"): "takes JSON to be of its form, and says so where it is not",
    ("checks.py", "check_range"): "compares a value before its type is looked at",
    ("model.py", "_check_layers"): "likewise",
    ("loading.py", "_configs_of"): "gives keys of a file as keywords",
}
"""Functions that try a file's values, so that their mistakes are the file's."""
_TOGETHER = 500
"""Inputs of one child."""


def make_target(name: str, folder: Path) -> Any:
    """Return a target by its name, whole files and all."""
    if name == "checkpoints":
        from fuzz_checkpoints import make_checkpoints

        return make_checkpoints(folder)
    from fuzz_targets import TARGETS

    return TARGETS[name](folder)


NAMES = ("sequences", "shards", "checkpoints", "mutations")


def judge(target: Any, kind: int, chosen: Any, folder: Path) -> str:
    """Let a target read one hostile file in a folder, which is emptied first; return what was found, nothing if all is well."""
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    target.write(kind, chosen, folder)
    said = io.StringIO()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(said):
            warnings.simplefilter("error")
            target.read(folder)
    except ValueError as error:
        if mistake := own_mistake(error):
            return f"hidden behind a line: {_describe(mistake)}"
        text = str(error)
        own = isinstance(error, FormatError) or type(error) is ValueError
        if not (own and text.startswith(str(folder)) and "\n" not in text and len(text) < 3000):
            return _describe(error)
    except BaseException as error:
        return _describe(error)
    return ""


def fewer_edits(target: Any, kind: int, chosen: Sequence[Edit], folder: Path) -> Sequence[Edit]:
    """Return the edits that it takes to find the same."""
    what = judge(target, kind, chosen, folder)
    for place in reversed(range(len(chosen))):
        rest = [*chosen[:place], *chosen[place + 1 :]]
        if rest and judge(target, kind, rest, folder) == what:
            chosen = rest
    return chosen


def own_mistake(error: BaseException) -> BaseException | None:
    """Return the plain mistake of ours from which an error was made, if any: what was raised in a line of protperf itself."""
    seen: list[BaseException] = []
    waiting: list[BaseException | None] = [error]
    while waiting:
        each = waiting.pop()
        if each is None or each in seen:
            continue
        seen.append(each)
        waiting += [each.__cause__, each.__context__]
        codes = [frame.f_code for frame, _ in traceback.walk_tb(each.__traceback__)]
        if not isinstance(each, MISTAKES) or not codes or not codes[-1].co_filename.startswith(SOURCES):
            continue
        named = next(code for code in reversed(codes) if not code.co_name.startswith("<"))  # no comprehension
        if (Path(named.co_filename).name, named.co_name) not in TRIED:
            return each
    return None


def check_whole(target: Any, folder: Path) -> str:
    """Let a target read whole files; return what was found, nothing if they hold what is expected."""
    folder.mkdir()
    try:
        target.check(folder)
    except Exception as error:
        return f"whole files: {_describe(error)}"
    return ""


def run_child(target: Any, number: int, count: int, folder: Path, report: Any) -> None:
    """Read hostile files, drawn with the child's number as seed; report findings, refusals and the peak of memory."""
    place = folder / "input"
    place.mkdir()
    limit_memory(MOST_MEMORY)
    before = peak_memory()
    found: dict[str, str] = {}
    done = [0]

    @seed(number)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(inputs(number))
    def read(drawn: Input) -> None:
        kind, chosen = drawn
        done[0] += 1
        (folder / "now").write_text(json.dumps([target.name, kind, chosen]))
        signal.setitimer(signal.ITIMER_PROF, SECONDS_AN_INPUT)  # SIGPROF ends the process
        what = judge(target, kind, chosen, place)
        if what and what not in found:
            signal.setitimer(signal.ITIMER_PROF, SECONDS_AN_INPUT)
            found[what] = json.dumps([target.name, kind, fewer_edits(target, kind, chosen, place)])
        signal.setitimer(signal.ITIMER_PROF, 0)

    read()
    report.put((done[0], found, peak_memory(), peak_memory() - before))


def run_many(name: str, inputs: int, first: int = 0) -> dict[str, Any]:
    """Read so many hostile files in children, one after the other; return the figures."""
    context = multiprocessing.get_context("fork")
    figures: dict[str, Any] = {
        "inputs": 0,
        "seconds": 0.0,
        "peak": 0,
        "more": 0,
        "findings": {},
        "counts": Counter(),
    }
    scratch = Path(
        tempfile.mkdtemp(prefix="fuzz", dir=MEMORY_DISK if os.access(MEMORY_DISK, os.W_OK) else None)
    )
    target = make_target(name, scratch / "whole")
    if what := check_whole(target, scratch / "checked"):
        figures["findings"][what] = "as they are"
        figures["counts"][what] = 1
    _warm(target, scratch)
    start, number = time.monotonic(), first
    while figures["inputs"] < inputs:
        number += 1
        folder = scratch / f"child{number}"
        folder.mkdir()
        report = context.Queue()
        child = context.Process(
            target=run_child,
            args=(target, number, min(_TOGETHER, inputs - figures["inputs"]), folder, report),
        )
        child.start()
        result = None
        while result is None and (child.is_alive() or not report.empty()):
            with contextlib.suppress(Exception):
                result = report.get(timeout=0.2)
        child.join()
        if result is None:
            how = (
                signal.Signals(-child.exitcode).name
                if (child.exitcode or 0) < 0
                else f"status {child.exitcode}"
            )
            now = (folder / "now").read_text() if (folder / "now").exists() else "before the first"
            result = (_TOGETHER // 2, {f"ended by {how}": now}, 0, 0)
        figures["inputs"] += result[0]
        for what, sample in result[1].items():
            figures["findings"].setdefault(what, sample)
            figures["counts"][what] += 1
        figures["peak"], figures["more"] = max(figures["peak"], result[2]), max(figures["more"], result[3])
        shutil.rmtree(folder)
    figures["seconds"] = time.monotonic() - start
    shutil.rmtree(scratch)
    return figures


def _warm(target: Any, folder: Path) -> None:
    """Import what is imported late, and let hypothesis look at the sources, once for all children."""
    place = folder / "warm"
    place.mkdir()

    @settings(
        max_examples=50,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(inputs(0))
    def read(drawn: Input) -> None:
        judge(target, *drawn, place)

    read()


def peak_memory() -> int:
    """Return the most memory that this process has held, in bytes."""
    return int(re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[0]) * 1024


def _describe(error: BaseException) -> str:
    """Return a finding by its kind and place, the same for all inputs that meet it."""
    place = next(
        (
            frame
            for frame in reversed(traceback.extract_tb(error.__traceback__))
            if "protperf" in frame.filename and "/tests/" not in frame.filename
        ),
        traceback.extract_tb(error.__traceback__)[-1],
    )
    said = " ".join(re.sub(r"\d+|'[^']*'|/\S+", "_", str(error)).split())[:80]
    return f"{type(error).__name__} at {Path(place.filename).name}:{place.lineno}: {said}"


def main() -> int:
    """Run all targets; print the figures, then the findings with the numbers that make them again."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=200_000, help="hostile files in all (%(default)s)")
    parser.add_argument(
        "--target", choices=NAMES, action="append", help="one reader alone; may be given again"
    )
    parser.add_argument("--first", type=int, default=0, help="seed of the first child, less 1 (%(default)s)")
    options = parser.parse_args()
    names = options.target or NAMES
    failed = False
    print(f"{'reader':<12} {'inputs':>9} {'seconds':>8} {'peak MiB':>9} {'grown by':>9} findings", flush=True)
    for name in names:
        figures = run_many(name, -(-options.inputs // len(names)), options.first)
        peak, more = figures["peak"] >> 20, figures["more"] >> 20
        print(
            f"{name:<12} {figures['inputs']:>9,} {figures['seconds']:>8.0f} {peak:>9,} {more:>9,} {len(figures['findings'])}",
            flush=True,
        )
        for what, sample in figures["findings"].items():
            failed = True
            print(f"  {what} (in {figures['counts'][what]} children): {sample}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
