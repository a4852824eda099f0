"""`protperf bench scaling`: the arithmetic of communication against numbers worked out by hand."""

from __future__ import annotations

import doctest
import json
from pathlib import Path

import pytest

from protperf.bench import scaling
from protperf.bench.__main__ import main
from protperf.bench.presets import read_preset
from protperf.bench.scaling import Links, Model, ddp_step, fsdp_step, possible_mfu
from protperf.devices import Peak
from protperf.work import Work, float32_work, training_work

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "cluster.md"

# 100 MB of gradients in 4 buckets of 25 MiB; a window is 1 s: 0.25 s forward, 0.75 s backward with what is done again
MODEL = Model(parameters=25_000_000, blocks=9, work=Work(10, 20, 10), tokens_per_second=1024.0, window=1024)
# 0.8 x 125 GB/s inside a node, 0.8 x 2 x 5 GB/s between nodes
LINKS = Links(inside=125e9, card=5e9, cards=2)


def test_examples_in_docstrings_are_true():
    assert doctest.testmod(scaling).failed == 0


def test_an_all_reduce_inside_a_node():
    step = ddp_step(MODEL, LINKS, gpus=8, windows=2, pieces=3)
    assert step.computing == 6.0
    assert step.sent_bytes == 2 * 7 / 8 * 100e6
    # 175 MB at 100 GB/s, and 4 buckets of 2 x 3 hops
    assert step.sending == pytest.approx(175e6 / 100e9 + 4 * 6 * 5e-6)
    # all but the last bucket goes while the third batch's 1.5 s of backward pass are computed
    assert step.open_seconds == pytest.approx(step.sending / 4)
    assert step.small == pytest.approx((1 + 1) * 6 * 5e-6)
    assert step.efficiency == pytest.approx(6 / (6 + step.sending / 4 + 12 * 5e-6))


def test_between_nodes_the_network_cards_of_a_node_are_the_limit():
    step = ddp_step(MODEL, LINKS, gpus=16, windows=1, pieces=1)
    assert step.sent_bytes == 2 * 15 / 16 * 100e6
    assert step.sending == pytest.approx(187.5e6 / 8e9 + 4 * 8 * 5e-6)
    many = Links(inside=125e9, card=100e9, cards=8)  # then it is NVLink again
    assert many.rate(16) == many.rate(8) == 100e9


def test_what_takes_longer_than_the_backward_pass_stays_open():
    slow = Links(inside=125e9, card=0.05e9, cards=1)  # 0.04 GB/s: 187.5 MB take 4.69 s
    step = ddp_step(MODEL, slow, gpus=16, windows=1, pieces=1)
    assert step.open_seconds == pytest.approx(187.5e6 / 0.04e9 + 4 * 8 * 5e-6 - 0.75)
    assert step.efficiency == pytest.approx(1 / (1 + step.open_seconds + 2 * 8 * 5e-6))


def test_shards_travel_three_times_in_every_batch():
    step = fsdp_step(MODEL, LINKS, gpus=8, windows=1, pieces=2)
    assert step.sent_bytes == 2 * 3 * 7 / 8 * 100e6
    gather = 87.5e6 / 100e9 + 10 * 7 * 5e-6  # 10 blocks of 7 hops
    assert step.sending == pytest.approx(2 * 3 * gather)
    # the first block's weights and the last one's gradients
    assert step.open_seconds == pytest.approx(2 * 2 * gather / 10)
    slow = Links(
        inside=0.125e9, card=5e9, cards=1
    )  # 0.1 GB/s: a gather takes 0.875 s, the passes 0.25 s and 0.75 s
    step = fsdp_step(MODEL, slow, gpus=8, windows=1, pieces=1)
    gather = 0.875 + 10 * 7 * 5e-6
    assert step.open_seconds == pytest.approx(gather - 0.25 + 2 * gather - 0.75)


def test_the_36_layer_performer_at_its_size(tmp_path: Path):
    """By hand, from docs/cluster.md: operations of a token, bytes of a step, hours of TrEMBL."""
    out = tmp_path / "numbers.json"
    assert (
        main(["scaling", "--gpus", "8", "512", "--json", str(out), "--plot", str(tmp_path / "figures")]) == 0
    )
    numbers = json.loads(out.read_text())
    assert numbers["parameters"] == 75_590_656
    weights = 36 * 2 * (4 * 512**2 + 2 * 512 * 1024)
    attention = 36 * 8 * 2 * 256 * 64
    scores = 0.15 * 2 * 512 * 36
    work = numbers["work_per_token"]
    assert work["forward"] == pytest.approx(weights + 4 * attention + scores, rel=1e-6)
    assert work["backward"] == pytest.approx(2 * weights + 6 * attention + 2 * scores, rel=1e-6)
    rate = 0.1 * 989.4e12 / (work["forward"] + work["backward"])
    assert numbers["tokens_per_second"] == pytest.approx(rate)
    node, most = numbers["steps"]["DDP, 8 cards"]
    assert node["computing"] == pytest.approx(8 * 8192 / rate)
    assert most["computing"] == pytest.approx(8192 / rate)
    assert most["sent_bytes"] == pytest.approx(2 * 511 / 512 * 4 * 75_590_656)
    assert [path.name for path in (tmp_path / "figures").iterdir()] == ["scaling.png"]


def test_the_tables_of_the_document_are_the_command_s(capsys: pytest.CaptureFixture[str]):
    assert main(["scaling"]) == 0
    printed = capsys.readouterr().out
    shown = [line.removeprefix("    ") for line in DOCUMENT.read_text().splitlines()]
    assert printed.strip() in "\n".join(line.rstrip() for line in shown)


def test_a_gpu_without_a_peak_is_told_in_one_line():
    with pytest.raises(ValueError, match="--gpu H900: not there; allowed: A10,") as caught:
        main(["scaling", "--gpu", "H900"])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "share_of_float32"),
    [
        ([], 16),  # products: 4 forward, all again, and 6 backward with 2 more again
        (["activation_checkpointing=false"], 12),  # only features are computed again
        (["activation_checkpointing=false", "softmax_layers=[0,1,2,3,4,5,6,7,8,9,10,11]"], 8),
    ],
)
def test_no_gpu_passes_its_float32(overrides: list[str], share_of_float32: int):
    """By hand: of `performer_36l` on a GPU of 10 TFLOP/s in bf16 and 1 in float32, in seconds for 10^12 tokens."""
    config = read_preset("performer_36l", overrides, num_layers=None)
    whole = training_work(config, causal=False, documents=[[8192]], num_asked=0)
    part = float32_work(config, causal=False, documents=[[8192]])
    assert sum(part) == 8192 * 36 * 8 * share_of_float32 * 2 * 256 * 64
    peak = Peak(float32=1.0, tf32=5.0, bf16=10.0, fp16=10.0)
    seconds = (sum(whole) - sum(part)) / 10 + sum(part)
    assert possible_mfu(whole, part, peak) == pytest.approx((whole.forward + whole.backward) / 10 / seconds)


def test_an_mfu_out_of_reach_is_refused_with_the_one_in_reach(capsys: pytest.CaptureFixture[str]):
    # 0.458 us of weights at 989.4 TFLOP/s, 0.114 again; 1.41 us of attention at 66.9, 0.85 again
    with pytest.raises(ValueError, match=r"--mfu 0\.2: out of reach of H100, .* allowed: at most 0\.195$"):
        main(["scaling", "--mfu", "0.2"])
    assert main(["scaling", "--mfu", "0.195", "--gpus", "8"]) == 0
    assert "x MFU 0.195 (at most 0.195) = " in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--gpus", "1"], ["--mfu", "0"], ["--rounds", "2"]])
def test_wrong_usage_exits_with_status_2(arguments: list[str]):
    with pytest.raises(SystemExit) as caught:
        main(["scaling", *arguments])
    assert caught.value.code == 2
