"""The configuration of a run, read back: nothing in it is resolved, run or unfolded."""

from __future__ import annotations

from pathlib import Path

import pytest

from protperf.formats import FormatError
from protperf.formats.run_config import read_run_config


def test_a_run_s_configuration_reads_no_environment_and_unfolds_to_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("SECRET", "hunter2")
    path = tmp_path / "config.yaml"
    path.write_text("model:\n  a: ${oc.env:SECRET}\n  b: [1, 2]\nother: 3\n")
    assert read_run_config(path, remedy="give another") == {"model": {"a": "${oc.env:SECRET}", "b": [1, 2]}}
    unfolding = "a0: &a0 [x]\n" + "".join(
        f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)
    )
    for text in (
        unfolding,
        "a: !!python/object/apply:os.system [ls]\n",
        "a: [" * 5000,
        "x" * 300_000,
        "\xff",
    ):
        path.write_bytes(text.encode("latin-1"))
        with pytest.raises(
            FormatError,
            match=r"config\.yaml: (not a run's|more than 256 KiB, too large for a run's) configuration.*; give another$",
        ):
            read_run_config(path, remedy="give another")
