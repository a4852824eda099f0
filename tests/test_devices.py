"""What a device can do at most: data sheets by name, and a measured rate where there is none."""

from __future__ import annotations

import doctest
import math
from collections.abc import Iterator

import pytest
import torch
from lightning_fabric.utilities.throughput import _CUDA_FLOPS

from protperf import devices
from protperf.bench import measure
from protperf.devices import PEAKS, listed_flops, measured_flops, peak_flops

CPU = torch.device("cpu")
PRECISIONS = ("32-true", "bf16-mixed", "16-mixed")

NAMES = {
    "Tesla V100-SXM2-16GB": "V100",
    "Tesla V100-SXM2-32GB": "V100",
    "Tesla V100-PCIE-32GB": "V100 PCIE",
    "Tesla V100S-PCIE-32GB": "V100S",
    "Tesla T4": "T4",
    "NVIDIA A10": "A10",
    "NVIDIA A10G": "A10G",
    "NVIDIA A100-SXM4-40GB": "A100",
    "NVIDIA A100-SXM4-80GB": "A100",
    "NVIDIA A100 80GB PCIe": "A100",
    "NVIDIA L4": "L4",
    "NVIDIA L40": "L40",
    "NVIDIA L40S": "L40S",
    "NVIDIA GeForce RTX 3090": "RTX 3090",
    "NVIDIA GeForce RTX 3090 Ti": "RTX 3090 TI",
    "NVIDIA GeForce RTX 4090": "RTX 4090",
    "NVIDIA H100 80GB HBM3": "H100",
    "NVIDIA H100 PCIe": "H100 PCIE",
    "NVIDIA H100 NVL": "H100 NVL",
    "NVIDIA GH200 480GB": "GH200",
    "NVIDIA H200": "H200",
    "NVIDIA H200 NVL": "H200 NVL",
    "NVIDIA B200": "B200",
    "AMD Instinct MI250X": "MI250X",
    "AMD Instinct MI300X": "MI300X",
}

OTHERS = {
    "V100": "v100 sxm",
    "V100 PCIE": "v100 pcie",
    "V100S": "v100s pcie",
    "T4": "t4",
    "A100": "a100",
    "L4": "l4",
    "L40": "l40",
    "H100": "h100 sxm",
    "H100 PCIE": "h100 pcie",
}
"""Ours -> Lightning's name. Left out are entries of theirs with sparsity (H200, H100 NVL) or without tensor cores (RTX)."""


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)
    measured_flops.cache_clear()


def test_examples_in_docstrings_are_true():
    assert doctest.testmod(devices).failed == 0


def test_names_as_drivers_print_them_are_told_apart():
    assert set(NAMES.values()) == set(PEAKS)
    for name, entry in NAMES.items():
        assert listed_flops(name, "16-mixed") == 1e12 * PEAKS[entry].fp16, name


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 3080",
        "NVIDIA H20",
        "",
    ],
)
def test_a_part_or_a_slower_kin_of_a_gpu_is_not_taken_for_it(name: str):
    assert all(math.isnan(listed_flops(name, precision)) for precision in PRECISIONS)


@pytest.mark.parametrize("entry", OTHERS)
def test_figures_are_those_of_lightning(entry: str):
    other, own = _CUDA_FLOPS[OTHERS[entry]], PEAKS[entry]
    keys = {"float32": torch.float32, "tf32": "tfloat32", "bf16": torch.bfloat16, "fp16": torch.float16}
    for field, key in keys.items():
        expected = other.get(key, math.nan)
        assert 1e12 * getattr(own, field) == pytest.approx(expected, rel=1e-3, nan_ok=True)


def test_no_figure_counts_sparsity():
    """Every maker's 16-bit rate is twice that of TF32: a sparse figure in one column alone would be four times or the same."""
    for name, peak in PEAKS.items():
        if not math.isnan(peak.tf32):
            assert peak.bf16 == pytest.approx(2 * peak.tf32, rel=0.02), name
            assert peak.tf32 >= peak.float32


def test_float32_counts_tf32_only_where_torch_may_use_it():
    torch.set_float32_matmul_precision("highest")
    assert listed_flops("NVIDIA H100 PCIe", "32-true") == 51.2e12
    assert listed_flops("Tesla T4", "32-true") == 8.1e12
    torch.set_float32_matmul_precision("high")
    assert listed_flops("NVIDIA H100 PCIe", "32-true") == 378e12
    assert listed_flops("Tesla T4", "32-true") == 8.1e12  # has none


def test_a_type_without_units_of_its_own_is_measured(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    monkeypatch.setattr(devices, "measured_flops", lambda device, dtype: (device.type, dtype))
    gpu = torch.device("cuda", 0)
    assert peak_flops(gpu, "bf16-mixed") == ("cuda", torch.bfloat16)
    assert peak_flops(gpu, "16-mixed") == 65e12


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_cpu_is_measured_as_the_benchmarks_measure_it(precision: str):
    dtype = {"32-true": torch.float32, "bf16-mixed": torch.bfloat16}[precision]
    product = measure.matrix_product(dtype, CPU)
    measure.warm_up(product, device=CPU)
    seconds = min(measure.seconds_of(product, device=CPU) for _ in range(5))
    rate = peak_flops(CPU, precision)
    assert 1 / 3 < rate / (measure.MATMUL_FLOPS / seconds) < 3
    assert peak_flops(CPU, precision) == rate  # once a process
