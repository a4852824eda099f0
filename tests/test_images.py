"""Attention maps: what they show, where they go, and that training does not notice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attention_cases import every_model_kind_in_directions
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from training import SMALL, assert_same, load_plain, protperf, small_dataset, train_small
from wandb_file import read_wandb

from protperf import layers as layers_module
from protperf.attention import attention_rows
from protperf.callbacks.images import choose_proteins, some_maps
from protperf.config import ModelConfig
from protperf.model import ProteinModel
from protperf.vocab import VOCABULARY

IMAGES = ("trainer.validate_every=10", "logger.attention_images_every=2", "trainer.max_steps=40")


@every_model_kind_in_directions
def test_maps_are_the_rows_of_the_attention_matrix(kind: str, causal: bool, monkeypatch: pytest.MonkeyPatch):
    """The rows are computed pair by pair, from the arguments that attention got in an ordinary pass."""
    shape = {"num_layers": 5, "num_heads": 2, "model_dim": 16, "feedforward_dim": 32, "num_features": 128}
    torch.manual_seed(3)
    model = ProteinModel(
        ModelConfig(**shape, attention=kind, qk_norm=kind == "trig", dropout=0.2), causal=causal
    )
    tokens = torch.randint(5, 25, (1, 37))
    maps = some_maps(model, tokens)
    assert model.training

    seen: list[tuple[torch.Tensor, torch.Tensor, dict[str, Any]]] = []
    attend = layers_module.attend

    def note(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: Any, **how: Any) -> torch.Tensor:
        seen.append((q, k, how))
        return attend(q, k, v, documents, **how)

    monkeypatch.setattr(layers_module, "attend", note)
    with torch.no_grad():
        model.eval()(tokens)
    assert list(maps) == [0, 1, 2, 4]
    for layer, weights in maps.items():
        q, k, how = seen[layer]
        expected = attention_rows(q, k, rows=torch.arange(37), **how)[0]
        assert weights.shape == (2, 37, 37)
        torch.testing.assert_close(weights, expected, rtol=1e-4, atol=1e-6)
        assert not causal or not weights.triu(1).any()


def test_each_window_gives_its_longest_protein_cut_to_256_tokens():
    bos, eos, pad = VOCABULARY.bos, VOCABULARY.eos, VOCABULARY.pad
    rest, short, long = [7] * 5 + [eos], [bos, *[8] * 10, eos], [bos, *[9] * 400, eos]
    windows = np.full((2, 500), pad, np.uint8)
    windows[0, : len(rest + short + long)] = rest + short + long
    windows[1, : len(rest + short)] = rest + short
    found = choose_proteins(windows)
    assert [protein.tolist() for protein in found] == [long[:256], short]


def test_images_are_files_at_their_interval_and_training_does_not_notice(tmp_path: Path):
    with_images, without = tmp_path / "a", tmp_path / "b"
    train_small(with_images, *IMAGES, "model.dropout=0.3")
    train_small(without, *IMAGES, "model.dropout=0.3", "logger.attention_images_every=0")
    names = [path.name for path in sorted((with_images / "images").iterdir())]
    assert names == ["step=00000020.png", "step=00000040.png"]
    assert all(path.read_bytes()[:4] == b"\x89PNG" for path in (with_images / "images").iterdir())
    assert not (without / "images").exists()
    a, b = (load_plain(path / "checkpoints" / "step=00000040.ckpt") for path in (with_images, without))
    for part in ("state_dict", "optimizer_states", "lr_schedulers", "callbacks"):
        assert_same(a[part], b[part], part)


def test_a_folder_that_takes_no_images_ends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "images").write_text("a file")
    train_small(tmp_path, *IMAGES)
    assert [m for m in caplog.messages if "no attention maps of this step" in m]
    assert (tmp_path / "checkpoints" / "step=00000040.ckpt").exists()


@pytest.mark.slow
def test_two_ranks_make_one_run_of_wandb_and_draw_one_set_of_images(tmp_path: Path):
    """With shards, which must come together for an image."""
    ranks = ("trainer=fsdp", "trainer.devices=2", "trainer.num_nodes=1", "trainer.accelerator=cpu")
    arguments = ("train", f"data.path={small_dataset()}", "name=w", "logger=both", *SMALL, *ranks, *IMAGES)
    result = protperf(
        *arguments, cwd=tmp_path, OMP_NUM_THREADS="1"
    )  # starts cold: W&B is imported where it is used
    assert result.returncode == 0, result.stderr
    run_dir = tmp_path / "runs" / "w"
    assert not (run_dir / "images").exists()
    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    assert events.Tags()["images"] == [f"attention/maps/{number}" for number in (1, 2, 3)]
    assert [event.step for event in events.Images("attention/maps/1")] == [20, 40]
    [file] = read_wandb(run_dir)
    assert list(file.series("train/loss")) == [10, 20, 30, 40]
    drawn = file.series("attention/maps.filenames")
    assert list(drawn) == [20, 40]
    [folder] = run_dir.glob("wandb/offline-run-*/files")
    for names in drawn.values():
        assert [(folder / name).read_bytes()[:4] for name in names] == [b"\x89PNG"] * 3
