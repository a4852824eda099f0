"""A Transformer becomes a Performer: the swap, what its features learn, what is reported, and what it refuses."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from wide_models import save_checkpoint, wide_model

from protperf.attention.features import FEATURE_MAPS, UNPROJECTED
from protperf.batches import documents_of
from protperf.checkpoint import load_model
from protperf.config import ObjectiveConfig
from protperf.convert import main, swap_options
from protperf.convert.proteins import (
    ask_pieces,
    count_shared,
    cut_proteins,
    exam,
    hold_out,
    measure_accuracy,
    practice,
)
from protperf.convert.swap import measure_pair_squares, swap_attention
from protperf.convert.swap_options import SWAPS
from protperf.convert.swap_report import verdict
from protperf.convert.transfer import transfer_attention, transfer_losses
from protperf.convert.tuning import add_lora, tune
from protperf.inference.approximation import measure_approximation
from protperf.model import ProteinModel
from protperf.objectives import EVALUATION_EPOCH, NOT_ASKED
from protperf.vocab import VOCABULARY

MASKED = ObjectiveConfig()


def make_teacher(*, causal: bool = False) -> ProteinModel:
    """Return a small model whose attention is sharp enough that features by chance do badly."""
    model = wide_model("softmax", causal=causal, num_features=32)
    with torch.no_grad():
        for block in model.blocks:
            block.attention.qkv.weight[:32] *= 2.5  # type: ignore[union-attr, index]
    return model


def make_proteins(number: int, *, length: int = 30) -> list[np.ndarray]:
    generator = np.random.default_rng(3)
    return [generator.integers(20, size=length + i, dtype=np.uint8) for i in range(number)]


def swap(teacher: ProteinModel, **choice: Any) -> ProteinModel:
    settings = {"attention": "favor", "num_features": 32, "projection_seed": 0, "softmax_layers": ()}
    return swap_attention(teacher, **{**settings, "features": "drawn", **choice})


def transferred(
    teacher: ProteinModel, pieces: list[np.ndarray], *, steps: int = 20, seed: int = 0, **choice: Any
) -> ProteinModel:
    model = swap(teacher, features="learned", **choice)
    questions = practice(pieces, MASKED, steps=steps, size=4, seed=seed)
    transfer_attention(teacher, model, questions, steps=steps, rate=3e-2, advance=lambda losses: None)
    return model


def shown(pieces: list[np.ndarray]) -> tuple[Tensor, Tensor]:
    batch, documents = ask_pieces(pieces, range(len(pieces)), MASKED, seed=0, epoch=EVALUATION_EPOCH)
    return batch.inputs, documents


@pytest.mark.parametrize("attention", ["favor", "favor_hyperbolic", "oprf", "relu", "elu"])
def test_a_swap_keeps_every_weight_and_shares_none(attention: str):
    teacher = make_teacher()
    model = swap(teacher, attention=attention)
    own = model.state_dict()
    for name, value in teacher.state_dict().items():
        assert torch.equal(own[name], value), name
        assert own[name].data_ptr() != value.data_ptr(), name
    assert model.blocks[0].attention.kind == attention  # type: ignore[union-attr]


@pytest.mark.parametrize("features", ["drawn", "learned"])
def test_layers_that_are_kept_are_exact(features: str):
    teacher = make_teacher()
    tokens, documents = shown(cut_proteins(make_proteins(3), most=64))
    kept = swap(teacher, softmax_layers=(0, 1), features=features)
    assert torch.equal(kept(tokens, documents), teacher(tokens, documents))
    one = swap(teacher, softmax_layers=(0,), features=features)
    losses = transfer_losses(teacher, one, tokens, documents)
    assert losses[0] == 0
    assert losses[1] > 0.01
    found = measure_approximation(teacher, one, [(tokens, documents)])
    assert found.layer_error[0] == found.drift[0] == 0
    assert verdict("softmax", error=0.0, null=1.0) == "exact"


@pytest.mark.parametrize("causal", [False, True])
def test_the_report_is_what_a_count_by_hand_gives(causal: bool):
    teacher = make_teacher(causal=causal)
    model = swap(teacher)
    pieces = cut_proteins(make_proteins(2, length=9), most=64)
    tokens, documents = shown(pieces)
    found = measure_approximation(teacher, model, [(tokens[:1], documents[:1]), (tokens[1:], documents[1:])])
    seen: list[tuple[Tensor, Tensor, Tensor]] = []
    teacher.watch(tokens, documents, lambda q, k, v, *_: seen.append((q.double(), k.double(), v.double())))
    for layer, head in ((0, 0), (1, 1)):
        expected = _by_hand(model, seen[layer], layer, head, documents, causal=causal)
        for name, value in expected.items():
            assert float(getattr(found, name)[layer, head]) == pytest.approx(value, rel=1e-4), name
    layer_error = torch.sqrt(transfer_losses(teacher, model, tokens, documents).double())
    torch.testing.assert_close(found.layer_error, layer_error, rtol=1e-4, atol=0)


def _by_hand(
    model: ProteinModel,
    qkv: tuple[Tensor, Tensor, Tensor],
    layer: int,
    head: int,
    documents: Tensor,
    *,
    causal: bool,
) -> dict[str, float]:
    """Work out a head's numbers token by token, pair by pair."""
    projection: Any = model.blocks[layer].attention.projection
    width = qkv[0].shape[-1]
    sums = dict.fromkeys(("size", "error", "null", "q", "k", "entropy", "most", "tokens"), 0.0)
    for row in range(len(documents)):
        length = int((documents[row] >= 0).sum())
        q, k, v = (x[row, head, :length] for x in qkv)
        phi_q, phi_k = (
            torch.exp(
                x @ projection.double().T * width**-0.25 - x.square().sum(-1, keepdim=True) / 2 / width**0.5
            )
            for x in (q, k)
        )
        for i in range(length):
            past = slice(0, i + 1 if causal else length)
            p = torch.softmax(q[i] @ k[past].T / math.sqrt(width), -1)
            u = phi_q[i] @ phi_k[past].T
            y, z, m = p @ v[past], (u / u.sum()) @ v[past], v[past].mean(0)
            sums["size"] += float(y.square().sum())
            sums["error"] += float((z - y).square().sum())
            sums["null"] += float((m - y).square().sum())
            sums["q"] += float(q[i].norm())
            sums["k"] += float(k[i].norm())
            sums["entropy"] -= float((p * p.log()).sum())
            sums["most"] += math.log(len(p))
            sums["tokens"] += 1
    return {
        "error": math.sqrt(sums["error"] / sums["size"]),
        "null": math.sqrt(sums["null"] / sums["size"]),
        "logit": sums["q"] * sums["k"] / sums["tokens"] ** 2 / math.sqrt(width),
        "entropy": sums["entropy"] / sums["tokens"],
        "most": sums["most"] / sums["tokens"],
    }


def test_drift_is_the_error_of_the_states_that_leave_each_layer():
    teacher = make_teacher()
    model = swap(teacher)
    tokens, documents = shown(cut_proteins(make_proteins(1), most=64))
    found = measure_approximation(teacher, model, [(tokens, documents)])
    exact, approximate = (each.states(tokens, layers=(1, 2)) for each in (teacher, model))
    expected = [((z - y).norm() / y.norm()).item() for y, z in zip(exact, approximate, strict=True)]
    assert found.drift.tolist() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("attention", "causal", "most"), [("favor", False, 0.8), ("oprf", True, 0.8), ("relu", False, 0.97)]
)
def test_transfer_brings_every_layer_nearer_and_moves_features_alone(
    attention: str, causal: bool, most: float
):
    teacher = make_teacher(causal=causal)
    pieces = cut_proteins(make_proteins(8), most=64)
    tokens, documents = shown(pieces)
    model = transferred(teacher, pieces, attention=attention)
    before = transfer_losses(teacher, swap(teacher, attention=attention), tokens, documents)
    after = transfer_losses(teacher, model, tokens, documents)
    assert (after < most * before).all(), (before, after)
    own = model.state_dict()
    assert all(torch.equal(own[name], value) for name, value in teacher.state_dict().items())


def test_transfer_is_a_function_of_its_seed():
    teacher = make_teacher()
    pieces = cut_proteins(make_proteins(4), most=64)
    first, again, other = (
        transferred(teacher, pieces, steps=3, seed=seed).state_dict() for seed in (0, 0, 1)
    )
    assert all(torch.equal(first[name], value) for name, value in again.items())
    assert not torch.equal(first["blocks.0.attention.projection"], other["blocks.0.attention.projection"])


def test_a_transferred_model_is_an_ordinary_one(tmp_path: Path):
    teacher = make_teacher()
    pieces = cut_proteins(make_proteins(4), most=64)
    model = transferred(teacher, pieces)
    loaded = load_model(save_checkpoint(model, tmp_path / "m.ckpt")).model
    tokens = torch.from_numpy(np.concatenate(pieces[:2])[None])
    with torch.inference_mode():
        packed = loaded(tokens, documents_of(tokens))
        assert torch.equal(packed, model(tokens, documents_of(tokens)))
        alone = [loaded(torch.from_numpy(piece[None])) for piece in pieces[:2]]
    torch.testing.assert_close(packed, torch.cat(alone, dim=1), atol=1e-5, rtol=1e-4)
    batched = model(tokens, documents_of(tokens))  # features that ask for gradients are in the other layout
    torch.testing.assert_close(packed, batched, atol=1e-5, rtol=1e-4)


def test_oprf_is_told_the_norms_that_the_exact_model_has():
    teacher = make_teacher()
    model = swap(teacher, attention="oprf")
    tokens, documents = shown(cut_proteins(make_proteins(1, length=12), most=64))
    measure_pair_squares(teacher, model, [(tokens, documents)])
    seen: list[Tensor] = []
    teacher.watch(
        tokens,
        documents,
        lambda q, k, *_: seen.append((q.unsqueeze(3) + k.unsqueeze(2)).square().sum(-1).mean((0, 2, 3))),
    )
    for block, expected in zip(model.blocks, seen, strict=True):
        found: Any = block.attention.pair_square
        torch.testing.assert_close(found, expected / math.sqrt(8), rtol=1e-4, atol=0)


def test_what_is_held_out_depends_on_residues_alone():
    proteins = make_proteins(25)
    twice = [*proteins, proteins[3]]
    learned, measured = hold_out(twice)
    assert len({each.tobytes() for each in measured}) == 3  # a tenth of 25
    assert count_shared(measured, learned) == 0
    assert len(learned) + len(measured) == 26
    _, reversed_measured = hold_out(twice[::-1])
    assert {each.tobytes() for each in reversed_measured} == {each.tobytes() for each in measured}
    assert [len(part) for part in hold_out(proteins[:2])] == [1, 1]
    with pytest.raises(ValueError, match="one protein alone"):
        hold_out([proteins[0], proteins[0]])


def test_long_proteins_are_cut_and_nothing_is_lost():
    protein = make_proteins(1, length=20)[0]
    pieces = cut_proteins([protein], most=8)
    assert [len(piece) for piece in pieces] == [8, 8, 6]
    assert np.array_equal(np.concatenate(pieces)[1:-1], protein)
    assert pieces[0][0] == VOCABULARY.bos
    assert pieces[-1][-1] == VOCABULARY.eos


def test_accuracy_is_that_of_each_protein_asked_alone():
    model = make_teacher()
    pieces = cut_proteins(make_proteins(7), most=64)
    correct, asked, nll = 0, 0, 0.0
    for number in range(len(pieces)):
        batch, _ = ask_pieces(pieces, [number], MASKED, seed=5, epoch=EVALUATION_EPOCH)
        places = batch.targets != NOT_ASKED
        assert (batch.inputs[places] == VOCABULARY.mask).all()
        scores = model.logits(model(batch.inputs))[places].log_softmax(-1)
        right = batch.targets[places].long()
        correct += int((scores.argmax(-1) == right).sum())
        nll -= scores.gather(1, right[:, None]).sum().item()
        asked += len(right)
    for budget in (1, 100, 10_000):
        found = measure_accuracy(model, pieces, MASKED, seed=5, token_budget=budget)
        assert (found["asked"], found["accuracy"]) == (asked, pytest.approx(correct / asked))
        assert found["loss"] == pytest.approx(nll / asked, rel=1e-5)


def test_tuning_lowers_the_loss_and_leaves_an_ordinary_model():
    model = swap(make_teacher())
    before = copy.deepcopy(model)
    pieces = cut_proteins(make_proteins(4), most=64)
    losses: list[float] = []
    tune(
        model,
        practice(pieces, MASKED, steps=30, size=4, seed=0),
        steps=30,
        rate=1e-2,
        method="full",
        lora_rank=1,
        seed=0,
        advance=lambda loss: losses.append(float(loss)),
    )
    assert np.mean(losses[-5:]) < 0.8 * np.mean(losses[:5])
    assert model.state_dict().keys() == before.state_dict().keys()
    assert torch.equal(model.blocks[0].attention.projection, before.blocks[0].attention.projection)  # type: ignore[union-attr, arg-type]
    assert not model.training


def test_lora_merged_is_lora_unmerged():
    pytest.importorskip("peft")
    model = swap(make_teacher(), features="learned")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    adapted = add_lora(model, rank=2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(len(name)))
    moving = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert len(moving) == 2 * 2 * 4  # two thin matrices beside each of four, in two layers
    assert all("lora_" in name for name in moving)
    tokens, documents = shown(cut_proteins(make_proteins(2), most=64))
    unmerged = model(tokens, documents)
    adapted.merge_and_unload()
    torch.testing.assert_close(model(tokens, documents), unmerged, atol=1e-5, rtol=1e-4)
    after = model.state_dict()
    assert after.keys() == before.keys()
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    matrices = ("attention.qkv", "attention.out", "feedforward.into", "feedforward.out")
    assert changed == {f"blocks.{layer}.{name}.weight" for layer in (0, 1) for name in matrices}


def test_lora_trains(tmp_path: Path):
    pytest.importorskip("peft")
    model = swap(make_teacher())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    questions = practice(cut_proteins(make_proteins(4), most=64), MASKED, steps=3, size=2, seed=0)
    tune(model, questions, steps=3, rate=1e-2, method="lora", lora_rank=2, seed=0, advance=lambda loss: None)
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert len(changed) == 8
    assert load_model(save_checkpoint(model, tmp_path / "m.ckpt")).model.config == model.config


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save_checkpoint(make_teacher(), tmp_path / "m.ckpt")


@pytest.fixture
def fasta(tmp_path: Path) -> Path:
    path = tmp_path / "proteins.fasta"
    path.write_text(
        "".join(f">p{i}\n{VOCABULARY.decode(each)}\n" for i, each in enumerate(make_proteins(12)))
    )
    return path


def run(checkpoint: Path, *options: str) -> int:
    return main([str(checkpoint), str(checkpoint.parent / "out"), *options])


def test_the_command_swaps_transfers_tunes_and_reports(
    checkpoint: Path, fasta: Path, capsys: pytest.CaptureFixture[str]
):
    report = checkpoint.parent / "report.json"
    learn = ["--transfer", "20", "--tune", "2", "--proteins-per-step", "4"]
    choice = ["--attention", "favor", "--features", "32", "--keep-softmax", "1"]
    assert run(checkpoint, *choice, "--fasta", str(fasta), *learn, "--report", str(report)) == 0
    out, err = capsys.readouterr()
    assert "learns from 10 proteins, measured on 2 held-out ones" in err
    assert out.splitlines()[-1] == str(checkpoint.parent / "out")
    found = json.loads(report.read_text())
    assert list(found["accuracy"]) == ["exact", "swapped", "transferred", "tuned"]
    assert found["settings"]["proteins"]["measured_and_learned_from"] == 0
    first, second = found["layers"]
    assert first["error"]["transferred"] < first["error"]["swapped"]
    assert (second["verdict"], second["error"]["swapped"]) == ("exact", 0.0)
    assert [head["head"] for head in first["heads"]] == [0, 1]
    assert all(f"{value['accuracy']:.3f}" in out for value in found["accuracy"].values())
    trained = load_model(checkpoint.parent / "out")
    config = trained.model.config
    assert (config.attention, config.features, config.softmax_layers) == ("favor", "learned", (1,))
    assert trained.step == 9  # seven of the checkpoint


def test_without_proteins_the_command_swaps_and_reports_nothing(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
):
    assert run(checkpoint, "--attention", "relu", "--projection-seed", "3") == 0
    assert capsys.readouterr().out == f"{checkpoint.parent / 'out'}\n"
    config = load_model(checkpoint.parent / "out").model.config
    assert (config.attention, config.num_features, config.projection_seed) == ("relu", 256, 3)


WRONG_USAGE = {
    "--features 64": "--features: is of another attention; add --attention favor",
    "--fasta x": "--fasta: is of another attention",
    "--attention softmax": "invalid choice: 'softmax'",
    "--attention linformer": "invalid choice: 'linformer'",
    "--attention favor --keep-softmax first": "give numbers of layers, from 0, such as 0,11",
    "--attention favor --transfer 10": "--transfer 10: needs proteins; add --fasta FILE",
    "--attention favor --tune 10": "--tune 10: needs proteins",
    "--attention favor --tune -1 --fasta x": "--tune -1: must be at least 0",
    "--attention favor --rate 0.1 --fasta x": "--rate: says something with --tune alone",
    "--attention favor --lora-rank 4 --tune 3 --fasta x": "--lora-rank: says something with --tune-method lora alone",
    "--attention favor --report x": "--report: nothing is measured without proteins",
    "--attention favor --features 0": "--features 0: must be at least 1",
    "--attention favor --transfer 1 --fasta x --transfer-rate nan": "--transfer-rate nan: must be above 0",
    "--attention favor --projection-seed -1": "--projection-seed -1: must be at least 0",
    "--attention oprf": "--attention oprf: fits its features to the norms",
    "--attention elu --features 8": "--features: --attention elu has no projection",
    "--attention elu --transfer 8 --fasta x": "--attention elu has no features that could learn",
}


@pytest.mark.parametrize("usage", WRONG_USAGE)
def test_wrong_usage_ends_with_one_line(usage: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main(["model", "out", *usage.split()])
    assert ended.value.code == 2
    assert WRONG_USAGE[usage] in capsys.readouterr().err.splitlines()[-1]


def test_what_does_not_fit_the_model_or_the_proteins_is_one_line(
    checkpoint: Path, fasta: Path, tmp_path: Path
):
    with pytest.raises(ValueError, match="--keep-softmax 2: no such layer; allowed: 0 to 1"):
        run(checkpoint, "--attention", "favor", "--keep-softmax", "0,2")
    linear = save_checkpoint(wide_model("relu", causal=False), tmp_path / "linear.ckpt")
    with pytest.raises(ValueError, match="has attention 'relu'; only exact attention"):
        run(linear, "--attention", "favor")
    (tmp_path / "one.fasta").write_text(">a\nMKTAYIAK\n")
    one = ["--attention", "favor", "--transfer", "2", "--fasta", str(tmp_path / "one.fasta")]
    with pytest.raises(ValueError, match="one protein alone"):
        run(checkpoint, *one)
    report = tmp_path / "report.json"
    report.touch()
    with pytest.raises(ValueError, match=r"report\.json: exists already"):
        run(checkpoint, "--attention", "favor", "--fasta", str(fasta), "--report", str(report))
    learning = ["--attention", "favor", "--features", "8", "--fasta", str(fasta)]
    with pytest.raises(
        ValueError, match="--keep-softmax keeps all 2 layers, so that nothing is left to learn"
    ):
        run(checkpoint, *learning, "--keep-softmax", "0,1", "--transfer", "2")
    with pytest.raises(
        ValueError, match=r"--rate 1e\+30: .* is no finite number after learning; give a lower"
    ):
        run(checkpoint, *learning, "--tune", "3", "--rate", "1e30")
    assert not (checkpoint.parent / "out").exists()


def test_a_report_takes_the_place_of_no_part_of_a_model(checkpoint: Path, fasta: Path, tmp_path: Path):
    source = tmp_path / "folder"
    assert main([str(checkpoint), str(source)]) == 0
    before = (source / "config.json").read_bytes()
    options = ["--attention", "favor", "--fasta", str(fasta), "--force"]
    for place in (source / "config.json", tmp_path / "out", tmp_path / "out" / "report.json"):
        with pytest.raises(ValueError, match="is the place of a model; give another name"):
            main([str(source), str(tmp_path / "out"), *options, "--report", str(place)])
    assert (source / "config.json").read_bytes() == before
    assert not (tmp_path / "out").exists()


def test_an_exam_is_the_same_whatever_the_budget():
    pieces = cut_proteins(make_proteins(5), most=64)
    asked = [
        sorted(
            (
                row[row != VOCABULARY.pad].tolist()
                for batch, _ in exam(pieces, MASKED, seed=1, token_budget=budget)
                for row in batch.inputs
            )
        )
        for budget in (10, 1000)
    ]
    assert asked[0] == asked[1]


def test_swaps_are_feature_maps_and_those_without_projection_are_known():
    assert set(SWAPS) <= set(FEATURE_MAPS)
    assert set(swap_options.UNPROJECTED) == UNPROJECTED


def test_verdicts_name_the_share_of_the_error_of_averaging():
    assert verdict("favor", error=0.2, null=0.8) == "close (25 % of the error of averaging)"
    assert verdict("relu", error=0.6, null=0.8) == "rough (75 % of the error of averaging)"
    assert verdict("favor", error=0.72, null=0.8).startswith("hardly better than averaging (90 %")
    assert verdict("favor", error=1.0, null=0.8).startswith("worse than averaging (125 %")
