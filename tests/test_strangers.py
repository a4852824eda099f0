"""Files from strangers: nothing in them runs, names no other file, or takes more memory than the file is worth."""

from __future__ import annotations

import ast
import gzip
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import make_checkpoint
from fuzz_hdf5 import hostile_hdf5, whole_dataset
from prepared import REPOSITORY
from training import protperf

from protperf.checkpoint import load_model
from protperf.checkpoint.export import export_model
from protperf.checkpoint.room import num_numbers
from protperf.config import ModelConfig, read_record
from protperf.convert.files import read_pickle
from protperf.formats import FormatError, one_line
from protperf.formats.embeddings import EmbeddingFile
from protperf.formats.manifest import read_manifest
from protperf.formats.shards import ShardSet
from protperf.model import ProteinModel

SOURCES = sorted(path for top in ("protperf", "data_prep") for path in (REPOSITORY / top).rglob("*.py"))

OWN = "written by protperf itself, in folders that only it writes to"
ALLOWED: dict[str, dict[str, str]] = {
    "pickle.loads": {
        "data_prep/executors/processes.py": "tasks and results through pipes to own processes",
        "data_prep/executors/runner.py": "likewise",
    },
    "json.loads": {
        "protperf/formats/json_files.py": "the one reader of JSON files",
        "protperf/formats/embedding_npz.py": "a text within a bounded member",
        "protperf/formats/embedding_parquet.py": "a text that Arrow has read",
        "protperf/formats/partial_output.py": OWN,
        "protperf/bench/paper/jobs.py": OWN,
        "protperf/bench/paper/call.py": OWN,
        "protperf/bench/paper/page.py": OWN,
        "data_prep/build.py": OWN,
        "data_prep/folder.py": OWN,
        "data_prep/journal.py": OWN,
        "data_prep/bench/__init__.py": OWN,
        "data_prep/bench/jobs.py": OWN,
        "data_prep/download/__init__.py": OWN,
    },
    "torch.load": {
        "protperf/checkpoint/pickles.py": "after its pickle was looked through",
        "protperf/tensor_folder.py": OWN,
    },
    "np.load": {"protperf/formats/ngrams.py": OWN, "data_prep/tables.py": OWN},
    "h5py.File": {
        "protperf/formats/shard_writer.py": "writes",
        "protperf/formats/ngrams.py": "writes",
    },
    "gzip.GzipFile": {"protperf/formats/unpacking.py": "up to a bound"},
    "gzip.open": {
        "data_prep/tables.py": "line by line, each up to a bound",
        "data_prep/bench/jobs.py": "a bench",
    },
    "OmegaConf.create": {
        "protperf/config/record.py": "without aliases, never resolved",
        "protperf/bench/presets.py": "presets of the package",
        "protperf/train/runs.py": "own values",
        "protperf/loggers/tensorboard.py": "own values",
    },
    "zipfile.ZipFile": {
        "protperf/checkpoint/pickles.py": "no member is packed",
        "protperf/formats/npz_reading.py": "members are read up to a bound",
    },
    "OmegaConf.load": {"protperf/completion.py": "a file of the package"},
    "safe_open": {"protperf/checkpoint/folder.py": "after the size of its header"},
}
"""Calls that open or unpack what a stranger may have made, and the files that may make them."""

NEVER = {
    *(
        "eval",
        "exec",
        "pickle.load",
        "pickle.Unpickler",
        "marshal.loads",
        "shelve.open",
        "joblib.load",
        "dill.loads",
    ),
    *(
        "os.system",
        "yaml.load",
        "yaml.unsafe_load",
        "json.load",
        "gzip.decompress",
        "zlib.decompress",
    ),
    *(
        "bz2.decompress",
        "lzma.decompress",
        "shutil.unpack_archive",
        "tarfile.open",
        "torch.jit.load",
        "torch.hub.load",
    ),
    *("pd.read_pickle", "np.fromregex", "cloudpickle.loads", "importlib.util.spec_from_file_location"),
}


def calls(path: Path) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


@pytest.mark.parametrize("path", SOURCES, ids=[str(path.relative_to(REPOSITORY)) for path in SOURCES])
def test_what_opens_files_of_strangers_stands_in_few_places(path: Path):
    place = str(path.relative_to(REPOSITORY))
    for name, node in calls(path):
        assert name not in NEVER, f"{place}:{node.lineno}: {name}"
        assert place in ALLOWED.get(name, {place: ""}), f"{place}:{node.lineno}: {name}"
        given = {each.arg: ast.unparse(each.value) for each in node.keywords}
        assert not {"allow_pickle", "trust_remote_code"} & given.keys(), f"{place}:{node.lineno}"
        assert not (name.startswith("subprocess.") and "shell" in given), f"{place}:{node.lineno}"
        if name == "torch.load" or "ckpt_path" in given:
            assert given.get("weights_only") == "True", f"{place}:{node.lineno}"


def test_the_table_of_places_names_none_that_is_gone():
    for name, places in ALLOWED.items():
        for place in places:
            assert name in {found for found, _ in calls(REPOSITORY / place)}, f"{place}: {name}"


def archive(path: Path, members: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", method) as made:
        for name, data in members.items():
            made.writestr(f"m/{name}", data)
    return path


def pickled(call: bytes, argument: bytes) -> bytes:
    """Return a pickle of a checkpoint in which a name is called."""
    return b"\x80\x02}X\x0a\x00\x00\x00state_dictc" + call + b"\n" + argument + b"\x85Rs."


CALLS = {
    "code": (b"posix\nsystem", b"X\x0c\x00\x00\x00touch HACKED"),
    "evaluation": (b"builtins\neval", b"X\x01\x00\x00\x001"),
    "a terabyte of bytes": (b"builtins\nbytearray", b"\x8a\x06\x00\x00\x00\x00\x00\x01"),
    "a terabyte of numbers": (b"torch\nFloatTensor", b"\x8a\x06\x00\x00\x00\x00\x00\x01"),
    "a storage": (b"torch.storage\nUntypedStorage", b"\x8a\x06\x00\x00\x00\x00\x00\x01"),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_pickle_that_names_anything_but_tensors_is_refused_unread(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("torch opened it"))
    path = archive(tmp_path / "m.ckpt", {"data.pkl": pickled(*CALLS[name]), "version": b"3\n"})
    for read in (load_model, read_pickle):
        with pytest.raises(FormatError, match=r"it names .* give another one|it names"):
            read(path)
    assert sorted(os.listdir(tmp_path)) == ["m.ckpt"]


def test_no_second_pickle_hides_behind_the_one_that_is_looked_through(tmp_path: Path):
    whole = make_checkpoint(tmp_path / "m.ckpt")
    with zipfile.ZipFile(whole) as file:
        members = {name.partition("/")[2]: file.read(name) for name in file.namelist()}
    evil = pickled(*CALLS["code"])
    for name in ("DATA.PKL", "Data.pkl", "x/data.pkl", "data.pkl"):
        with zipfile.ZipFile(tmp_path / "two.ckpt", "w") as made, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a name that stands there twice
            for each, data in [*members.items(), (name, evil)]:
                made.writestr(f"m/{each}", data)
        for read in (load_model, read_pickle):
            with pytest.raises(FormatError, match="two"):
                read(tmp_path / "two.ckpt")
    (tmp_path / "behind.ckpt").write_bytes(evil + whole.read_bytes())  # a pickle first, an archive behind it
    with pytest.raises(FormatError, match="not a checkpoint"):
        load_model(tmp_path / "behind.ckpt")


def test_members_of_a_checkpoint_lie_in_it_unpacked(tmp_path: Path):
    whole = make_checkpoint(tmp_path / "m.ckpt")
    with zipfile.ZipFile(whole) as file:
        members = {name.partition("/")[2]: file.read(name) for name in file.namelist()}
    packed = archive(tmp_path / "packed.ckpt", members, zipfile.ZIP_DEFLATED)
    large = archive(tmp_path / "large.ckpt", {**members, "data.pkl": bytes(17 << 20)})
    for path in (packed, large):
        for read in (load_model, read_pickle):
            with pytest.raises(FormatError, match=r"members are packed|claim more bytes"):
                read(path)


def test_a_tensor_claims_no_more_numbers_than_are_stored(tmp_path: Path):
    path = make_checkpoint(tmp_path / "m.ckpt")
    content = torch.load(path, weights_only=True)
    content["state_dict"]["model.embedding.weight"] = torch.ones(1).expand(1 << 20, 1 << 20)
    torch.save(content, path)
    with pytest.raises(FormatError, match="stores fewer numbers"):
        load_model(path)
    torch.save({"a": torch.empty(5, device="meta")}, path)
    with pytest.raises(FormatError, match="holds objects"):
        read_pickle(path)


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
from fuzz import _limit_memory
from protperf.checkpoint import load_model
_limit_memory()
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


SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "learned": {"attention": "favor", "features": "learned"},
    "gated": {"attention": "rfa", "num_features": 128},
    "expected": {"attention": "oprf", "qk_norm": True},
    "pooled": {"attention": "linformer", "linformer_rank": 3, "linformer_length": 7},
    "hashed": {"attention": "reformer", "lsh_rounds": 3, "lsh_buckets": 6},
    "unhashed": {"attention": "reformer", "lsh_buckets": 1},
    "exact": {"attention": "softmax", "feedforward": "swiglu", "biases": True},
    "mixed": {"attention": "favor", "softmax_layers": (1,), "positions": "none"},
    "BERT's": {
        "attention": "softmax",
        "positions": "learned",
        "max_positions": 9,
        "norm": "post",
        "embedding_norm": True,
        "head": "dense",
        "tied_head": False,
        "biases": True,
    },
}


@pytest.mark.parametrize(
    ("name", "causal"),
    [
        (name, causal)
        for name, shape in SHAPES.items()
        for causal in (False, True)
        if not (causal and shape.get("attention") == "linformer")
    ],
)
def test_the_numbers_of_a_model_are_known_from_its_configuration(name: str, causal: bool):
    config = ModelConfig(
        **{"num_layers": 3, "num_heads": 2, "model_dim": 8, "feedforward_dim": 12, "num_features": 5}
        | SHAPES[name]
    )
    found = sum(value.numel() for value in ProteinModel(config, causal=causal).state_dict().values())
    assert num_numbers(config, causal=causal) == found


def edit_manifest(folder: Path, path: str, value: Any) -> None:
    manifest = json.loads((folder / "manifest.json").read_bytes())
    *parents, last = [int(key) if key.isdigit() else key for key in path.split(".")]
    entry = manifest
    for key in parents:
        entry = entry[key]
    entry[last] = value
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("window", 2**60),
        ("window", 0),
        ("window", "16"),
        ("shards.0.windows", 2**60),
        ("shards.0.windows", 4),
        ("shards.0.windows", -1),
        ("shards.1.windows", True),
        ("shards.0.offset", -1),
        ("shards.0.offset", 2**63),
        ("shards.0.bytes", None),
        ("shards.0.file", "../secret"),
        ("shards.0.file", "/etc/passwd"),
        ("shards.0.file", ".."),
        ("shards.0.file", "a\0b"),
        ("shards.0.split", ["train"]),
        ("ngrams.file", "../ngrams.h5"),
        ("splits.train.length_histogram", {"many": 1}),
        ("splits.train", []),
    ],
)
def test_a_manifest_names_windows_that_are_there_in_its_own_folder(tmp_path: Path, path: str, value: Any):
    whole_dataset(tmp_path / "d")
    edit_manifest(tmp_path / "d", path, value)
    with pytest.raises(
        FormatError, match=r"manifest\.json: (damaged manifest|names a file outside)"
    ) as caught:
        read_manifest(tmp_path / "d")
    assert str(caught.value).startswith(str(tmp_path))


def test_a_shard_shorter_than_its_windows_is_refused_whatever_the_manifest_says(tmp_path: Path):
    folder = whole_dataset(tmp_path / "d")
    edit_manifest(folder, "shards.0.bytes", 2**62)
    edit_manifest(folder, "shards.0.windows", 2**57)
    with pytest.raises(FormatError, match=r"train-00000-of-00002\.h5: \d+ bytes, the manifest says"):
        ShardSet(folder, "train")


def test_hdf5_holds_nothing_that_lies_elsewhere_or_unpacks(tmp_path: Path):
    refused = {}
    for name, path in hostile_hdf5(tmp_path):
        with EmbeddingFile(path) as file, pytest.raises(FormatError, match="entry '0000000000'") as caught:
            file[0]
        refused[name] = str(caught.value).partition("damaged (")[2]
    assert refused["external"] == refused["soft"] == "a link to elsewhere); embed again"
    assert all(refused[name].startswith("its numbers lie in another file") for name in ("storage", "virtual"))
    assert len(refused) == 7


def test_a_message_is_one_printable_line_whatever_it_quotes():
    said = str(FormatError("a\nb\x1b[31mc\0" + "\u202e" + "x" * 10**6 + "end"))
    assert said.isprintable()
    assert len(said) < 2100
    assert said.startswith(r"a\nb\x1b[31mc\x00\u202e")
    assert said.endswith("end")
    assert one_line("tab\there") == r"tab\there"


def test_a_run_s_configuration_reads_no_environment_and_unfolds_to_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("SECRET", "hunter2")
    path = tmp_path / "config.yaml"
    path.write_text("model:\n  a: ${oc.env:SECRET}\n  b: [1, 2]\nother: 3\n")
    assert read_record(path) == {"model": {"a": "${oc.env:SECRET}", "b": [1, 2]}}
    unfolding = "a0: &a0 [x]\n" + "".join(
        f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)
    )
    for text in (
        unfolding,
        "a: !!python/object/apply:os.system [ls]\n",
        "a: [" * 5000,
        "x" * 300_000,
        "\xff",
    ):
        path.write_bytes(text.encode("latin-1"))
        with pytest.raises(ValueError, match=r"config\.yaml: (not a configuration|too large)"):
            read_record(path)


def safetensors(path: Path, header: Any, data: bytes = b"") -> None:
    text = json.dumps(header).encode() if not isinstance(header, bytes) else header
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


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
    safetensors(folder / "model.safetensors", header, bytes(4))
    with pytest.raises(ValueError, match=r"model\.safetensors: ") as caught:
        load_model(folder)
    assert str(caught.value).startswith(str(folder))


def test_a_header_of_safetensors_has_a_bound(tmp_path: Path):
    folder = tmp_path / "m"
    export_model(load_model(make_checkpoint(tmp_path / "m.ckpt")), folder)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2**60) + b"{}")
    with pytest.raises(FormatError, match="a header of 1,152,921,504,606,846,976 bytes"):
        load_model(folder)


def test_transformers_opens_no_pickle_and_runs_nothing_of_a_folder(tmp_path: Path):
    pytest.importorskip("transformers")
    from transformers import AutoModel

    import protperf.hf  # noqa: F401

    folder = tmp_path / "m"
    export_model(load_model(make_checkpoint(tmp_path / "m.ckpt")), folder)
    config = json.loads((folder / "config.json").read_bytes())
    config["auto_map"] = {"AutoModel": "evil.Evil", "AutoConfig": "evil.Evil"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'HACKED')!r}, 'w')\n")
    AutoModel.from_pretrained(folder)
    weights = torch.load(tmp_path / "m.ckpt", weights_only=True)["state_dict"]
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    with pytest.raises(OSError, match=r"model\.safetensors"):
        AutoModel.from_pretrained(folder)
    assert not (tmp_path / "HACKED").exists()


def test_convert_opens_no_file_that_a_folder_names(tmp_path: Path):
    """All that the JSON files of a folder may name lies outside; an audit hook sees what is opened."""
    folder, secret = tmp_path / "in" / "m", tmp_path / "secret.safetensors"
    folder.mkdir(parents=True)
    shutil.copy(REPOSITORY / "LICENSE", secret)
    names = [str(secret), "../../secret.safetensors", "../../../secret.safetensors"]
    keys = (
        "_name_or_path",
        "vocab_file",
        "tokenizer_file",
        "weights",
        "auto_map",
        "model_file",
        "base_model_name_or_path",
    )
    for number, name in enumerate(names):
        config = {"model_type": "bert", **dict.fromkeys(keys, name)}
        place = folder.with_name(f"m{number}")
        place.mkdir()
        (place / "config.json").write_text(json.dumps(config))
        (place / "tokenizer.json").write_text(
            json.dumps({"model": {"vocab": name}, "added_tokens": [{"content": name}]})
        )
        (place / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
        shutil.copytree(place, folder.with_name(f"w{number}"))
        safetensors(folder.with_name(f"w{number}") / "model.safetensors", {"__metadata__": {"a": name}})
    script = """
import sys
from pathlib import Path
from protperf.convert.program import main
opened = []
sys.addaudithook(lambda event, values: opened.append(str(values[0])) if event == "open" else None)
for place in sorted(Path("in").glob("[mw]?")):
    try:
        sys.argv = ["protperf convert", str(place), "out"]
        main([str(place), "out"])
    except ValueError as error:
        print(error)
print([name for name in opened if "secret" in name])
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    *lines, opened = done.stdout.splitlines()
    assert opened == "[]", done.stdout + done.stderr
    assert len(lines) == 6, done.stdout + done.stderr
    assert all(re.match(r"in/[mw]\d", line) for line in lines)
    assert not (tmp_path / "out").exists()


def test_numbers_of_an_archive_claim_what_is_there(tmp_path: Path):
    from embedding_outputs import describe, write

    from protperf.formats.embedding_npz import NpzFile

    path = tmp_path / "e"
    write(path, "npz", describe("per_tok"), range(3))
    whole = path.read_bytes()
    with zipfile.ZipFile(path) as file:
        members = {name: file.read(name) for name in file.namelist()}
    huge = (
        b"\x93NUMPY\1\0\x76\0"
        + b"{'descr': '<U9', 'fortran_order': False, 'shape': (1099511627776,), }".ljust(117)
        + b"\n"
    )
    for name in ("ids.npy", "headers.npy", "num_residues.npy", "about.npy"):
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as made:
            for each, data in members.items():
                made.writestr(each, huge if each == name else data)
        with pytest.raises(FormatError, match=r"e: no readable embedding file|e: holds"):
            NpzFile(path)
    path.write_bytes(whole)
    with NpzFile(path) as file:
        assert all(isinstance(each.array, np.ndarray) and each.array.flags.writeable for each in file)


BOMB = r"bomb\.fasta: a record of more than 8 MiB of text"
MANIFEST = r"dataset/manifest\.json: damaged manifest \(1152921504606846976 windows"
COMMANDS: dict[str, tuple[tuple[str, ...], str]] = {
    "sequences": (("embed", "m.ckpt", "bomb.fasta", "out.h5"), BOMB),
    "prepare": (("prepare", "bomb.fasta", "out"), BOMB),
    "checkpoint": (
        ("embed", "evil.ckpt", "a.fasta", "out.h5"),
        r"evil\.ckpt: not a checkpoint .*it names posix",
    ),
    "folder": (("convert", "model", "out"), r"model/model\.safetensors: its configuration asks for"),
    "evaluate": (("evaluate", "m.ckpt", "dataset"), MANIFEST),
    "train": (("train", "data.path=dataset", "name=out", "run_dir=out"), MANIFEST),
    "mutations": (
        ("score", "m.ckpt", "--mutations", "bomb.csv", "out.csv"),
        r"bomb\.csv: .* unpack to more",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_ends_with_one_line(name: str, tmp_path: Path):
    make_checkpoint(tmp_path / "m.ckpt")
    archive(tmp_path / "evil.ckpt", {"data.pkl": pickled(*CALLS["code"]), "version": b"3\n"})
    (tmp_path / "a.fasta").write_text(">a\nMKTAYI\n")
    for file, start, size in (("bomb.fasta", b">a\n", 16), ("bomb.csv", b"mutant\n", 272)):
        packed = gzip.compress(b"M" * (16 << 20)) * (size // 16)
        (tmp_path / file).write_bytes(gzip.compress(start) + packed)
    edit_manifest(whole_dataset(tmp_path / "dataset"), "shards.0.windows", 2**60)
    export_model(load_model(tmp_path / "m.ckpt"), tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_bytes())
    config["model"]["num_layers"] = 10**9
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    arguments, message = COMMANDS[name]
    done = protperf(*arguments, cwd=tmp_path)
    *log, line = done.stderr.splitlines()
    assert re.match(f"protperf {arguments[0]}: {message}", line), line
    assert "Traceback" not in "".join(log)
    assert (done.returncode, done.stdout) == (1, "")
    assert not (tmp_path / "HACKED").exists()
    assert not any(path.is_file() for path in (tmp_path / "out").rglob("*.h5"))
