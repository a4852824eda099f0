"""What pretrained weights may look like, and what would make the model answer otherwise: refused, in one line that names it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from pretrained_models import (
    BERT_TOKENS,
    ESM_TOKENS,
    ROBERTA_TOKENS,
    as_fairseq,
    make_bert,
    make_esm,
    make_roberta,
    save,
    shared_tokens,
)
from training import assert_same

from protperf.convert import main
from protperf.convert.files import is_pretrained
from protperf.convert.sources import Pretrained, load_pretrained
from protperf.convert.tokens import NEVER
from protperf.formats import FormatError
from protperf.vocab import VOCABULARY

Edit = Callable[[Path], Any]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders `bert`, `roberta` and `esm`, each with `config.json`, `pytorch_model.bin` and `vocab.txt`."""
    folder = tmp_path_factory.mktemp("saved")
    makers = {
        "bert": (make_bert, BERT_TOKENS),
        "roberta": (make_roberta, ROBERTA_TOKENS),
        "esm": (make_esm, ESM_TOKENS),
    }
    for name, (make, vocabulary) in makers.items():
        save(make(), folder / name, form="bin", vocabulary=vocabulary)
    return folder


def weights_of(folder: Path) -> dict[str, Tensor]:
    return torch.load(folder / "pytorch_model.bin", weights_only=True)


def config(**changes: Any) -> Edit:
    """Change keys of the config; `None` removes one."""

    def edit(folder: Path) -> None:
        path = folder / "config.json"
        content = json.loads(path.read_text()) | changes
        path.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))

    return edit


def weights(change: Callable[[dict[str, Tensor]], Any]) -> Edit:
    def edit(folder: Path) -> None:
        content = weights_of(folder)
        change(content)
        torch.save(content, folder / "pytorch_model.bin")

    return edit


def vocabulary(*tokens: str) -> Edit:
    return lambda folder: (folder / "vocab.txt").write_text("\n".join(tokens))


def remove(*names: str) -> Edit:
    return lambda folder: [(folder / name).unlink() for name in names]


def content(name: str, data: bytes) -> Edit:
    return lambda folder: (folder / name).write_bytes(data)


def fill(name: str, value: float) -> Edit:
    return weights(lambda found: found[name].view(-1)[:1].fill_(value))


def old_pickle(folder: Path) -> None:
    torch.save(weights_of(folder), folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)


def objects(folder: Path) -> None:
    torch.save({"args": Path("a"), **weights_of(folder)}, folder / "pytorch_model.bin")


def shards(folder: Path) -> None:
    (folder / "pytorch_model.bin").rename(folder / "pytorch_model-00001-of-00002.bin")
    (folder / "pytorch_model.bin.index.json").write_text("{}")


def two_files(folder: Path) -> None:
    for name in ("a.bin", "b.bin"):
        shutil.copy(folder / "pytorch_model.bin", folder / name)
    (folder / "pytorch_model.bin").unlink()


def shared_layers(folder: Path) -> None:
    """A layer's tensors under the names of 20."""
    own = ".layer.0."
    first = [name for name in weights_of(folder) if own in name]
    weights(
        lambda found: found.update(
            {name.replace(own, f".layer.{n}."): found[name] for name in first for n in range(20)}
        )
    )(folder)
    config(num_hidden_layers=20)(folder)


def flip(folder: Path) -> None:
    data = bytearray((folder / "pytorch_model.bin").read_bytes())
    data[len(data) // 2] ^= 1
    (folder / "pytorch_model.bin").write_bytes(data)


QUERY = "bert.encoder.layer.0.attention.self.query.weight"
FREQUENCIES = "esm.rotary_embeddings.inv_freq"
WORDS = "bert.embeddings.word_embeddings.weight"
KINDS = "bert.embeddings.token_type_embeddings.weight"

REFUSED: dict[str, tuple[str, Edit, str]] = {
    "gelu_new": (
        "bert",
        config(hidden_act="gelu_new"),
        r"config\.json: hidden_act is 'gelu_new'; allowed: 'gelu'",
    ),
    "relu": ("roberta", config(hidden_act="relu"), "hidden_act is 'relu'"),
    "relative positions": (
        "bert",
        config(position_embedding_type="relative_key"),
        "position_embedding_type is 'relative_key'; allowed: 'absolute'",
    ),
    "relative positions of ESM": (
        "esm",
        config(position_embedding_type="relative_key_query"),
        "position_embedding_type is 'relative_key_query'; allowed: 'absolute', 'rotary'",
    ),
    "a decoder": ("bert", config(is_decoder=True), "is_decoder is True; allowed: False"),
    "cross attention": ("roberta", config(add_cross_attention=True), "add_cross_attention is True"),
    "a folding model": ("esm", config(is_folding_model=True), "is_folding_model is True"),
    "another model": (
        "bert",
        config(model_type="distilbert"),
        "model_type 'distilbert'; allowed: bert, roberta, esm",
    ),
    "no model at all": ("bert", config(model_type=None), "model_type None; allowed"),
    "no heads": ("bert", config(num_attention_heads=None), "no num_attention_heads, .* give --heads N"),
    "heads that do not divide": ("bert", config(num_attention_heads=5), "5 heads do not divide the width 32"),
    "heads that rotations deny": (
        "esm",
        config(num_attention_heads=2),
        r"inv_freq is \(4,\), its config asks for \(8,\)",
    ),
    "heads in words": (
        "bert",
        config(num_attention_heads="4"),
        "num_attention_heads is '4'; allowed: a whole number",
    ),
    "another width": (
        "bert",
        config(hidden_size=48),
        r"word_embeddings.weight is \(31, 32\), its config asks for \(any, 48\)",
    ),
    "another inner width": ("bert", config(intermediate_size=64), r"intermediate.dense.weight is \(48, 32\)"),
    "more layers": (
        "bert",
        config(num_hidden_layers=3),
        "bert.encoder.layer.2.attention.self.query.weight is missing",
    ),
    "fewer layers": ("bert", config(num_hidden_layers=1), "bert.encoder.layer.1.* and 15 more has no place"),
    "other positions": (
        "bert",
        config(max_position_embeddings=41),
        r"position_embeddings.weight is \(40, 32\)",
    ),
    "another number of tokens": ("bert", config(vocab_size=30), "vocab_size is 30; allowed: 31"),
    "eps in words": ("bert", config(layer_norm_eps="small"), "layer_norm_eps is 'small'; allowed: a number"),
    "eps beyond all": ("bert", config(layer_norm_eps=10**400), "layer_norm_eps is 1000.*; allowed: a number"),
    "dropout in words": (
        "esm",
        config(token_dropout="yes"),
        "token_dropout is 'yes'; allowed: true or false",
    ),
    "another mask": ("esm", config(mask_token_id=31), "mask_token_id is 31; allowed: 32"),
    "another padding": ("roberta", config(pad_token_id=0), "pad_token_id is 0; allowed: 1"),
    "other rotations": ("esm", config(rope_theta=500.0), "rope_theta is 500.0; allowed: 10000.0"),
    "scaled rotations": (
        "esm",
        config(rope_parameters={"rope_type": "linear"}),
        "rope_parameters is .*'linear'.*; allowed: rope_theta 10000.0",
    ),
    "frequencies": ("esm", fill(FREQUENCIES, 0.5), "inv_freq are other frequencies"),
    "a list for a config": ("bert", content("config.json", b"[]"), "config.json: a list, not a JSON object"),
    "no head": (
        "bert",
        weights(lambda found: found.pop("cls.predictions.transform.dense.weight")),
        "cls.predictions.transform.dense.weight is missing; give weights of a masked language model, its head included",
    ),
    "a weight less": ("bert", weights(lambda found: found.pop(QUERY)), f"{QUERY} is missing"),
    "a weight more": (
        "bert",
        weights(lambda found: found.update(adapter=torch.ones(2))),
        "adapter has no place in this layout",
    ),
    "a gate": (
        "roberta",
        weights(lambda found: found.update({"roberta.encoder.layer.0.gate.weight": torch.ones(2)})),
        "roberta.encoder.layer.0.gate.weight has no place",
    ),
    "not a number": ("bert", fill(QUERY, float("nan")), f"{QUERY} holds what is no finite number"),
    "8 bits": (
        "bert",
        weights(lambda found: found.update({QUERY: found[QUERY].to(torch.float8_e4m3fn)})),
        rf"usual types .'{QUERY}' is of type torch.float8_e4m3fn.; save its state dict alone, as safetensors, in float32",
    ),
    "sparse": (
        "bert",
        weights(lambda found: found.update({WORDS: found[WORDS].to_sparse()})),
        "torch.sparse_coo; allowed: dense floating point",
    ),
    "more than float32 holds": (
        "bert",
        weights(lambda found: found.update({QUERY: found[QUERY].double() * 1e300})),
        f"{QUERY} holds what is no finite number",
    ),
    "two names of a norm": (
        "bert",
        weights(lambda found: found.update({"bert.embeddings.LayerNorm.gamma": torch.zeros(32)})),
        "bert.embeddings.LayerNorm.weight under that name and an old one",
    ),
    "no kinds": (
        "bert",
        weights(lambda found: found.update({KINDS: torch.zeros(0, 32)})),
        f"{KINDS} is .0, 32., its config asks for",
    ),
    "whole numbers": (
        "bert",
        weights(lambda found: found.update({QUERY: found[QUERY].to(torch.int8)})),
        "is of type torch.int8, .*; allowed: dense floating point",
    ),
    "a head that is not tied": (
        "bert",
        weights(lambda found: found.update({"cls.predictions.decoder.weight": found[WORDS] + 1})),
        "decoder.weight is not the embedding, but the config ties them",
    ),
    "two biases": (
        "bert",
        weights(lambda found: found.update({"cls.predictions.bias": torch.zeros(31)})),
        "cls.predictions.decoder.bias and cls.predictions.bias differ",
    ),
    "an untied head that is not there": (
        "bert",
        lambda folder: (
            config(tie_word_embeddings=False)(folder),
            weights(lambda found: found.pop("cls.predictions.decoder.weight"))(folder),
        ),
        "cls.predictions.decoder.weight is missing",
    ),
    "no vocabulary": ("bert", remove("vocab.txt"), "no vocabulary .*; give --vocab FILE"),
    "a vocabulary with gaps": (
        "bert",
        lambda folder: (remove("vocab.txt")(folder), content("vocab.json", b'{"A": 0, "C": 2}')(folder)),
        "no vocabulary that gives each token its number",
    ),
    "a vocabulary in words": (
        "bert",
        lambda folder: (
            remove("vocab.txt")(folder),
            content("tokenizer.json", b'{"model": {"vocab": {"A": []}}}')(folder),
        ),
        "no vocabulary that gives each token its number",
    ),
    "a list for a kind": ("bert", config(model_type=["bert"]), r"model_type \['bert'\]; allowed: bert"),
    "a vocabulary too long": ("bert", vocabulary(*BERT_TOKENS, "*"), "32 tokens, the embedding has 31 rows"),
    "no tryptophan": (
        "bert",
        vocabulary(*[each for each in BERT_TOKENS if each != "W"]),
        "the vocabulary has no W; needed",
    ),
    "no mask": ("bert", vocabulary(*[each for each in BERT_TOKENS if each != "[MASK]"]), "has no <mask>"),
    "a token twice": ("bert", vocabulary(*BERT_TOKENS[:-1], "A"), "token 'A' is in the vocabulary twice"),
    "pieces": ("bert", vocabulary(*BERT_TOKENS[:-1], "##A"), "token '##A' is a piece of a protein"),
    "pairs": ("bert", vocabulary(*BERT_TOKENS[:-1], "AL"), "token 'AL' is a piece of a protein"),
    "two names": (
        "bert",
        vocabulary(*BERT_TOKENS[:-1], "<cls>"),
        r"'<cls>' and '\[CLS\]'; allowed: one name for <bos>",
    ),
    "an old pickle": ("bert", old_pickle, "not a whole file of torch 1.6 or later; save it anew"),
    "a cut file": ("bert", content("pytorch_model.bin", b"PK\x03\x04" * 9), "not a whole file of torch 1.6"),
    "a layer in many places": (
        "bert",
        shared_layers,
        "its tensors claim more than 2 times the bytes of the file",
    ),
    "a damaged file": ("bert", flip, "damaged .the checksum of .* is wrong"),
    "objects": (
        "bert",
        objects,
        "holds more than plain values and tensors of usual types .*; save its state dict alone",
    ),
    "a list of tensors": (
        "bert",
        lambda folder: torch.save([torch.ones(2)], folder / "pytorch_model.bin"),
        "not a state dict",
    ),
    "several files": ("bert", shards, "cut into several files; save them as one"),
    "files to choose from": ("bert", two_files, r"holds a\.bin, b\.bin; give one of these files"),
    "no weights": (
        "bert",
        remove("pytorch_model.bin"),
        "holds no model.safetensors and no pytorch_model.bin",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_change_answers_is_refused_in_one_line(name: str, saved: Path, tmp_path: Path):
    kind, edit, message = REFUSED[name]
    shutil.copytree(saved / kind, tmp_path / kind)
    edit(tmp_path / kind)
    with pytest.raises(FormatError, match=message) as caught:
        load_pretrained(tmp_path / kind)
    assert str(caught.value).startswith(str(tmp_path / kind))
    assert "\n" not in str(caught.value)


def converted(saved: Path, folder: Path, kind: str, edit: Edit, **options: Any) -> Pretrained:
    shutil.copytree(saved / kind, folder / kind)
    edit(folder / kind)
    return load_pretrained(folder / kind, **options)


def assert_equal_models(a: Pretrained, b: Pretrained) -> None:
    assert a.trained.model.config == b.trained.model.config
    assert_same(dict(a.trained.model.state_dict()), dict(b.trained.model.state_dict()))


def as_json(name: str, make: Callable[[tuple[str, ...]], Any]) -> Edit:
    def edit(folder: Path) -> None:
        tokens = tuple((folder / "vocab.txt").read_text().split("\n")[:-1])
        (folder / "vocab.txt").unlink()
        (folder / name).write_text(json.dumps(make(tokens)))

    return edit


def numbered(tokens: tuple[str, ...]) -> dict[str, int]:
    return {token: number for number, token in enumerate(tokens)}


def tokenizer(tokens: tuple[str, ...]) -> dict[str, Any]:
    added = [{"id": number, "content": token, "special": True} for number, token in enumerate(tokens[:5])]
    return {"model": {"type": "WordPiece", "vocab": numbered(tokens)}, "added_tokens": added}


def old_norms(found: dict[str, Tensor]) -> None:
    for name in [name for name in found if "LayerNorm" in name]:
        found[name.replace("weight", "gamma").replace("bias", "beta")] = found.pop(name)


ACCEPTED: dict[str, tuple[str, Edit]] = {
    "tokenizer.json": ("bert", as_json("tokenizer.json", tokenizer)),
    "vocab.json": ("roberta", as_json("vocab.json", numbered)),
    "vocab_list in the config": (
        "roberta",
        lambda folder: (remove("vocab.txt")(folder), config(vocab_list=list(ROBERTA_TOKENS))(folder)),
    ),
    "ESM's own alphabet": ("esm", remove("vocab.txt")),
    "norms as TensorFlow called them": ("bert", weights(old_norms)),
    "heads for other questions": (
        "bert",
        weights(lambda found: found.update({"cls.seq_relationship.weight": torch.ones(2, 32)})),
    ),
    "no frequencies": ("esm", weights(lambda found: found.pop(FREQUENCIES))),
    "a state dict within another": (
        "bert",
        lambda folder: torch.save({"model": weights_of(folder)}, folder / "pytorch_model.bin"),
    ),
    "a tied head left out": ("bert", weights(lambda found: found.pop("cls.predictions.decoder.weight"))),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_means_the_same_gives_the_same_model(name: str, saved: Path, tmp_path: Path):
    kind, edit = ACCEPTED[name]
    assert_equal_models(load_pretrained(saved / kind), converted(saved, tmp_path, kind, edit))


def test_fewer_bits_become_float32(saved: Path, tmp_path: Path):
    halves = weights(lambda found: found.update({name: value.half() for name, value in found.items()}))
    state = converted(saved, tmp_path, "bert", halves).trained.model.state_dict()
    whole = load_pretrained(saved / "bert").trained.model.state_dict()
    for name, value in state.items():
        assert value.dtype == whole[name].dtype
        torch.testing.assert_close(value, whole[name], atol=2e-3, rtol=2e-3)


def test_heads_are_taken_from_the_user_where_no_config_says_them(saved: Path, tmp_path: Path):
    found = converted(saved, tmp_path, "bert", config(num_attention_heads=None), heads=4)
    assert_equal_models(found, load_pretrained(saved / "bert"))
    with pytest.raises(FormatError, match="num_attention_heads is 4, --heads says 8; leave --heads out"):
        load_pretrained(saved / "bert", heads=8)


def test_rows_without_a_token_are_left_out_and_named(saved: Path, tmp_path: Path):
    found = converted(saved, tmp_path, "bert", vocabulary(*BERT_TOKENS[:-1]))
    assert found.left_out == ("(row 30)",)
    assert "tokens of the source left out: (row 30)" in found.notes()


def test_tables_have_the_rows_of_our_tokens(saved: Path):
    found = load_pretrained(saved / "roberta")
    model, source = found.trained.model, weights_of(saved / "roberta")
    state = model.state_dict()
    words = source["roberta.embeddings.word_embeddings.weight"]
    numbers = shared_tokens(ROBERTA_TOKENS)
    for number, token in enumerate(VOCABULARY.tokens):
        row = numbers.get(number, 3)  # <unk>
        assert state["embedding.weight"][number].equal(words[row]), token
        bias = source["lm_head.bias"][row] if number in numbers else NEVER
        assert float(state["head.bias"][number]) == float(bias), token
    assert found.left_out == (".", "-")
    places = source["roberta.embeddings.position_embeddings.weight"]
    kinds = source["roberta.embeddings.token_type_embeddings.weight"]
    assert state["position_embedding.weight"].equal(places[2:] + kinds[0])
    assert model.max_length == 40


def test_fairseq_s_names_mean_the_same_model(saved: Path, tmp_path: Path):
    file = as_fairseq(make_roberta(), tmp_path / "tiny", name="tiny")
    expected = load_pretrained(saved / "roberta")
    for path in (file, file.parent, file.parent / "tiny_config.json"):
        assert is_pretrained(path)
        assert_equal_models(load_pretrained(path), expected)


def test_fairseq_s_weights_need_heads_and_a_vocabulary_from_somebody(saved: Path, tmp_path: Path):
    file = as_fairseq(make_roberta(), tmp_path / "tiny", name="tiny")
    settings = json.loads((file.parent / "tiny_config.json").read_text())
    (file.parent / "tiny_config.json").write_text(json.dumps(settings | {"layers": 3}))
    with pytest.raises(FormatError, match=r"tiny_config.json: layers is 3; allowed: 2"):
        load_pretrained(file)
    (file.parent / "tiny_config.json").unlink()
    with pytest.raises(FormatError, match="no vocabulary"):
        load_pretrained(file, heads=4)
    vocabulary_file = saved / "roberta" / "vocab.txt"
    with pytest.raises(FormatError, match=r"no heads, .* give --heads N"):
        load_pretrained(file, vocabulary=vocabulary_file)
    found = load_pretrained(file, heads=4, vocabulary=vocabulary_file)
    assert found.trained.model.config.norm_eps == 1e-5
    for name in ("a_config.json", "b_config.json"):
        (file.parent / name).write_text("{}")
    with pytest.raises(
        FormatError, match=r"a_config.json and b_config.json may be the config of tiny.safetensors"
    ):
        load_pretrained(file)


def test_a_name_of_a_stranger_is_said_in_printable_letters(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    shutil.copytree(saved / "esm", tmp_path / "esm")
    weights(lambda found: found.update({"esm.pooler.\x1b[31m": torch.ones(1)}))(tmp_path / "esm")
    assert main([str(tmp_path / "esm"), str(tmp_path / "out")]) == 0
    said = capsys.readouterr().err
    assert r"esm.pooler.\x1b[31m" in said
    assert "\x1b" not in said


def test_the_command_tells_foreign_weights_from_its_own(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main([str(saved / "esm"), str(tmp_path / "esm")]) == 0
    said = capsys.readouterr().err
    assert "no part in the scores of tokens, left out: esm.contact_head.regression.weight" in said
    assert "tokens of the source left out: . - <null_1>" in said
    assert sorted(os.listdir(tmp_path / "esm")) == ["config.json", "model.safetensors", "model_card.md"]
    for path in (tmp_path / "esm", tmp_path / "esm" / "model.safetensors", tmp_path / "esm" / "config.json"):
        assert not is_pretrained(path)
    with pytest.raises(ValueError, match="--heads is for pretrained weights of other programs"):
        main([str(tmp_path / "esm"), str(tmp_path / "again"), "--heads", "4"])
    assert main([str(tmp_path / "esm"), str(tmp_path / "again")]) == 0
    assert (tmp_path / "again" / "config.json").read_text() == (tmp_path / "esm" / "config.json").read_text()
    with pytest.raises(ValueError, match="is where the model comes from"):
        main([str(saved / "esm"), str(saved / "esm"), "--force"])
    with pytest.raises(ValueError, match="nothing: no such file or folder"):
        main([str(tmp_path / "nothing"), str(tmp_path / "out")])
