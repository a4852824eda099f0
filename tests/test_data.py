"""Which window is read when: one global order, whatever the number of ranks, workers and starts."""

from __future__ import annotations

import json
import pickle
import shutil
import subprocess
import sys
from itertools import islice
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from training import WINDOW, small_dataset

from protperf.batches import Batch
from protperf.config import DataConfig, ObjectiveConfig
from protperf.data import (
    MIX_BLOCK,
    NO_WINDOW,
    Position,
    QuestionDataset,
    ReadingError,
    TrainingOrder,
    WindowData,
    evaluation_keys,
)
from protperf.formats.shards import ShardSet
from protperf.objectives import NOT_ASKED, ask, question_generator
from protperf.vocab import VOCABULARY

MASKED = ObjectiveConfig()
Key = tuple[int, int]


def order(*, rank: int = 0, world_size: int = 1, batch_size: int = 3, start: int = 0, n: int = 17) -> Any:
    return TrainingOrder(
        [n], seed=4, batch_size=batch_size, rank=rank, world_size=world_size, start=lambda: start
    )


def global_sequence(count: int, *, world_size: int, batch_size: int, start: int = 0) -> list[Key]:
    """Return what all ranks see, in order: batch by batch, rank by rank."""
    ranks = [
        order(rank=r, world_size=world_size, batch_size=batch_size, start=start) for r in range(world_size)
    ]
    steps = zip(*map(iter, ranks), strict=True)
    keys = (key for step in steps for batch in step for key in batch)
    return list(islice(keys, count))


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("batch_size", [1, 3, 5, 40])
def test_all_ranks_together_see_one_sequence(world_size: int, batch_size: int):
    assert global_sequence(200, world_size=world_size, batch_size=batch_size) == global_sequence(
        200, world_size=1, batch_size=1
    )


def test_each_epoch_holds_each_window_once_in_an_order_of_its_own():
    keys = global_sequence(17 * 6, world_size=1, batch_size=1)
    epochs = [keys[17 * e : 17 * e + 17] for e in range(6)]
    for number, epoch in enumerate(epochs):
        assert {e for e, _ in epoch} == {number}
        assert sorted(window for _, window in epoch) == list(range(17))
    assert len({tuple(window for _, window in epoch) for epoch in epochs}) == 6


@given(st.integers(0, 60), st.integers(1, 4), st.integers(1, 7))
def test_going_on_from_any_sample_gives_the_rest(start: int, world_size: int, batch_size: int):
    whole = global_sequence(120, world_size=1, batch_size=1)
    rest = global_sequence(120 - start, world_size=world_size, batch_size=batch_size, start=start)
    assert rest == whole[start:]


def test_every_batch_is_full_across_the_end_of_an_epoch():
    assert [len(batch) for batch in islice(iter(order(batch_size=5, n=7)), 20)] == [5] * 20
    assert len({*global_sequence(20, world_size=1, batch_size=1)}) == 20


def test_the_order_is_the_one_that_older_checkpoints_stopped_in():
    """Kept from the first version: a run begun with it must go on as it would have."""
    keys = TrainingOrder([1000], seed=3, batch_size=1, rank=0, world_size=1, start=int).keys(
        np.array([0, 1, 2, 999, 1000, 123_456_789])
    )
    assert keys == [(0, 253), (0, 26), (0, 17), (0, 296), (1, 851), (123_456, 730)]


def position(**changes: Any) -> Position:
    fixed = {"seed": 7, "context_length": 8, "digests": ["d"], "quotas": [MIX_BLOCK], "num_windows": 17}
    return Position(**{**fixed, **changes})


def test_the_start_is_asked_when_iteration_begins():
    there = position()
    later = TrainingOrder([17], seed=4, batch_size=3, rank=0, world_size=1, start=there.start)
    there.load_state_dict({**there.state_dict(), "samples": 31})
    assert next(iter(later)) == next(iter(order(start=31)))


@pytest.mark.parametrize("world_size", [1, 2, 3, 16])
@pytest.mark.parametrize("num_windows", [1, 5, 16])
def test_ranks_share_an_evaluation_out_without_repeats(num_windows: int, world_size: int):
    shares = [evaluation_keys(num_windows, rank=r, world_size=world_size) for r in range(world_size)]
    windows = [window for share in shares for _, window in share if window != NO_WINDOW]
    assert sorted(windows) == list(range(num_windows))
    assert len({len(share) for share in shares}) == 1  # sums over ranks need all of them each time
    assert len({epoch for share in shares for epoch, _ in share}) == 1


def window_data(**options: Any) -> WindowData:
    defaults: dict[str, Any] = {"path": str(small_dataset()), "batch_size": 4, "num_workers": 0}
    return WindowData(DataConfig(**{**defaults, **options}), MASKED, seed=1)


def batches_of(loader: Any, count: int) -> list[Batch]:
    return list(islice(iter(loader), count))


# torch warns where workers are more than cores
@pytest.mark.filterwarnings("ignore:This DataLoader will create 8 worker processes:UserWarning")
@pytest.mark.parametrize("num_workers", [1, pytest.param(8, marks=pytest.mark.slow)])
def test_workers_change_nothing(num_workers: int):
    alone = batches_of(window_data(num_workers=0).train_dataloader(), 30)
    shared = batches_of(window_data(num_workers=num_workers).train_dataloader(), 30)
    for one, other in zip(alone, shared, strict=True):
        assert one.inputs.equal(other.inputs)
        assert one.targets.equal(other.targets)


def test_ranks_cut_the_loaders_sequence(monkeypatch: pytest.MonkeyPatch):
    whole = np.concatenate([batch.inputs for batch in batches_of(window_data().train_dataloader(), 24)])
    for world_size in (2, 4):
        ranks = []
        for rank in range(world_size):
            data = window_data()
            data.trainer = SimpleNamespace(global_rank=rank, world_size=world_size)
            ranks.append(batches_of(data.train_dataloader(), 24))
        seen = [batch.inputs for step in zip(*ranks, strict=True) for batch in step]
        np.testing.assert_array_equal(np.concatenate(seen), whole)


def test_an_epoch_of_training_shows_each_window_of_the_shards_once():
    shards = ShardSet(small_dataset(), "train")
    data = WindowData(
        DataConfig(path=str(small_dataset()), batch_size=1, num_workers=0),
        ObjectiveConfig(kind="causal"),
        seed=1,
    )
    seen = [batch.inputs[0].numpy().tobytes() for batch in batches_of(data.train_dataloader(), len(shards))]
    assert sorted(seen) == sorted(shards.read(index).tobytes() for index in range(len(shards)))


def test_validation_shows_each_window_once_and_the_same_questions_each_time():
    data = window_data(valid_sets=("valid", "test"), batch_size=3)
    loaders = data.val_dataloader()
    assert len(loaders) == 2
    for name, loader in zip(("valid", "test"), loaders, strict=True):
        shards = ShardSet(small_dataset(), name)
        first, second = list(loader), list(loader)
        assert sum(len(batch.inputs) for batch in first) == len(shards)
        for one, other in zip(first, second, strict=True):
            assert one.inputs.equal(other.inputs)
            assert one.targets.equal(other.targets)
        restored = np.concatenate(
            [np.where(batch.targets == NOT_ASKED, batch.inputs, batch.targets) for batch in first]
        )
        np.testing.assert_array_equal(restored, shards.read_many(range(len(shards))))


def test_at_most_the_given_number_of_validation_windows_is_read():
    loader = window_data(valid_windows=5, batch_size=2).val_dataloader()[0]
    assert [len(batch.inputs) for batch in loader] == [2, 2, 1]
    everything = window_data(valid_windows=10**6).val_dataloader()[0]
    manifest = json.loads((small_dataset() / "manifest.json").read_text())
    assert sum(len(batch.inputs) for batch in everything) == manifest["splits"]["valid"]["windows"]


def test_a_rank_without_a_window_is_asked_nothing_and_all_ranks_together_everything():
    def questions(rank: int, world_size: int) -> list[Batch]:
        data = window_data(valid_windows=3, batch_size=4)
        data.trainer = SimpleNamespace(global_rank=rank, world_size=world_size)
        return list(data.val_dataloader()[0])

    (whole,) = questions(0, 1)
    ranks = [questions(rank, 4) for rank in range(4)]
    assert [len(batches) for batches in ranks] == [1] * 4
    for row, (batch,) in enumerate(ranks[:3]):
        assert batch.inputs.equal(whole.inputs[row : row + 1])
        assert batch.targets.equal(whole.targets[row : row + 1])
    (nothing,) = ranks[3]
    assert nothing.inputs.eq(VOCABULARY.pad).all()
    assert nothing.targets.eq(NOT_ASKED).all()


def test_batches_are_bytes_of_whole_windows():
    batch = next(iter(window_data().train_dataloader()))
    assert isinstance(batch, Batch)
    assert str(batch.inputs.dtype) == str(batch.targets.dtype) == "torch.uint8"
    assert batch.inputs.shape == batch.targets.shape == (4, WINDOW)


def test_a_question_set_may_be_pickled():
    shards = ShardSet(small_dataset(), "train")
    dataset = QuestionDataset(shards, MASKED, seed=0, evaluation=False)
    keys = [(0, 3), (5, 1)]
    for one, other in zip(dataset[keys], pickle.loads(pickle.dumps(dataset))[keys], strict=True):
        assert one.equal(other)


@pytest.mark.parametrize("kind", ["masked", "causal"])
def test_a_batch_is_the_questions_of_its_windows(kind: str):
    shards, objective = ShardSet(small_dataset(), "train"), ObjectiveConfig(kind=kind)
    keys = [(0, 3), (2, 0), (0, 3), (7, 5)]
    batch = QuestionDataset(shards, objective, seed=9, evaluation=False)[keys]
    for place, (epoch, window) in enumerate(keys):
        generator = question_generator(9, epoch=epoch, window=window)
        inputs, targets = ask(shards.read(window), objective, generator)
        np.testing.assert_array_equal(batch.inputs[place], inputs)
        np.testing.assert_array_equal(batch.targets[place], targets)


def test_a_batch_travels_by_value_and_may_be_changed():
    batch = next(iter(window_data().train_dataloader()))
    arrived = pickle.loads(ForkingPickler.dumps(batch))
    assert isinstance(arrived, Batch)
    for one, other in zip(batch, arrived, strict=True):
        assert one.equal(other)
        assert not other.is_shared()
    arrived.inputs.zero_()
    assert batch.inputs.any()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_damage_is_told_in_one_line_by_workers_too(num_workers: int, tmp_path: Path):
    folder = Path(shutil.copytree(small_dataset(), tmp_path / "data"))
    data = window_data(path=str(folder), num_workers=num_workers)
    (entry,) = data.train_shards.sets[0].manifest.shards_of("train")
    content = bytearray((folder / entry.file).read_bytes())
    content[entry.offset : entry.offset + 16 * WINDOW] = b"\xc8" * 16 * WINDOW
    (folder / entry.file).write_bytes(content)
    with pytest.raises(
        ReadingError,
        match=rf"^{folder / entry.file}: window \d+ holds 200, which is no token: damaged; [^\n]*$",
    ):
        batches_of(data.train_dataloader(), 100)


def test_a_shorter_context_shows_each_piece_of_each_window_once():
    stored = ShardSet(small_dataset(), "train")
    whole = stored.read_many(range(len(stored)))
    data = WindowData(
        DataConfig(path=str(small_dataset()), batch_size=1, num_workers=0, context_length=16),
        ObjectiveConfig(kind="causal"),
        seed=1,
    )
    assert (data.window, len(data.train_shards)) == (16, len(stored) * WINDOW // 16)
    seen = [
        b.inputs[0].numpy().tobytes() for b in batches_of(data.train_dataloader(), len(data.train_shards))
    ]
    assert sorted(seen) == sorted(piece.tobytes() for piece in whole.reshape(-1, 16))
    assert {batch.inputs.shape[1] for batch in data.val_dataloader()[0]} == {16}


_FLAT = """
import sys
from pathlib import Path
from protperf.config import DataConfig, ObjectiveConfig
from protperf.data import WindowData

def resident():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))

config = DataConfig(path=sys.argv[1], batch_size=50, num_workers=0)
loader = iter(WindowData(config, ObjectiveConfig(), seed=1).train_dataloader())
for count in range(1, 4001):
    next(loader)
    if count in (200, 4000):
        print(resident())
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="needs /proc to see memory")
def test_memory_is_flat_over_200000_windows():
    command = [sys.executable, "-c", _FLAT, str(small_dataset())]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    early, late = map(int, result.stdout.split())
    assert late < 1.05 * early


OTHER = {
    "seed": {"seed": 8},
    "num_windows": {"num_windows": 16},
    "digest": {"digests": ["other"]},
    "context_length": {"context_length": 4},
    "more_digests": {"digests": ["d", "e"]},
    "weights": {"quotas": [MIX_BLOCK // 2] * 2},
}


@pytest.mark.parametrize("key", OTHER)
def test_other_data_or_another_seed_is_not_gone_on_with(key: str):
    state = position().state_dict()
    position().load_state_dict(state)
    with pytest.raises(ValueError, match=f"cannot resume: .* trained with {key} .*another name") as error:
        position().load_state_dict(position(**OTHER[key]).state_dict())
    assert "\n" not in str(error.value)


def test_a_position_from_before_mixes_is_gone_on_with_by_its_own_data_alone():
    old = {"samples": 5, "seed": 7, "num_windows": 17, "digest": "d"}
    there = position()
    there.load_state_dict(old)
    assert there.start() == 5
    for other in (position(context_length=4, num_windows=34), position(digests=["d", "e"], num_windows=20)):
        with pytest.raises(ValueError, match="cannot resume"):
            other.load_state_dict(old)


def test_position_counts_the_windows_of_all_ranks():
    there = position()
    batch = next(iter(window_data().train_dataloader()))
    there.on_train_batch_end(SimpleNamespace(world_size=3), None, None, batch, 0)
    assert there.start() == there.state_dict()["samples"] == 12


def test_a_split_that_is_not_there_is_named_with_those_that_are(tmp_path: Path):
    with pytest.raises(ValueError, match=r"'ood' holds no protein; there are: train valid test"):
        window_data(valid_sets=("valid", "ood"))
