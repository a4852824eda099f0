"""`protperf plot`: figures of the right size that show something, and principal components that are right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from protperf.formats import FormatError
from protperf.formats.embedding_merge import WRITERS
from protperf.formats.embeddings import Embedding, EmbeddingInfo
from protperf.formats.metrics_file import append_metrics
from protperf.plot import draw_curve, main, organism_of, parse, plot_curve, plot_map, project

WIDTH, HEIGHT = 1050, 675  # 7 x 4.5 inches at 150 dots


def make_run(path: Path) -> Path:
    path.mkdir()
    for step in range(20, 420, 20):
        append_metrics(
            path / "metrics.csv", [(step, {"train/perplexity": 14 + 200 / step, "train/loss": 2.0})]
        )
    for step in (200, 400):
        append_metrics(path / "metrics.csv", [(step, {"valid/perplexity": 16 + 200 / step})])
    return path


def make_embeddings(path: Path, count: int = 60, *, kind: str = "mean", organisms: bool = True) -> Path:
    generator = np.random.default_rng(0)
    info = EmbeddingInfo(kind, 8, "best.ckpt", "0" * 64, "masked")
    with WRITERS[path.suffix[1:]](path, info) as writer:
        for number in range(count):
            length = int(generator.integers(5, 50))
            rows = generator.standard_normal((length, 8)).astype(np.float32) + number % 3
            arrays = {"per_tok": rows, "contacts": np.zeros((length, length), np.float32)}
            name = (
                f"sp|P{number:05d}|X{number}_{('HUMAN', 'ECOLI', 'YEAST')[number % 3]}" if organisms else "q"
            )
            writer.add(number, Embedding(name, name, length, arrays.get(kind, rows.mean(0))))
    return path


def colours_of(path: Path) -> set[tuple[int, ...]]:
    """Return the colours of a PNG of the right size, 8 bits a channel."""
    image = (imread(path)[..., :3] * 255).round().astype(int)
    assert image.shape == (HEIGHT, WIDTH, 3)
    return set(map(tuple, image.reshape(-1, 3).tolist()))


def changed_share(first: Path, second: Path) -> float:
    return float((imread(first) != imread(second)).any(-1).mean())


def test_curve_shows_both_curves(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["curve", str(make_run(tmp_path / "run")), str(tmp_path / "curve.png")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'curve.png'}\n"
    colours = colours_of(tmp_path / "curve.png")
    assert {(0x99, 0x99, 0x99), (0x00, 0x72, 0xB2)} <= colours
    assert main(["curve", str(tmp_path / "run" / "metrics.csv"), str(tmp_path / "same.png")]) == 0
    assert changed_share(tmp_path / "curve.png", tmp_path / "same.png") == 0


def test_floors_are_drawn_across_the_figure(tmp_path: Path):
    run = make_run(tmp_path / "run")
    scores = {"valid": {"model": {"perplexity": 17.0}, "unigram": {"perplexity": 18.0}}}
    (tmp_path / "scores.json").write_text(json.dumps(scores))
    assert main(["curve", str(run), str(tmp_path / "plain.png")]) == 0
    assert main(["curve", str(run), str(tmp_path / "a.png"), "--scores", str(tmp_path / "scores.json")]) == 0
    assert main(["curve", str(run), str(tmp_path / "b.png"), "--floor", "unigram on valid=18"]) == 0
    assert changed_share(tmp_path / "a.png", tmp_path / "b.png") == 0
    assert changed_share(tmp_path / "plain.png", tmp_path / "a.png") > 0
    dark_in_row = (imread(tmp_path / "a.png")[:-80, 100:, :3].max(-1) < 0.4).sum(1)
    assert dark_in_row.max() > (WIDTH - 100) / 4  # a dotted line from edge to edge


def test_the_legend_of_a_curve_covers_neither_curves_nor_floors():
    curves = {"train": {step: 20.0 - step for step in range(1, 6)}, "valid": {5: 16.0}}
    floors = {f"{name} on valid": 15.0 + number for number, name in enumerate(("a", "b", "c", "d"))}
    figure = draw_curve(curves, floors, title="runs/mine")
    figure.canvas.draw()
    (legend,), (axes,) = figure.legends, figure.axes
    assert len(legend.get_texts()) == 6
    box, drawn = legend.get_window_extent(), axes.get_tightbbox()
    assert not box.overlaps(drawn)
    assert figure.bbox.contains(*box.min)
    assert figure.bbox.contains(*box.max)


def test_figures_say_what_they_are_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "runs").mkdir()
    make_run(tmp_path / "runs" / "mine")
    make_embeddings(tmp_path / "mine.h5")
    monkeypatch.chdir(tmp_path)

    def figure_of(*words: str) -> Figure:
        options = parse([*words, "a.png"])
        return (plot_curve if words[0] == "curve" else plot_map)(options)

    (curve,), (points,) = figure_of("curve", "runs/mine").axes, figure_of("map", "mine.h5").axes
    assert curve.get_title(loc="left") == "runs/mine"
    assert points.get_title(loc="left") == "mine.h5: 60 proteins, mean embeddings of best.ckpt"
    assert points.get_legend().get_title().get_text() == "organism"
    for words in (("curve", "runs/mine"), ("map", "mine.h5")):
        assert figure_of(*words, "--title", "Mine").axes[0].get_title(loc="left") == "Mine"


def test_map_has_a_colour_for_each_organism_or_for_length(tmp_path: Path):
    embeddings = make_embeddings(tmp_path / "e.h5")
    for name, options in (
        ("auto", []),
        ("organism", ["--colour", "organism"]),
        ("length", ["--color", "length"]),
    ):
        assert main(["map", str(embeddings), str(tmp_path / f"{name}.png"), *options]) == 0
    assert {(0x00, 0x72, 0xB2), (0xE6, 0x9F, 0x00), (0x00, 0x9E, 0x73)} <= colours_of(tmp_path / "auto.png")
    assert changed_share(tmp_path / "auto.png", tmp_path / "organism.png") == 0
    assert len(colours_of(tmp_path / "length.png")) > 200


def test_map_of_rows_is_the_map_of_their_means(tmp_path: Path):
    for kind in ("mean", "per_tok"):
        embeddings = make_embeddings(tmp_path / f"{kind}.h5", kind=kind, organisms=False)
        assert main(["map", str(embeddings), str(tmp_path / f"{kind}.png"), "--title", "same"]) == 0
    assert changed_share(tmp_path / "mean.png", tmp_path / "per_tok.png") < 1e-3


def test_map_is_the_same_of_every_format(tmp_path: Path):
    pytest.importorskip("pyarrow")
    for name in ("h5", "npz", "parquet"):
        embeddings = make_embeddings(tmp_path / f"e.{name}")
        assert main(["map", str(embeddings), str(tmp_path / f"{name}.png"), "--title", "same"]) == 0
        assert changed_share(tmp_path / "h5.png", tmp_path / f"{name}.png") == 0
    assert (
        main(["map", str(make_embeddings(tmp_path / "max.h5", kind="max")), str(tmp_path / "max.png")]) == 0
    )


def test_figures_are_written_as_their_name_says(tmp_path: Path):
    run = str(make_run(tmp_path / "run"))
    for name, start in (("a.pdf", b"%PDF"), ("a.svg", b"<?xml")):
        assert main(["curve", run, str(tmp_path / name)]) == 0
        assert (tmp_path / name).read_bytes().startswith(start)


def test_components_are_those_of_the_covariance():
    generator = np.random.default_rng(0)
    vectors = generator.standard_normal((200, 5)) * [1, 5, 2, 3, 0.5] + 100
    found = project(vectors.astype(np.float32))
    values, axes = np.linalg.eigh(np.cov(vectors.T))
    np.testing.assert_allclose(found.explained, values[[-1, -2]] / values.sum(), rtol=1e-4)
    expected = (vectors - vectors.mean(0)) @ axes[:, [-1, -2]]
    np.testing.assert_allclose(np.abs(found.points), np.abs(expected), atol=2e-3)
    np.testing.assert_allclose(project(vectors[::-1]).points, project(vectors).points[::-1], atol=1e-9)


@pytest.mark.parametrize(
    ("vectors", "message"),
    [
        (np.zeros((2, 4)), "holds 2 proteins"),
        (np.ones((5, 4)), "all embeddings are equal"),
        (np.full((5, 4), np.nan), "not finite"),
    ],
)
def test_nothing_to_map_is_said(vectors: np.ndarray, message: str):
    with pytest.raises(ValueError, match=message):
        project(vectors)


@pytest.mark.parametrize(
    ("header", "organism"),
    [
        ("sp|P01308|INS_HUMAN Insulin OS=Homo sapiens OX=9606", "HUMAN"),
        ("q1 something OS=Homo sapiens OX=9606", "Homo sapiens"),
        ("q1", ""),
    ],
)
def test_organism_of_a_header(header: str, organism: str):
    assert organism_of(header) == organism


def test_existing_figure_is_replaced_only_by_force(tmp_path: Path):
    argv = ["curve", str(make_run(tmp_path / "run")), str(tmp_path / "a.png")]
    (tmp_path / "a.png").write_text("mine")
    with pytest.raises(ValueError, match=r"a\.png: exists already.*--force"):
        main(argv)
    assert (tmp_path / "a.png").read_text() == "mine"
    assert main([*argv, "--force"]) == 0
    assert colours_of(tmp_path / "a.png")


def test_mistakes_are_one_line_and_leave_nothing(tmp_path: Path):
    (tmp_path / "in").mkdir()
    run, out = make_run(tmp_path / "in" / "run"), tmp_path / "out"
    out.mkdir()
    figure = str(out / "a.png")
    scores, bad, empty = (tmp_path / "in" / name for name in ("scores.json", "bad.json", "metrics.csv"))
    scores.write_text('{"test": {}}')
    bad.write_text("no json")
    append_metrics(empty, [(1, {"train/loss": 2.0})])
    plain = make_embeddings(tmp_path / "in" / "plain.h5", organisms=False)
    contacts = make_embeddings(tmp_path / "in" / "contacts.h5", kind="contacts")
    few = make_embeddings(tmp_path / "in" / "few.h5", count=2)
    for argv, message in (
        (["curve", str(tmp_path / "no"), figure], "no: no such file"),
        (["curve", str(empty), figure], "no perplexity yet"),
        (["curve", str(run), figure, "--scores", str(scores)], "'valid'; --split takes: test"),
        (["curve", str(run), figure, "--scores", str(bad)], r"bad\.json: not what"),
        (["curve", str(run), figure, "--scores", str(out / "no.json")], r"no\.json: cannot be read"),
        (["map", str(tmp_path / "no.h5"), figure], r"no\.h5: no such file"),
        (["map", str(run), figure], r"run: is a folder; a map is of one \.h5"),
        (["map", str(contacts), figure], r"contacts\.h5: holds contacts; a map is of mean"),
        (["map", str(few), figure], r"few\.h5: holds 2 proteins"),
        (["map", str(plain), figure, "--colour", "organism"], "no header names an organism"),
        (["curve", str(run), str(out / "no" / "a.png")], "no such folder"),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            main(argv)
        assert "\n" not in str(caught.value)
    with pytest.raises(FormatError, match=r"bad\.json"):
        main(["map", str(bad), figure])
    assert os.listdir(out) == []


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["curve", "run"],
        ["curve", "run", "a.txt"],
        ["curve", "run", "a.png", "--floor", "17.9"],
        ["map", "e.h5", "a.png", "--colour", "x"],
    ],
)
def test_wrong_usage_exits_with_status_2(argv: list[str]):
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2


def test_command_needs_neither_torch_nor_a_display(tmp_path: Path):
    run = make_run(tmp_path / "run")
    code = "import atexit, sys; atexit.register(lambda: print('torch' in sys.modules)); from protperf.cli import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", code, "plot", "curve", str(run), str(tmp_path / "a.png")],
        capture_output=True,
        text=True,
        env={name: value for name, value in os.environ.items() if name != "DISPLAY"}
        | {"HOME": str(tmp_path)},
    )
    assert (done.returncode, done.stdout.split()[-1]) == (0, "False"), done.stderr
    assert colours_of(tmp_path / "a.png")
