"""docs/cloud.md tells the truth: its costs are products, its hours follow from the work and the peaks that it names."""

from __future__ import annotations

import re
from functools import cache

import pytest
from conftest import REPOSITORY
from hydra import compose, initialize_config_module
from test_cluster_docs import TREMBL

from protperf.bench.presets import read_preset
from protperf.bench.scaling import ASKED, describe
from protperf.devices import PEAKS
from protperf.train import read_settings
from protperf.work import training_work

PAGE = (REPOSITORY / "docs" / "cloud.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE[PAGE.index("| where | machine |") :].split("\n\n")[0].splitlines()[2:]
]


@cache
def work_of_a_token() -> float:
    """Return the operations of `performer_36l`, forward and backward."""
    config = read_preset("performer_36l", [], num_layers=None)
    work = training_work(config, causal=False, documents=[[8192]], num_asked=round(ASKED * 8192))
    return (work.forward + work.backward) / 8192


def most_of(gpu: str) -> float:
    """Return the MFU that `performer_36l` can have at most."""
    config = read_preset("performer_36l", [], num_layers=None)
    return describe(config, window=8192, gpu=gpu, mfu=0.1).possible_mfu


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]}-{row[1]}-{row[2]}")
def test_a_pass_costs_what_the_table_says(row: list[str]):
    _, _, cost, gpus, peak, hours, price, day, hours_of_eight = row
    name = next(word for word in gpus.split() if word in ("A100", "H100", "H200"))
    one = TREMBL * work_of_a_token() / (0.1 * PEAKS[name].bf16 * 1e12) / 3600
    assert float(hours) == pytest.approx(one, rel=2e-3)
    assert float(peak) == pytest.approx(PEAKS[name].bf16, rel=1e-3)
    assert float(hours_of_eight) == pytest.approx(one / 8, rel=1e-2)
    assert float(cost.replace(",", "")) == pytest.approx(one * float(price), rel=5e-3)
    assert day.startswith("2026-")


def test_every_command_of_the_page_is_the_pass_that_it_prices():
    """And the decay of its learning rate ends with it."""
    commands = re.findall(r"experiment=trembl_masked_36l(?:[^`\n]|\n(?! *\n))*", PAGE)
    assert len(commands) == 4
    for command in commands:
        assert "trainer.max_steps=144800" in command
    for overrides, steps in (["trainer.max_steps=144800"], TREMBL / 64 / 8192), ([], 500_000):
        with initialize_config_module("protperf.conf", version_base="1.3"):
            settings = read_settings(compose("train", ["experiment=trembl_masked_36l", *overrides]))
        assert settings.trainer.max_steps == settings.optim.decay_steps == pytest.approx(steps, rel=1e-3)
        assert settings.data.batch_size == 64


def test_sums_in_the_text_are_right():
    text = " ".join(PAGE.split())
    cheapest, dearest = (limit(float(row[2].replace(",", "")) for row in ROWS) for limit in (min, max))
    assert f"({cheapest:,.0f} to {dearest:,.0f} dollars at" in " ".join(
        (REPOSITORY / "README.md").read_text().split()
    )
    passes = 500_000 * 64 * 8192 / TREMBL
    assert f"{passes:.2f} passes: {cheapest * passes:,.0f} to {dearest * passes:,.0f} USD instead of" in text
    assert f"instead of {cheapest:,.0f} to {dearest:,.0f}." in text
    checkpoint = 12.04 * 75_590_656
    for said, value, expected in (
        ("at 100 MB/s 9 s", 9, checkpoint / 100e6),
        ("1,000 steps of 363 ms are 363 s", 363, 1000 * 8 * 8192 * work_of_a_token() / (0.1 * 989.4e12)),
        ("lost on average, 182 s", 182, 363 / 2),
        ("an interruption an hour costs 5 %", 0.05, 182 / 3600),
        ("takes 0.25 % at 1 GB/s", 0.0025, checkpoint / 1e9 / 363),
        ("One H100 takes 116.6 hours for what eight take 14.6 for", 14.6, 116.6 / 8),
        ("More than 19.5 % (H100, H200)", 0.195, most_of("H100")),
        ("and 18.4 % (A100) is not possible", 0.184, most_of("A100")),
    ):
        assert said in text, said
        assert value == pytest.approx(expected, rel=2e-2), said
