"""`protperf bench reading`: every row is printed, and the bare reads are of the loader's windows."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from training import WINDOW as SMALL_WINDOW
from training import small_dataset

from protperf.bench import reading
from protperf.bench.__main__ import main
from protperf.bench.reading import GOAL, PREAD, Result, generate, opened, random_windows
from protperf.formats.shards import ShardSet
from protperf.vocab import VOCABULARY


@pytest.fixture(autouse=True)
def short_turns(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reading, "PREAD_SECONDS", 1e-3)
    monkeypatch.setattr(reading, "_QUIET_SECONDS", 0.0)


def rows_of(text: str) -> dict[str, list[str]]:
    """Return row -> cells of the one table."""
    (block,) = [block for block in text.split("\n\n") if block.startswith("loader ")]
    lines = [[part.strip() for part in line.split("  ") if part.strip()] for line in block.splitlines()]
    assert len({len(line) for line in lines}) == 1
    return {name: cells for name, *cells in lines[1:]}


@pytest.mark.parametrize("workers", [(0,), pytest.param((2, 0), marks=pytest.mark.slow)])
def test_a_dataset_is_read_by_each_loader(
    workers: tuple[int, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "numbers.json"
    arguments = ["reading", str(small_dataset()), "--workers", *map(str, workers), "--batch-size", "3"]
    arguments += ["--batches", "5", "--rounds", "2", "--json", str(out), "--plot", str(tmp_path / "figures")]
    assert main(arguments) == 0
    names = {f"{kind}, {count} workers" for kind in ("masked", "causal") for count in workers} | {PREAD}
    assert set(rows_of(capsys.readouterr().out)) == names
    numbers = json.loads(out.read_text())
    results = {result["name"]: result for result in numbers["results"]}
    assert set(results) == names
    bare = results[PREAD]["rounds"]
    for result in results.values():
        assert len(result["rounds"]) == 2
        rate = 5 * 3 * SMALL_WINDOW / np.median(result["rounds"])
        assert result["tokens_per_second"] == pytest.approx(rate)
        assert result["over_goal"] == pytest.approx(rate / 433_800)
        ratios = [theirs / ours for theirs, ours in zip(bare, result["rounds"], strict=True)]
        assert result["share_of_pread"] == pytest.approx(np.median(ratios))
    assert [path.name for path in (tmp_path / "figures").iterdir()] == ["reading.png"]


def test_without_a_dataset_one_is_generated_and_removed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(reading, "SHARD_WINDOWS", 2)
    assert main(["reading", "--workers", "0", "--batches", "2", "--rounds", "1"]) == 0
    out = capsys.readouterr().out
    assert "generated dataset: windows of 8,192 tokens, batches of 8, 2 batches a turn" in out
    assert set(rows_of(out)) == {"masked, 0 workers", "causal, 0 workers", PREAD}
    assert not list(tmp_path.iterdir())


def test_generated_shards_hold_whole_proteins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reading, "SHARD_WINDOWS", 3)
    generate(tmp_path, seed=1)
    shards = ShardSet(tmp_path, "train")
    shards.verify()
    assert (len(shards), shards.window, len(shards.manifest.shards)) == (48, 8192, 16)
    for shard in shards.read_many(range(48)).reshape(16, -1):
        starts, ends = np.flatnonzero(shard == VOCABULARY.bos), np.flatnonzero(shard == VOCABULARY.eos)
        assert (starts[0], ends[-1]) == (0, len(shard) - 1)
        np.testing.assert_array_equal(starts[1:], ends[:-1] + 1)
        assert (ends - starts).min() > 50
        others = shard[(shard != VOCABULARY.bos) & (shard != VOCABULARY.eos)]
        assert set(others.tolist()) == set(range(VOCABULARY.num_standard))


def test_generated_windows_depend_on_the_seed_alone():
    one, same, other = (random_windows(np.random.default_rng(seed)) for seed in (0, 0, 1))
    np.testing.assert_array_equal(one, same)
    assert (one != other).any()


def test_bare_reads_are_of_the_windows_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reading, "SHARD_WINDOWS", 3)
    generate(tmp_path, seed=0)
    windows = [*np.random.default_rng(0).permutation(48).tolist(), 0, 47, 47]
    rows, pread = [], os.pread
    with opened(tmp_path, windows) as read:
        monkeypatch.setattr(os, "pread", lambda *arguments: rows.append(pread(*arguments)))
        read()
    assert b"".join(rows) == ShardSet(tmp_path, "train").read_many(windows).tobytes()


@pytest.mark.parametrize(
    ("workers", "times", "word"),
    [(0, 100, "aim"), (2, 99.9, "bar"), (2, 20, "bar"), (0, 19.9, "below the bar"), (None, 500, "limit")],
)
def test_what_is_reached_is_said(workers: int | None, times: float, word: str):
    assert Result("any", "masked", workers, times * GOAL, times, 1.0, ()).reached == word


def test_folder_that_is_no_dataset_is_told_in_one_line(tmp_path: Path):
    with pytest.raises(ValueError, match=r"no manifest\.json") as caught:
        main(["reading", str(tmp_path)])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("arguments", [["--workers", "-1"], ["--batches", "0"], ["--device", "cpu"]])
def test_wrong_usage_exits_with_status_2(arguments: list[str]):
    with pytest.raises(SystemExit) as caught:
        main(["reading", *arguments])
    assert caught.value.code == 2
