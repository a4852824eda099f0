"""A wheel built from the repository, installed in another folder, prepares, trains and embeds."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile

import pytest
from conftest import REPOSITORY

pytestmark = pytest.mark.slow


def run(*command, cwd, **environment):
    """Run a command that must succeed and return what it printed."""
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from the files that git tracks (or would)."""
    source = tmp_path_factory.mktemp("source")
    listed = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=REPOSITORY)
    for name in filter(None, listed.split("\0")):
        if (REPOSITORY / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((REPOSITORY / name).read_bytes())
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", "dist", ".", cwd=source)
    (path,) = (source / "dist").glob("*.whl")
    return path


def test_the_wheel_holds_configuration_types_sample_and_licence(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    for name in [
        "protperf/conf/train.yaml",
        "protperf/conf/data/default.yaml",
        "protperf/conf/experiment/demo.yaml",
        "protperf/py.typed",
        "data_prep/sample/uniprot_sample.fasta.gz",
        "data_prep/sample/README.md",
    ]:
        assert name in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not [name for name in names if name.startswith(("tests/", "conf/"))]


def test_the_installed_wheel_trains_and_embeds_elsewhere(wheel, tmp_path):
    site = tmp_path / "site"
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", site)
    run(*pip, wheel, cwd=tmp_path)
    here = {"PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    protperf = (sys.executable, "-m", "protperf")

    def call(*arguments):
        return run(*protperf, *arguments, cwd=tmp_path, **here)

    where = run(sys.executable, "-c", "import protperf; print(protperf.__file__)", cwd=tmp_path, **here)
    assert where.startswith(str(site))
    call("prepare", "--sample", "shards", "--window", "256")
    call(
        "train",
        "experiment=demo",
        "data.path=shards",
        "name=wheel",
        "trainer.max_steps=2",
        "data.batch_size=2",
    )
    (tmp_path / "one.fasta").write_text(">one\nMKTAYIAKQRQISFVKSHFSRQ\n")
    call("embed", "runs/wheel", "one.fasta", "one.h5")
    assert (tmp_path / "one.h5").stat().st_size > 0
