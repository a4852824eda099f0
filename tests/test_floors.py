"""The floor plan: a module imports from its own room or from a lower floor, never upwards, never sideways."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
FLOORS = (
    "conf vocab config",
    "formats",
    "attention positions batches metrics devices tensor_folder",
    "layers",
    "model objectives optim weights work",
    "inference",
    "data task callbacks checkpoint loggers figures",
    "language_model arguments",
    "train evaluate embed score generate convert bench maps plot hf completion",
    "cli",
    "__main__",
)
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms.split()} | {"__init__": -1}
FRONT_PAGE = ("__init__", "language_model")
"""`import protperf` shows the API, which it imports when it is asked for."""
SOURCES = sorted(path for top in ("protperf", "data_prep") for path in (REPOSITORY / top).rglob("*.py"))
NAMES = [str(path.relative_to(REPOSITORY)) for path in SOURCES]


def imports(path: Path) -> Iterator[tuple[str, ...]]:
    """Yield every import of a file, nested ones too, as dotted parts; `from a import b` is `a.b`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (tuple(alias.name.split(".")) for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            yield from (tuple(f"{node.module}.{alias.name}".split(".")) for alias in node.names)


def room_of(module: tuple[str, ...]) -> str:
    return module[1] if module[1] in FLOOR_OF else "__init__" if module[1] == "__version__" else "?"


@pytest.mark.parametrize("path", SOURCES, ids=NAMES)
def test_imports_go_to_the_own_room_or_to_a_lower_floor(path: Path):
    top, *rest = path.relative_to(REPOSITORY).with_suffix("").parts
    floor = FLOOR_OF[rest[0]] if top == "protperf" else 2
    for module in imports(path):
        if module[0] == "protperf":
            room = room_of(module)
            assert room in FLOOR_OF, f"{path.name}: {'.'.join(module)} has no room in the floor plan"
            below = FLOOR_OF[room] < floor or (top, room) == ("protperf", rest[0])
            assert below or (rest[0], room) == FRONT_PAGE, ".".join(module)
        assert module[0] != "data_prep" or top == "data_prep", "protperf never imports data_prep"


@pytest.mark.parametrize("path", SOURCES, ids=NAMES)
def test_heavy_packages_stay_on_their_floors(path: Path):
    top, *rest = path.relative_to(REPOSITORY).with_suffix("").parts
    floor = FLOOR_OF[rest[0]] if top == "protperf" else 1
    found = {module[0] for module in imports(path)}
    assert "lightning" not in found
    assert "torch" not in found or floor >= 2
    assert "pytorch_lightning" not in found or floor == FLOOR_OF["callbacks"] or rest[0] == "train"
    assert "hydra" not in found or rest[0] == "train"


@pytest.mark.parametrize("path", SOURCES, ids=NAMES)
def test_files_and_functions_are_short(path: Path):
    assert len(path.read_text().splitlines()) <= 400
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert (node.end_lineno or 0) - node.lineno < 80, f"{node.name} is too long"
