"""`protperf bench paper`: each experiment runs for real, goes on where it was, and what it says follows from its runs."""

from __future__ import annotations

import doctest
import gzip
import json
import multiprocessing.forkserver
import os
import re
import signal
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path

import pytest
import torch
from matplotlib.image import imread
from prepared import SAMPLE, read_fasta, read_proteins, write_fasta
from training import LEAN

from protperf.attention import attend
from protperf.bench.__main__ import main
from protperf.bench.paper import curves, long, page, similarity
from protperf.bench.paper.arguments import EXPERIMENTS
from protperf.bench.paper.dataset import held_out_members
from protperf.bench.paper.jobs import RESULT_NAME, call_job, claim, run_all
from protperf.bench.paper.tuning import tune
from protperf.checkpoint import load_model
from protperf.evaluate import evaluate
from protperf.formats.metrics_file import read_metrics

WINDOW = 64
SPLITS = ["--valid", "0.15", "--ood", "0.15"]
SMALL = ["--layers", "2", "--heads", "2", "--model-dim", "16", "--feedforward-dim", "32", "--features", "8"]
SHORT = ["--window", str(WINDOW), "--steps", "4", "--batch", "2", "--validate-every", "2", "--warmup", "1"]


@pytest.fixture(scope="module", autouse=True)
def lean_processes():
    """Start the server of processes without what training does not need, as other tests start theirs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(LEAN), *filter(None, sys.path)]))
        multiprocessing.forkserver.ensure_running()


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return 180 short proteins, and a table of 60 clusters of three."""
    folder = tmp_path_factory.mktemp("proteins")
    distinct = {sequence: header for header, sequence in read_fasta(SAMPLE) if 40 <= len(sequence) <= 100}
    records = [(header, sequence) for sequence, header in distinct.items()][:180]
    names = [header.split("|")[1] for header, _ in records]
    lines = [f"{names[place - place % 3]}\t{name}\n" for place, name in enumerate(names)]
    table = folder / "clusters.tsv.gz"
    table.write_bytes(gzip.compress("".join(lines).encode()))
    return [write_fasta(folder / "proteins.fasta", records), str(table)]


def run(experiment: str, folder: Path, *arguments: str) -> dict:
    """Run an experiment; return its numbers. It prints a table, draws figures, and its rows fill a page."""
    out, figures = folder / f"{experiment}.json", folder / experiment
    command = ["paper", experiment, *arguments, "--json", str(out), "--plot", str(figures), "--force"]
    assert main(command) == 0
    for path in figures.iterdir():
        assert imread(path).std() > 0.01
    assert any(figures.iterdir())
    markdown = folder / "page.md"
    markdown.write_text(f"before\n<!-- {experiment} -->\nold\n<!-- /{experiment} -->\nafter\n")
    assert main(["paper", "page", str(markdown), str(out)]) == 0
    text = markdown.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert text.count("\n|---") >= 1
    return json.loads(out.read_text())


@pytest.fixture(scope="module")
def trained(inputs: list[str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    """Return the folder of work of `curves`, and its numbers."""
    folder = tmp_path_factory.mktemp("curves")
    size = [*SPLITS, *SMALL, *SHORT, "--seeds", "1"]
    systems = ["--systems", "Transformer", "Linformer"]
    return folder, run("curves", folder, *inputs, "--work", str(folder / "work"), *size, *systems)


@pytest.mark.parametrize("name", ["curves", "long", "page"])
def test_examples_in_docstrings_are_true(name: str):
    assert doctest.testmod(import_module(f"protperf.bench.paper.{name}")).failed == 0


def test_curves_are_those_of_the_runs(trained: tuple[Path, dict]):
    folder, numbers = trained
    assert [(run["system"], run["objective"]) for run in numbers["runs"]] == [
        ("Transformer", "masked"),
        ("Linformer", "masked"),
        ("Transformer", "causal"),
    ]
    for each in numbers["runs"]:
        path = folder / "work" / "curves" / curves.run_name(each["system"], each["objective"], 0)
        metrics = read_metrics(path / "metrics.csv")
        assert {int(step): score["perplexity"] for step, score in each["curve"].items()} == metrics[
            "valid/perplexity"
        ]
        assert list(each["curve"]) == ["2", "4"]
        assert each["ood"]["accuracy"] == metrics["test_ood/accuracy"][4]
        model = load_model(path).model
        assert each["parameters"] == sum(parameter.numel() for parameter in model.parameters())
        assert model.causal == (each["objective"] == "causal")


def test_models_and_floors_got_what_evaluate_says(trained: tuple[Path, dict]):
    folder, numbers = trained
    for each in numbers["runs"]:
        name = curves.run_name(each["system"], each["objective"], 0)
        best = load_model(folder / "work" / "curves" / name / "model")
        dataset = folder / "work" / f"data-{WINDOW}" / "dataset"
        expected = evaluate(best, dataset, splits=["valid", "ood"], seed=0)
        for split in ("valid", "ood"):
            assert each[split]["perplexity"] == pytest.approx(
                expected[split]["model"]["perplexity"], rel=1e-5
            )
            floors = numbers["floors"][each["objective"]]["0"][split]
            for floor, score in floors.items():
                assert score == {key: expected[split][floor][key] for key in score}
            assert list(floors) == ["unigram", "trigram", "4-gram"]


def test_ood_is_whole_clusters_and_valid_is_not(inputs: list[str], trained: tuple[Path, dict]):
    sequence_of = {header.split("|")[1]: sequence for header, sequence in read_fasta(Path(inputs[0]))}
    split_of = {
        protein: split
        for split, proteins in read_proteins(trained[0] / "work" / f"data-{WINDOW}" / "dataset").items()
        for protein in proteins
    }
    names = list(sequence_of)
    clusters = [
        {split_of.get(sequence_of[name]) for name in names[first : first + 3]} - {None}
        for first in range(0, len(names), 3)
    ]
    assert sum(cluster == {"ood"} for cluster in clusters) > 3
    assert all(cluster == {"ood"} for cluster in clusters if "ood" in cluster)
    assert any(cluster == {"train", "valid"} for cluster in clusters)


def test_a_second_start_does_nothing_again_and_other_options_are_refused(
    inputs: list[str], trained: tuple[Path, dict], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder, numbers = trained
    work = ["--work", str(folder / "work")]
    size = [*SPLITS, *SMALL, *SHORT, "--seeds", "1", "--systems", "Transformer", "--objectives", "causal"]
    again = run("curves", tmp_path, *inputs, *work, *size)
    assert "1 of 1 jobs are done already" in capsys.readouterr().err
    assert again["runs"] == [numbers["runs"][2]]
    with pytest.raises(
        ValueError, match=r"curves: was begun with --batch 2 \(now 4\); give the same options"
    ):
        run("curves", tmp_path, *inputs, *work, *size, "--batch", "4")
    with pytest.raises(ValueError, match=r"data-64: was begun with --ood 0.15 \(now 0.3\)"):
        run("curves", tmp_path, *inputs, *work, *size, "--ood", "0.3")


@pytest.mark.slow
def test_a_killed_command_goes_on_where_it_was(inputs: list[str], trained: tuple[Path, dict], tmp_path: Path):
    size = [*SPLITS, *SMALL, *SHORT, "--seeds", "1", "--jobs", "1", "--objectives", "masked"]
    arguments = [*inputs, "--work", str(tmp_path / "work"), *size]
    arguments += ["--systems", "Transformer", "Linformer"]
    command = [sys.executable, "-m", "protperf", "bench", "paper", "curves", *arguments]
    first = tmp_path / "work" / "curves" / "masked-softmax-0" / RESULT_NAME
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(LEAN), *sys.path])}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    while not first.exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "work" / "curves" / "masked-linformer-0" / RESULT_NAME).exists()
    done = first.stat().st_mtime_ns
    numbers = run("curves", tmp_path, *arguments)
    assert first.stat().st_mtime_ns == done
    expected = [run for run in trained[1]["runs"] if run["objective"] == "masked"]
    for one, other in zip(numbers["runs"], expected, strict=True):
        assert {**one, "seconds": 0} == {**other, "seconds": 0}


def test_a_run_that_diverges_is_a_result_and_is_said_to(
    inputs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    size = [*SPLITS, *SMALL, *SHORT, "--learning-rate", "1e30", "--seeds", "1", "--objectives", "causal"]
    systems = ["--systems", "Transformer"]
    numbers = run("curves", tmp_path, *inputs, "--work", str(tmp_path / "work"), *size, *systems)
    (diverged,) = numbers["runs"]
    assert diverged["valid"] is None
    text = capsys.readouterr().out
    (row,) = [line.split() for line in text.splitlines() if line.startswith("Transformer")]
    assert row[2:8] == ["NaN"] * 4 + ["0/1,", "0/1"]
    assert re.search(r"^NaN: causal-softmax-0: .*at step [24]", text, flags=re.MULTILINE)


def test_similarity_is_that_of_the_trained_models(trained: tuple[Path, dict], tmp_path: Path):
    numbers = run("similarity", tmp_path, "--work", str(trained[0] / "work"), "--window", str(WINDOW))
    assert [model["name"] for model in numbers["models"]] == ["masked-softmax-0", "masked-linformer-0"]
    dataset = trained[0] / "work" / f"data-{WINDOW}" / "dataset"
    lengths = [len(protein) for protein in similarity.held_out_proteins(dataset, num=500)]
    assert (
        max(lengths) == WINDOW - 2
    )  # of a protein that goes on in the next window, what fits between its edges
    for model in numbers["models"]:
        assert model["residues"] == sum(lengths)
        for which in ("trained", "untrained"):
            assert -1 <= model[which]["pearson"] <= 1
            assert 0 <= model[which]["chance"] <= 1


@pytest.mark.slow(minutes=0.8)
def test_long_trains_the_deepest_transformer_that_fits(inputs: list[str], tmp_path: Path):
    size = [
        *SPLITS,
        "--layers",
        "2",
        "--heads",
        "2",
        "--model-dim",
        "16",
        "--feedforward-dim",
        "32",
        "--features",
        "32",
    ]
    depths = ["--window", "256", "--depths", "1", "3", "12", "--seconds", "0.05"]
    numbers = run("long", tmp_path, *inputs, "--work", str(tmp_path / "work"), *size, *depths)
    measured = {name: step["bytes"] for name, step in numbers["measured"].items()}
    room = measured["Performer-ReLU"]
    fitting = [
        name for name in ("Transformer, 1", "Transformer, 3", "Transformer, 12") if measured[name] <= room
    ]
    assert list(numbers["runs"]) == ["Performer-ReLU", *fitting[-1:], "Transformer, half as wide"]
    assert "Transformer, 12" not in fitting
    assert measured["Transformer, weights kept"] > measured["Transformer, 1"] + 2 * 256**2 * 4


@pytest.mark.parametrize("causal", [False, True])
def test_attention_as_written_is_exact_attention(causal: bool):
    q, k, v = torch.randn(3, 1, 2, 65, 8, generator=torch.Generator().manual_seed(0))
    expected = attend(q, k, v, kind="softmax", causal=causal)
    torch.testing.assert_close(long.attend_as_written(q, k, v, causal=causal), expected)


@pytest.mark.slow(minutes=0.8)
def test_moved_weights_begin_as_they_were_and_learn(inputs: list[str], tmp_path: Path):
    size = [*SPLITS, *SMALL, *SHORT, "--tune-steps", "4"]
    numbers = run("transfer", tmp_path, *inputs, "--work", str(tmp_path / "work"), *size)
    folder = tmp_path / "work" / "transfer"
    final = json.loads((folder / "transformer-qk" / RESULT_NAME).read_text())["valid"]
    rows = numbers["rows"]
    start = rows["Transformer with qk_norm, going on"]["curve"]["0"]
    assert start["perplexity"] == pytest.approx(final["perplexity"], rel=1e-5)
    assert rows["positive, from it"]["curve"]["0"] != rows["positive, from scratch"]["curve"]["0"]
    assert rows["positive, from it"]["product"] == rows["trigonometric, from it"]["product"]
    assert all(list(row["curve"]) == ["0", "1", "4"] for row in rows.values())


def test_redrawn_runs_differ_from_those_that_are_not(inputs: list[str], tmp_path: Path):
    size = [*SPLITS, *SMALL, *SHORT, "--projections", "1", "--redraw-every", "2"]
    numbers = run("redraw", tmp_path, *inputs, "--work", str(tmp_path / "work"), *size)
    exact, never, redrawn = numbers["runs"]
    assert (exact["redrawn"], never["redrawn"], redrawn["redrawn"]) == ("exact", "never", "every 2 steps")
    first, last = "2", "4"
    assert never["curve"][first] == redrawn["curve"][first]
    assert never["curve"][last] != redrawn["curve"][last]
    assert exact["curve"][first] != never["curve"][first]


def test_speed_measures_each_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("protperf.bench.measure.TURN_SECONDS", 1e-4)
    numbers = run("speed", tmp_path, *SMALL, "--lengths", "32", "64", "--rounds", "2")
    names = [(each["length"], each["name"]) for each in numbers["results"]]
    assert names == [(length, name) for length in (32, 64) for name in ("relu", "softmax", "X line")]
    assert all(each["seconds"] > 0 for each in numbers["results"])


def test_error_compares_positive_and_trigonometric_features(tmp_path: Path):
    one = ["--features", "16", "64", "--sigmas", "0.25", "--length", "64", "--seeds", "2", "--layers", "2"]
    model = ["--layer-features", "16", "--layer-heads", "2", "--layer-head-dim", "8", "--layer-length", "64"]
    numbers = run("error", tmp_path, *one, *model)
    errors = numbers["by_features"]["0.25"]
    names = ["favor, iid", "favor, orthogonal", "trig, iid", "trig, orthogonal", "uniform attention"]
    assert list(errors) == list(numbers["by_layers"]) == names
    assert errors["favor, orthogonal"]["64"] < errors["favor, orthogonal"]["16"]
    assert list(numbers["by_layers"]["trig, iid"]) == ["1", "2"]


def test_a_job_that_fails_ends_the_command_with_its_last_line(tmp_path: Path):
    claim(tmp_path / "work", {})
    job = call_job("bad", tmp_path / "work", tune, model={"num_layers": 0}, weights=None, dataset="", batch=1)
    with pytest.raises(ValueError, match=r"work/bad: .*all it said is in .*bad\.log") as caught:
        run_all([job], tmp_path / "work", at_once=1)
    assert "\n" not in str(caught.value)


def test_options_that_were_refused_do_not_bind_those_that_mend_them(inputs: list[str], tmp_path: Path):
    size = ["--work", str(tmp_path / "work"), "--window", str(WINDOW), "--valid", "0.15", *SMALL]
    for share in ("1e-9", "1e-8"):
        with pytest.raises(ValueError, match=f"--ood {share[:2]}.*holds out no cluster"):
            main(["paper", "curves", *inputs, *size, "--ood", share])


def test_settings_bind_what_was_done(tmp_path: Path):
    claim(tmp_path / "work", {"--steps": 4})
    claim(tmp_path / "work", {"--steps": 5})
    (tmp_path / "work" / "job.log").touch()
    claim(tmp_path / "work", {"--steps": 5})
    with pytest.raises(ValueError, match=r"was begun with --steps 5 \(now 4\)"):
        claim(tmp_path / "work", {"--steps": 4})


def test_similarity_of_another_window_is_refused(trained: tuple[Path, dict], tmp_path: Path):
    with pytest.raises(ValueError, match=r"data-128/dataset: no dataset; give the --window"):
        run("similarity", tmp_path, "--work", str(trained[0] / "work"), "--window", "128")


def test_a_folder_of_something_else_is_refused(tmp_path: Path):
    (tmp_path / "precious").write_text("data")
    with pytest.raises(ValueError, match="holds something else"):
        claim(tmp_path, {"--steps": 4})
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a\tb\nc\n", r"table:2: 'c' is not `representative TAB member`"),
        ("a\tb\tc\n", r"table:1: "),
        ("a\tb\n", r"--ood 1e-09: holds out no cluster"),
    ],
)
def test_bad_tables_are_refused(tmp_path: Path, content: str, message: str):
    (tmp_path / "table").write_text(content)
    with pytest.raises(ValueError, match=message):
        held_out_members(tmp_path / "table", share=1e-9)


@pytest.mark.parametrize("text", ["", "<!-- speed -->", "<!-- curves --><!-- /curves -->" * 2])
def test_a_page_without_the_place_is_refused(text: str):
    with pytest.raises(
        ValueError, match=r"here: has <!-- curves --> \.\.\. not once|here: has <!-- curves -->"
    ):
        page.fill(text, {"experiment": "curves"}, place="here")


@pytest.mark.parametrize(
    "arguments",
    [["curves"], ["nothing"], ["speed", "--heads", "3"], ["redraw", "a", "b", "--work", "w", "--ood", "1.5"]],
)
def test_wrong_usage_exits_with_status_2(arguments: list[str]):
    with pytest.raises(SystemExit) as caught:
        main(["paper", *arguments])
    assert caught.value.code == 2


def test_every_experiment_has_its_module():
    for name in EXPERIMENTS:
        module = import_module(f"protperf.bench.paper.{name}")
        assert callable(module.run)
        assert callable(module.rows)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"experiment": "jobs"}, "not what"),
        ({"experiment": 7}, "not what"),
        ({"experiment": "error"}, "run it again"),
    ],
)
def test_numbers_of_no_experiment_or_a_part_of_them_are_refused(
    numbers: dict[str, object], message: str, tmp_path: Path
):
    out, markdown = tmp_path / "out.json", tmp_path / "page.md"
    out.write_text(json.dumps(numbers))
    name = numbers["experiment"]
    markdown.write_text(f"<!-- {name} -->\n<!-- /{name} -->\n")
    with pytest.raises(ValueError, match=message):
        main(["paper", "page", str(markdown), str(out)])
