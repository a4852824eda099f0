"""A model from a stranger: neither its configuration nor its header claims more than there is."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from hostile import write_safetensors
from prepared import REPOSITORY
from safetensors.torch import load_file, save_file

from protperf.checkpoint import load_model
from protperf.checkpoint.export import export_model
from protperf.formats import FormatError

CLAIMS: dict[str, dict[str, Any]] = {
    "layers": {"num_layers": 10**9},
    "narrow layers": {"num_layers": 10**9, "model_dim": 2, "num_heads": 1, "feedforward_dim": 1},
    "width": {"model_dim": 2 * 10**9, "num_heads": 2},
    "inner width": {"feedforward_dim": 10**12},
    "features": {"num_features": 10**12},
    "positions": {"positions": "learned", "max_positions": 10**12},
    "pooling": {"attention": "linformer", "linformer_length": 10**9, "linformer_rank": 10**9},
    "buckets": {"attention": "reformer", "lsh_buckets": 10**12},
    "a number beyond all": {"num_layers": 10**300},
    "layers of nothing": {
        "num_layers": 4_096,
        "model_dim": 2,
        "num_heads": 1,
        "feedforward_dim": 1,
        "num_features": 1,
    },
    "a number beyond words": {"model_dim": 8 * 10**3000, "num_heads": 8, "positions": "none"},
    "rounds": {"attention": "reformer", "lsh_buckets": 1, "lsh_rounds": 10**9},
}


def test_no_configuration_asks_for_more_memory_than_its_weights_take(tmp_path: Path):
    """In a process of its own, which a law that is broken would end."""
    trained = load_model(make_checkpoint(tmp_path / "m.ckpt"))
    content = torch.load(tmp_path / "m.ckpt", weights_only=True)
    for name, change in CLAIMS.items():
        folder = tmp_path / f"{name} folder"
        export_model(trained, folder)
        config = json.loads((folder / "config.json").read_bytes())
        config["model"] |= change
        (folder / "config.json").write_text(json.dumps(config))
        about = content["protperf"] | {"model": content["protperf"]["model"] | change}
        torch.save(content | {"protperf": about}, tmp_path / f"{name}.ckpt")
    script = """
import sys
from pathlib import Path
from hostile import limit_memory
from protperf.checkpoint import load_model
limit_memory(1 << 30)
for path in map(Path, sys.argv[1:]):
    try:
        load_model(path)
    except ValueError as error:
        print(type(error).__name__, str(error).startswith(str(path)), error)
"""
    paths = [
        str(path) for name in CLAIMS for path in (tmp_path / f"{name}.ckpt", tmp_path / f"{name} folder")
    ]
    done = subprocess.run(
        [sys.executable, "-c", script, *paths],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "tests")])},
    )
    lines = done.stdout.splitlines()
    assert len(lines) == len(paths), done.stdout + done.stderr
    assert all(line.startswith("FormatError True ") for line in lines)


@pytest.mark.parametrize(
    "header",
    [
        {"a": {"dtype": "F32", "shape": [2**60], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [2**33, 2**33], "data_offsets": [0, 0]}},
        {"a": {"dtype": "F32", "shape": [0, 2**62], "data_offsets": [0, 0]}},
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 2**62]}},
        {"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}},
        {"a": {"dtype": "Q7", "shape": [1], "data_offsets": [0, 4]}},
        b"[" * 100_000,
        b"",
    ],
)
def test_a_header_of_safetensors_claims_what_is_there(tmp_path: Path, header: Any):
    folder = tmp_path / "m"
    export_model(load_model(make_checkpoint(tmp_path / "m.ckpt")), folder)
    write_safetensors(folder / "model.safetensors", header, bytes(4))
    with pytest.raises(ValueError, match=r"model\.safetensors: ") as caught:
        load_model(folder)
    assert str(caught.value).startswith(str(folder))


def test_no_weight_stands_in_a_folder_under_two_names(tmp_path: Path):
    folder = tmp_path / "m"
    export_model(load_model(make_checkpoint(tmp_path / "m.ckpt")), folder)
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"norm.weight": torch.zeros(16)}, folder / "model.safetensors")
    with pytest.raises(
        FormatError,
        match=r"safetensors: holds both norm\.weight and model\.norm\.weight, which are one weight; give",
    ):
        load_model(folder)
    bare = {name.removeprefix("model."): value for name, value in weights.items()}
    save_file(bare, folder / "model.safetensors")
    assert load_model(folder).model.norm.weight.equal(bare["norm.weight"])


def test_a_header_of_safetensors_has_a_bound(tmp_path: Path):
    folder = tmp_path / "m"
    export_model(load_model(make_checkpoint(tmp_path / "m.ckpt")), folder)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2**60) + b"{}")
    with pytest.raises(FormatError, match="a header of 1,152,921,504,606,846,976 bytes"):
        load_model(folder)
