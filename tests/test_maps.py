"""`protperf maps`: the commands on real files, and how their figures are laid out."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
from Bio.Data.IUPACData import protein_letters_1to3
from checkpoints import make_checkpoint
from conftest import REPOSITORY
from matplotlib.image import imread
from prepared import random_records, write_fasta
from test_structures import pdb_line

from protperf.checkpoint import describe, load_model
from protperf.config import ModelConfig, ObjectiveConfig
from protperf.formats.contact_head import read_contact_head
from protperf.formats.structures import read_structure
from protperf.inference.attention_maps import attention_maps
from protperf.inference.contacts import predict_contacts
from protperf.maps import __main__ as maps_main
from protperf.maps.__main__ import main
from protperf.maps.arguments import parse
from protperf.maps.attention import AttentionMaps, draw, relative
from protperf.maps.drawing import BOS, EOS, as_text, coarse, label_tokens, new_panels
from protperf.model import ProteinModel
from protperf.vocab import STANDARD_RESIDUES, VOCABULARY

MAGIC = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_checkpoint(tmp_path_factory.mktemp("model") / "step=00000007.ckpt"))


@pytest.fixture(scope="module")
def causal(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model") / "step=00000007.ckpt"
    return str(make_checkpoint(path, attention="relu", kind="causal"))


@pytest.fixture
def fasta(tmp_path: Path) -> str:
    return write_fasta(tmp_path / "a.fasta", random_records([30, 40, 300]))


def load(path: Path) -> dict[str, np.ndarray]:
    with np.load(path) as file:
        return dict(file)


def test_numbers_of_maps_are_those_of_attention(tmp_path: Path, checkpoint: str, fasta: str):
    out = tmp_path / "maps.npz"
    assert main(["attention", checkpoint, fasta, str(out), "--record", "p1"]) == 0
    found = load(out)
    assert str(found["id"]) == "p1"
    assert found["tokens"][[0, -1]].tolist() == ["<bos>", "<eos>"]
    assert "".join(found["tokens"][1:-1]) == random_records([30, 40])[1][1]
    assert found["attention"].shape == (2, 2, 42, 42)
    np.testing.assert_allclose(found["attention"].sum(-1), 1, atol=1e-5)  # rows sum to one
    tokens = torch.tensor([[VOCABULARY.id_of(token) for token in found["tokens"]]])
    rows = torch.tensor([7, 41, 0])
    model = load_model(checkpoint).model
    one = attention_maps(model, tokens, layers=[1, 0], heads=[1], rows=rows)  # pair by pair
    assert list(one) == [1, 0]
    for layer, weights in one.items():
        np.testing.assert_allclose(weights[0], found["attention"][layer, 1][rows], rtol=1e-3, atol=1e-6)


def test_chosen_rows_layers_and_heads(tmp_path: Path, causal: str, fasta: str):
    whole, some = tmp_path / "whole.npz", tmp_path / "some.npz"
    argv = ["attention", causal, fasta]
    assert main([*argv, str(whole), "--layers", "all", "--heads", "all"]) == 0
    assert main([*argv, str(some), "--rows", "30", "10-12", "11", "--layers", "-1", "--heads", "1"]) == 0
    found, expected = load(some), load(whole)
    assert found["rows"].tolist() == [10, 11, 12, 30]
    assert (found["layers"].tolist(), found["heads"].tolist()) == ([1], [1])
    np.testing.assert_allclose(
        found["attention"][0, 0], expected["attention"][1, 1][[10, 11, 12, 30]], rtol=1e-3, atol=1e-6
    )
    assert not np.triu(expected["attention"], 1).any()  # causal


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_figures_in_each_format(
    tmp_path: Path, causal: str, fasta: str, suffix: str, capsys: pytest.CaptureFixture
):
    out = tmp_path / f"maps{suffix}"
    argv = ["attention", causal, fasta, str(out), "--heads", "0"]
    assert main(argv) == 0
    assert out.read_bytes().startswith(MAGIC[suffix])
    captured = capsys.readouterr()
    assert captured.out == f"{out}\n"
    assert captured.err == "protperf maps: p0, layers 0 1 of 2, heads 0 of 2\n"
    with pytest.raises(ValueError, match="exists already"):
        main(argv)
    assert main([*argv, "--force", "--rows", "5-9"]) == 0


def texts(figure: object) -> list[str]:
    from matplotlib.text import Text

    return [text.get_text() for text in figure.findobj(Text)]  # type: ignore[attr-defined]


def test_a_figure_says_what_it_shows(causal: str):
    """Sequence on the axes, a title, titles of panels, a colour bar with its meaning."""
    letters = [BOS, *"MKVLAAGITW", EOS]
    weights = np.full((2, 1, 12, 12), 1 / 12, np.float32)
    maps = AttentionMaps("p1", letters, np.arange(12), [0, 3], [1], weights, causal=False)
    figure = draw(maps, title="p1, 10 residues")
    found = texts(figure)
    assert {"layer 0 head 1", "layer 3 head 1"} < set(found)
    assert any("p1, 10 residues" in text for text in found)
    assert "attention weight relative to even attention (1)" in found
    assert [label.get_text() for label in figure.axes[1].get_xticklabels()] == [
        BOS,
        *"MKVLAAGIT",
        "W\n10",
        EOS,
    ]
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()][1:3] == ["M1", "K2"]


def test_weights_are_shown_relative_to_even_attention():
    """Each row of even attention is 1 wherever it sees, causal or not."""
    rows = np.array([1, 3])
    even = np.full((1, 1, 2, 5), 0.2, np.float32)
    maps = AttentionMaps("p", list("abcde"), rows, [0], [0], even, causal=False)
    np.testing.assert_allclose(relative(maps), 1)
    seen = np.array([[[[1 / 2, 1 / 2, 0, 0, 0], [1 / 4, 1 / 4, 1 / 4, 1 / 4, 0]]]], np.float32)
    maps = AttentionMaps("p", list("abcde"), rows, [0], [0], seen, causal=True)
    expected = [[1, 1, np.nan, np.nan, np.nan], [1, 1, 1, 1, np.nan]]
    np.testing.assert_array_equal(relative(maps)[0, 0], expected)


def ticks(length: int, inches: float, *, axis: str = "x", first: int = 1) -> list[str]:
    _, panels = new_panels(1, 1, size=(3, 3))
    letters = (["A", "C", "D", "E", "F"] * length)[:length]
    label_tokens(panels[0, 0], axis, letters, range(first, first + length), inches=inches)
    labels = panels[0, 0].get_xticklabels() if axis == "x" else panels[0, 0].get_yticklabels()
    return [label.get_text() for label in labels]


def test_letters_thin_out_where_there_is_no_room():
    assert ticks(10, 3.0) == ["A", "C", "D", "E", "F", "A", "C", "D", "E", "F\n10"]
    assert ticks(3, 3.0, axis="y", first=1000) == ["A1,000", "C1,001", "D1,002"]
    assert ticks(10, 0.7, axis="y")[-1] == "10 F"
    assert ticks(100, 2.0) == ["A1", *(f"F{number}" for number in range(10, 101, 10))]
    assert ticks(34_350, 10.0)[:3] == ["A1", "F500", "F1,000"]
    assert len(ticks(34_350, 10.0)) < 10 * 72 / 9 + 2


def test_names_in_figures_are_short_and_no_formulas():
    assert as_text("sp|P1|A_B") == "sp|P1|A_B"
    assert as_text("a$b$") == r"a\$b\$"
    assert as_text("x" * 61) == "x" * 57 + "..."
    figure, panels = new_panels(1, 1, size=(3, 3))
    panels[0, 0].set_title(as_text(r"$\no formula$"))
    figure.canvas.draw()


def test_a_figure_too_large_to_draw_is_refused():
    with pytest.raises(ValueError, match="10 x 1,500 inches is too large to be drawn; allowed: 400"):
        new_panels(288, 1, size=(10, 1500))


def test_a_coarse_matrix_keeps_the_largest_of_each_block():
    matrix = np.zeros((2, 4000), np.float32)
    matrix[1, 3999], matrix[0, 5] = 7.0, 3.0
    matrix[0, 2000:] = np.nan
    found, blocks = coarse(matrix)
    assert blocks == (1, 3)
    assert found.shape == (2, 1334)
    assert found[1, -1] == 7
    assert found[0, 1] == 3
    assert np.isnan(found[0, 667:]).all()
    assert found[0, 666] == 0  # two zeros and a NaN
    small, blocks = coarse(matrix[:, :10])
    assert blocks == (1, 1)
    np.testing.assert_array_equal(small, matrix[:, :10])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--record", "p9"], "a.fasta: no record 'p9' among 3; the first are p0, p1, p2"),
        (["--rows", "31"], "--rows 31: the protein has 30 residues"),
        (["--layers", "2"], r"--layers 2: the model has 0 to 1 \(or -2 to -1\)"),
        (["--heads", "-3"], "--heads -3: the model has 0 to 1"),
    ],
)
def test_what_is_not_there_is_said_in_one_line(
    tmp_path: Path, checkpoint: str, fasta: str, options: list[str], message: str
):
    with pytest.raises(ValueError, match=message) as error:
        main(["attention", checkpoint, fasta, str(tmp_path / "a.png"), *options])
    assert "\n" not in str(error.value)


def test_a_record_that_was_left_out_says_why(tmp_path: Path, checkpoint: str):
    fasta = write_fasta(tmp_path / "b.fasta", [("good", "MKV"), ("bad", "MK1V")])
    with pytest.raises(ValueError, match=r"b\.fasta:4: record 'bad' has '1'"):
        main(["attention", checkpoint, fasta, str(tmp_path / "a.png"), "--record", "bad"])


def test_maps_too_large_for_memory_are_refused_before_any_work(tmp_path: Path, checkpoint: str):
    fasta = write_fasta(tmp_path / "long.fasta", random_records([20_000]))
    with pytest.raises(
        ValueError, match=r"2 layers x 2 heads x 20,002 rows x 20,002 tokens are 6\.0 GiB; allowed: 1"
    ):
        main(["attention", checkpoint, fasta, str(tmp_path / "a.png")])


@pytest.mark.parametrize(
    "argv",
    [
        ["attention", "m", "f", "a.txt"],
        ["attention", "m", "f", "a.png", "--rows", "0"],
        ["attention", "m", "f", "a.png", "--rows", "9-3"],
        ["attention", "m", "f", "a.png", "--rows", "x"],
        ["similarity", "m", "f", "a.npz"],
        ["similarity", "m", "f", "a.png", "--max-proteins", "0"],
        ["contacts", "m", "a.png"],
        ["contacts", "m", "a.png", "--structures", "s", "--regularisation", "0"],
        ["contacts", "m", "a.png", "--structures", "s", "--head", "h", "--save-head", "g"],
        ["maps"],
    ],
)
def test_wrong_usage_ends_with_status_two(argv: list[str]):
    with pytest.raises(SystemExit) as error:
        main(argv)
    assert error.value.code == 2


def test_memory_that_runs_out_is_one_line(monkeypatch: pytest.MonkeyPatch):
    class Map:
        @staticmethod
        def run(options: object) -> int:
            raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(maps_main, "import_module", lambda name: Map)
    with pytest.raises(ValueError, match="out of memory; choose shorter proteins or fewer rows"):
        main(["attention", "m", "f", "a.png"])


def test_usage_can_be_typed_as_it_stands(capsys: pytest.CaptureFixture):
    """An option that takes several values would swallow what stands behind it."""
    for name, begin in (("attention", "CHECKPOINT FASTA OUT"), ("contacts", "CHECKPOINT OUT --structures")):
        with pytest.raises(SystemExit):
            parse([name, "--help"])
        assert capsys.readouterr().out.startswith(f"usage: protperf maps {name} {begin}")


def test_a_layer_that_is_no_number_is_said_in_words(capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit) as caught:
        parse(["attention", "m", "f", "a.png", "--heads", "first"])
    assert caught.value.code == 2
    assert "argument --heads: 'first' is no number such as 0 or -1, and not all" in capsys.readouterr().err


def test_similarity_is_drawn_and_written(
    tmp_path: Path, checkpoint: str, sample_path: Path, capsys: pytest.CaptureFixture
):
    out, numbers = tmp_path / "s.png", tmp_path / "s.json"
    argv = [
        "similarity",
        checkpoint,
        str(sample_path),
        str(out),
        "--json",
        str(numbers),
        "--max-proteins",
        "20",
    ]
    assert main(argv) == 0
    found = json.loads(numbers.read_text())
    assert (found["proteins"], found["heads"]) == (20, 4)
    matrix = np.array(found["similarity"])
    assert matrix.shape == (20, 20)
    np.testing.assert_allclose(matrix, matrix.T)
    assert re.search(rf"Pearson {found['pearson']:.3f} with BLOSUM62 over 190 pairs", capsys.readouterr().out)
    image = imread(out)
    assert len(np.unique(image[..., :3].sum(-1))) > 20
    with pytest.raises(ValueError, match=r"s\.png: exists already"):
        main(argv)


def test_what_similarity_leaves_out_is_said_and_counted_as_far_as_it_read(
    tmp_path: Path, checkpoint: str, sample_path: Path, capsys: pytest.CaptureFixture
):
    records = [(f"p{i}", residues) for i, (_, residues) in enumerate(random_records([200] * 9))]
    records[2], records[7] = ("bad", "MK*V"), ("worse", "MK-V")
    fasta = write_fasta(tmp_path / "a.fasta", records)
    argv = ["similarity", checkpoint, fasta, str(tmp_path / "s.png"), "--force"]
    assert main([*argv, "--max-proteins", "2"]) == 0
    assert "read 2 records: 2 accepted (400 residues), 0 left out" in capsys.readouterr().err
    assert main([*argv, "--max-proteins", "4"]) == 3
    assert "read 5 records: 4 accepted (800 residues), 1 left out" in capsys.readouterr().err
    assert main(argv) == 3
    assert "read 9 records: 7 accepted (1,400 residues), 2 left out" in capsys.readouterr().err


def test_no_output_replaces_the_checkpoint(tmp_path: Path, checkpoint: str, fasta: str):
    target = tmp_path / "model.png"  # a link is what it leads to
    target.symlink_to(checkpoint)
    write_pairs(tmp_path, seed=0)
    contacts = ["contacts", checkpoint, str(tmp_path / "o.png"), "--structures", str(tmp_path)]
    for argv in (
        ["attention", checkpoint, fasta, str(target)],
        ["similarity", checkpoint, fasta, str(tmp_path / "o.png"), "--json", checkpoint],
        [*contacts, "--save-head", checkpoint],
        [*contacts, "--json", checkpoint],
    ):
        with pytest.raises(ValueError, match="is an input; give another name"):
            main([*argv, "--force"])


def write_pairs(folder: Path, *, seed: int) -> Path:
    """Write a chain of 40 residues, each standard one twice: letters 39 - 2i apart touch, and nothing else does."""
    order = np.random.default_rng(seed).permutation(20)
    names = [protein_letters_1to3[STANDARD_RESIDUES[letter]].upper() for letter in order]
    path = folder / f"pairs{seed}.pdb"
    lines = []
    for place, name in enumerate([*names, *names[::-1]]):
        pair = min(place, 39 - place)
        lines.append(pdb_line(" CA ", name, str(place + 1), 100 * pair + 4 * (place >= 20)))
    path.write_text("".join(lines))
    return path


def make_matching_checkpoint(path: Path) -> Path:
    """Write a model whose one head looks at tokens of the same letter: queries are keys are nearly orthogonal."""
    config = ModelConfig(
        attention="softmax", num_layers=1, num_heads=1, model_dim=64, feedforward_dim=8, positions="none"
    )
    model = ProteinModel(config, causal=False)
    with torch.no_grad():
        model.embedding.weight.normal_(generator=torch.Generator().manual_seed(0))
        same = model.blocks[0].attention.qkv.weight
        same.zero_()
        same[:64], same[64:128] = torch.eye(64), torch.eye(64)
    about = describe(config, ObjectiveConfig(), attend_across_documents=False, dataset_digest="")
    state = {f"model.{name}": value for name, value in model.state_dict().items()}
    torch.save({"protperf": about, "state_dict": state, "global_step": 0}, path)
    return path


def test_a_model_that_looks_at_partners_predicts_all_contacts(tmp_path: Path):
    """Long range: 8 contacts, 24 to 39 apart, among 136 pairs; the first L / 5 = 8 must be they."""
    checkpoint = make_matching_checkpoint(tmp_path / "m.ckpt")
    structures = [str(write_pairs(tmp_path, seed=seed)) for seed in range(4)]
    out, numbers = tmp_path / "c.png", tmp_path / "c.json"
    argv = ["contacts", str(checkpoint), str(out), "--json", str(numbers), "--structures", *structures]
    assert main(argv) == 0
    results = json.loads(numbers.read_text())
    for found in results["structures"].values():
        assert found["model"]["long"] == {"L": 8 / 40, "L/2": 8 / 20, "L/5": 1.0}
        assert found["model"]["medium"]["L/5"] == 6 / 8  # 13 to 23 apart: six contacts
        assert found["random"]["long"]["L/5"] == pytest.approx(8 / 136)
        assert found["nearest first"]["long"]["L/5"] == 0  # contacts are an odd number apart: none is 24
    head = read_contact_head(tmp_path / "contact_head.json")
    residues = VOCABULARY.encode(read_structure(Path(structures[0])).residues)
    found = predict_contacts(load_model(checkpoint).model, residues, head)
    likeliest = np.argsort(np.triu(found, 6).ravel())[::-1][:17]  # residues 17 and 22 are 5 apart
    assert (
        sorted((int(i) + int(j)) for i, j in zip(*np.unravel_index(likeliest, found.shape), strict=True))
        == [39] * 17
    )


def test_contacts_are_judged_on_structures_that_were_not_fitted_to(
    tmp_path: Path, checkpoint: str, shared_dir: Path, capsys: pytest.CaptureFixture
):
    folder = shared_dir / "data" / "structures"
    structures = [str(folder / name) for name in ("1ubi.pdb.gz", "1ejg.pdb.gz", "1a8o.cif.gz")]
    bad = tmp_path / "bad.pdb"
    bad.write_text("nothing\n")
    out, numbers = tmp_path / "c.svg", tmp_path / "c.json"
    argv = ["contacts", checkpoint, str(out), "--json", str(numbers), "--structures", *structures, str(bad)]
    assert main(argv) == 3
    captured = capsys.readouterr()
    assert "left out: " in captured.err
    assert "1a8o A: 70 residues, 0 of them not seen, 4 modified" in captured.err
    results = json.loads(numbers.read_text())
    by_name = results["structures"]
    assert list(by_name) == ["1ubi A", "1ejg A", "1a8o A"]
    # 76 residues have 53 * 52 / 2 pairs 24 apart or more, 82 of them contacts
    assert by_name["1ubi A"]["random"]["long"]["L"] == pytest.approx(82 / (52 * 53 / 2))
    mean = np.mean([found["model"]["long"]["L"] for found in by_name.values()])
    assert results["mean"]["model"]["long"]["L"] == pytest.approx(mean)
    head = read_contact_head(tmp_path / "contact_head.json")
    assert head.weights.shape == (2, 2)
    assert [each["contacts"] for each in head.provenance["fitted_to"]] == [141, 67, 77]
    assert head.provenance["held_out_precision"] == results["mean"]["model"]

    with pytest.raises(ValueError, match="a second structure '1ubi A'"):
        main([*argv, structures[0], "--force"])
    again = ["contacts", checkpoint, str(tmp_path / "d.png"), "--structures", structures[0]]
    assert main([*again, "--head", str(tmp_path / "contact_head.json")]) == 0
    assert "by the given head" in capsys.readouterr().out
    assert not (tmp_path / "d.json").exists()
    with pytest.raises(ValueError, match="1 structure to use; a head is judged on structures"):
        main([*again[:2], str(tmp_path / "e.png"), "--save-head", str(tmp_path / "e.json"), *again[3:]])


def test_a_head_that_is_there_is_not_replaced_unasked(tmp_path: Path, checkpoint: str):
    (tmp_path / "contact_head.json").write_text("mine")
    argv = ["contacts", checkpoint, str(tmp_path / "c.png"), "--structures", str(tmp_path)]
    with pytest.raises(ValueError, match=r"contact_head\.json: exists already; .* by --save-head") as caught:
        main(argv)
    assert "\n" not in str(caught.value)
    assert (tmp_path / "contact_head.json").read_text() == "mine"


def test_files_passed_over_in_a_folder_are_said(
    tmp_path: Path, checkpoint: str, capsys: pytest.CaptureFixture
):
    for name in ("a.pdb", "NOTES.txt", "b.PDB", "c.cif.bz2", "d.tsv"):
        (tmp_path / name).write_text("nothing\n")
    with pytest.raises(ValueError, match="no structure of 1 can be used"):
        main(["contacts", checkpoint, str(tmp_path / "c.png"), "--structures", str(tmp_path)])
    said = capsys.readouterr().err
    assert (
        f"{tmp_path}: 4 passed over (NOTES.txt, b.PDB, c.cif.bz2, ...): no name of a structure, .pdb" in said
    )


def test_a_record_is_found_by_its_accession_too(
    tmp_path: Path, checkpoint: str, capsys: pytest.CaptureFixture
):
    names = ["sp|P1|A_B", "P2 no accession", "sp|P2|C_D", "sp|P3|E_F"]
    fasta = write_fasta(tmp_path / "a.fasta", [(name, "MKV") for name in names])
    for wanted, found in (("P3", "sp|P3|E_F"), ("P2", "P2"), ("sp|P1|A_B", "sp|P1|A_B")):
        out = str(tmp_path / "m.npz")
        assert main(["attention", checkpoint, fasta, out, "--record", wanted, "--force"]) == 0
        assert f"protperf maps: {found}, layers" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("attention", "Exit status: 0 all done, 1 failure, 2 wrong usage."),
        ("similarity", "Exit status: 0 all done, 3 some records left out, 1 failure, 2 wrong usage."),
        ("contacts", "Exit status: 0 all done, 3 some structures left out, 1 failure, 2 wrong usage."),
    ],
)
def test_help_tells_the_exit_status(name: str, expected: str, capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit):
        main([name, "--help"])
    assert expected in " ".join(capsys.readouterr().out.split())


def test_the_page_on_maps_is_true(
    tmp_path: Path,
    shared_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    """Its commands and its Python run one after the other."""
    text = (REPOSITORY / "docs" / "maps.md").read_text()
    blocks = re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL)
    monkeypatch.chdir(tmp_path)
    checkpoint = Path("runs", "demo", "checkpoints", "best.ckpt")
    checkpoint.parent.mkdir(parents=True)
    make_checkpoint(checkpoint)
    Path("structures").mkdir()
    for name in ("1ubi.pdb.gz", "1ejg.pdb.gz", "1a8o.cif.gz"):
        Path("structures", name).symlink_to(shared_dir / "data" / "structures" / name)
    subprocess.run(["bash", "-euc", blocks[0]], check=True)
    lines = [shlex.split(line) for block in blocks[1:] for line in block.splitlines()]
    assert len(lines) == 7
    for command, name, *argv in lines:
        assert command == "protperf"
        assert import_module(f"protperf.{name}.__main__").main(argv) == 0
    written = {"maps.png", "maps.svg", "maps.npz", "rows.png", "similarity.png", "similarity.json"}
    written |= {"contacts.png", "contact_head.json", "two.h5"}
    assert set(os.listdir()) == {"runs", "structures", "two.fasta"} | written
    capsys.readouterr()
    for block, shape in zip(
        re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL), ("(20, 20)", "(2, 22, 22)"), strict=True
    ):
        exec(block, {})
        assert shape in capsys.readouterr().out
