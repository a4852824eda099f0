"""What is released: a source archive of the whole repository, and a wheel that prepares, trains and embeds elsewhere."""

from __future__ import annotations

import email
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from conftest import REPOSITORY
from programs import in_ci

pytestmark = pytest.mark.slow(minutes=1)


def run(*command, cwd, **environment):
    """Run a command that must succeed and return what it printed."""
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def tracked():
    """The files that git tracks (or would)."""
    listed = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=REPOSITORY)
    return {name for name in filter(None, listed.split("\0")) if (REPOSITORY / name).is_file()}


@pytest.fixture(scope="module")
def built(tracked, tmp_path_factory):
    """The source archive and the wheel, which is built from the archive."""
    source = tmp_path_factory.mktemp("source")
    for name in tracked:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((REPOSITORY / name).read_bytes())
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", "dist", ".", cwd=source)
    (archive,) = (source / "dist").glob("*.tar.gz")
    (wheel,) = (source / "dist").glob("*.whl")
    return archive, wheel


def test_the_source_archive_holds_every_file_that_git_tracks(built, tracked):
    with tarfile.open(built[0]) as archive:
        names = {str(Path(*Path(name).parts[1:])) for name in archive.getnames()}
    assert tracked <= names
    made = {"PKG-INFO", "setup.cfg"}
    assert not [
        name
        for name in names - tracked - made
        if Path(name).suffix and not name.startswith("protperf.egg-info")
    ]


def test_the_wheel_holds_all_code_all_configuration_the_sample_and_the_licences(built, tracked):
    with zipfile.ZipFile(built[1]) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
        (metadata,) = (name for name in wheel.namelist() if name.endswith("/METADATA"))
        about = email.message_from_bytes(wheel.read(metadata))
        licences = [name for name in wheel.namelist() if "/licenses/" in name]
    expected = {name for name in tracked if name.startswith(("protperf/", "data_prep/"))}
    expected |= {f"protperf/{name}" for name in tracked if name.startswith("conf/")}
    assert names == expected
    assert "protperf/py.typed" in names
    assert about["Name"] == "protperf"
    assert about["License-Expression"] == "Apache-2.0 AND CC-BY-4.0"  # the sample is UniProt's
    assert {Path(name).name for name in licences} == {"LICENSE", "README.md"}


def test_the_installed_wheel_trains_and_embeds_elsewhere(built):
    """With the dependencies of its own that CI installs; elsewhere with those of this environment, which has more."""
    folders = os.pathsep.join(folder for folder in sys.path if Path(folder).name == "site-packages")
    here = {
        "PYTHON": sys.executable,
        "OMP_NUM_THREADS": "1",
        **({} if in_ci() else {"DEPENDENCIES": folders}),
    }
    said = run(REPOSITORY / ".ci/try-wheel", built[1], cwd=built[1].parent, **here)
    assert said.splitlines()[-1].startswith("protperf ")
