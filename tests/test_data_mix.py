"""Several datasets mixed by weight: exact shares, each window once an epoch, one position, the same for all ranks."""

from __future__ import annotations

from collections import Counter
from functools import cache
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prepared import SAMPLE, read_fasta
from training import WINDOW, load_plain, prepared, protperf, small_dataset, train_small

from protperf.config import DataConfig, ObjectiveConfig, from_section
from protperf.data import MIX_BLOCK, TrainingOrder, WindowData, mix, mix_quotas
from protperf.formats.shards import ShardSet

SIZES = [700, 40, 9]
QUOTAS = mix_quotas([3, 2, 1])
CAUSAL = ObjectiveConfig(kind="causal")


@cache
def other_dataset(window: int = WINDOW) -> Path:
    """Prepare proteins of the sample that `small_dataset` does not hold."""
    records = [record for record in read_fasta(SAMPLE) if 40 <= len(record[1]) <= 100][100:130]
    return prepared(f"other-{window}", records, window=window, valid=0.1, test=0.1)


def order(*, rank: int = 0, world_size: int = 1, batch_size: int = 1, start: int = 0) -> TrainingOrder:
    return TrainingOrder(
        SIZES,
        quotas=QUOTAS,
        seed=4,
        batch_size=batch_size,
        rank=rank,
        world_size=world_size,
        start=lambda: start,
    )


def owners(windows: np.ndarray) -> np.ndarray:
    return np.searchsorted(np.cumsum(SIZES), windows, side="right")


@pytest.mark.parametrize(
    ("weights", "quotas"),
    [
        ([5.0], [65536]),
        ([1, 1], [32768, 32768]),
        ([1, 1, 1], [21846, 21845, 21845]),
        ([3, 1], [49152, 16384]),
        ([0.7, 0.2, 0.1], [45875, 13107, 6554]),  # 45875.2, 13107.2, 6553.6
        ([8_400_000, 40_000], [65225, 311]),  # 65225.4, 310.6
    ],
)
def test_quotas_are_whole_numbers_nearest_to_the_weights(weights: list[float], quotas: list[int]):
    assert mix_quotas(weights) == quotas
    assert mix_quotas([1e9 * weight for weight in weights]) == quotas


@given(st.lists(st.floats(0.001, 1.0), min_size=1, max_size=12))
def test_quotas_fill_the_block_and_are_off_by_less_than_one(weights: list[float]):
    quotas = mix_quotas(weights)
    assert sum(quotas) == MIX_BLOCK
    for weight, quota in zip(weights, quotas, strict=True):
        assert abs(quota - weight / sum(weights) * MIX_BLOCK) < 1


def test_a_weight_that_would_never_be_read_is_refused():
    with pytest.raises(ValueError, match=r"has 1e-06 of 1 .*, less than one sample in 65,536; give it more"):
        mix_quotas([0.999999, 0.000001])


@pytest.mark.parametrize("block", [0, 1, 77])
def test_each_block_holds_its_share_of_each_dataset(block: int):
    samples = np.arange(block * MIX_BLOCK, (block + 1) * MIX_BLOCK)
    datasets, numbers = mix(samples, QUOTAS, seed=1)
    for dataset, quota in enumerate(QUOTAS):
        mine = np.sort(numbers[datasets == dataset])
        np.testing.assert_array_equal(mine, np.arange(block * quota, (block + 1) * quota))


def test_short_stretches_hold_about_their_share():
    datasets, _ = mix(np.arange(64 * 1000), QUOTAS, seed=1)
    shares = (datasets.reshape(64, 1000) == 0).mean(1)
    # 1000 draws with chance 1/2 have a standard deviation of 0.0158
    assert abs(shares - 0.5).max() < 5 * 0.0158
    assert 0.7 < shares.std() / 0.0158 < 1.3


def test_blocks_and_seeds_have_orders_of_their_own():
    first = np.arange(MIX_BLOCK)
    seen = [mix(first + MIX_BLOCK * block, QUOTAS, seed=seed)[0] for seed in (1, 2) for block in (0, 1)]
    for one in range(4):
        for other in range(one):
            # equal in a place by chance: 1/4 + 1/9 + 1/36
            assert abs((seen[one] == seen[other]).mean() - 14 / 36) < 0.02


def test_all_windows_of_a_dataset_are_read_equally_often():
    keys = order().keys(np.arange(3 * MIX_BLOCK))
    windows = np.array([window for _, window in keys])
    for dataset, (size, quota) in enumerate(zip(SIZES, QUOTAS, strict=True)):
        counts = Counter(windows[owners(windows) == dataset].tolist())
        whole, rest = divmod(3 * quota, size)
        assert len(counts) == size
        assert set(counts.values()) <= {whole, whole + 1}
        assert sum(count == whole + 1 for count in counts.values()) == rest or rest == 0
    assert len(set(keys)) == len(keys)  # so no question is asked twice


def test_datasets_of_one_size_have_orders_of_their_own():
    twins = TrainingOrder(
        [100, 100], quotas=mix_quotas([1, 1]), seed=0, batch_size=1, rank=0, world_size=1, start=int
    )
    keys = twins.keys(np.arange(MIX_BLOCK))
    datasets, numbers = mix(np.arange(MIX_BLOCK), twins.quotas, seed=0)
    first = [
        {
            int(n): window % 100
            for (_, window), d, n in zip(keys, datasets, numbers, strict=True)
            if d == number
        }
        for number in (0, 1)
    ]
    same = sum(first[0][place] == first[1][place] for place in range(1000))
    assert same < 40  # 10 by chance


@pytest.mark.parametrize(("world_size", "batch_size"), [(2, 3), (4, 1), (3, 200)])
@pytest.mark.parametrize("start", [0, 5, MIX_BLOCK - 7, 10**9 + 1])
def test_ranks_and_starts_change_nothing(world_size: int, batch_size: int, start: int):
    expected = order().keys(np.arange(start, start + 6 * world_size * batch_size))
    ranks = [
        islice(iter(order(rank=rank, world_size=world_size, batch_size=batch_size, start=start)), 6)
        for rank in range(world_size)
    ]
    assert [key for step in zip(*ranks, strict=True) for batch in step for key in batch] == expected


def mixed_data(**options: Any) -> WindowData:
    defaults: dict[str, Any] = {
        "path": str(small_dataset()),
        "more_paths": (str(other_dataset()),),
        "batch_size": 4,
        "num_workers": 0,
    }
    return WindowData(DataConfig(**{**defaults, **options}), CAUSAL, seed=1)


def shown(data: WindowData, batches: int) -> list[bytes]:
    loader = islice(iter(data.train_dataloader()), batches)
    return [row.numpy().tobytes() for batch in loader for row in batch.inputs]


def test_windows_of_all_folders_are_shown_by_weight():
    stored = [ShardSet(folder, "train") for folder in (small_dataset(), other_dataset())]
    known = [{shards.read(index).tobytes() for index in range(len(shards))} for shards in stored]
    seen = shown(mixed_data(weights=(1.0, 3.0)), 500)
    assert set(seen) == known[0] | known[1]
    share = sum(row in known[1] for row in seen) / len(seen)
    assert abs(share - 0.75) < 5 * (0.75 * 0.25 / len(seen)) ** 0.5
    by_windows = mixed_data()
    assert by_windows.quotas == mix_quotas([len(shards) for shards in stored])


def test_workers_and_ranks_read_the_same_mix():
    whole = shown(mixed_data(), 24)
    assert shown(mixed_data(num_workers=1), 24) == whole
    ranks = []
    for rank in range(2):
        data = mixed_data()
        data.trainer = SimpleNamespace(global_rank=rank, world_size=2)
        rows = shown(data, 24)
        ranks.append([rows[first : first + 2] for first in range(0, len(rows), 2)])
    assert [row for step in zip(*ranks, strict=True) for batch in step for row in batch] == whole


def test_validation_is_that_of_the_first_folder():
    loader = mixed_data().val_dataloader()[0]
    assert sum(len(batch.inputs) for batch in loader) == len(ShardSet(small_dataset(), "valid"))


def test_folders_of_two_windows_are_mixed_when_cut_to_one():
    longer = str(other_dataset(window=96))
    with pytest.raises(ValueError, match=r"windows of 96 tokens.* have 64; .* data.context_length=32$"):
        mixed_data(more_paths=(longer,))
    data = mixed_data(more_paths=(longer,), context_length=32)
    assert {len(row) for row in shown(data, 10)} == {32}


def test_training_on_a_mix_goes_on_where_it_stopped(tmp_path: Path):
    mixture = (f"data.more_paths=['{other_dataset()}']", "data.weights=[1,2]", "data.context_length=32")
    _, whole = train_small(tmp_path / "whole", *mixture, "trainer.max_steps=9")
    _, first = train_small(tmp_path / "halves", *mixture, "trainer.max_steps=4")
    _, second = train_small(tmp_path / "halves", *mixture, "trainer.max_steps=9")
    assert first.inputs + second.inputs == whole.inputs
    assert first.losses + second.losses == whole.losses
    with pytest.raises(
        ValueError, match=r"cannot resume: .* weights \[0\.33.*\], this run has \[0\.5, 0\.5\]"
    ):
        train_small(tmp_path / "halves", *mixture, "data.weights=[1,1]", "trainer.max_steps=12")
    with pytest.raises(ValueError, match="context_length 32, this run has 16"):
        train_small(tmp_path / "halves", *mixture, "data.context_length=16", "trainer.max_steps=12")
    with pytest.raises(ValueError, match=r"cannot resume: .* more_digests"):
        train_small(tmp_path / "halves", "data.context_length=32", "trainer.max_steps=12")


@pytest.mark.slow
def test_the_command_line_mixes_and_attends_across_documents(tmp_path: Path):
    """`data.attend_across_documents` reaches the model: attention inside documents alone gives another loss."""
    losses = []
    for across in ("true", "false"):
        result = protperf(
            *("train", f"data.path={small_dataset()}", f"data.more_paths=['{other_dataset()}']"),
            *("data.weights=[2,1]", f"name=run-{across}", f"data.attend_across_documents={across}"),
            *("model=tiny", "trainer.max_steps=2", "trainer.accelerator=cpu", "data.num_workers=1"),
            cwd=tmp_path,
        )
        assert result.returncode == 0, result.stderr
        content = load_plain(next((tmp_path / "runs" / f"run-{across}" / "checkpoints").glob("step=*.ckpt")))
        assert content["protperf"]["attend_across_documents"] is (across == "true")
        assert content["callbacks"]["Position"]["weights"] == [43691 / 65536, 21845 / 65536]
        losses.append((tmp_path / "runs" / f"run-{across}" / "metrics.csv").read_text())
    assert losses[0] != losses[1]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"weights": [1.0, 2.0]}, r"weights is \[1\.0, 2\.0\]; allowed: none, or 1"),
        ({"more_paths": ["b"], "weights": [1.0]}, "weights .* or 2, one for path and each of more_paths"),
        ({"more_paths": ["b"], "weights": [1.0, 0.0]}, "weights .* allowed: numbers above 0"),
        ({"more_paths": ["b"], "weights": [1.0, -1.0]}, "weights .* allowed: numbers above 0"),
        ({"more_paths": ["b"], "weights": [1.0, float("nan")]}, "weights .* allowed: numbers above 0"),
        ({"more_paths": ["b"], "weights": [1.0, float("inf")]}, "weights .* allowed: numbers above 0"),
        ({"more_paths": ["a"]}, "more_paths .* each folder once"),
        ({"more_paths": ["b", "b"]}, "more_paths .* each folder once"),
        ({"context_length": -1}, "context_length is -1; allowed: at least 0"),
    ],
)
def test_a_mix_that_does_not_fit_is_refused_in_one_line(values: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message) as error:
        from_section(DataConfig, {"path": "a", **values})
    assert "\n" not in str(error.value)


def test_a_context_that_does_not_divide_the_window_is_refused():
    with pytest.raises(ValueError, match="windows of 64 tokens cannot be cut into windows of 48"):
        mixed_data(context_length=48)
