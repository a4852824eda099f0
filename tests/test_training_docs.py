"""docs/training.md tells the truth: its shell blocks run, its tables are the presets and the weights that there are."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conftest import REPOSITORY
from pages import run_lines
from test_config import PARAMETERS, settings_of
from torch import Tensor
from training import status_of

from protperf.config import ModelConfig
from protperf.model import ProteinModel
from protperf.vocab import VOCABULARY

DOCS = (REPOSITORY / "docs" / "training.md").read_text()


def rows_of(header: str) -> Iterator[list[str]]:
    """Yield the cells of the table that begins with a header, without it."""
    lines = DOCS[DOCS.index(header) :].split("\n\n")[0].splitlines()
    for line in lines[2:]:
        yield [cell.strip() for cell in line.strip("|").split("|")]


def test_the_preset_tables_say_what_the_presets_are():
    own = list(rows_of("| `model=` | attention |"))
    paper = list(rows_of("| `experiment=` | `model=` |"))
    assert [row[0].strip("`") for row in own] + [row[1].strip("`") for row in paper] == list(PARAMETERS)
    for row in own:
        check_model(settings_of(f"model={row[0].strip('`')}").model, row[1:])
    for experiment, name, *shape, tokens, windows, parameters in paper:
        settings = settings_of(f"experiment={experiment.strip('`')}")
        assert settings.model == settings_of(f"model={name.strip('`')}").model
        assert (settings.data.context_length, settings.data.batch_size) == (int(tokens), int(windows))
        check_model(settings.model, [*shape, parameters])


def check_model(model: ModelConfig, cells: list[str]) -> None:
    """Compare attention, layers, heads, feed-forward, width and parameters of a row."""
    features = f", {model.num_features} features" if model.attention != "softmax" else ""
    assert cells[0] == model.attention + features
    shape = (model.num_layers, model.num_heads, model.feedforward_dim, model.model_dim)
    assert tuple(map(int, cells[1:5])) == shape
    with torch.device("meta"):
        parameters = ProteinModel(model, causal=False).parameters()
    assert int(cells[5].replace(",", "")) == sum(parameter.numel() for parameter in parameters)


MODELS = [
    ModelConfig(
        num_layers=3, num_heads=2, model_dim=96, feedforward_dim=160, feedforward=kind, qk_norm=normed
    )
    for kind in ("gelu", "swiglu")
    for normed in (False, True)
]


def evaluate(formula: str, config: ModelConfig) -> float:
    """Compute a cell such as `0.02 / sqrt(2 layers)`."""
    names = {
        "V": len(VOCABULARY),
        "D": config.model_dim,
        "F": config.feedforward_dim,
        "H": config.num_heads,
        "layers": config.num_layers,
        "sqrt": math.sqrt,
    }
    return eval(re.sub(r"(\d) ([A-Za-z])", r"\1 * \2", formula), {"__builtins__": {}}, names)


def documented(config: ModelConfig) -> list[tuple[re.Pattern[str], list[str]]]:
    """Return the rows that apply to a model: a pattern of names, and shape, values and standard deviation."""
    chosen = {config.feedforward, "qk_norm" if config.qk_norm else ""}
    rows = []
    for name, *cells in rows_of("| parameter | shape |"):
        condition = re.search(r"with `(\w+)`", name)
        if condition is None or condition[1] in chosen:
            rows.append((re.compile(re.escape(name.split("`")[1]).replace(r"\.N\.", r"\.\d+\.")), cells))
    return rows


@pytest.mark.parametrize("config", MODELS, ids=lambda c: f"{c.feedforward}-{'qk_norm' if c.qk_norm else ''}")
def test_every_parameter_begins_as_its_row_of_the_table_says(config: ModelConfig):
    torch.manual_seed(0)
    model = ProteinModel(config, causal=False)
    used = set()
    for name, parameter in model.named_parameters():
        rows = [(pattern, cells) for pattern, cells in documented(config) if pattern.fullmatch(name)]
        assert len(rows) == 1, name
        pattern, (shape, values, deviation) = rows[0]
        used.add(pattern)
        size = tuple(int(evaluate(side, config)) for side in shape.strip("()").split(","))
        assert tuple(parameter.shape) == size, name
        check_values(name, parameter.detach().double(), values, evaluate(deviation, config))
    assert used == {pattern for pattern, _ in documented(config)}


def check_values(name: str, values: Tensor, kind: str, deviation: float) -> None:
    """Compare with a constant, or mean and standard deviation within 5 standard errors of normal ones (1 in 1.7 million)."""
    if kind != "normal":
        assert deviation == 0
        assert (values == float(kind)).all(), name
        return
    count = values.numel()
    assert count > 3000, name
    assert abs(values.mean().item()) < 5 * deviation / math.sqrt(count), name
    assert abs(values.std().item() / deviation - 1) < 5 / math.sqrt(2 * count), name


def test_the_table_of_weights_has_no_row_that_no_model_has():
    names = {pattern.pattern + str(cells) for config in MODELS for pattern, cells in documented(config)}
    assert len(names) == len(list(rows_of("| parameter | shape |")))


def test_links_of_the_page_lead_somewhere():
    for link in re.findall(r"\]\((?!https?:)([^)#]+)\)", DOCS):
        assert (REPOSITORY / "docs" / link).exists(), link


@pytest.mark.slow(minutes=2)
def test_the_shell_blocks_run_in_order_as_typed(tmp_path: Path):
    blocks = re.findall(r"^```bash\n(.*?)^```$", DOCS, flags=re.MULTILINE | re.DOTALL)
    assert len(blocks) == 5
    for block in blocks:
        run_lines(block, tmp_path, lambda words: status_of(words, tmp_path))
    for name, steps in {"mine": 20, "stable": 40, "cooled": 30, "small": 4}.items():
        assert (tmp_path / "runs" / name / "checkpoints" / f"step={steps:08d}.ckpt").is_file()
