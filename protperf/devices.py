"""Which device a command computes on, checked before work starts, and what it can do at most."""

from __future__ import annotations

import math
import re
import statistics
import time
from functools import cache
from typing import NamedTuple

import torch


class Peak(NamedTuple):
    """Dense products of matrices on one GPU, in 10^12 operations a second; NaN: no units for that type.

    Attributes:
        float32: without TF32.
        tf32: float32 rounded to TF32.
        bf16: bfloat16, sums in float32.
        fp16: float16, sums in float32.
    """

    float32: float
    tf32: float
    bf16: float
    fp16: float


PEAKS: dict[str, Peak] = {
    "V100 PCIE": Peak(14.0, math.nan, math.nan, 112.0),
    "V100": Peak(15.7, math.nan, math.nan, 125.0),
    "V100S": Peak(16.4, math.nan, math.nan, 130.0),
    "T4": Peak(8.1, math.nan, math.nan, 65.0),
    "A10": Peak(31.2, 62.5, 125.0, 125.0),
    "A10G": Peak(35.0, 35.0, 70.0, 70.0),
    "A100": Peak(19.5, 156.0, 312.0, 312.0),
    "L4": Peak(30.3, 60.0, 121.0, 121.0),
    "L40": Peak(90.5, 90.5, 181.0, 181.0),
    "L40S": Peak(91.6, 183.0, 362.0, 362.0),
    "RTX 3090": Peak(35.6, 35.6, 71.0, 71.0),
    "RTX 3090 TI": Peak(40.0, 40.0, 80.0, 80.0),
    "RTX 4090": Peak(82.6, 82.6, 165.2, 165.2),
    "H100 PCIE": Peak(51.2, 378.0, 756.0, 756.0),
    "H100 NVL": Peak(60.0, 417.7, 835.5, 835.5),
    "H100": Peak(66.9, 494.7, 989.4, 989.4),
    "GH200": Peak(66.9, 494.7, 989.4, 989.4),
    "H200 NVL": Peak(60.0, 417.7, 835.5, 835.5),
    "H200": Peak(66.9, 494.7, 989.4, 989.4),
    "B200": Peak(75.0, 1125.0, 2250.0, 2250.0),
    "MI250X": Peak(23.95, math.nan, 191.5, 191.5),
    "MI300X": Peak(163.4, 653.7, 1307.4, 1307.4),
}
"""Words of a name as `torch.cuda.get_device_name` prints it -> what the makers' data sheets say, without sparsity.

A name without a form (H100, V100) is that of the SXM module. A MI250X shows as two devices: this is one of them.
"""

_NOT_WHOLE = {"MIG", "LAPTOP", "D", "MAX"}
"""Words in the names of GPUs that are only a part or a slower kin of the one they are named after."""

PRECISIONS = ("fp32", "bf16", "fp16")
"""Of a trained model's computations, as commands and the API name them."""

_TYPES = {"32-true": torch.float32, "bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
_PRODUCT_SECONDS = 0.05


def choose_device(name: str, *, precision: str = "fp32") -> torch.device:
    """Return the device meant by `auto`, `cpu`, `cuda`, `cuda:N` or `mps`; `auto` takes a GPU if there is one.

    Args:
        name: as the user gave it.
        precision: `fp32`, `bf16` or `fp16`: what is to be computed in.

    Raises:
        ValueError: no such device here, or it does not compute in that precision; one line that says what there is.
    """
    available = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    if torch.backends.mps.is_available():
        available.append("mps")
    if name == "auto":
        wanted = available[1] if len(available) > 1 else "cpu"
    else:
        wanted = "cuda:0" if name == "cuda" else name
    if wanted not in available:
        raise ValueError(f"--device {name}: not here; there is: {', '.join(available)}")
    device = torch.device(wanted)
    _check_precision(device, precision)
    return device


def _check_precision(device: torch.device, precision: str) -> None:
    """Refuse a precision that a device does not compute in, before any work."""
    if precision not in PRECISIONS:
        raise ValueError(f"precision {precision!r}: no such one; allowed: {', '.join(PRECISIONS)}")
    if precision == "fp16" and device.type == "cpu":
        raise ValueError("--precision fp16: not on a CPU, which takes fp32 and bf16; --device cuda for fp16")
    if precision == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported():
        name = torch.cuda.get_device_name(device)
        raise ValueError(f"--precision bf16: {name} has no units for it; allowed there: fp32, fp16")


def peak_flops(device: torch.device, precision: str) -> float:
    """Return the operations a second that products of matrices reach at most on one device.

    Of a GPU in `PEAKS` the data sheet's dense figure. Of any other device, a CPU among them, the measured rate of a
    square product in that type on the threads that torch has now (1024 wide on a CPU, 8192 on others; measured once a
    process, about 50 ms): which is what the machine gives, not what its maker promises.

    32-true counts TF32 only where torch may use it (`torch.set_float32_matmul_precision`). Linear attention computes in
    float32 under every precision, so a model does not reach the figure of the 16-bit types.

    Args:
        device: as of a tensor.
        precision: `32-true`, `bf16-mixed` or `16-mixed`, as in training.
    """
    known = math.nan
    if device.type == "cuda":
        known = listed_flops(torch.cuda.get_device_name(device), precision)
    if math.isnan(known):
        return measured_flops(device, _TYPES[precision])
    return known


def listed_flops(name: str, precision: str) -> float:
    """Return a GPU's dense peak by its name, in operations a second; NaN if it is not in `PEAKS`.

    >>> listed_flops("NVIDIA H100 80GB HBM3", "bf16-mixed") / 1e12
    989.4
    """
    words = set(re.split(r"[\s/-]+", name.upper()))
    fitting = [each for each in PEAKS if set(each.split()) <= words]
    if not fitting or words & _NOT_WHOLE:
        return math.nan
    peak = PEAKS[max(fitting, key=lambda each: len(each.split()))]
    if precision != "32-true":
        return 1e12 * (peak.bf16 if precision == "bf16-mixed" else peak.fp16)
    rounds = torch.get_float32_matmul_precision() != "highest" and not math.isnan(peak.tf32)
    return 1e12 * (peak.tf32 if rounds else peak.float32)


@cache
def measured_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the operations a second of a square product of matrices: the median of some in a row."""
    width = 1024 if device.type == "cpu" else 8192
    a, b = (torch.ones(width, width, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    _product_seconds(a, b, out)  # the first is slower
    count = 1 + 2 * min(10, round(_PRODUCT_SECONDS / 2 / max(1e-9, _product_seconds(a, b, out))))
    seconds = [_product_seconds(a, b, out) for _ in range(count)]
    return 2 * width**3 / statistics.median(seconds)


def _product_seconds(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> float:
    start = time.perf_counter()
    torch.mm(a, b, out=out)
    out[-1, -1].item()  # waits for a GPU
    return time.perf_counter() - start
