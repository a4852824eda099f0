"""docs/favor.md tells the truth: its errors are those that were measured, its arithmetic is right, README says the same of speed."""

from __future__ import annotations

import json
import math
import re

import pytest
from conftest import REPOSITORY
from pages import read_page

PAGE = " ".join(read_page("docs/favor.md").split())
MEASURED = json.loads((REPOSITORY / "docs" / "paper" / "error.json").read_text())["by_features"]


@pytest.mark.parametrize(
    ("said", "sigma", "features"),
    [
        (
            "At 0.25 N(0, 1), 256 positive orthogonal features err by {} and uniform attention by {}",
            "0.25",
            256,
        ),
        ("With 32 they err by {}", "0.25", 32),
        ("At 0.5 N(0, 1), 256 err by {}, uniform attention by {}", "0.5", 256),
        ("64 err by {}: none", "0.5", 64),
        ("as much as uniform attention ({})", "1", None),
    ],
)
def test_errors_are_those_that_were_measured(said: str, sigma: str, features: int | None):
    errors = [MEASURED[sigma][name] for name in ("favor, orthogonal", "uniform attention")]
    values = [each[str(features or 16)] for each in errors][0 if features else 1 :]
    assert said.format(*(f"{value:.3f}" for value in values)) in PAGE


def test_what_is_said_of_long_queries_holds():
    positive, sines, uniform = (
        MEASURED["1"][name].values()
        for name in ("favor, orthogonal", "trig, orthogonal", "uniform attention")
    )
    assert [round(value, 1) for value in positive] == pytest.approx([1.6] * len(positive), abs=0.15)
    assert [a / b for a, b in zip(positive, uniform, strict=True)] == pytest.approx(
        [2] * len(positive), rel=0.1
    )
    assert min(sines) > 70
    assert (
        max(
            MEASURED["0.5"]["trig, orthogonal"][f] / MEASURED["0.5"]["favor, orthogonal"][f]
            for f in ("32", "256")
        )
        < 1
    )


def test_the_table_is_the_variance_of_a_feature():
    rows = re.findall(
        r"^\| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d,]+) \|$", read_page("docs/favor.md"), re.MULTILINE
    )
    assert len(rows) == 5
    for square, *errors, needed in rows:
        variance = math.exp(float(square)) - 1
        for error, features in zip(errors, (64, 256), strict=True):
            assert float(error) == pytest.approx(
                math.sqrt(variance / features), abs=0.05 if len(error) < 4 else 0.005
            )
        assert int(needed.replace(",", "")) == math.ceil(variance / 0.1**2)


def test_speed_is_what_readme_says():
    readme = " ".join(read_page("README.md").split())
    for said, row in (
        ("`relu` is 16.9 times and `favor` 13.6 times as fast", "| 16.9x faster | 13.6x faster |"),
        ("causal 4.4 and 4.0 times", "| 4.4x faster | 4.0x faster |"),
        ("3.8 times as fast as with exact attention", "| the same against exact attention | 3.8x faster |"),
        (
            "at about 500 tokens (`relu`) to 700 (`favor`), causal at 1,300 to 1,600",
            "about 500 (`relu`) to 700 tokens (`favor`), causal at 1,300 to 1,600",
        ),
    ):
        assert said in PAGE
        assert row in readme
