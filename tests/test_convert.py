"""`protperf convert` and the folder that people share: the same model bit for bit, or one line that says what is wrong."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from checkpoints import make_checkpoint
from omegaconf import OmegaConf
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from training import assert_same, protperf, small_dataset, train_small

from protperf.checkpoint import find_checkpoint, load_model
from protperf.checkpoint.card import CardDetails, write_card
from protperf.checkpoint.export import export_model
from protperf.checkpoint.facts import collect_facts
from protperf.convert import main
from protperf.formats import FormatError
from protperf.formats.metrics_file import append_metrics
from protperf.formats.scores import read_scores
from protperf.train import runs
from protperf.vocab import VOCABULARY

FILES = ["config.json", "model.safetensors", "model_card.md"]
KINDS = [
    ("favor", "masked"),
    ("relu", "causal"),
    ("softmax", "masked"),
    ("elu", "causal"),
    ("oprf", "masked"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shared")
    assert main([str(make_checkpoint(path / "m.ckpt")), str(path / "model")]) == 0
    return path / "model"


@pytest.mark.parametrize(("attention", "kind"), KINDS)
def test_a_folder_is_the_checkpoint_bit_for_bit(tmp_path: Path, attention: str, kind: str):
    checkpoint = make_checkpoint(tmp_path / "m.ckpt", attention=attention, kind=kind)
    assert main([str(checkpoint), str(tmp_path / "model")]) == 0
    assert sorted(os.listdir(tmp_path / "model")) == FILES
    before, after = load_model(checkpoint), load_model(tmp_path / "model")
    assert_same(dict(before.model.state_dict()), dict(after.model.state_dict()))
    assert before.describe() == after.describe()
    assert before.step == after.step == 7
    assert not after.model.training
    tokens = torch.arange(26).repeat(2, 3)
    with torch.no_grad():
        assert before.model(tokens).equal(after.model(tokens))


def test_a_redrawn_projection_and_its_number_are_kept(tmp_path: Path):
    trained = load_model(make_checkpoint(tmp_path / "m.ckpt"))
    trained.model.redraw_projections(5)
    export_model(trained, tmp_path / "model")
    again = load_model(tmp_path / "model").model
    assert int(again.redraws) == 5
    assert_same(dict(again.state_dict()), dict(trained.model.state_dict()))


def test_no_weight_is_stored_twice_and_nothing_is_pickled(folder: Path):
    weights = load_file(folder / "model.safetensors")
    assert "model.embedding.weight" in weights
    assert not [name for name in weights if "head" in name or "logits" in name]
    size = sum(value.numel() * value.element_size() for value in weights.values())
    assert size < (folder / "model.safetensors").stat().st_size < size + 4096
    header_size = struct.unpack("<Q", (folder / "model.safetensors").read_bytes()[:8])[0]
    header = json.loads((folder / "model.safetensors").read_bytes()[8 : 8 + header_size])
    assert header["__metadata__"]["format"] == "pt"


def test_the_checksum_is_as_the_specification_says(folder: Path):
    digest = hashlib.sha256()
    with safe_open(folder / "model.safetensors", "np") as file:
        for name in sorted(file.keys()):
            array = file.get_tensor(name)
            digest.update(f"{name} torch.{array.dtype} {array.shape}\n".encode() + array.tobytes())
        assert file.metadata()["protperf_sha256"] == digest.hexdigest()


def test_what_a_killed_process_left_is_removed(folder: Path, tmp_path: Path):
    (tmp_path / ".model.safetensors.host.1.1.tmp").write_bytes(bytes(99))
    assert main([str(folder), str(tmp_path), "--force"]) == 0
    assert sorted(os.listdir(tmp_path)) == FILES


def test_config_holds_all_that_rebuilds_the_model(folder: Path):
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "protperf"
    assert config["architectures"] == ["ProtperfForMaskedLM"]
    assert (config["format"], config["format_version"], config["step"]) == ("protperf-model", 1, 7)
    assert (config["model"]["attention"], config["objective"]["kind"]) == ("favor", "masked")
    assert config["vocabulary"][:20] == list("ACDEFGHIKLMNPQRSTVWY")
    assert len(config["vocabulary"]) == 36


def test_any_path_of_a_folder_means_it(folder: Path, tmp_path: Path):
    weights = folder / "model.safetensors"
    for path in (folder, weights, folder / "config.json", folder.parent):
        assert find_checkpoint(path) == weights
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "best.ckpt").touch()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").touch()
    assert find_checkpoint(tmp_path).name == "best.ckpt"


def test_a_command_takes_a_folder_for_a_checkpoint(folder: Path, tmp_path: Path):
    (tmp_path / "a.fasta").write_text(">a\nMKVLAA\n")
    done = protperf("embed", folder, "a.fasta", "a.h5", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    tokens = torch.tensor([[VOCABULARY.bos, *VOCABULARY.encode("MKVLAA").tolist(), VOCABULARY.eos]])
    with torch.no_grad():
        expected = load_model(folder.parent / "m.ckpt").model(tokens)[0, 1:-1].mean(0)
    with h5py.File(tmp_path / "a.h5") as file:
        np.testing.assert_allclose(file["0000000000"][:], expected, atol=1e-6)


def edit_config(**changes: Any) -> Callable[[Path], Any]:
    def edit(folder: Path) -> None:
        path = folder / "config.json"
        content = json.loads(path.read_text()) | changes
        path.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))

    return edit


def edit_weights(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], Any]:
    """Change the weights and leave the checksum out, as another program that writes safetensors would."""

    def edit(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors", {"format": "pt"})

    return edit


def cut(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", (folder / "model.safetensors").stat().st_size - 100)


def flip(folder: Path) -> None:
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-777] ^= 1
    (folder / "model.safetensors").write_bytes(data)


def shard(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    (folder / "model.safetensors.index.json").write_text("{}")


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "cut": (cut, r"model\.safetensors: not a whole safetensors file"),
    "empty": (lambda folder: (folder / "model.safetensors").write_bytes(b""), "not a whole safetensors file"),
    "text": (
        lambda folder: (folder / "model.safetensors").write_text("a" * 99),
        "not a whole safetensors file",
    ),
    "one bit": (flip, "damaged .the checksum of the weights is wrong"),
    "no config": (
        lambda folder: (folder / "config.json").unlink(),
        r"model\.safetensors but no config\.json",
    ),
    "no JSON": (lambda folder: (folder / "config.json").write_text("{"), r"config\.json: not JSON"),
    "a list": (
        lambda folder: (folder / "config.json").write_text("[]"),
        "not of a protperf model .format 'list'",
    ),
    "another model's": (edit_config(format=None, model_type="esm"), "not of a protperf model .format None"),
    "newer": (edit_config(format_version=2), "model format 2, this protperf reads 1 to 1: update"),
    "no version": (edit_config(format_version=None), "model format None"),
    "other vocabulary": (edit_config(fingerprint="0" * 64), "another vocabulary"),
    "no model": (edit_config(model=None), "'model' is None, not of type dict"),
    "a step in words": (edit_config(step="seven"), "'step' is 'seven', not of type int"),
    "a number of layers that is none": (
        edit_config(model={"num_layers": 2.0}),
        r"not a model of this protperf .ModelConfig.num_layers is 2\.0, not of type int",
    ),
    "a number in words": (edit_config(model={"dropout": "0.1"}), "not a model of this protperf"),
    "an objective in numbers": (
        edit_config(objective={"ask_eos": 1}),
        "ObjectiveConfig.ask_eos is 1, not of type bool",
    ),
    "a new option": (edit_config(model={"new_option": 1}), "not a model of this protperf .*new_option"),
    "another width": (
        edit_config(model={"num_layers": 2, "num_heads": 2, "model_dim": 32}),
        r"is \(\d+, \d+\), this model has",
    ),
    "a weight less": (
        edit_weights(lambda weights: weights.pop("model.norm.bias")),
        "norm.bias is not in the file",
    ),
    "a weight more": (
        edit_weights(lambda weights: weights.update(other=torch.ones(1))),
        "other is not in the model",
    ),
    "a weight of two lines": (
        edit_weights(lambda weights: weights.update({"two\nlines": torch.ones(1)})),
        r"two\\nlines is not in the model",
    ),
    "not a number": (
        edit_weights(lambda weights: weights["model.norm.bias"].fill_(float("nan"))),
        "norm.bias holds what is no finite number",
    ),
    "infinite projection": (
        edit_weights(lambda weights: weights["model.blocks.1.attention.projection"].fill_(float("inf"))),
        "blocks.1.attention.projection holds what is no finite number",
    ),
    "several files": (shard, "cut into several files; save them as one"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_what_is_no_whole_folder_is_named_in_one_line(name: str, tmp_path: Path):
    main([str(make_checkpoint(tmp_path / "m.ckpt")), str(tmp_path / "model")])
    damage, message = DAMAGES[name]
    damage(tmp_path / "model")
    with pytest.raises(ValueError, match=message) as caught:
        load_model(tmp_path / "model")
    assert str(caught.value).startswith(str(tmp_path / "model"))
    assert "\n" not in str(caught.value)


def test_an_existing_folder_is_refused_and_replaced_with_force(folder: Path, tmp_path: Path):
    source, out = folder.parent / "m.ckpt", tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"out: exists already and is not empty; .* --force"):
        main([str(source), str(out)])
    assert os.listdir(out) == ["notes.txt"]
    assert main([str(source), str(out), "--force"]) == 0
    assert sorted(os.listdir(out)) == [*FILES, "notes.txt"]
    with pytest.raises(ValueError, match="is where the model comes from"):
        main([str(out), str(out), "--force"])
    with pytest.raises(ValueError, match=r"notes\.txt: is a file"):
        main([str(source), str(out / "notes.txt")])
    assert load_model(out).step == 7


def test_a_full_disk_leaves_no_folder_that_looks_whole(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from protperf.checkpoint import folder as module

    def commit(path: Path, data: bytes) -> None:
        if path.name.startswith(full):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        path.write_bytes(data)

    full = "model_card.md"

    monkeypatch.setattr(module, "commit_bytes", commit)
    with pytest.raises(OSError, match=r"model_card\.md"):
        main([str(folder.parent / "m.ckpt"), str(tmp_path / "out")])
    assert os.listdir(tmp_path) == []
    monkeypatch.undo()
    assert main([str(folder.parent / "m.ckpt"), str(tmp_path / "out")]) == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    full = ".model.safetensors"
    monkeypatch.setattr(module, "commit_bytes", commit)
    with pytest.raises(OSError, match=r"out/model\.safetensors"):
        main([str(folder.parent / "m.ckpt"), str(tmp_path / "out"), "--force"])
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


@pytest.mark.parametrize("wrong", [["--license", "my own"], ["--to", "pickle"], ["--name", "a\nb"]])
def test_wrong_usage_exits_with_status_2(wrong: list[str]):
    with pytest.raises(SystemExit) as caught:
        main(["a", "b", *wrong])
    assert caught.value.code == 2


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has come to its end as `protperf train` lets it."""
    run_dir = tmp_path_factory.mktemp("finished") / "tiny-run"
    run, _ = train_small(run_dir, "trainer.max_steps=6", "trainer.validate_every=3")
    runs.record_settings(run.settings)
    runs.test_best(run)
    runs.share_best(run)
    return run_dir


def test_training_leaves_its_best_model_to_be_shared(finished: Path):
    assert sorted(os.listdir(finished / "model")) == FILES
    best, shared = (load_model(finished / name) for name in (Path("checkpoints", "best.ckpt"), Path("model")))
    assert_same(dict(best.model.state_dict()), dict(shared.model.state_dict()))
    assert shared.step == best.step


def cells(card: str) -> list[list[str]]:
    return [line.strip("| ").split(" | ") for line in card.splitlines() if line.startswith("| ")]


def test_the_card_tells_what_the_run_measured_and_read(finished: Path):
    card = (finished / "model" / "model_card.md").read_text()
    metrics = [line.split(",") for line in (finished / "metrics.csv").read_text().splitlines()[1:]]
    values = {(name, int(step)): float(value) for step, name, value in metrics}
    step = load_model(finished / "model").step
    rows = cells(card)
    for name, at in (("valid", step), ("test", 6)):
        perplexity, accuracy = (values[f"{name}/{metric}", at] for metric in ("perplexity", "accuracy"))
        assert [name, "this model", f"{perplexity:.3f}", f"{100 * accuracy:.2f}%"] in rows
    manifest = json.loads((small_dataset() / "manifest.json").read_text())
    assert manifest["digest"] in card
    train = manifest["splits"]["train"]
    assert ["train", f"{train['sequences']:,}", f"{train['residues']:,}"] in rows
    assert ["optim.learning_rate", "0.01"] in rows
    assert "# tiny-run\n" in card
    assert str(small_dataset().parent) not in card, "a card names no folder of the machine"
    assert "licen" not in card.lower()


def test_tested_numbers_are_told_of_the_best_weights_alone(finished: Path, tmp_path: Path):
    last = finished / "checkpoints" / "step=00000006.ckpt"
    main([str(last), str(tmp_path / "out")])
    assert [
        row[0] for row in cells((tmp_path / "out" / "model_card.md").read_text()) if "this model" in row
    ] == ["valid"]


def test_what_a_run_measured_of_other_weights_is_not_told(finished: Path, tmp_path: Path):
    """The run went on: its test is of weights that may no longer be the best."""
    run_dir = tmp_path / "run"
    shutil.copytree(finished, run_dir)
    append_metrics(run_dir / "metrics.csv", [(9, {"train/loss": 2.0})])
    assert list(collect_facts(load_model(run_dir)).results) == ["valid"]


def test_a_swapped_model_has_no_results_of_the_one_it_was_made_from(tmp_path: Path):
    run, _ = train_small(tmp_path / "run", "model.attention=softmax", "trainer.max_steps=2")
    runs.record_settings(run.settings)
    assert collect_facts(load_model(tmp_path / "run")).results
    assert main([str(tmp_path / "run"), str(tmp_path / "out"), "--attention", "relu"]) == 0
    card = (tmp_path / "out" / "model_card.md").read_text()
    assert "None is recorded with this model" in card
    assert f"weights SHA-256 {load_model(tmp_path / 'run').weights_digest()}" in card
    assert "exact attention swapped for relu" in card


def test_a_run_that_cannot_be_read_costs_facts_and_not_the_card(finished: Path, tmp_path: Path):
    run_dir = tmp_path / "run"
    shutil.copytree(finished, run_dir)
    config = OmegaConf.load(run_dir / "config.yaml")
    config.data.more_paths, config.data.path = ["a", "b"], "nowhere"
    OmegaConf.save(config, run_dir / "config.yaml")
    facts = collect_facts(load_model(run_dir))
    assert facts.manifest is None
    assert facts.settings["data.more_paths"] == "windows of 2 more datasets mixed in"
    (run_dir / "config.yaml").write_text("[1, {")
    (run_dir / "metrics.csv").write_text("not ours")
    facts = collect_facts(load_model(run_dir))
    assert (facts.settings, facts.manifest, facts.results) == ({}, None, {})
    assert "None is recorded" in write_card(load_model(run_dir), facts, CardDetails())


def test_the_card_takes_name_licence_and_scores_from_the_user_and_invents_none(folder: Path, tmp_path: Path):
    bare = (folder / "model_card.md").read_text()
    assert "None is recorded with this model" in bare
    assert "digest `unknown`" in bare
    scores = {
        "test": {
            "model": {"perplexity": 12.5, "accuracy": 0.25, "step": 7, "objective": "masked"},
            "unigram": {"perplexity": 18.25, "accuracy": 0.0999},
        }
    }
    (tmp_path / "scores.json").write_text(json.dumps(scores))
    options = ["--name", "My model", "--license", "CC-BY-4.0", "--scores", str(tmp_path / "scores.json")]
    assert main([str(folder), str(tmp_path / "out"), *options]) == 0
    card = (tmp_path / "out" / "model_card.md").read_text()
    assert "\nlicense: CC-BY-4.0\n" in card
    assert "# My model\n" in card
    assert ["test", "this model", "12.500", "25.00%"] in cells(card)
    assert ["test", "unigram", "18.250", "9.99%"] in cells(card)
    scores["test"]["model"]["step"] = 8
    (tmp_path / "scores.json").write_text(json.dumps(scores))
    with pytest.raises(ValueError, match=r"scores\.json: of a masked model after 8 steps, .* masked .* 7"):
        main([str(folder), str(tmp_path / "other"), *options])
    assert not (tmp_path / "other").exists()


def test_a_card_takes_no_markup_of_a_stranger_s_run(finished: Path, tmp_path: Path):
    run_dir = tmp_path / "run\n# Licence"
    shutil.copytree(finished, run_dir)
    config = OmegaConf.load(run_dir / "config.yaml")
    config.optim.kind = "adamw |\n\n# Licence\n\nMIT <script>x</script> \x1b[31m `a` [b](c) \\| d"
    config.optim["www.evil.example"] = "https://evil.example/x www.evil.example a@evil.example"
    config.trainer.precision = "a`|https://evil.example\\|`"
    config.data.context_length = "many"
    OmegaConf.save(config, run_dir / "config.yaml")
    content = torch.load(run_dir / "checkpoints" / "best.ckpt", weights_only=True)
    content["protperf"] |= {"origin": "a` <b>", "dataset_digest": "0` <b>"}
    torch.save(content, run_dir / "checkpoints" / "best.ckpt")
    append_metrics(
        run_dir / "metrics.csv", [(load_model(run_dir).step, {"www.evil.example/perplexity": 2.0})]
    )
    trained = load_model(run_dir)
    card = write_card(trained, collect_facts(trained), CardDetails())
    own_words = re.sub(r"`[^`\n]*`", "", re.sub(r"```[^`]*```", "", card))
    assert card.count("evil.example") == 6
    assert re.search(r"evil|://|www|@", own_words) is None, "readers of Markdown make links of bare addresses"
    assert all(
        line.count("|") == (5 if "this model" in line else 3) for line in card.splitlines() if "evil" in line
    )
    assert all(char.isprintable() or char == "\n" for char in card)
    assert "\n# Licence" not in card
    assert re.search(r"(?<!\\)<(?!mask>)", re.sub(r"`[^`]*`", "", card)) is None
    line = next(line for line in card.splitlines() if line.startswith("| optim.kind "))
    assert len(re.findall(r"(?<!\\)(?:\\\\)*\|", line)) == 3
    assert "from `a' <b>`;" in card
    assert "digest `unknown`" in card


def test_scores_of_other_weights_are_refused_whatever_their_step(folder: Path, tmp_path: Path):
    with safe_open(folder / "model.safetensors", "np") as file:
        digest = file.metadata()["protperf_sha256"]
    own = {"perplexity": 12.5, "accuracy": 0.25, "step": 7, "objective": "masked", "checkpoint": "b.ckpt"}
    path = tmp_path / "scores.json"
    path.write_text(json.dumps({"test": {"model": own | {"weights_sha256": digest}}}))
    assert main([str(folder.parent / "m.ckpt"), str(tmp_path / "out"), "--scores", str(path)]) == 0
    path.write_text(json.dumps({"test": {"model": own | {"weights_sha256": "0" * 64}}}))
    with pytest.raises(
        ValueError, match=r"scores\.json: of the weights in b\.ckpt, those of .*m\.ckpt are others"
    ):
        main([str(folder.parent / "m.ckpt"), str(tmp_path / "other"), "--scores", str(path)])
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    "change",
    [
        *({name: None} for name in ("perplexity", "accuracy", "step", "objective", "weights_sha256")),
        {"perplexity": 10**400},
        {"perplexity": "5"},
        {"accuracy": 10**400},
        {"accuracy": [0.5]},
        {"step": "x"},
        {"step": 1.5},
        {"step": True},
        {"dataset_digest": 5},
    ],
    ids=lambda change: str(change)[:30],
)
def test_scores_have_the_types_of_what_evaluate_writes(change: dict[str, Any], tmp_path: Path):
    whole = {"perplexity": 5, "accuracy": 1, "step": 7, "objective": "masked", "weights_sha256": "0" * 64}
    path = tmp_path / "scores.json"
    path.write_text(json.dumps({"test": {"model": whole}}))
    assert read_scores(path)["test"]["model"] == whole
    path.write_text(json.dumps({"test": {"model": whole | change}}))
    with pytest.raises(ValueError, match=r"scores\.json: not what `protperf evaluate --json` writes"):
        read_scores(path)


def test_a_card_tells_of_this_model_on_held_out_proteins_alone(folder: Path):
    trained = load_model(folder)

    def card_of(scores: dict[str, Any]) -> str:
        return write_card(trained, collect_facts(trained), CardDetails(scores=scores))

    of_model = {"perplexity": 12.5, "accuracy": 0.25, "dataset_digest": ""}
    card = card_of({"train": {"model": of_model}, "test": {"model": of_model, "against": of_model}})
    assert [row[:2] for row in cells(card) if "12.500" in row] == [["test", "this model"]]
    assert "over residues held out from training." in card
    assert "None is recorded with this model" in card_of({"train": {"model": of_model}})
    elsewhere = card_of({"test": {"model": of_model | {"dataset_digest": "ab12"}}})
    assert "held out" not in elsewhere
    assert "not that of the training (digest `ab12`), so training may have seen them" in elsewhere


def test_a_disk_that_is_full_at_the_end_of_training_costs_a_warning(
    finished: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    run, _ = train_small(tmp_path / "run", "trainer.max_steps=2")
    (tmp_path / "run" / "model").write_text("in the way")
    runs.share_best(run)
    assert "the best model has no folder" in caplog.text


def test_the_card_s_own_examples_run(finished: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("transformers")
    card = (finished / "model" / "model_card.md").read_text()
    blocks = [block.split("```")[0] for block in card.split("```python\n")[1:]]
    assert len(blocks) == 2
    found: dict[str, Any] = {}
    for code in blocks:
        exec(code.replace("FOLDER", str(finished / "model")), found)
    assert found["logits"].shape == (1, 12, 36)


def test_foreign_files_stay_format_errors(tmp_path: Path):
    (tmp_path / "model.safetensors").write_bytes(b"x")
    with pytest.raises(FormatError):
        load_model(tmp_path)
