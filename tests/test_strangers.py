"""Files from strangers: what opens them stands in few places, and a command that meets one ends with one line."""

from __future__ import annotations

import ast
import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoints import make_checkpoint
from fuzz_hdf5 import whole_dataset
from hostile import CALLS, archive, edit_manifest, pickled
from prepared import REPOSITORY
from training import protperf

from protperf.checkpoint import load_model
from protperf.checkpoint.export import export_model

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
        "protperf/formats/run_config.py": "without aliases, never resolved",
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


BOMB = r"no record accepted of 1; the first: bomb\.fasta:1: record 'a' has 16,777,219 bytes of text; allowed: 8 MiB; "
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
    config["model"]["num_layers"] = 4_000
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    arguments, message = COMMANDS[name]
    done = protperf(*arguments, cwd=tmp_path)
    *log, line = done.stderr.splitlines()
    assert re.match(f"protperf {arguments[0]}: {message}", line), line
    assert "Traceback" not in "".join(log)
    assert (done.returncode, done.stdout) == (1, "")
    assert not (tmp_path / "HACKED").exists()
    assert not any(path.is_file() for path in (tmp_path / "out").rglob("*.h5"))
