"""A file of torch.save is looked through before torch opens it: it names nothing but tensors and claims what is there."""

from __future__ import annotations

import os
import pickletools
import re
import struct
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint
from hostile import CALLS, archive, pickled
from prepared import REPOSITORY

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


def parts(path: Path) -> tuple[bytes, bytes, int]:
    """Return what stands before an archive's directory, the directory, and the number of its entries."""
    raw = path.read_bytes()
    number, size, offset = struct.unpack_from("<10xHII", raw, raw.rfind(b"PK\5\6"))
    return raw[:offset], raw[offset : offset + size], number


def moved(directory: bytes, by: int) -> bytes:
    """Return a directory whose members lie elsewhere."""
    made, place = bytearray(directory), 0
    while place < len(made):
        name, extra, comment = struct.unpack_from("<3H", made, place + 28)
        struct.pack_into("<I", made, place + 42, struct.unpack_from("<I", made, place + 42)[0] + by)
        place += 46 + name + extra + comment
    return bytes(made)


def ends(number: int, size: int, offset: int, *, record: int, longest: bool = False) -> tuple[bytes, bytes]:
    """Return the 64-bit end record of a directory, and what follows it when that record lies at `record`."""
    long = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, number, number, size, offset)
    short = (0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF) if longest else (number, number, size, offset)
    located = struct.pack("<4sLQL", b"PK\6\7", 0, record, 1)
    return long, located + struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, *short, 0)


def test_all_who_read_a_checkpoint_find_the_same_members(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Python takes the directory before the end record, torch the one that this names: each would see another pickle."""
    whole = make_checkpoint(tmp_path / "m.ckpt")
    with zipfile.ZipFile(whole) as file:
        members = {name.partition("/")[2]: file.read(name) for name in file.namelist()}
    evil = archive(tmp_path / "e", {**members, "data.pkl": pickled(*CALLS["a terabyte of bytes"])})
    bad, bad_entries, number = parts(evil)
    good, good_entries, _ = parts(archive(tmp_path / "g", members))
    before, gap = len(bad), bytes(1 << 16)
    front = (
        bad + gap + bad_entries
    )  # what Python adds to offsets in the directory behind is the way from one to the other
    way = len(bad_entries) + len(good)
    shifted = front + good + moved(good_entries, len(front) - way)
    size, at = len(bad_entries), before + len(gap)
    wrong, wrong_tail = ends(number, size, at, record=len(front))
    right_at = len(front) + len(wrong) + len(good)
    right, _ = ends(number, size, right_at, record=0)
    inside = front + wrong + good + moved(good_entries, len(front) + len(wrong))
    raw = whole.read_bytes()
    hidden = {
        "shifted": shifted + struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, number, number, size, at, 0),
        "located": inside + right + wrong_tail,
        "unmarked": inside + bytes(len(right)) + wrong_tail,
        "in front": bytes(8) + raw,
        "behind": raw + bytes(8),
        "comment": raw[:-2] + struct.pack("<H", 4) + b"PK\5\6",
    }
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("torch opened it"))
    for name, data in hidden.items():
        path = tmp_path / f"{name}.ckpt"
        path.write_bytes(data)
        for read, (what, remedy) in (REFUSALS | CUT).items():
            with pytest.raises(
                FormatError, match=rf"{name}\.ckpt: {what}( \(its directory .*\))?; {remedy}$"
            ):
                read(path)


def test_members_have_one_name_and_one_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Python cuts a name at a zero byte, and newer ones take a name from a field beside it."""
    body, entries, number = parts(archive(tmp_path / "a", {"data.pkl": b"x", "version": b"3\n"}))
    second = struct.pack("<HHBL", 0x7075, 9, 1, 0) + b"else"
    length, extra = (struct.unpack_from("<H", entries, place)[0] for place in (28, 30))
    assert not extra
    name_end = 46 + length
    long = entries[:30] + struct.pack("<H", len(second)) + entries[32:name_end] + second + entries[name_end:]
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("torch opened it"))
    for name, found in (("field", long), ("zero", entries.replace(b"version", b"versio\0"))):
        end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, number, number, len(found), len(body), 0)
        (tmp_path / f"{name}.ckpt").write_bytes(body + found + end)
        with pytest.raises(FormatError, match=r"or cut short \(its directory can be read in two ways"):
            load_model(tmp_path / f"{name}.ckpt")


@pytest.mark.parametrize("kind", ["torch's own", "Python's", "sizes of 64 bits", "everything of 64 bits"])
def test_whole_archives_open_whatever_the_width_of_their_numbers(kind: str, tmp_path: Path):
    """Above 4 GiB sizes and places of members stand in a field of their own."""
    whole = make_checkpoint(tmp_path / "m.ckpt")
    with zipfile.ZipFile(whole) as file:
        members = {name.partition("/")[2]: file.read(name) for name in file.namelist()}
    path = archive(tmp_path / "p.ckpt", members) if kind == "Python's" else whole
    if kind.endswith("64 bits"):
        body, entries, number = parts(whole)
        made, place = b"", 0
        while place < len(entries):
            length = 46 + struct.unpack_from("<H", entries, place + 28)[0]
            entry = bytearray(entries[place : place + length])
            packed, plain = struct.unpack_from("<2L", entry, 20)
            (at,) = struct.unpack_from("<L", entry, 42)
            struct.pack_into("<2L", entry, 20, 0xFFFFFFFF, 0xFFFFFFFF)
            struct.pack_into("<H", entry, 30, 28)
            struct.pack_into("<L", entry, 42, 0xFFFFFFFF)
            made += bytes(entry) + struct.pack("<HH3Q", 1, 24, plain, packed, at)
            place += length
        path = tmp_path / "long.ckpt"
        long, tail = ends(number, len(made), len(body), record=len(body) + len(made))
        path.write_bytes(body + made + long + tail)
    expected, found = torch.load(whole, weights_only=True), torch.load(path, weights_only=True)
    assert found["protperf"] == expected["protperf"]
    state = load_model(path).model.state_dict()
    assert all(
        state[name.removeprefix("model.")].equal(each) for name, each in expected["state_dict"].items()
    )


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


def test_one_storage_under_many_names_is_no_larger_model(tmp_path: Path):
    """A stranger's megabyte would be a gigabyte as soon as it is copied into a model, ours or another program's."""
    content = torch.load(make_checkpoint(tmp_path / "m.ckpt"), weights_only=True)
    shared = torch.ones(1 << 15)
    names = {f"model.x{number}": shared for number in range(30)}
    views = {f"model.x{number}": shared[:-number] for number in range(1, 31)}
    for found in (names, views):
        torch.save(content | {"state_dict": content["state_dict"] | found}, tmp_path / "m.ckpt")
        with pytest.raises(
            FormatError, match=r"m\.ckpt: .* \(its tensors claim more than 2 times the bytes of"
        ):
            load_model(tmp_path / "m.ckpt")
        torch.save(found, tmp_path / "m.bin")
        with pytest.raises(
            FormatError, match=r"more than 2 times .*\); save its state dict alone, as safetens"
        ):
            read_pickle(tmp_path / "m.bin")


def test_weights_that_share_a_matrix_or_a_buffer_are_read(tmp_path: Path):
    """A head that is the embedding, weights that lie in one buffer, and the same dict twice in a file."""
    table, buffer = torch.randn(36, 64), torch.randn(1000)
    state = {"embedding": table, "head": table}
    state |= {f"layer{number}": buffer[number * 100 :][:100] for number in range(10)}
    torch.save({"model": state, "again": state, "ema": state}, tmp_path / "m.bin")
    found = read_pickle(tmp_path / "m.bin")
    assert list(found) == list(state)
    assert all(value.equal(state[name]) for name, value in found.items())


def test_a_pickle_has_a_bound_of_instructions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Each empty list of a byte takes 200."""
    lists = b"\x80\x02](" + b"]" * 450_000 + b"e."
    path = archive(tmp_path / "m.ckpt", {"data.pkl": lists, "version": b"3\n"})
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("torch opened it"))
    for read, (what, remedy) in REFUSALS.items():
        with pytest.raises(FormatError, match=rf": {what} \(it has EMPTY_LIST None at step 4.*\); {remedy}$"):
            read(path)


def test_a_text_of_an_old_protocol_is_refused_without_a_warning(tmp_path: Path):
    path = archive(tmp_path / "m.ckpt", {"data.pkl": b"\x80\x02S'\\q'\n.", "version": b"3\n"})
    for read, (what, _) in REFUSALS.items():
        with pytest.raises(FormatError, match=rf": {what}"):
            read(path)


def test_the_checkpoint_of_a_run_lies_within_the_bounds(tmp_path: Path):
    """Adam's state of small layers, whose pickle is long beside the numbers: however many they are, it stays in the bound."""
    content = torch.load(make_checkpoint(tmp_path / "m.ckpt"), weights_only=True)
    state = {
        number: {key: torch.zeros(128) for key in ("step", "exp_avg", "exp_avg_sq")} for number in range(200)
    }
    torch.save(content | {"optimizer_states": [{"state": state, "param_groups": []}]}, tmp_path / "m.ckpt")
    with zipfile.ZipFile(tmp_path / "m.ckpt") as file:
        steps = sum(1 for _ in pickletools.genops(file.read("m/data.pkl")))
    assert 1000 < steps < (tmp_path / "m.ckpt").stat().st_size / 16
    load_model(tmp_path / "m.ckpt")


def test_a_device_beside_the_weights_is_a_plain_value(tmp_path: Path):
    torch.save({"model": {"a": torch.ones(2)}, "device": torch.device("cpu")}, tmp_path / "m.bin")
    assert read_pickle(tmp_path / "m.bin")["a"].tolist() == [1, 1]


def test_no_message_writes_out_what_a_pickle_holds_many_times(tmp_path: Path):
    """22 levels are 4 million ones, 80 MB of text; in a process of its own, with little memory."""
    content = torch.load(make_checkpoint(tmp_path / "m.ckpt"), weights_only=True)
    levels = 22
    twice: tuple[object, ...] = (1,)
    for _ in range(levels):
        twice = (twice, twice)
    about, state = content["protperf"], content["state_dict"]
    cases = {
        "weight": content | {"state_dict": state | {twice: torch.ones(1)}},
        "setting": content | {"protperf": about | {"model": about["model"] | {twice: 1}}},
        "origin": content | {"protperf": about | {"origin": twice}},
        "value": content | {"protperf": about | {"model": about["model"] | {"attention": twice}}},
        "foreign": {twice: torch.ones(1)},
    }
    for name, case in cases.items():
        torch.save(case, tmp_path / f"{name}.bin")
    script = """
import sys
from pathlib import Path
from hostile import limit_memory
from protperf.checkpoint import load_model
from protperf.convert.files import read_pickle
limit_memory(64 << 20)
for name in ("weight", "setting", "value", "origin", "foreign"):
    path = Path(sys.argv[1], f"{name}.bin")
    try:
        read = read_pickle if name == "foreign" else load_model
        print(name, "read", getattr(read(path), "origin", None))
    except ValueError as error:
        print(name, str(error).removeprefix(str(path)))
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "tests")])},
    )
    foreign = ": not a checkpoint of `protperf train` ({} is of another type); give another one"
    assert done.stdout.splitlines() == [
        f"weight {foreign.format('state_dict.(a key of type tuple)')}",
        f"setting {foreign.format('protperf.model.(a key of type tuple)')}",
        f"value {foreign.format('protperf.model.attention')}",
        "origin read ",
        "foreign : not a state dict (names and tensors); save the state dict alone",
    ], done.stderr
