"""The files of pretrained weights: which are opened, and how much of them is read."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hostile import write_safetensors
from prepared import REPOSITORY

from protperf.convert.files import LARGEST_VOCABULARY, read_vocabulary
from protperf.formats import FormatError


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
        write_safetensors(folder.with_name(f"w{number}") / "model.safetensors", {"__metadata__": {"a": name}})
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


def test_a_vocabulary_is_read_whole_or_not_at_all(tmp_path: Path):
    path = tmp_path / "vocab.txt"
    path.write_bytes(b"A\n" * (LARGEST_VOCABULARY // 2))
    assert len(read_vocabulary(path)) == LARGEST_VOCABULARY // 2
    path.write_bytes(b"A\n" * (LARGEST_VOCABULARY // 2) + b"C")
    with pytest.raises(FormatError, match=r"vocab\.txt: more than 1 MiB; give a file with a token a line"):
        read_vocabulary(path)


def test_each_number_of_a_vocabulary_is_that_of_one_token(tmp_path: Path):
    path = tmp_path / "tokenizer.json"
    for added, found in (
        ([], ("L", "A")),
        ([{"content": "A", "id": 1}, {"content": "G", "id": 2}], ("L", "A", "G")),
        ([{"content": "G", "id": 1}], None),
        ([{"content": "A", "id": 2}], ("L", "A", "A")),  # which `map_tokens` refuses
        ([{"content": ["G"], "id": 2}], None),
        ([{"content": "G", "id": 3}], None),
        ([{"content": "G", "id": -1}], None),
        ([{"content": "G", "id": True}], None),
    ):
        path.write_text(json.dumps({"model": {"vocab": {"L": 0, "A": 1}}, "added_tokens": added}))
        if found:
            assert read_vocabulary(path) == found
            continue
        with pytest.raises(
            FormatError, match=r"tokenizer\.json: no vocabulary that gives each token its num"
        ):
            read_vocabulary(path)
    path.write_text(json.dumps({"L": 0, "A": 0, "G": 1}))
    with pytest.raises(FormatError, match="no vocabulary that gives"):
        read_vocabulary(path)
