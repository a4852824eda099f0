"""`protperf.hf`: through transformers a folder gives the numbers that protperf gives, whatever the padding."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint
from safetensors.torch import load_file, save_file
from training import assert_same

from protperf.checkpoint import load_model
from protperf.checkpoint.export import export_model
from protperf.convert import main
from protperf.vocab import VOCABULARY

pytest.importorskip("transformers")

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
)

from protperf.hf import ProtperfConfig, ProtperfForMaskedLM, ProtperfModel, ProtperfTokenizer

TOLERANCE = 1e-5
"""float32 sums in another order; hidden states are of order one. Without padding they are equal bit for bit."""

PROTEINS = ["MKVLAAGIVTS", "MK", "MKTTTWYCXBUZJO", "mkvlaagivtsmkvlaagivts"]
AUTO = {"masked": AutoModelForMaskedLM, "causal": AutoModelForCausalLM}
LAYERS = 2


@pytest.fixture(
    scope="module", params=[("favor", "masked"), ("relu", "causal"), ("softmax", "masked")], ids="-".join
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hf")
    attention, kind = request.param
    checkpoint = make_checkpoint(path / "m.ckpt", attention=attention, kind=kind)
    assert main([str(checkpoint), str(path / "model")]) == 0
    return path / "model"


def alone(folder: Path, protein: str, *, layer: int = LAYERS) -> torch.Tensor:
    """Ask protperf's own model about one protein, without padding or transformers."""
    tokens = [VOCABULARY.bos, *VOCABULARY.encode(protein).tolist(), VOCABULARY.eos]
    with torch.no_grad():
        return load_model(folder).model.states(torch.tensor([tokens]), layers=(layer,))[0][0]


@pytest.mark.parametrize("side", ["left", "right"])
def test_states_are_protperf_s_whatever_stands_beside_them(folder: Path, side: str):
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side=side)
    model = AutoModel.from_pretrained(folder)
    assert type(model) is ProtperfModel
    assert not model.training
    inputs = tokenizer(PROTEINS, padding=True, return_tensors="pt")
    assert set(inputs) == {"input_ids", "attention_mask"}
    with torch.no_grad():
        output = model(**inputs, output_hidden_states=True)
        without_mask = model(inputs["input_ids"])
    assert len(output.hidden_states) == LAYERS + 1
    assert output.hidden_states[-1] is output.last_hidden_state
    assert without_mask.hidden_states is None
    for row, protein in enumerate(PROTEINS):
        real = inputs["attention_mask"][row].bool()
        for layer, states in enumerate(output.hidden_states):
            torch.testing.assert_close(
                states[row, real], alone(folder, protein, layer=layer), atol=TOLERANCE, rtol=TOLERANCE
            )
        assert without_mask.last_hidden_state[row, real].equal(output.last_hidden_state[row, real])


def test_one_protein_alone_is_equal_bit_for_bit(folder: Path):
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder)
    with torch.no_grad():
        states = model(**tokenizer(PROTEINS[0], return_tensors="pt")).last_hidden_state
    assert states[0].equal(alone(folder, PROTEINS[0]))


def test_garbage_behind_the_mask_is_never_seen(folder: Path):
    model = AutoModel.from_pretrained(folder)
    tokens = torch.tensor([[VOCABULARY.bos, 3, 4, 5, VOCABULARY.eos, 7, 7, 7]])
    mask = torch.tensor([[1, 1, 1, 1, 1, 0, 0, 0]])
    with torch.no_grad():
        short = model(tokens[:, :5]).last_hidden_state
        long = model(tokens, attention_mask=mask).last_hidden_state
    torch.testing.assert_close(long[:, :5], short, atol=TOLERANCE, rtol=TOLERANCE)


def test_loss_is_the_mean_over_the_labels_asked(folder: Path):
    kind = load_model(folder).objective.kind
    model = AUTO[kind].from_pretrained(folder)
    inputs = AutoTokenizer.from_pretrained(folder)(PROTEINS, padding=True, return_tensors="pt")
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    with torch.no_grad():
        output = model(**inputs, labels=labels)
    expected = []
    embedding = load_model(folder).model.embedding.weight
    for protein in PROTEINS:
        tokens = [VOCABULARY.bos, *VOCABULARY.encode(protein).tolist(), VOCABULARY.eos]
        scores = torch.log_softmax(alone(folder, protein) @ embedding.detach().T, -1)
        shift = int(kind == "causal")
        expected += [-float(scores[place - shift, tokens[place]]) for place in range(shift, len(tokens))]
    assert float(output.loss) == pytest.approx(math.fsum(expected) / len(expected), rel=1e-5)
    assert output.logits.shape == (*labels.shape, 36)
    loss, logits = model(**inputs, labels=labels, return_dict=False)
    assert loss.equal(output.loss)
    assert logits.equal(output.logits)


def test_training_reaches_every_weight(folder: Path):
    kind = load_model(folder).objective.kind
    model = AUTO[kind].from_pretrained(folder).train()
    inputs = AutoTokenizer.from_pretrained(folder)(PROTEINS, padding=True, return_tensors="pt")
    model(**inputs, labels=inputs["input_ids"]).loss.backward()
    assert [name for name, weight in model.named_parameters() if weight.grad is None] == []


def test_what_transformers_saves_protperf_opens_bit_for_bit(folder: Path, tmp_path: Path):
    before = load_model(folder)
    AUTO[before.objective.kind].from_pretrained(folder).save_pretrained(tmp_path / "saved")
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path / "saved")
    after = load_model(tmp_path / "saved")
    assert_same(dict(before.model.state_dict()), dict(after.model.state_dict()))
    assert before.describe() == after.describe()
    assert before.step == after.step
    again = AutoModel.from_pretrained(tmp_path / "saved")
    assert_same(dict(again.model.state_dict()), dict(before.model.state_dict()))
    assert AutoTokenizer.from_pretrained(tmp_path / "saved")("MK")["input_ids"] == [27, 10, 8, 28]
    assert str(folder) not in (tmp_path / "saved" / "config.json").read_text()


def test_the_wrong_head_is_refused(folder: Path):
    kind = load_model(folder).objective.kind
    wrong, right = (
        AUTO[name] for name in (("causal", "masked") if kind == "masked" else ("masked", "causal"))
    )
    with pytest.raises(ValueError, match=f"its objective is {kind}; load it with {right.__name__}"):
        wrong.from_pretrained(folder)


def test_sampling_is_left_to_protperf_generate(tmp_path: Path):
    checkpoint = make_checkpoint(tmp_path / "m.ckpt", attention="relu", kind="causal")
    main([str(checkpoint), str(tmp_path / "model")])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match="`protperf generate FOLDER` does"):
        model.generate(torch.tensor([[27, 1]]))
    assert "text-generation" not in (tmp_path / "model" / "model_card.md").read_text()


@pytest.fixture
def masked(tmp_path: Path) -> Path:
    assert main([str(make_checkpoint(tmp_path / "m.ckpt")), str(tmp_path / "model")]) == 0
    return tmp_path / "model"


def test_weights_of_half_width_keep_the_projection_exact(masked: Path):
    model = AutoModel.from_pretrained(masked, dtype=torch.bfloat16)
    own = load_model(masked).model
    assert model.dtype == model.model.embedding.weight.dtype == torch.bfloat16
    for one, other in zip(model.model.blocks, own.blocks, strict=True):
        assert one.attention.projection.equal(other.attention.projection)
    with torch.no_grad():
        states = model(torch.tensor([[27, 1, 2, 3, 28]])).last_hidden_state
    assert states.isfinite().all()


@pytest.mark.parametrize("change", ["missing", "unknown", "shape"])
def test_no_weight_is_made_up(masked: Path, change: str):
    weights = load_file(masked / "model.safetensors")
    if change == "missing":
        weights.pop("model.norm.bias")
    elif change == "unknown":
        weights["model.other"] = torch.ones(1)
    else:
        weights["model.norm.bias"] = torch.ones(5)
    save_file(weights, masked / "model.safetensors", {"format": "pt"})
    with pytest.raises((ValueError, RuntimeError), match=r"model\.(norm\.bias|other)|mismatched"):
        AutoModel.from_pretrained(masked)


def test_weights_with_a_wrong_checksum_are_refused(masked: Path):
    """Of a flipped bit transformers itself sees nothing."""
    data = bytearray((masked / "model.safetensors").read_bytes())
    data[-777] ^= 1
    (masked / "model.safetensors").write_bytes(data)
    for opener in (AutoModel, AutoModelForMaskedLM):
        with pytest.raises(ValueError, match=r"model\.safetensors: damaged .the checksum"):
            opener.from_pretrained(masked)
    with pytest.raises(ValueError, match="the checksum"):
        AutoModel.from_pretrained(masked.parent, config=AutoConfig.from_pretrained(masked), subfolder="model")


def test_weights_that_are_no_numbers_are_refused(masked: Path):
    weights = load_file(masked / "model.safetensors")
    weights["model.norm.bias"][3] = torch.nan
    save_file(weights, masked / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"norm\.bias holds what is no finite number"):
        AutoModel.from_pretrained(masked)


def test_a_configuration_asks_for_no_more_layers_than_there_are(masked: Path):
    """Also where transformers has cut the weights into several files."""
    config = json.loads((masked / "config.json").read_bytes())
    ProtperfForMaskedLM.from_pretrained(masked).save_pretrained(masked / "cut", max_shard_size="8KB")
    (masked / "cut" / "config.json").write_text(json.dumps(config))
    assert len(list((masked / "cut").glob("*.safetensors"))) > 1
    ProtperfForMaskedLM.from_pretrained(masked / "cut")
    narrow = {"model_dim": 2, "num_heads": 1, "feedforward_dim": 1, "num_features": 1}
    config["model"] |= {"num_layers": 500, **narrow}
    for folder in (masked, masked / "cut"):
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(ValueError, match=r"asks for 500 layers, the file holds \d+ tensors"):
            ProtperfForMaskedLM.from_pretrained(folder)


def test_another_vocabulary_is_refused(masked: Path):
    config = json.loads((masked / "config.json").read_text()) | {"fingerprint": "0" * 64}
    (masked / "config.json").write_text(json.dumps(config))
    for opener in (AutoModel, AutoTokenizer):
        with pytest.raises(ValueError, match="another vocabulary"):
            opener.from_pretrained(masked)


def test_a_config_tells_the_shape_by_transformers_names(masked: Path):
    config = AutoConfig.from_pretrained(masked)
    assert type(config) is ProtperfConfig
    assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == (16, 2, 2)
    assert (config.vocab_size, config.pad_token_id, config.mask_token_id) == (
        36,
        VOCABULARY.pad,
        VOCABULARY.mask,
    )
    new = ProtperfForMaskedLM(ProtperfConfig(model={"num_layers": 1, "model_dim": 8, "num_heads": 2}))
    assert new.get_input_embeddings().weight.shape == (36, 8)


def test_a_tokenizer_reads_residues_and_refuses_the_rest(masked: Path):
    tokenizer = AutoTokenizer.from_pretrained(masked)
    assert type(tokenizer) is ProtperfTokenizer
    assert tokenizer("mk v\nX")["input_ids"] == [27, 10, 8, 17, 23, 28]
    assert tokenizer("MK<mask>V")["input_ids"] == [27, 10, 8, 29, 17, 28]
    assert tokenizer.decode([27, 10, 29, 17, 28]) == "<bos>M<mask>V<eos>"
    assert tokenizer.decode([27, 10, 17, 28], skip_special_tokens=True) == "MV"
    assert tokenizer.convert_ids_to_tokens(list(range(36))) == list(VOCABULARY.tokens)
    assert len(tokenizer) == 36
    with pytest.raises(ValueError, match="'-' at residue 3 is no residue"):
        tokenizer("MK-V")
    with pytest.raises(ValueError, match="one protein a row"):
        tokenizer("MK", "MV")


def test_a_collator_of_transformers_masks_residues_alone(masked: Path):
    tokenizer = AutoTokenizer.from_pretrained(masked)
    collate = DataCollatorForLanguageModeling(
        tokenizer, mlm_probability=0.5, mask_replace_prob=1.0, random_replace_prob=0.0
    )
    torch.manual_seed(0)
    batch = collate([tokenizer(protein) for protein in ["MKVLAAGIVTS", "MKTTT"] * 20])
    asked = batch["labels"] != -100
    assert (batch["labels"][asked] < VOCABULARY.num_residues).all()
    assert (batch["input_ids"][asked] == VOCABULARY.mask).all()
    assert asked.float().mean() > 0.1


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ([[1, 0, 1, 1]], "hides tokens inside of row 0"),
        ([[1, 1]], r"attention_mask is \(1, 2\), input_ids are \(1, 4\)"),
    ],
)
def test_masks_that_mean_nothing_here_are_refused(masked: Path, mask: list[list[int]], message: str):
    with pytest.raises(ValueError, match=message):
        AutoModel.from_pretrained(masked)(torch.tensor([[27, 1, 2, 28]]), attention_mask=torch.tensor(mask))


def test_padding_inside_of_a_protein_is_refused_without_a_mask(masked: Path):
    with pytest.raises(ValueError, match="<pad> in input_ids stands inside of row 0"):
        AutoModel.from_pretrained(masked)(torch.tensor([[27, 1, VOCABULARY.pad, 2, 28]]))


def test_a_mask_alone_decides_what_is_padding(folder: Path):
    """A collator may draw `<pad>` as the random token of a place: it is seen as any token is, there and at the end."""
    model = AutoModel.from_pretrained(folder)
    tokens = torch.tensor([[VOCABULARY.bos, 3, VOCABULARY.pad, 5, VOCABULARY.eos, VOCABULARY.pad]])
    mask = torch.tensor([[1, 1, 1, 1, 1, 0]])
    with torch.no_grad():
        seen = model(tokens, attention_mask=mask).last_hidden_state[:, :5]
        expected = load_model(folder).model(tokens[:, :5])
        everywhere = model(tokens, attention_mask=torch.ones_like(mask)).last_hidden_state
        whole = load_model(folder).model(tokens)
    torch.testing.assert_close(seen, expected, atol=TOLERANCE, rtol=TOLERANCE)
    torch.testing.assert_close(everywhere, whole, atol=TOLERANCE, rtol=TOLERANCE)


def test_a_collator_that_draws_any_token_is_no_error(masked: Path):
    """Transformers' default puts a random id in a tenth of the places asked, `<pad>` now and then."""
    tokenizer, model = AutoTokenizer.from_pretrained(masked), AutoModelForMaskedLM.from_pretrained(masked)
    collate = DataCollatorForLanguageModeling(
        tokenizer, mlm_probability=0.5, mask_replace_prob=0.0, random_replace_prob=1.0
    )
    torch.manual_seed(0)
    batch = collate([tokenizer("MKVLAAGIVTS") for _ in range(40)])
    assert (batch["input_ids"][:, 1:-1] == VOCABULARY.pad).any()
    assert torch.isfinite(model(**batch).loss)


def test_without_transformers_one_line_says_what_to_install():
    code = "import sys; sys.modules['transformers'] = None; import protperf.hf"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=dict(os.environ))
    assert (
        done.stderr.splitlines()[-1]
        == "ImportError: protperf.hf needs transformers: pip install 'protperf[hf]'"
    )


def test_transformers_opens_no_pickle_and_runs_nothing_of_a_folder(tmp_path: Path):
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
