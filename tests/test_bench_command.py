"""`protperf bench`: each benchmark runs for real, prints its tables and writes its numbers and figures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from matplotlib.image import imread
from training import small_dataset

from protperf.bench import measure
from protperf.bench.__main__ import main

ATTENTION = [
    "attention",
    "--lengths",
    "24",
    "48",
    "--heads",
    "2",
    "--head-dim",
    "8",
    "--features",
    "16",
    "--rounds",
    "2",
]
ERROR = [
    "error",
    "--features",
    "16",
    "64",
    "--sigmas",
    "0.125",
    "0.25",
    "--length",
    "128",
    "--head-dim",
    "16",
    "--heads",
    "2",
    "--seeds",
    "2",
]
MODEL = ["model", "--preset", "tiny", "--layers", "2", "--rounds", "2"]
SMALL = ["model_dim=16", "num_heads=2", "feedforward_dim=32", "num_features=8"]
FIGURE_SHAPE = (675, 1200, 4)  # 8 x 4.5 inches at 150 dots


@pytest.fixture(autouse=True)
def short_turns(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(measure, "TURN_SECONDS", 1e-4)


def run(arguments: list[str], folder: Path) -> tuple[dict, dict[str, Path]]:
    """Run a benchmark; return what it wrote: numbers, and figures by name, each of them not empty."""
    assert main([*arguments, "--json", str(folder / "numbers.json"), "--plot", str(folder / "figures")]) == 0
    figures = {path.stem: path for path in (folder / "figures").iterdir()}
    for path in figures.values():
        image = imread(path)
        # all scales of the error stand one above another, narrow enough for a telephone
        assert image.shape[1] < 900 if path.stem == "error_features" else image.shape == FIGURE_SHAPE
        assert len(np.unique(image[..., :3].sum(-1))) > 10
    return json.loads((folder / "numbers.json").read_text()), figures


def tables_of(text: str) -> dict[str, dict[str, list[str]]]:
    """Return title -> row -> cells of every table; columns are at least two blanks apart."""
    tables = {}
    for block in text.split("\n\n"):
        lines = [[part for part in line.split("  ") if part.strip()] for line in block.splitlines()]
        if len(lines) > 1 and all(len(line) == len(lines[0]) > 1 for line in lines):
            title = lines[0][0].strip()
            tables.setdefault(title, {}).update({line[0].strip(): line[1:] for line in lines[1:]})
    return tables


def test_attention_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "performer_pytorch", None)
    kinds = ["favor", "elu"]
    numbers, figures = run([*ATTENTION, "--packed", "3", "--kinds", *kinds], tmp_path)
    out, log = capsys.readouterr()
    assert log.count("performer-pytorch") == 1
    assert "performer-pytorch is not installed: left out\n" in log
    names = {f"{kind}{packed}" for kind in ("SDPA", *kinds) for packed in ("", ", packed")} | {"X line"}
    for title in ("ms", "faster", "share, %", "MiB"):
        assert set(tables_of(out)[title]) == names
    assert set(tables_of(out)["time over unpacked"]) == {name for name in names if name.endswith("packed")}
    cells = {
        (cell["contestant"], cell["direction"], cell["passes"], cell["length"]): cell
        for cell in numbers["cells"]
    }
    assert len(cells) == len(names) * 2 * 2 * 2
    for (name, *_), cell in cells.items():
        assert len(cell["rounds"]) == 2
        assert cell["seconds"] == pytest.approx(sum(cell["rounds"]) / 2)
        assert (cell["share"] is None) == (name == "X line")
        assert cell["extra_bytes"] >= 0
    titles = {
        f"{q}_{d}_{p}"
        for q in ("time", "memory")
        for d in ("bidirectional", "causal")
        for p in ("forward", "forward_backward")
    }
    assert set(figures) == titles
    assert numbers["machine"]["threads"] == torch.get_num_threads()
    assert numbers["machine"]["torch"] == torch.__version__


def test_attention_compares_with_performer_pytorch_where_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    built = []

    class FastAttention(torch.nn.Module):
        def __init__(self, dim_heads: int, *, nb_features: int, causal: bool) -> None:
            super().__init__()
            print("unable to import cuda code")
            built.append((dim_heads, nb_features, causal))

        def forward(self, q, k, v):
            return (q + k + v) / 3

    monkeypatch.setitem(sys.modules, "performer_pytorch", SimpleNamespace(FastAttention=FastAttention))
    assert main([*ATTENTION, "--kinds", "favor", "--direction", "causal"]) == 0
    out, _ = capsys.readouterr()
    assert "unable" not in out
    assert set(tables_of(out)["ms"]) == {"SDPA", "X line", "favor", "performer-pytorch"}
    assert (8, 16, True) in built


def test_attention_leaves_out_what_is_too_slow_and_says_so(capsys: pytest.CaptureFixture[str]):
    assert main([*ATTENTION, "--kinds", "relu", "--direction", "causal", "--budget", "1e-9"]) == 0
    out, _ = capsys.readouterr()
    assert set(tables_of(out)["ms"]["relu"]) == {"-"} or [
        cell.strip() for cell in tables_of(out)["ms"]["relu"]
    ] == ["-", "-"]
    reasons = [
        line
        for line in out.splitlines()
        if line.startswith("-: relu, causal, forward, 24 tokens: one call took")
    ]
    assert len(reasons) == 1


def test_every_table_of_errors_holds_uniform_attention(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    numbers, figures = run([*ERROR, "--layers", "3"], tmp_path)
    out, _ = capsys.readouterr()
    tables = tables_of(out)
    assert len(tables) == 3
    rows = {
        f"{kind}, {c}"
        for kind in ("favor", "favor_hyperbolic", "oprf", "trig")
        for c in ("iid", "orthogonal", "simplex")
    }
    for table in tables.values():
        assert set(table) == rows | {"uniform attention"}
    assert set(figures) == {"error_0.125", "error_0.25", "error_features", "error_layers"}
    for errors in (*numbers["by_features"].values(), numbers["by_layers"]):
        assert set(errors) == rows | {"uniform attention"}
    assert set(numbers["by_layers"]["favor, iid"]) == {"1", "2", "3"}


def test_errors_are_those_of_random_features(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """At q, k = 0.25 N(0, 1) features along w and -w beat uniform attention, whose error is about std(q.k / sqrt(K))."""
    numbers, _ = run([*ERROR, "--layers", "0"], tmp_path)
    out, _ = capsys.readouterr()
    errors = numbers["by_features"]["0.25"]
    null = errors["uniform attention"]["64"]
    assert null == errors["uniform attention"]["16"]
    assert null == pytest.approx(
        0.25**2, rel=0.3
    )  # 2 seeds of 2 heads: the mean of v, K 16, is known to 18 %
    assert errors["favor_hyperbolic, orthogonal"]["64"] < null < errors["favor, iid"]["16"]
    row = tables_of(out)["q, k ~ 0.25 N(0, 1); features:"]
    assert row["favor, iid"][0].rstrip().endswith("*")
    assert not row["favor_hyperbolic, orthogonal"][1].rstrip().endswith("*")
    assert "*" not in "".join(row["uniform attention"])


def test_model_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    numbers, figures = run([*MODEL, "--length", "64", *SMALL, "attention=favor"], tmp_path)
    out, _ = capsys.readouterr()
    assert set(tables_of(out)["attention"]) == {"favor", "softmax", "X line"}
    assert set(figures) == {"model"}
    results = {result["name"]: result for result in numbers["results"]}
    for result in results.values():
        assert result["tokens_per_second"] == pytest.approx(64 / result["seconds"])
        assert result["over_x_line"] == mean_ratio(result, results["X line"])
        assert result["faster_than_softmax"] == mean_ratio(results["softmax"], result)
        assert result["mfu"] > 0
        assert result["step_bytes"] > 0
    assert numbers["setting"]["model"]["attention"] == "favor"
    assert numbers["setting"]["model"]["num_layers"] == 2
    # weights, and AdamW's two moments of each; the buffers and counters beside them are small
    weights = 4 * sum(p.numel() for p in model_weights(numbers["setting"]["model"]))
    assert 3 * weights < results["favor"]["held_bytes"] < 3 * weights + 4096


def mean_ratio(one: dict, other: dict):
    """The median of two rounds is their mean."""
    return pytest.approx(np.mean(np.array(one["rounds"]) / other["rounds"]))


def model_weights(config: dict) -> list[torch.nn.Parameter]:
    from protperf.config import ModelConfig
    from protperf.model import ProteinModel

    return list(ProteinModel(ModelConfig(**config), causal=False).parameters())


def test_model_trains_on_windows_of_a_dataset_and_of_several_proteins(tmp_path: Path):
    numbers, _ = run([*MODEL, *SMALL, "--data", str(small_dataset()), "--batch", "2"], tmp_path)
    assert (numbers["setting"]["batch"], numbers["setting"]["length"]) == (2, 64)
    again, _ = run([*MODEL, *SMALL, "--length", "64", "--packed", "5", "--force"], tmp_path)
    assert again["setting"]["documents"] == 5


def test_a_model_that_is_too_slow_is_left_out(capsys: pytest.CaptureFixture[str]):
    assert main([*MODEL, *SMALL, "--length", "64", "--budget", "1e-9"]) == 0
    out, _ = capsys.readouterr()
    assert out.count("above --budget 1e-09; --layers cuts the depth") == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["attention", "--kinds", "favour"], "--kinds favour: not there; allowed: favor,"),
        (["error", "--kinds", "relu"], "--kinds relu: not there; allowed: favor,"),
        (["error", "--couplings", "qr"], "--couplings qr: not there; allowed: iid,"),
        (
            ["model", "--preset", "performer_37l"],
            "--preset performer_37l: not there; allowed: paper_concat,",
        ),
        (["model", "num_layer=3"], "num_layer"),
        (["model", "attention"], "attention"),
        (["model", "--data", "nowhere"], "nowhere: no such dataset folder"),
        (["model", "--json", "no/a.json"], "no: no such folder to write a.json to"),
        (["model", "--json", "taken.json"], r"taken\.json: exists already"),
        (["model", "--plot", "taken.json"], r"taken\.json: is a file"),
        (["model", "--plot", "figures"], "figures: holds figures already"),
    ],
)
def test_a_mistake_is_one_line(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken.json").write_text("mine")
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "a.png").write_text("mine")
    with pytest.raises(ValueError, match=message) as caught:
        main(arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["speed"],
        ["attention", "--lengths", "0"],
        ["attention", "--lengths", "16", "--packed", "17"],
        ["attention", "--features", "15"],
        ["attention", "--budget", "0"],
        ["attention", "--dtype", "int8"],
        ["error", "--sigmas", "x"],
        ["error", "--layers", "-1"],
        ["model", "--length", "64", "--data", "somewhere"],
        ["model", "--packed", "2", "--data", "somewhere"],
        ["model", "--packed", "9", "--length", "8"],
        ["model", "--rounds", "0"],
    ],
)
def test_wrong_usage_exits_with_status_2(arguments: list[str]):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2


def test_help_needs_no_torch(tmp_path: Path):
    code = (
        "import atexit, sys; atexit.register(lambda: print('torch' in sys.modules)); "
        "from protperf.cli import main; sys.exit(main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "bench", "model", "--help"],
        capture_output=True,
        text=True,
        env={**os.environ, "HOME": str(tmp_path)},
    )
    assert (done.returncode, done.stdout.split()[-1]) == (0, "False"), done.stderr
    assert "--preset" in done.stdout
