"""A file of torch.save is looked through before torch opens it: it names nothing but tensors and claims what is there."""

from __future__ import annotations

import os
import re
import warnings
import zipfile
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint
from hostile import CALLS, archive, pickled

from protperf.checkpoint import load_model
from protperf.convert.files import read_pickle
from protperf.formats import FormatError

REFUSALS = {
    load_model: ("not a checkpoint of `protperf train`, or cut short", "give another one"),
    read_pickle: (
        "holds more than plain values and tensors of usual types",
        "save its state dict alone, as safetensors, in float32",
    ),
}
CUT = {read_pickle: ("not a whole file of torch 1.6 or later", "save it anew: .*")}
"""What each reader says, and what it says to do; the second one of a file that is no whole archive."""


@pytest.mark.parametrize("name", CALLS)
def test_a_pickle_that_names_anything_but_tensors_is_refused_unread(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("torch opened it"))
    path = archive(tmp_path / "m.ckpt", {"data.pkl": pickled(*CALLS[name]), "version": b"3\n"})
    named = re.escape(CALLS[name][0].decode().replace("\n", " "))
    for read, (what, remedy) in REFUSALS.items():
        with pytest.raises(FormatError, match=rf"/m\.ckpt: {what} \(it names {named}\); {remedy}$"):
            read(path)
    assert sorted(os.listdir(tmp_path)) == ["m.ckpt"]


def test_no_second_pickle_hides_behind_the_one_that_is_looked_through(tmp_path: Path):
    whole = make_checkpoint(tmp_path / "m.ckpt")
    with zipfile.ZipFile(whole) as file:
        members = {name.partition("/")[2]: file.read(name) for name in file.namelist()}
    evil = pickled(*CALLS["code"])
    for name in ("DATA.PKL", "Data.pkl", "x/data.pkl", "data.pkl"):
        with zipfile.ZipFile(tmp_path / "m2.ckpt", "w") as made, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a name that stands there twice
            for each, data in [*members.items(), (name, evil)]:
                made.writestr(f"m/{each}", data)
        for read, (what, remedy) in (REFUSALS | CUT).items():
            with pytest.raises(FormatError, match=rf": {what} \(it has two pickles, or two .*\); {remedy}$"):
                read(tmp_path / "m2.ckpt")
    (tmp_path / "behind.ckpt").write_bytes(evil + whole.read_bytes())  # a pickle first, an archive behind it
    with pytest.raises(FormatError, match="not a checkpoint"):
        load_model(tmp_path / "behind.ckpt")


def test_members_of_a_checkpoint_lie_in_it_unpacked(tmp_path: Path):
    whole = make_checkpoint(tmp_path / "m.ckpt")
    with zipfile.ZipFile(whole) as file:
        members = {name.partition("/")[2]: file.read(name) for name in file.namelist()}
    packed = archive(tmp_path / "packed.ckpt", members, zipfile.ZIP_DEFLATED)
    large = archive(tmp_path / "large.ckpt", {**members, "data.pkl": bytes(17 << 20)})
    for path, found in ((packed, "its members are packed, .*"), (large, ".*, or its pickle too many")):
        for read, (what, remedy) in (REFUSALS | CUT).items():
            with pytest.raises(FormatError, match=rf"{path.name}: {what} \({found}\); {remedy}$"):
                read(path)


def test_a_tensor_claims_no_more_numbers_than_are_stored(tmp_path: Path):
    path = make_checkpoint(tmp_path / "m.ckpt")
    content = torch.load(path, weights_only=True)
    content["state_dict"]["model.embedding.weight"] = torch.ones(1).expand(1 << 20, 1 << 20)
    torch.save(content, path)
    with pytest.raises(FormatError, match="stores fewer numbers"):
        load_model(path)
    torch.save({"a": torch.empty(5, device="meta")}, path)
    with pytest.raises(
        FormatError,
        match=r"holds more than .* \(it names torch\._utils _rebuild_meta_tensor_no_storage\); save its state dict",
    ):
        read_pickle(path)
