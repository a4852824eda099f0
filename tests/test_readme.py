"""Every shell block of the README runs, in order, in one folder, as a new user would type it."""

from __future__ import annotations

import gzip
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPOSITORY, SAMPLE
from pages import run_lines
from training import PYTHON_PATH, status_of

from protperf.formats.metrics_file import read_metrics

README = (REPOSITORY / "README.md").read_text()
BLOCKS = re.findall(r"^```bash\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)
SHORT_DEMO = "model.num_layers=1 trainer.max_steps=10 trainer.validate_every=5 trainer.checkpoint_every=5"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A folder with a FASTA file of one's own, outside the repository."""
    folder = tmp_path_factory.mktemp("readme")
    records = gzip.decompress(SAMPLE.read_bytes()).split(b"\n>")[:300]
    (folder / "my_proteins.fasta.gz").write_bytes(gzip.compress(b"\n>".join(records) + b"\n"))
    return folder


def run_shell(script, folder, **environment):
    """Run a block with this environment's `protperf`, stopping at the first command that fails."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=folder,
        env={**os.environ, "PATH": path, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=500,
    )


def test_the_readme_has_shell_blocks():
    assert len(BLOCKS) >= 6


@pytest.mark.parametrize("block", [block for block in BLOCKS if not block.startswith("make")])
def test_a_shell_block_runs(block, workplace):
    run_lines(block, workplace, lambda words: status_of(words, workplace))


def test_the_tour_leaves_a_curve_to_look_at(workplace):
    metrics = read_metrics(workplace / "runs" / "demo" / "metrics.csv")
    assert list(metrics["valid/perplexity"]) == [40, 80]
    assert list(metrics["train/perplexity"]) == [10, 20, 30, 40, 50, 60, 70, 80]


def test_the_python_block_runs_after_the_tour(workplace):
    (block,) = re.findall(r"^```python\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)
    done = subprocess.run([sys.executable, "-c", block], cwd=workplace, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_make_demo_leaves_what_it_promises(tmp_path):
    assert "make demo\n" in BLOCKS
    if not (REPOSITORY / ".venv/bin/.installed").exists():
        pytest.skip("make has not installed .venv here")
    demo = tmp_path / "demo"
    script = "make demo VENV=.venv DEMO=" + str(demo)
    done = run_shell(script, REPOSITORY, DEMO_OPTIONS=SHORT_DEMO, PYTHONPATH=PYTHON_PATH)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    expected = [
        "curve.png",
        "embeddings.h5",
        "map.png",
        "runs/demo/metrics.csv",
        "runs/demo/model/model.safetensors",
    ]
    for name in [*expected, "shards/manifest.json", "scores.json"]:
        assert (demo / name).is_file(), name
    assert (demo / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert len(re.findall(r"^-- \d+ s$", done.stdout, flags=re.MULTILINE)) == 6


def test_make_test_is_what_ci_runs():
    assert "make test\n" in BLOCKS
    assert "make test" in (REPOSITORY / ".ci/run").read_text()
    planned = run_shell("make --dry-run test", REPOSITORY).stdout
    for tool in ("ruff format --check", "ruff check", "mypy", "pytest"):
        assert tool in planned


def test_relative_links_of_the_readme_lead_somewhere():
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", README)
    assert links
    for link in links:
        assert (REPOSITORY / link).exists(), link
