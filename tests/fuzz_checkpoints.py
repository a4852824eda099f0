"""Whole checkpoints, shared folders and foreign weights, and hostile ones of them."""

from __future__ import annotations

import contextlib
import copy
import json
import pickletools
import shutil
import struct
from collections import Counter, OrderedDict
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from checkpoints import make_checkpoint
from fuzz_edits import Edit, at, dump, edit_bytes, edit_json, json_values
from fuzz_targets import Target, edit_member
from safetensors.torch import save_file

from protperf.checkpoint import check_resumable, load_model
from protperf.checkpoint.export import export_model
from protperf.convert.files import is_pretrained
from protperf.convert.sources import load_pretrained
from protperf.convert.tokens import ESM_ALPHABET
from protperf.vocab import VOCABULARY

_GLOBALS = (
    *(
        "builtins bytearray",
        "torch FloatTensor",
        "torch UntypedStorage",
        "torch.storage UntypedStorage",
        "torch Tensor",
    ),
    *(
        "posix system",
        "os system",
        "builtins eval",
        "_codecs encode",
        "collections Counter",
        "builtins set",
        "torch device",
    ),
    *(
        "torch._utils _rebuild_meta_tensor_no_storage",
        "torch._utils _rebuild_qtensor",
        "torch.nn.parameter Parameter",
    ),
    *(
        "torch._utils _rebuild_nested_tensor",
        "torch._tensor _rebuild_from_type_v2",
        "torch._utils _rebuild_wrapper_subclass",
    ),
)
_CALLS = tuple(
    b"c" + name.replace(" ", "\n").encode() + b"\n" + argument + b"\x85R"
    for name in _GLOBALS
    for argument in (b"J\xff\xff\xff\x7f", b"\x8a\x08" + struct.pack("<q", 2**40), b"X\4\0\0\0true", b"K\1")
)
_WORDS = (
    *_CALLS,
    b"}",
    b"]",
    b"\x8f",
    b"(",
    b"t",
    b".",
    b"R",
    b"b",
    b"h\1",
    b"j\1\0\0\0",
    b"\x8a\xff",
    b"\x80\4",
    b"Q",
    b"u",
    b"s",
)


def odd_values() -> list[Any]:
    """Return what weights and descriptions may be replaced by."""
    endless: list[Any] = [1]
    for _ in range(40):
        endless = [endless, endless]
    held: list[Any] = []
    held.append(held)
    shaped = OrderedDict(a=1)
    shaped.items = 5  # type: ignore[assignment,method-assign]
    return [
        *json_values(),
        endless,
        held,
        shaped,
        Counter("a"),
        torch.Size([2]),
        torch.float32,
        b"x",
        1j,
        (1, 2),
        torch.zeros(()),
        torch.zeros(0, 5),
        torch.ones(3, dtype=torch.int8),
        torch.ones(3, dtype=torch.complex64),
        torch.ones(16, dtype=torch.float8_e4m3fn),
        torch.ones(3).to_sparse(),
        torch.ones(1).expand(1 << 20, 1 << 20),
        torch.ones(1).expand(36, 16),
        torch.empty(3, device="meta"),
        torch.full((16,), torch.nan),
        torch.nn.Parameter(torch.ones(16)),
        torch.ones(16, dtype=torch.bool),
    ]


def make_checkpoints(folder: Path) -> Target:
    """Return the target of checkpoints, with whole ones in a folder."""
    folder.mkdir(parents=True)
    torch.manual_seed(1)  # an input is the same in each run
    kinds = ("favor", "rfa"), ("linformer", "reformer"), ("oprf", "softmax")
    whole = [
        make_checkpoint(folder / f"{kind}.ckpt", attention=kind)
        for pair in kinds
        for kind in pair
        if kind != "rfa"
    ]
    contents = [torch.load(path, weights_only=True) for path in whole]
    shared = folder / "shared"
    export_model(load_model(whole[0]), shared)
    foreign = _foreign(folder / "foreign")

    def write(seed: int, chosen: Sequence[Edit], place: Path) -> None:
        kind = seed % 5
        if kind <= 1:
            data = whole[seed // 5 % len(whole)].read_bytes()
            (place / "m.ckpt").write_bytes(_edit_archive(data, seed, chosen))
        elif kind == 2:
            content = contents[seed // 5 % len(whole)]
            with contextlib.suppress(TypeError, AttributeError, RuntimeError):  # what torch does not save
                torch.save(_edit_content(content, chosen), place / "m.ckpt")
        elif kind == 3:
            shutil.copytree(shared, place / "m", dirs_exist_ok=True)
            _edit_folder(place / "m", "model.safetensors", seed, chosen)
        else:
            shutil.copytree(foreign, place / "m", dirs_exist_ok=True)
            name = ("model.safetensors", "pytorch_model.bin")[seed // 5 % 2]
            (place / "m" / ("model.safetensors", "pytorch_model.bin")[1 - seed // 5 % 2]).unlink()
            _edit_folder(place / "m", name, seed, chosen)

    def read(place: Path) -> None:
        path = next(place.glob("m*"), place)
        if is_pretrained(path):
            load_pretrained(path, heads=2)
        elif path.suffix == ".ckpt":
            load_model(path)
            check_resumable(path, {"model": {}, "objective": {}, "attend_across_documents": False})
        else:
            load_model(path)

    def check(_: Path) -> None:
        for path, content in zip((*whole, shared), (*contents, contents[0]), strict=True):
            found = load_model(path).model.state_dict()
            for name, weight in found.items():
                assert torch.equal(weight, content["state_dict"][f"model.{name}"]), f"{path}: {name}"
        residue, row = VOCABULARY.tokens.index("L"), ESM_ALPHABET.index("L")
        for name in ("model.safetensors", "pytorch_model.bin"):
            place = folder / name
            place.mkdir(exist_ok=True)
            for file in ("config.json", name):
                shutil.copy(foreign / file, place)
            embedding = load_pretrained(place, heads=2).trained.model.state_dict()["embedding.weight"]
            rows = torch.load(foreign / "pytorch_model.bin", weights_only=True)
            expected = rows["encoder.sentence_encoder.embed_tokens.weight"][row]
            torch.testing.assert_close(embedding[residue], expected)

    return Target("checkpoints", write, read, check)


def _foreign(folder: Path) -> Path:
    """Write weights by fairseq's names with a config, as safetensors and as a pickle."""
    folder.mkdir(parents=True)
    dim, inner, rows, places = 8, 12, len(ESM_ALPHABET), 10
    weights: dict[str, torch.Tensor] = {}

    def linear(name: str, *shape: int) -> None:
        weights[f"{name}.weight"], weights[f"{name}.bias"] = torch.randn(shape), torch.randn(shape[0])

    base = "encoder.sentence_encoder."
    weights[f"{base}embed_tokens.weight"] = torch.randn(rows, dim)
    weights[f"{base}embed_positions.weight"] = torch.randn(places, dim)
    linear(f"{base}emb_layer_norm", dim)
    for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
        linear(f"{base}layers.0.self_attn.{part}", dim, dim)
    linear(f"{base}layers.0.self_attn_layer_norm", dim)
    linear(f"{base}layers.0.fc1", inner, dim)
    linear(f"{base}layers.0.fc2", dim, inner)
    linear(f"{base}layers.0.final_layer_norm", dim)
    linear("encoder.lm_head.dense", dim, dim)
    linear("encoder.lm_head.layer_norm", dim)
    weights["encoder.lm_head.weight"] = weights[f"{base}embed_tokens.weight"].clone()
    weights["encoder.lm_head.bias"] = torch.randn(rows)
    config = {
        "layers": 1,
        "heads": 2,
        "dim": dim,
        "ffn": inner,
        "layernorm_eps": 1e-5,
        "vocab_list": list(ESM_ALPHABET),
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")
    torch.save(weights, folder / "pytorch_model.bin")
    return folder


def _edit_archive(data: bytes, seed: int, chosen: Sequence[Edit]) -> bytes:
    """Edit the bytes of an archive of torch, or those of a member with the right checksum: its pickle mostly."""
    if seed & 128:
        return edit_bytes(data, chosen, (b"PK\1\2", b"PK\3\4", b"PK\5\6", b"PK\6\6"))

    def edit(name: str, part: bytes) -> bytes:
        return edit_pickle(part, chosen) if name.endswith("data.pkl") else edit_bytes(part, chosen)

    return edit_member(
        data,
        seed if seed & 32 else 0,
        chosen if seed & 32 else [(0, 0, 0, 0), *chosen],
        edit,
        packed=bool(seed & 16),
    )


def edit_pickle(data: bytes, chosen: Sequence[Edit]) -> bytes:
    """Edit a pickle between its instructions, which stay whole, from the last to the first; at the end now and then within."""
    places = _instructions(data)
    within = []
    picked = {at(place, len(places) - 1): (kind, place, value, width) for kind, place, value, width in chosen}
    for index in sorted(picked, reverse=True):
        kind, _, value, width = picked[index]
        start, end = places[index : index + 2]
        if kind <= 3:
            data = data[:start] + _WORDS[value % len(_WORDS)] + data[start if width else end :]
        elif kind == 4:
            data = data[:start] + data[end:]
        elif kind == 5:
            data = data[:start] + data[start : min(end, start + 64)] * (1 + value) + data[end:]
        elif kind == 6 and data[start : start + 1] in (b"K", b"M", b"J"):
            number = struct.pack("<q", (2**31 - 1, 2**40, 2**62, -1, -(2**40), 0)[value % 6])
            data = data[:start] + b"\x8a\x08" + number + data[end:]
        else:
            within.append(picked[index])
    return edit_bytes(data, within, _WORDS)


@lru_cache(maxsize=16)
def _instructions(data: bytes) -> list[int]:
    """Return where the instructions of a pickle begin, but for the first, and where it ends."""
    return [*(place for _, _, place in pickletools.genops(data) if place), len(data)]


def _edit_content(content: dict[str, Any], chosen: Sequence[Edit]) -> Any:
    """Return a copy of a checkpoint's content with some entries replaced."""
    odd = odd_values()
    content = {name: copy.copy(value) for name, value in content.items()}
    about = {name: copy.copy(value) for name, value in content["protperf"].items()}
    content["protperf"] = about
    for kind, place, value, width in chosen:
        owner = (
            content,
            about,
            about["model"],
            about["objective"],
            content["state_dict"],
            content["state_dict"],
        )[kind % 6]
        if not isinstance(owner, dict) or not owner:
            continue
        name = list(owner)[at(place, len(owner))]
        owner[name] = odd[(value + 256 * width) % len(odd)]
        if not isinstance(content.get("state_dict"), dict) or not isinstance(about.get("model"), dict):
            break
        if not isinstance(about.get("objective"), dict) or content.get("protperf") is not about:
            break
    return content


def _edit_folder(folder: Path, weights: str, seed: int, chosen: Sequence[Edit]) -> None:
    """Edit the config of a model's folder, the header of its weights, or their bytes."""
    path = folder / weights
    if seed & 16:
        config = json.loads((folder / "config.json").read_bytes())
        data = dump(edit_json(config, chosen))
        (folder / "config.json").write_bytes(edit_bytes(data, chosen) if seed & 192 == 192 else data)
        if not seed & 32:
            return
    data = path.read_bytes()
    if path.suffix != ".safetensors":
        data = _edit_archive(data, seed, chosen)
    elif seed & 64:
        data = edit_bytes(
            data, chosen, (b"F64", b"BF16", b"F8_E4M3", b"[]", b"9999999999999999999", b"-1", b"C64", b"F4")
        )
    else:
        size = int.from_bytes(data[:8], "little")
        header = dump(edit_json(json.loads(data[8 : 8 + size]), chosen))
        data = len(header).to_bytes(8, "little") + header + data[8 + size :]
    path.write_bytes(data)
