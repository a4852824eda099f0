"""How benchmarks measure: turns, medians, memory, arithmetic and crossovers against counts made by hand or by torch."""

from __future__ import annotations

import doctest
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from protperf.bench import error, measure, report
from protperf.bench.attention import draw_inputs, extra_bytes, too_much
from protperf.bench.attention_tables import PASSES, Cell, crossover, find_crossovers
from protperf.bench.contestants import PACKED, Setting, cut, documents_of, gather
from protperf.bench.model import X_LINE, Trainee, step_flops
from protperf.bench.presets import draw_question, read_preset
from protperf.bench.replaced import attention_replaced, average_values, return_values
from protperf.model import ProteinModel
from protperf.work import attention_work

CPU = torch.device("cpu")
MIB = 2**20
TINY = ("model_dim=16", "num_heads=2", "feedforward_dim=24", "num_features=8")


@pytest.mark.parametrize("module", [measure, report])
def test_examples_in_docstrings_are_true(module):
    found = doctest.testmod(module)
    assert found.attempted > 0
    assert found.failed == 0


# turns and medians


def test_contestants_alternate():
    played: list[str] = []
    contestants = {name: lambda name=name: played.append(name) for name in "abc"}
    samples = measure.alternate(contestants, rounds=3, device=CPU, repeats={"b": 2})
    assert "".join(played) == "abbcabbcabbc"
    assert {name: len(rounds) for name, rounds in samples.items()} == {"a": 3, "b": 3, "c": 3}


def test_a_turn_counts_the_seconds_of_one_call(monkeypatch: pytest.MonkeyPatch):
    clock = iter([10.0, 16.0, 20.0, 21.0])
    monkeypatch.setattr(measure.time, "perf_counter", lambda: next(clock))
    samples = measure.alternate({"a": list, "b": list}, rounds=1, device=CPU, repeats={"a": 3})
    assert samples == {"a": [2.0], "b": [1.0]}


def test_a_disturbed_round_does_not_move_the_median():
    assert measure.median([2.0, 900.0, 1.0]) == 2.0
    assert measure.median([2.0, 1.0, 4.0, 900.0]) == 3.0
    assert measure.median([math.nan, 1.0, math.nan]) == math.inf


def test_a_slow_spell_of_the_machine_cancels_in_a_ratio():
    assert measure.ratio([1.0, 70.0, 2.0], [2.0, 140.0, 4.0]) == 0.5
    assert measure.ratio([], [1.0]) is None


def test_a_busy_machine_is_told():
    assert measure.warn_of_unrest([]) == ""
    assert measure.warn_of_unrest([0.010, 0.019]) == ""
    assert "took between 10 and 25 ms" in measure.warn_of_unrest([0.010, 0.025, 0.011])


def test_growth_is_extrapolated_on_log_axes():
    assert measure.forecast([], 512) is None
    assert measure.forecast([(256, 3.0)], 512) == pytest.approx(12.0)  # unknown: as exact attention
    assert measure.forecast([(1, 7.0), (256, 1.0), (512, 2**1.5)], 2048) == pytest.approx(2**4.5)
    assert measure.forecast([(256, 1.0), (512, 99.0)], 1024) == pytest.approx(4 * 99.0)  # a disturbed point
    assert measure.forecast([(256, 2.0), (512, 1.0)], 1024) == pytest.approx(2.0)  # never falling
    assert measure.forecast([(256, 0.0), (512, 0.0)], 1024) == 0.0


def test_what_would_take_too_long_or_too_much_is_left_out_with_a_reason(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(measure, "free_bytes", lambda device: 3000.0)
    before = [
        Cell("a", "causal", "forward", length, rounds=(9.0, length / 512), extra_bytes=length)
        for length in (256, 512)
    ]
    assert too_much(before, 1024, budget=3, device=CPU) == ""
    assert too_much(before, 2048, budget=3, device=CPU) == "one call would take about 4 s, above --budget 3"
    heavy = too_much(before, 4096, budget=99, device=CPU)
    assert heavy == "a call would take about 4.1 kB of memory, 3 kB are free"
    assert too_much([], 10**9, budget=1e-9, device=CPU) == ""


# memory


def test_the_memory_meter_finds_known_allocations():
    before = torch.empty(7 * MIB, dtype=torch.uint8)

    def call() -> torch.Tensor:
        first, second = (torch.empty(size * MIB, dtype=torch.uint8) for size in (3, 4))
        del first
        third = torch.empty(2 * MIB, dtype=torch.uint8)
        del second
        return third + before[: 2 * MIB]

    assert measure.peak_allocated(call, device=CPU) == 7 * MIB
    assert measure.peak_allocated(lambda: before.add_(1), device=CPU) < 64  # a scalar


def test_what_a_backward_pass_keeps_and_makes_counts():
    x = torch.zeros(MIB // 4, requires_grad=True)  # 1 MiB
    # alive together at the peak: exp (kept and given), its square kept for nothing else, the gradient of the sum
    peak = measure.peak_allocated(lambda: x.exp().exp().sum().backward(), device=CPU)
    assert 3 * MIB <= peak <= 5 * MIB


@pytest.mark.parametrize("passes", PASSES)
def test_inputs_outputs_and_gradients_are_not_extra(passes: str):
    inputs = draw_inputs(Setting(heads=2, head_dim=16), Cell("", "causal", passes, 256))

    def add(q, k, v):
        return (q + k) + v  # one tensor beside the result

    extra = extra_bytes(lambda: inputs.attend(add), inputs, CPU)
    assert extra == (inputs.v.nbytes if passes == PASSES[0] else 0)  # gradients come when the sum is gone
    assert extra_bytes(lambda: inputs.attend(return_values), inputs, CPU) == 0


# arithmetic


@pytest.mark.parametrize("feedforward", ["gelu", "swiglu"])
def test_a_training_step_without_attention_does_what_torch_counts(feedforward: str):
    config = read_preset("tiny", [*TINY, f"feedforward={feedforward}"], num_layers=3)
    question = draw_question(batch=2, length=40, packed=0, seed=0, device=CPU)
    trainee = Trainee(config, question, precision="32-true")
    with FlopCounterMode(display=False) as counter:
        trainee.step_without_attention()
    assert step_flops(config, question, kind=X_LINE) == counter.get_total_flops()
    head = {"causal": False, "documents": [40], "head_dim": 8}
    one = attention_work("relu", rows=8, **head)
    whole = step_flops(config, question, kind="relu")
    assert whole - counter.get_total_flops() == 2 * 2 * 3 * (one.forward + one.backward)


# crossovers


def test_crossover_of_straight_lines_on_log_axes_is_exact():
    """Exact attention takes L^2, the other one 700 L: they meet at 700."""
    lengths = [256, 512, 1024, 2048]
    assert crossover({length: 700 / length for length in lengths}) == pytest.approx(700)
    assert crossover({length: 512 / length for length in lengths}) == pytest.approx(512)


def test_crossover_outside_of_what_was_measured():
    assert crossover({256: 0.5, 512: 0.25}) == 0
    assert crossover({256: 2.0, 512: 1.1}) == math.inf
    assert crossover({}) is None


def test_only_the_last_crossing_counts():
    """Faster, slower, faster: what holds for all that follows. Ratios 2 and 1/2 meet half-way."""
    assert crossover({256: 0.5, 512: 2.0, 1024: 0.5}) == pytest.approx(512 * 2**0.5)


def test_packed_rows_cross_packed_exact_attention():
    place = {"direction": "causal", "passes": "forward"}
    times = {
        "SDPA": (1, 4),
        "SDPA, packed": (8, 32),
        "favor": (2, 2),
        "favor, packed": (16, 16),
        "X line": (1, 1),
    }
    cells = [
        Cell(name, **place, length=length, rounds=(seconds, seconds))
        for name, both in times.items()
        for length, seconds in zip((256, 512), both, strict=True)
    ]
    found = {each["contestant"]: each["length"] for each in find_crossovers(cells)}
    assert found == pytest.approx({"favor": 256 * 2**0.5, "favor, packed": 256 * 2**0.5})


# contestants


def test_documents_fill_the_window():
    for length, number in ((64, 1), (64, 5), (64, 64)):
        sizes = cut(length, number, seed=3)
        assert len(sizes) == number
        assert min(sizes) >= 1
        assert sum(sizes) == length
    documents = documents_of(Setting(batch=2, packed=5, seed=3), 64)
    assert documents.dtype == torch.int32
    for row in documents:
        assert row.unique_consecutive(return_counts=True)[1].tolist() == cut(64, 5, seed=3)


def test_all_do_the_same_work_at_their_own_price():
    setting = Setting(heads=2, head_dim=8, num_features=16, packed=3)
    inputs = draw_inputs(setting, Cell("", "causal", PASSES[1], 48))
    found = {each.name: each for each in gather(setting, causal=True, length=48)}
    for name, each in found.items():
        if name not in ("trig", "trig" + PACKED):  # whose rows may sum to nearly nothing
            assert inputs.attend(each.attend).isfinite().all(), name
            assert inputs.q.grad is not None or name == X_LINE
    q, k, v = inputs.q, inputs.k, inputs.v
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert torch.equal(found["SDPA"].attend(q, k, v), exact)
    assert torch.equal(found[X_LINE].attend(q, k, v), v)


# replaced attention


def test_attention_is_replaced_for_a_while_only():
    config = replace(
        read_preset("tiny", [*TINY, "attention=softmax"], num_layers=2), activation_checkpointing=True
    )
    model = ProteinModel(config, causal=False)
    tokens = torch.arange(20).reshape(2, 10)
    before = model(tokens)
    with attention_replaced(return_values):
        model(tokens).sum().backward()
    weight = model.blocks[0].attention.qkv.weight
    of_q, of_k, of_v = weight.grad.unflatten(0, (3, -1))
    assert not of_q.any()
    assert not of_k.any()
    assert of_v.any()
    assert torch.equal(model(tokens), before)


def test_approximations_and_the_null_are_compared_with_softmax_itself():
    """The model that attends exactly, in float64 by the formula, is the softmax model; the null is the mean of v."""
    options = SimpleNamespace(heads=2, head_dim=8, layers=3, length=30)
    model, tokens = error.draw_model(options, seed=1, device=CPU)
    states = error.hidden_states(model, tokens, error.exact_attention)
    assert len(states) == 3
    with torch.inference_mode():
        torch.testing.assert_close(model.norm(states[-1]), model(tokens), rtol=1e-5, atol=1e-5)
    uniform = error.hidden_states(model, tokens, average_values)
    assert error.relative_error(uniform[-1], states[-1]) > 1e-4


def test_mean_pair_square_is_the_mean_over_pairs():
    q, k = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 5, 4)
    pairs = (q.unsqueeze(3) + k.unsqueeze(2)).square().sum(-1) / 2  # K^(1/2) = 2
    torch.testing.assert_close(error.mean_pair_square(q, k), pairs.mean((0, 2, 3)))


def test_relative_error_by_hand():
    assert error.relative_error(torch.tensor([3.0, 0.0]), torch.tensor([3.0, 4.0])) == pytest.approx(0.8)
