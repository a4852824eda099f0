"""What must be true of the repository for a release: versions, changelog, citation, hooks, licences, the tour of the house."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

import pytest
import yaml
from conftest import REPOSITORY
from packaging.requirements import Requirement
from packaging.version import Version
from test_floors import FLOORS, SOURCES, imports

from protperf import __version__

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
CHANGELOG = (REPOSITORY / "CHANGELOG.md").read_text()
CONTRIBUTING = (REPOSITORY / "CONTRIBUTING.md").read_text()
HOOKS = yaml.safe_load((REPOSITORY / ".pre-commit-config.yaml").read_text())
BIN = Path(sys.executable).parent


def planned(target: str) -> list[str]:
    """Return the commands of the environment's programs that make would run for a target."""
    by_make = {"MAKEFLAGS", "MAKEOVERRIDES", "JOBS"}
    outside = {name: value for name, value in os.environ.items() if name not in by_make}
    done = subprocess.run(
        ["make", "--dry-run", target, "VENV=.venv"],
        cwd=REPOSITORY,
        env=outside,
        capture_output=True,
        text=True,
        check=True,
    )
    lines = done.stdout.splitlines()
    return [line for line in lines if re.search(r"\.venv/bin/(?!pip |\.installed)", line)]


def test_the_version_stands_in_one_place():
    assert PROJECT["version"] == __version__ == version("protperf")
    for name in ("CITATION.cff", "README.md", "CONTRIBUTING.md", "protperf/__init__.py", "Makefile"):
        assert __version__ not in (REPOSITORY / name).read_text(), name


def test_the_changelog_can_be_released():
    headings = re.findall(r"^## (.*)$", CHANGELOG, flags=re.MULTILINE)
    released = [heading.split(" - ") for heading in headings if heading != "Unreleased"]
    assert headings.count("Unreleased") <= 1
    assert "Unreleased" not in headings[1:]
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d", date) for _, date in released)
    assert released == sorted(released, key=lambda each: (Version(each[0]), each[1]), reverse=True)
    if headings[0] == "Unreleased":
        assert not released or Version(released[0][0]) < Version(__version__)
    else:
        assert released[0][0] == __version__
    kinds = re.findall(r"^### (.*)$", CHANGELOG, flags=re.MULTILINE)
    assert {*kinds} <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


@pytest.mark.slow
def test_the_citation_file_is_valid():
    schema = ["--builtin-schema", "vendor.citation-file-format"]
    subprocess.run([BIN / "check-jsonschema", *schema, REPOSITORY / "CITATION.cff"], check=True)


def test_the_citation_says_what_the_project_says():
    citation = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text())
    assert [author["name"] for author in citation["authors"]] == [each["name"] for each in PROJECT["authors"]]
    assert citation["license"] == PROJECT["license"].split(" AND ")[0]
    assert {*citation["keywords"]} <= {*PROJECT["keywords"]}


def test_hooks_run_the_commands_of_ci_with_the_tools_of_the_environment():
    assert {repository["repo"] for repository in HOOKS["repos"]} == {"local"}
    hooks = [hook for repository in HOOKS["repos"] for hook in repository["hooks"]]
    assert {hook["language"] for hook in hooks} == {"system"}
    assert "make test" in (REPOSITORY / ".ci/run").read_text()
    entries = [hook["entry"].removeprefix("env ") for hook in hooks]
    assert entries == planned("test")
    first = [hook["entry"] for hook in hooks if "pre-commit" in hook["stages"]]
    assert first == planned("lint")


@pytest.mark.parametrize("tool", ["ruff", "mypy", "pytest", "pytest-xdist"])
def test_the_tools_of_the_hooks_are_those_of_the_constraints(tool: str):
    lines = (REPOSITORY / "constraints.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if line.partition("==")[0] == tool]
    (pin,) = (each for each in pins if each.marker is None or each.marker.evaluate())
    assert version(tool) in pin.specifier


@pytest.mark.slow
def test_the_hooks_run_without_a_network(tmp_path: Path):
    if not (REPOSITORY / ".venv/bin/.installed").exists():
        pytest.skip("make has not installed .venv here")
    done = subprocess.run(
        [BIN / "pre-commit", "run", "--all-files", "lint"],
        cwd=REPOSITORY,
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "PIP_NO_INDEX": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^lint\.+Passed$", done.stdout, flags=re.MULTILINE)


def test_every_dependency_has_a_licence_that_goes_with_ours():
    done = subprocess.run([BIN / "pip-licenses", "--summary"], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_licence_that_does_not_go_with_ours_is_found():
    given = ["--fail-on", "Apache", "--packages", "argcomplete"]
    done = subprocess.run([BIN / "pip-licenses", *given], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 1


def test_every_import_is_a_declared_dependency():
    extras = [each for extra in PROJECT["optional-dependencies"].values() for each in extra]
    declared = {Requirement(each).name for each in [*PROJECT["dependencies"], *extras]}
    provided = {"protperf", "data_prep", *(root for name in declared for root in roots_of(name))}
    optional = {"performer_pytorch"}  # `bench` measures it where somebody has installed it
    for path in SOURCES:
        found = {module[0] for module in imports(path)} - {*sys.stdlib_module_names} - optional
        assert found <= provided, path


def roots_of(name: str) -> set[str]:
    """Return the top-level modules of a distribution."""
    try:
        files = distribution(name).files or []
    except PackageNotFoundError:
        return set()
    return {file.parts[0].removesuffix(".py") for file in files if file.suffix == ".py"}


def test_the_tour_shows_the_house_as_it_is():
    shown = re.findall(r"^ floor (\d+) +(.*)$", CONTRIBUTING, flags=re.MULTILINE)
    assert [rooms for _, rooms in reversed(shown)] == list(FLOORS)
    assert [int(number) for number, _ in reversed(shown)] == list(range(len(FLOORS)))


def test_what_the_tour_names_is_there():
    makefile = (REPOSITORY / "Makefile").read_text()
    for target in re.findall(r"(?:^|`)make ([a-z][\w-]+)", CONTRIBUTING, flags=re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target
    paths = re.findall(r"`((?:protperf|data_prep|conf|tests|docs|\.ci)/[\w/.-]*)`", CONTRIBUTING)
    assert len(paths) > 20
    for path in paths:
        assert (REPOSITORY / path).exists(), path
