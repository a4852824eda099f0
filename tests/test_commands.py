"""What all commands that take a trained model have in common."""

from __future__ import annotations

from pathlib import Path

import pytest
from training import protperf

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "command", ["embed", "score", "generate", "evaluate", "maps attention", "maps similarity"]
)
def test_half_precision_on_a_cpu_is_one_line_before_any_work(command: str, tmp_path: Path):
    """The checkpoint is none: what is refused first is the precision."""
    for name in ("m.ckpt", "a.fasta"):
        (tmp_path / name).write_text(">a\nMKV\n")
    rest = {
        "embed": ["a.fasta", "o.h5"],
        "score": ["a.fasta", "o.csv"],
        "generate": ["o.fasta"],
        "evaluate": ["."],
    }
    arguments = [*command.split(), "m.ckpt", *rest.get(command, ["a.fasta", "o.png"])]
    done = protperf(*arguments, "--precision", "fp16", "--device", "cpu", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.endswith(
        "--precision fp16: not on a CPU, which takes fp32 and bf16; --device cuda for fp16\n"
    )
