"""Checkpoints: plain, whole or absent, and a model again without Hydra or Lightning."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from training import load_plain, small_dataset, train_small

from protperf.batches import documents_of
from protperf.checkpoint import describe, find_checkpoint, load_model, read_checkpoint, step_checkpoints
from protperf.config import ModelConfig, ObjectiveConfig
from protperf.formats import FormatError
from protperf.formats.shards import ShardSet
from protperf.model import ProteinModel
from protperf.task import LanguageModelTask

OPTIONS = (
    "trainer.max_steps=25",
    "trainer.checkpoint_every=4",
    "trainer.keep_checkpoints=3",
    "trainer.validate_every=5",
    "trainer.redraw_every=10",
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LanguageModelTask]:
    run_dir = tmp_path_factory.mktemp("trained")
    run, _ = train_small(run_dir, *OPTIONS)
    return run_dir, run.task


def windows() -> torch.Tensor:
    return torch.from_numpy(ShardSet(small_dataset(), "valid").read_many(range(4)))


def outputs(model: ProteinModel) -> torch.Tensor:
    with torch.no_grad():
        return model.logits(model(windows(), documents_of(windows())))


def test_the_latest_and_the_best_stay_and_nothing_half_written(trained: tuple[Path, LanguageModelTask]):
    names = sorted(os.listdir(trained[0] / "checkpoints"))
    assert names == ["best.ckpt", "step=00000020.ckpt", "step=00000024.ckpt", "step=00000025.ckpt"]


def plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str | int) and plain(each) for key, each in value.items())
    if isinstance(value, list | tuple):
        return all(map(plain, value))
    return value is None or type(value) in (bool, int, float, str) or isinstance(value, torch.Tensor)


def test_checkpoints_hold_plain_values_alone(trained: tuple[Path, LanguageModelTask]):
    for path in (trained[0] / "checkpoints").iterdir():
        content = load_plain(path)
        assert all(plain(value) for value in content.values())
        assert content["global_step"] <= 25


def test_no_two_entries_share_storage(trained: tuple[Path, LanguageModelTask]):
    weights = load_plain(trained[0] / "checkpoints" / "best.ckpt")["state_dict"]
    places = [value.data_ptr() for value in weights.values()]
    assert len(set(places)) == len(places)


def test_the_loaded_model_is_the_trained_one(trained: tuple[Path, LanguageModelTask]):
    run_dir, task = trained
    loaded = load_model(run_dir / "checkpoints" / "step=00000025.ckpt")
    assert outputs(loaded.model).equal(outputs(task.model.eval()))
    assert not loaded.model.training
    assert (loaded.step, loaded.objective.kind) == (25, "masked")
    assert int(loaded.model.redraws) == 2
    assert loaded.dataset_digest == ShardSet(small_dataset(), "train").manifest.digest


def test_another_process_without_hydra_or_lightning_computes_the_same(
    trained: tuple[Path, LanguageModelTask],
):
    code = (
        "import sys, torch\n"
        "from protperf.checkpoint import load_model\n"
        "from protperf.batches import documents_of\n"
        "model = load_model(sys.argv[1]).model\n"
        "tokens = torch.load(sys.argv[2])\n"
        "with torch.no_grad(): torch.save(model.logits(model(tokens, documents_of(tokens))), sys.argv[3])\n"
        "print([name for name in ('hydra', 'pytorch_lightning') if name in sys.modules])"
    )
    run_dir = trained[0]
    torch.save(windows(), run_dir / "tokens.pt")
    last = run_dir / "checkpoints" / "step=00000025.ckpt"
    arguments = [
        sys.executable,
        "-c",
        code,
        str(last),
        str(run_dir / "tokens.pt"),
        str(run_dir / "logits.pt"),
    ]
    result = subprocess.run(arguments, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
    assert torch.load(run_dir / "logits.pt").equal(outputs(load_model(last).model))


def test_a_run_folder_means_its_best_checkpoint(trained: tuple[Path, LanguageModelTask], tmp_path: Path):
    run_dir = trained[0]
    assert find_checkpoint(run_dir) == find_checkpoint(run_dir / "checkpoints")
    assert find_checkpoint(run_dir).name == "best.ckpt"
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(ValueError, match="holds no checkpoint"):
        find_checkpoint(tmp_path)
    for step in (9, 100):
        (tmp_path / "checkpoints" / f"step={step:08d}.ckpt").touch()
    (tmp_path / "checkpoints" / "step=00000200.ckpt.partial").touch()
    (tmp_path / "checkpoints" / "step=mine.ckpt").touch()
    assert find_checkpoint(tmp_path).name == "step=00000100.ckpt"
    assert [path.name for path in step_checkpoints(tmp_path / "checkpoints")] == [
        "step=00000009.ckpt",
        "step=00000100.ckpt",
    ]
    with pytest.raises(ValueError, match=r"nowhere: no such file or folder; give"):
        find_checkpoint(tmp_path / "nowhere")


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def rewrite(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        content = load_plain(path)
        changed = change(content)
        torch.save(content if changed is None else changed, path)

    return edit


FOREIGN = "not a checkpoint of `protperf train`, or cut short"
LACKS = "not a checkpoint of `protperf train` .it lacks"

DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated": (truncate, FOREIGN),
    "first bytes only": (lambda path: path.write_bytes(path.read_bytes()[:1000]), FOREIGN),
    "empty": (lambda path: path.write_bytes(b""), FOREIGN),
    "text": (lambda path: path.write_text("step,metric,value\n" * 99), FOREIGN),
    "zeros": (lambda path: path.write_bytes(bytes(100_000)), FOREIGN),
    "code inside": (rewrite(lambda content: {**content, "path": Path("x")}), FOREIGN),
    "weights alone": (rewrite(lambda content: content["state_dict"]), LACKS),
    "a list": (rewrite(lambda content: [1, 2]), LACKS),
    "newer": (
        rewrite(lambda content: content["protperf"].update(format_version=99)),
        "99.*reads up to 1: update",
    ),
    "other vocabulary": (
        rewrite(lambda content: content["protperf"].update(fingerprint="0" * 64)),
        "another vocabulary",
    ),
    "no weights": (rewrite(lambda content: content["state_dict"].clear()), "blocks.0.* is not in the file"),
    "one weight less": (
        rewrite(lambda content: content["state_dict"].__delitem__("model.norm.bias")),
        "norm.bias is not in the file",
    ),
    "unknown option": (
        rewrite(lambda content: content["protperf"]["model"].update(new_option=1)),
        "new_option",
    ),
    "no description": (rewrite(lambda content: content.update(protperf={})), LACKS),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_file_that_is_no_whole_checkpoint_is_named_in_one_line(
    name: str, trained: tuple[Path, LanguageModelTask], tmp_path: Path
):
    damage, message = DAMAGES[name]
    path = tmp_path / "odd.ckpt"
    path.write_bytes((trained[0] / "checkpoints" / "best.ckpt").read_bytes())
    damage(path)
    with pytest.raises(ValueError, match=message) as error:
        load_model(path)
    assert str(error.value).startswith(f"{path}: ")
    assert "\n" not in str(error.value)
    if message in (FOREIGN, LACKS):
        assert isinstance(error.value, FormatError)


def test_another_number_of_features_is_named_by_key_and_may_be_drawn_anew(
    trained: tuple[Path, LanguageModelTask], tmp_path: Path
):
    content = load_plain(trained[0] / "checkpoints" / "best.ckpt")
    content["protperf"]["model"]["num_features"] = 12
    torch.save(content, tmp_path / "wider.ckpt")
    with pytest.raises(ValueError, match=r"blocks.0.attention.projection is \(8, 8\), .* \(12, 8\).*'draw'"):
        load_model(tmp_path / "wider.ckpt")
    model = load_model(tmp_path / "wider.ckpt", projections="draw").model
    expected = ProteinModel(model.config, causal=False)
    for one, other in zip(model.blocks, expected.blocks, strict=True):
        assert one.attention.projection.equal(other.attention.projection)
        assert one.attention.projection.shape == (12, 8)
    assert model.embedding.weight.equal(content["state_dict"]["model.embedding.weight"])


@pytest.mark.parametrize("to_type", [torch.float16, torch.bfloat16, torch.float64])
def test_the_projection_stays_float32_bit_for_bit(to_type: torch.dtype):
    model = ProteinModel(ModelConfig(), causal=False)
    before = [block.attention.projection.clone() for block in model.blocks]
    model.to(to_type)
    assert model.embedding.weight.dtype == to_type
    for exact, block in zip(before, model.blocks, strict=True):
        assert block.attention.projection.dtype == torch.float32
        assert block.attention.projection.equal(exact)


def test_a_description_holds_what_rebuilds_the_model():
    config, objective = ModelConfig(num_layers=3), ObjectiveConfig(kind="causal")
    about = describe(config, objective, attend_across_documents=True, dataset_digest="d")
    assert plain(about)
    assert ModelConfig(**about["model"]) == config
    assert ObjectiveConfig(**about["objective"]) == objective


def test_reading_gives_what_was_saved(trained: tuple[Path, LanguageModelTask]):
    content = read_checkpoint(trained[0] / "checkpoints" / "step=00000024.ckpt")
    assert content["global_step"] == 24
    assert content["callbacks"]["Position"]["samples"] == 24 * 4
