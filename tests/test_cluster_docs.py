"""docs/cluster.md tells the truth: its settings can be trained with, its sums are sums."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from conftest import REPOSITORY
from hydra import compose, initialize_config_module

from protperf.bench.presets import read_preset
from protperf.bench.scaling import describe, share_out
from protperf.train import read_settings

DOCS = (REPOSITORY / "docs" / "cluster.md").read_text()
TREMBL = 75.5e9 + 2 * 203e6
"""Residues, and <bos> and <eos> of each record."""
WINDOW = 8192


def rows_of(header: str) -> Iterator[list[str]]:
    """Yield the cells of the table that begins with a header, without it."""
    lines = DOCS[DOCS.index(header) :].split("\n\n")[0].splitlines()
    for line in lines[2:]:
        yield [cell.strip().strip("`") for cell in line.strip("|").split("|")]


def test_the_settings_of_each_number_of_gpus_can_be_trained_with():
    products = []
    for gpus, nodes, batch, windows, at_once, tokens, steps, strategy in rows_of("| GPUs | nodes x GPUs |"):
        num_nodes, devices = nodes.split(" x ")
        overrides = [f"data.batch_size={batch}", f"trainer.windows_at_once={at_once}"]
        overrides += [
            f"trainer.devices={devices}",
            f"trainer.num_nodes={num_nodes}",
            "trainer.accelerator=gpu",
        ]
        with initialize_config_module("protperf.conf", version_base="1.3"):
            config = compose("train", ["data.path=trembl", "model=performer_36l", strategy, *overrides])
        settings = read_settings(config)
        ranks = settings.trainer.devices * settings.trainer.num_nodes
        assert ranks == int(gpus)
        product = settings.data.batch_size
        assert product == ranks * int(windows)
        assert f"{product * WINDOW / 1e6:.2f}" == tokens
        assert int(steps.replace(",", "")) == pytest.approx(TREMBL / product / WINDOW, rel=3e-4)
        if ranks > 1:
            assert (int(windows), product) == share_out(ranks, at_once=8, at_most=512)
        products.append(product)
    assert products == sorted(products)


@pytest.mark.parametrize("row", list(rows_of("| MFU | tokens/s a GPU |")), ids=lambda row: row[0])
def test_an_epoch_costs_what_the_table_says(row: list[str]):
    share, rate, *hours = row
    config = read_preset("performer_36l", [], num_layers=None)
    model = describe(config, window=WINDOW, gpu="H100", mfu=int(share.removesuffix("%")) / 100)
    assert int(rate.replace(",", "")) == pytest.approx(model.tokens_per_second, rel=1e-3)
    one = TREMBL / model.tokens_per_second / 3600
    assert [float(each) for each in hours] == pytest.approx([one, one / 8, one / 64], rel=2e-2)


def test_sums_in_the_text_are_right():
    parameters = 75_590_656
    work = describe(
        read_preset("performer_36l", [], num_layers=None), window=WINDOW, gpu="H100", mfu=0.1
    ).work
    asked = work.forward + work.backward
    for text, value, expected in (
        ("P = 75,590,656 and f = 547.4 million", 547.4e6, asked),
        ("605 MB at most", 605e6, 2 * 4 * parameters),
        ("16 bytes a parameter, 1.2 GB", 1.2e9, 16 * parameters),
        ("910 MB for `performer_36l` (measured: 12.04 bytes a parameter)", 910e6, 12.04 * parameters),
        ("two are kept besides the best, 2.7 GB", 2.7e9, 3 * 12.04 * parameters),
        ("the 31 % of operations", 0.31, work.again / asked),
        ("17 % of `performer_36l`'s operations", 0.17, 36 * 8 * 10 * 2 * 256 * 64 / asked),
        ("numbers a token, 4.8 GB for 8 windows", 4.8e9, 36 * 512 * 4 * 8 * WINDOW),
        ("a pass over TrEMBL has only 18,100 steps", 18_100, TREMBL / (512 * WINDOW)),
        ("= 4.2e19", 4.2e19, TREMBL * asked),
        ("262 billion tokens, 3.5 epochs", 3.5, 500_000 * 64 * WINDOW / TREMBL),
        ("222 MB/s at 512 GPUs", 222e6, 512 * 433_800),
    ):
        assert text in " ".join(DOCS.split()), text
        assert value == pytest.approx(expected, rel=2e-2), text
