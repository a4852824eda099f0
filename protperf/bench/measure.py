"""How things are measured: in turns, in medians, with the memory of a call and the machine's own rate beside them."""

from __future__ import annotations

import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from protperf import __version__

Call = Callable[[], object]
"""Something to be timed; what it returns is dropped."""

MATMUL = "1024^3 matrix product"
"""The contestant that says what the machine can do."""

MATMUL_FLOPS = 2 * 1024**3

UNREST = 2.0
"""Slowest over fastest matrix product of a run, from which on its numbers are not to be trusted."""

TURN_SECONDS = 0.02
"""Short calls are repeated within their turn until it lasts this long, about."""

_CPU_INFO = Path("/proc/cpuinfo")
_MEMORY_INFO = Path("/proc/meminfo")
_GROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_GROUP_USED = Path("/sys/fs/cgroup/memory.current")


def seconds_of(call: Call, *, device: torch.device, repeats: int = 1) -> float:
    """Return the seconds of one call, as the mean of some in a row."""
    _wait(device)
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    _wait(device)
    return (time.perf_counter() - start) / repeats


def warm_up(call: Call, *, device: torch.device) -> float:
    """Make the first call, and a second one if that was short; return the seconds of the last."""
    first = seconds_of(call, device=device)
    return first if first > 1 else seconds_of(call, device=device)


def plan_turns(warm: Mapping[str, float]) -> dict[str, int]:
    """Return how many calls make a turn of each contestant.

    Short calls fill `TURN_SECONDS`; the matrix product, which stands for the machine, a tenth of the longest call.

    >>> plan_turns({"a": 0.0008, "b": 3.0, MATMUL: 0.1})
    {'a': 25, 'b': 1, '1024^3 matrix product': 3}

    Args:
        warm: name -> seconds of a call.
    """
    turns = {name: TURN_SECONDS for name in warm}
    turns[MATMUL] = max(TURN_SECONDS, min(1.0, max(warm.values()) / 10))
    return {name: max(1, min(1000, math.ceil(turns[name] / max(warm[name], 1e-9)))) for name in warm}


def alternate(
    contestants: Mapping[str, Call],
    *,
    rounds: int,
    device: torch.device,
    repeats: Mapping[str, int] | None = None,
) -> dict[str, list[float]]:
    """Time contestants that are warm: in each round every one has its turn, in the order given.

    Args:
        contestants: name -> call.
        rounds: number of rounds, at least 1.
        device: waited for before and after each turn.
        repeats: name -> calls within a turn (1).

    Returns:
        name -> seconds of one call in each round.
    """
    samples: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, call in contestants.items():
            samples[name].append(seconds_of(call, device=device, repeats=(repeats or {}).get(name, 1)))
    return samples


def median(values: Sequence[float]) -> float:
    """Return the median; what is not a number counts as infinite."""
    return statistics.median(math.inf if math.isnan(value) else value for value in values)


def ratio(ours: Sequence[float], other: Sequence[float]) -> float | None:
    """Return our time over the other's: the median over rounds of the ratio within a round, `None` without rounds.

    Within a round both meet the same machine, so a slow spell of it cancels.

    >>> ratio([1.0, 50.0, 3.0], [2.0, 100.0, 4.0])
    0.5
    """
    return median([one / two for one, two in zip(ours, other, strict=True)]) if ours and other else None


def warn_of_unrest(product_rounds: Sequence[float]) -> str:
    """Return a warning if the matrix product was not equally fast in all rounds of a run, else nothing.

    Turns do not cancel what a rival for the same cores does to code of many short parallel parts: each of them waits for
    the thread that was put aside.

    >>> warn_of_unrest([0.01, 0.011, 0.013])
    ''
    """
    fastest, slowest = min(product_rounds, default=1.0), max(product_rounds, default=1.0)
    if slowest < UNREST * fastest:
        return ""
    return (
        f"WARNING: the {MATMUL} took between {1e3 * fastest:.3g} and {1e3 * slowest:.3g} ms: something else was running, "
        "which does not slow all contestants equally. Measure again on a quiet machine."
    )


def matrix_product(dtype: torch.dtype, device: torch.device) -> Call:
    """Return a call of `MATMUL_FLOPS` operations in one product of square matrices."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(1024, 1024, generator=generator).to(device, dtype) for _ in range(2))
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out)


def peak_allocated(call: Call, *, device: torch.device) -> int:
    """Return how far the bytes of tensors rise, during a call, above what was allocated before it.

    On CUDA the allocator keeps count. On a CPU the profiler notes each allocation and release of torch's allocator,
    and the highest running sum counts; what libraries take for themselves (packed matrices in a matrix product) is not
    seen. Run it apart from timing: noting takes time, and on a CPU the call has one thread (each further one has buffers
    of its own).
    """
    if device.type == "cuda":
        _wait(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        _wait(device)
        return torch.cuda.max_memory_allocated(device) - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # it talks on stderr otherwise
    activities = [torch.profiler.ProfilerActivity.CPU]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the profiler does not see what other threads allocate
    try:
        with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
            held = call()
    finally:
        torch.set_num_threads(threads)
    del held  # not before: a result counts
    assert profiler.profiler is not None
    recorded = profiler.profiler.kineto_results
    assert recorded is not None
    notes = [event for event in recorded.events() if event.name() == "[memory]"]
    total = peak = 0
    for event in sorted(notes, key=lambda event: event.start_ns()):
        total += event.nbytes()
        peak = max(peak, total)
    return peak


def forecast(points: Sequence[tuple[int, float]], length: int) -> float | None:
    """Extrapolate a cost to a longer length: a straight line on log axes through the last two points.

    The exponent is held between 1 and 2, that of exact attention, which is assumed where there is one point.

    >>> forecast([(256, 0.5), (512, 1.0)], 2048)
    4.0

    Args:
        points: (length, cost), in the order of length.
        length: where to look.

    Returns:
        `None` without a point.
    """
    if not points:
        return None
    last_length, last = points[-1]
    exponent = 2.0
    if len(points) > 1 and last > 0 and points[-2][1] > 0:
        before_length, before = points[-2]
        exponent = min(2.0, max(1.0, math.log(last / before) / math.log(last_length / before_length)))
    return last * (length / last_length) ** exponent


def free_bytes(device: torch.device) -> float:
    """Return the memory that a call may still take: infinite where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    found = [math.inf]
    if _MEMORY_INFO.exists():
        lines = _MEMORY_INFO.read_text().splitlines()
        found += [1024 * float(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    if _GROUP_LIMIT.exists() and (limit := _GROUP_LIMIT.read_text().strip()).isdigit():
        found.append(float(limit) - float(_GROUP_USED.read_text()))
    return min(found)


def is_out_of_memory(error: BaseException) -> bool:
    """Say whether an error is the machine's size and not a mistake; allocators of CPUs raise a plain `RuntimeError`."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "allocate memory" in str(error)


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Return what a reader of the numbers must know of the machine."""
    return {
        "protperf": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
        "kernels": "CUDA" if device.type == "cuda" else torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }


def headline(machine: Mapping[str, Any]) -> str:
    """Return the machine in one line."""
    return (
        f"{machine['device']} ({machine['kernels']}), {machine['threads']} threads, torch {machine['torch']}, "
        f"protperf {machine['protperf']}"
    )


def choose_bench_device(name: str) -> torch.device:
    """Return the device meant by `auto` (CUDA if it is there), `cpu` or `cuda`.

    Raises:
        ValueError: no such device here.
    """
    from protperf.devices import choose_device

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return choose_device(name)


def normal(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    """Draw float32 numbers from scale * N(0, 1) on the CPU, the same for the same seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def _processor() -> str:
    """Return the processor's name, as well as the system tells it."""
    if _CPU_INFO.exists():
        for line in _CPU_INFO.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
