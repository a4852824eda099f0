"""Pretrained weights of other programs give the scores that those programs give: real models, and transformers' own."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from importlib import import_module
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from programs import skip
from torch import Tensor
from training import train_small

from protperf.checkpoint import TrainedModel, load_model
from protperf.checkpoint.export import export_model
from protperf.convert import main
from protperf.convert.sources import load_pretrained
from protperf.vocab import VOCABULARY

TOLERANCE = 1e-4
"""float32 sums in another order; logits are of order ten. Real models come to 1e-5."""

NAMES = {
    "<s>": "<bos>",
    "</s>": "<eos>",
    "<cls>": "<bos>",
    "[CLS]": "<bos>",
    "[SEP]": "<eos>",
    "[MASK]": "<mask>",
}
NAMES |= {"[PAD]": "<pad>", "[UNK]": "<unk>"}


def framed(residues: str) -> Tensor:
    """Return the tokens of one protein, `(1, L + 2)`."""
    return torch.tensor([[VOCABULARY.bos, *VOCABULARY.encode(residues).tolist(), VOCABULARY.eos]])


def our_columns(vocabulary: list[str]) -> list[int]:
    """Return our number of each token of a source."""
    return [VOCABULARY.id_of(NAMES.get(token, token)) for token in vocabulary]


@torch.no_grad()
def answers(trained: TrainedModel, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return hidden states and scores of one protein, `(L, D)` and `(L, V)`."""
    hidden = trained.model(tokens)
    return hidden[0], trained.model.logits(hidden)[0]


@pytest.mark.parametrize("number", [0, 1, 2])
def test_sapiens_answers_as_its_own_program(shared_dir: Path, number: int):
    weights = shared_dir / "data" / "weights"
    golden = np.load(weights / "golden_outputs.npz")
    chain = str(golden[f"sapiens_model_{number}"])
    trained = load_pretrained(weights / f"sapiens_{chain}.safetensors").trained
    hidden, logits = answers(trained, framed(str(golden[f"sequence_{number}"])))
    vocabulary = json.loads((weights / "sapiens_config.json").read_text())["vocab"]
    theirs = torch.from_numpy(golden[f"sapiens_logits_{number}"])
    torch.testing.assert_close(logits[:, our_columns(vocabulary)], theirs, atol=TOLERANCE, rtol=0)
    theirs = torch.from_numpy(golden[f"sapiens_hidden_mean_{number}"])
    torch.testing.assert_close(hidden.mean(0), theirs, atol=TOLERANCE, rtol=0)


def test_a_wrong_number_of_heads_is_felt(shared_dir: Path, tmp_path: Path):
    """Sapiens still predicts 96 % of masked residues with it: scores alone tell."""
    weights = shared_dir / "data" / "weights"
    shutil.copy(weights / "sapiens_vh.safetensors", tmp_path)
    golden = np.load(weights / "golden_outputs.npz")
    vocabulary = json.loads((weights / "sapiens_config.json").read_text())["vocab"]
    (tmp_path / "vocabulary.txt").write_text("\n".join(vocabulary))
    theirs = torch.from_numpy(golden["sapiens_logits_0"])
    for heads, felt in ((8, False), (4, True), (16, True)):
        file = tmp_path / "sapiens_vh.safetensors"
        trained = load_pretrained(file, heads=heads, vocabulary=tmp_path / "vocabulary.txt").trained
        logits = answers(trained, framed(str(golden["sequence_0"])))[1][:, our_columns(vocabulary)]
        assert (float((logits - theirs).abs().max()) > 100 * TOLERANCE) is felt


def test_a_folder_of_sapiens_holds_the_model_and_says_where_it_is_from(
    shared_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    source = shared_dir / "data" / "weights" / "sapiens_vh.safetensors"
    assert main([str(source), str(tmp_path / "vh"), "--name", "Sapiens VH", "--license", "MIT"]) == 0
    said = capsys.readouterr().err
    assert "the source has no B O U X Z J <reserved1>" in said
    before, after = load_pretrained(source).trained, load_model(tmp_path / "vh")
    assert before.describe() == after.describe()
    tokens = framed("QVQLVQSGAEVKX")
    assert answers(before, tokens)[1].equal(answers(after, tokens)[1])
    card = (tmp_path / "vh" / "model_card.md").read_text()
    assert "Converted by protperf from `sapiens_vh.safetensors (SHA-256 3dbacd8d" in card
    assert "Proteins of more than 142 residues are refused" in card


def fetch_antiberty(folder: Path) -> Path:
    """Return the folder of the models in the wheel of AntiBERTy (MIT), fetched from the package index: 97 MB."""
    wheel = ("--no-deps", "--quiet", "--retries", "1", "--dest", str(folder), "antiberty==0.1.3")
    done = subprocess.run([sys.executable, "-m", "pip", "download", *wheel], capture_output=True, text=True)
    if done.returncode:
        skip(f"no package index with antiberty 0.1.3: {done.stderr.strip().splitlines()[-1]}")
    models = "antiberty/trained_models/"
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as archive:
        for name in ("vocab.txt", "AntiBERTy_md_smooth/config.json", "AntiBERTy_md_smooth/pytorch_model.bin"):
            archive.extract(models + name, folder)
    return folder / models


@pytest.mark.slow
def test_antiberty_answers_as_its_own_program(shared_dir: Path, tmp_path: Path):
    models = fetch_antiberty(tmp_path)
    golden = np.load(shared_dir / "data" / "weights" / "golden_outputs.npz")
    found = load_pretrained(models / "AntiBERTy_md_smooth", vocabulary=models / "vocab.txt")
    vocabulary = (models / "vocab.txt").read_text().split()
    for number in range(3):
        hidden, logits = answers(found.trained, framed(str(golden[f"sequence_{number}"])))
        theirs = torch.from_numpy(golden[f"antiberty_logits_{number}"])
        torch.testing.assert_close(logits[:, our_columns(vocabulary)], theirs, atol=TOLERANCE, rtol=0)
        theirs = torch.from_numpy(golden[f"antiberty_hidden_mean_{number}"])
        torch.testing.assert_close(hidden.mean(0), theirs, atol=TOLERANCE, rtol=0)
    assert {name.split(".")[1] for name in found.ignored if name.startswith("cls.")} == {
        "species",
        "chain",
        "graft",
    }


WILD = "QVQLVQSGAEVKKPGASVKVSCKASGYTFTSYG"


@pytest.fixture(scope="module")
def sapiens(shared_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a converted Sapiens, `vh`, and sequences."""
    folder = tmp_path_factory.mktemp("sapiens")
    source = shared_dir / "data" / "weights" / "sapiens_vh.safetensors"
    assert main([str(source), str(folder / "vh")]) == 0
    (folder / "masked.fasta").write_text(">a\nQVQLVQSG<mask>EVKKPGASVKV<mask>CKASGYTFTSYG\n")
    (folder / "mutants.csv").write_text("mutant\nQ1A\nV2I:A9G\nWT\n")
    (folder / "wild.fasta").write_text(f">wild\n{WILD}\n")
    return folder


def run(folder: Path, command: str, *arguments: str) -> None:
    """Run a command in this process; what is the name of a file in `folder` means that file."""
    module = import_module(f"protperf.{command}")
    program = module if hasattr(module, "main") else import_module(f"protperf.{command}.__main__")
    paths = [str(folder / each) if (folder / each).exists() or "." in each else each for each in arguments]
    assert program.main(paths) == 0


@pytest.mark.parametrize("kind", ["attention", "similarity"])
def test_maps_of_a_converted_model_are_drawn(sapiens: Path, kind: str):
    (sapiens / "all.fasta").write_text(">all\nACDEFGHIKLMNPQRSTVWYACDEFGHIKLMNPQRSTVWY\n")
    run(sapiens, "maps", kind, "vh", "all.fasta", f"{kind}.png")
    assert (sapiens / f"{kind}.png").stat().st_size > 0


def test_pseudo_perplexity_is_that_of_each_residue_masked_alone(sapiens: Path):
    run(sapiens, "score", "vh", "wild.fasta", "a.csv", "--method", "pseudo-ppl")
    trained = load_model(sapiens / "vh")
    total = 0.0
    for place in range(1, len(WILD) + 1):
        tokens = framed(WILD)
        right, tokens[0, place] = int(tokens[0, place]), VOCABULARY.mask
        total += float(answers(trained, tokens)[1][place].log_softmax(-1)[right])
    row = (sapiens / "a.csv").read_text().split("\n")[1].split(",")
    assert float(row[3]) == pytest.approx(total, abs=1e-3)


def test_what_the_model_says_is_what_commands_write(sapiens: Path):
    """Embeddings, filled places and effects of mutations, against the model's own states and scores."""
    trained = load_model(sapiens / "vh")
    run(sapiens, "embed", "vh", "wild.fasta", "b.h5")
    with h5py.File(sapiens / "b.h5") as file:
        states = answers(trained, framed(WILD))[0][1:-1]
        np.testing.assert_allclose(file["0000000000"][:], states.mean(0), atol=1e-5)
    run(sapiens, "score", "vh", "--mutations", "mutants.csv", "--wild-type", "wild.fasta", "e.csv")
    tokens = framed(WILD)
    tokens[0, 1] = VOCABULARY.mask
    chances = answers(trained, tokens)[1][1].log_softmax(-1)
    effect = float(chances[VOCABULARY.id_of("A")] - chances[VOCABULARY.id_of("Q")])
    assert float((sapiens / "e.csv").read_text().split("\n")[1].split(",")[1]) == pytest.approx(
        effect, abs=1e-4
    )
    run(sapiens, "generate", "vh", "--fill", "masked.fasta", "f.fasta", "--top-k", "1")
    tokens = framed(WILD)
    tokens[0, [9, 21]] = VOCABULARY.mask
    logits = answers(trained, tokens)[1]
    surest = max((9, 21), key=lambda place: float(logits[place].softmax(-1).max()))
    filled = (sapiens / "f.fasta").read_text().split("\n")[1]
    assert filled[surest - 1] == VOCABULARY.tokens[int(logits[surest].argmax())]


def test_transformers_opens_a_converted_model(sapiens: Path, tmp_path: Path):
    pytest.importorskip("transformers")
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    import protperf.hf  # noqa: F401 - makes the folder known to transformers

    model, tokenizer = (
        kind.from_pretrained(sapiens / "vh") for kind in (AutoModelForMaskedLM, AutoTokenizer)
    )
    with torch.no_grad():
        logits = model(**tokenizer([WILD, "QVQ"], padding=True, return_tensors="pt")).logits
    own = answers(load_model(sapiens / "vh"), framed(WILD))[1]
    torch.testing.assert_close(logits[0], own, atol=TOLERANCE, rtol=0)
    model.save_pretrained(tmp_path)
    assert load_model(tmp_path).origin.startswith("sapiens_vh.safetensors (SHA-256 ")


def test_letters_that_a_source_lacks_have_no_chance_in_any_precision(sapiens: Path):
    trained = load_model(sapiens / "vh")
    logits = answers(trained, framed("QVXLJQSG"))[1]
    for dtype in (torch.float32, torch.float16):
        assert logits.to(dtype).isfinite().all()
        assert logits.to(dtype).float().softmax(-1)[:, VOCABULARY.encode("BOUXZJ").tolist()].max() == 0.0
    assert logits.equal(answers(trained, framed("QVBLZQSG"))[1]), "each is read as the unknown token"


def test_a_run_may_begin_with_pretrained_weights(sapiens: Path, tmp_path: Path):
    about = (
        "model.attention=favor",
        "model.num_features=16",
        f"init_from={sapiens / 'vh'}",
        "trainer.max_steps=1",
    )
    train_small(tmp_path / "run", *about)
    trained = load_model(tmp_path / "run")
    assert (trained.step, trained.model.config.attention) == (1, "favor")
    assert trained.origin.startswith("sapiens_vh.safetensors")
    export_model(trained, tmp_path / "shared")
    card = (tmp_path / "shared" / "model_card.md").read_text()
    assert "Trained on with protperf:" in card
