"""What all commands that take a trained model have in common."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

COMMANDS = {
    "embed": ["m.ckpt", "a.fasta", "o.h5"],
    "score": ["m.ckpt", "a.fasta", "o.csv"],
    "generate": ["m.ckpt", "o.fasta"],
    "evaluate": ["m.ckpt", "."],
    "maps attention": ["m.ckpt", "a.fasta", "o.png"],
    "maps similarity": ["m.ckpt", "a.fasta", "o.png"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_half_precision_on_a_cpu_is_one_line_before_any_work(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The checkpoint is none: what is refused first is the precision."""
    monkeypatch.chdir(tmp_path)
    for name in ("m.ckpt", "a.fasta"):
        Path(name).write_text(">a\nMKV\n")
    room, *rest = command.split()
    module = f"protperf.{room}" + ("" if room in ("generate", "evaluate") else ".__main__")
    arguments = [*rest, *COMMANDS[command], "--precision", "fp16", "--device", "cpu"]
    with pytest.raises(ValueError, match=r"^--precision fp16: not on a CPU, which takes fp32 and bf16"):
        import_module(module).main(arguments)
