"""What goes wrong in the middle of a run is said in one line, and loses nothing that was saved."""

from __future__ import annotations

import fcntl
import os
import pty
import resource
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from training import (
    SMALL,
    clean_environment,
    command_line,
    load_plain,
    protperf,
    settings_of,
    small_dataset,
    start_protperf,
    train_small,
)

from protperf.checkpoint import step_checkpoints, step_name
from protperf.formats.metrics_file import read_metrics
from protperf.train import build_run
from protperf.train.failures import explain_failure


def arguments(name: str, *options: str) -> tuple[str, ...]:
    return ("train", f"data.path={small_dataset()}", f"name={name}", *SMALL, *options)


class Exploding(pl.Callback):
    """Makes the gradient of one layer grow from a step on, until it is no number."""

    def __init__(self, layer: int, *, since: int) -> None:
        self._layer, self._since = layer, since

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        excess = trainer.global_step + 1 - self._since
        if excess >= 0:
            for parameter in module.model.blocks[self._layer].parameters():
                parameter.grad *= 1e3**excess if excess < 3 else float("nan")


@pytest.mark.parametrize("layer", [0, 1])
def test_a_run_that_diverges_names_the_step_the_layer_and_the_last_good_checkpoint(
    layer: int, tmp_path: Path
):
    options = (
        "trainer.max_steps=40",
        "trainer.checkpoint_every=8",
        "trainer.log_every=7",
        "trainer.gradient_clip=1",
    )
    run = build_run(settings_of(tmp_path, *options))
    run.trainer.callbacks.insert(0, Exploding(layer, since=17))
    with pytest.raises(ValueError, match="the loss is nan at step 21: ") as error:
        run.trainer.fit(run.task, run.data)
    text = str(error.value)
    assert f"the gradient's norm in layer {layer} was" in text
    assert "at step 19" in text
    assert "no number at step 20" in text
    assert f"the last good checkpoint is {tmp_path / 'checkpoints' / step_name(16)};" in text
    assert "\n" not in text
    _, record = train_small(tmp_path, *options)  # the cause is mended: it goes on from there
    assert len(record.losses) == 40 - 16


@pytest.mark.slow
def test_out_of_memory_names_the_knobs(tmp_path: Path):
    options = ("model.feedforward_dim=131072", "data.batch_size=128", "trainer.max_steps=3")
    limit = 8 * 2**30
    result = subprocess.run(
        command_line(*arguments("large", *options)),
        cwd=tmp_path,
        env=clean_environment(tmp_path),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 1, result.stderr
    last = result.stderr.splitlines()[-1]
    assert last.startswith("protperf train: out of memory; what helps")
    for knob in (
        "a shorter data.context_length",
        "trainer.windows_at_once=64 (it is 128",
        "activation_checkpointing=true",
    ):
        assert knob in last
    assert "Traceback" not in result.stderr


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.slow
def test_a_reading_process_that_dies_ends_the_run_where_it_goes_on_from(tmp_path: Path):
    options = ("data.num_workers=1", "trainer.max_steps=100000", "trainer.checkpoint_every=20")
    process = start_protperf(*arguments("reader", *options), cwd=tmp_path, stderr=subprocess.PIPE)
    folder = tmp_path / "runs" / "reader" / "checkpoints"
    deadline = time.monotonic() + 120
    while not (folder / step_name(20)).exists():
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)
    readers = [
        child
        for child in children_of(process.pid)
        if b"resource_tracker" not in Path(f"/proc/{child}/cmdline").read_bytes()
    ]
    os.kill(readers[0], signal.SIGKILL)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 75, said
    last = said.splitlines()[-1]
    assert last.startswith("protperf train: a process that reads data died")
    reached = step_checkpoints(folder)[-1]
    assert last.endswith(f"the same command goes on from runs/reader/checkpoints/{reached.name}")
    result = protperf(*arguments("reader", *options, "trainer.max_steps=30"), cwd=tmp_path)
    assert result.returncode == 0, result.stderr


def test_a_lost_rank_is_known_by_what_the_others_see(tmp_path: Path):
    code = (
        "import os, sys, torch, torch.distributed as d\n"
        "rank = int(sys.argv[1])\n"
        "d.init_process_group('gloo', init_method=f'file://{sys.argv[2]}', rank=rank, world_size=2)\n"
        "d.all_reduce(torch.ones(1))\n"
        "if rank: os._exit(9)\n"
        "try:\n"
        "    d.all_reduce(torch.ones(1 << 20))\n"
        "except RuntimeError as error:\n"
        "    print(type(error).__name__, error, flush=True)\n"
        "os._exit(0)"
    )
    command = [sys.executable, "-c", code]
    other = subprocess.Popen([*command, "1", str(tmp_path / "store")], stderr=subprocess.DEVNULL)
    said = subprocess.run(
        [*command, "0", str(tmp_path / "store")], capture_output=True, text=True, timeout=120, check=True
    ).stdout
    assert other.wait() == 9
    known = explain_failure(RuntimeError(said), settings_of(tmp_path))
    assert known is not None
    assert known[1] == 75
    assert "another rank ended" in known[0]
    assert "from the start" in known[0]
    assert (
        explain_failure(RuntimeError("mat1 and mat2 shapes cannot be multiplied"), settings_of(tmp_path))
        is None
    )


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system on which one checkpoint has room, and not two."""
    disk = tmp_path / "run" / "checkpoints"
    disk.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    if os.geteuid() or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("needs the right to mount a small tmpfs")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


class Filling(pl.Callback):
    """Fills a disk at one step and frees it at another."""

    def __init__(self, disk: Path, *, full: int, free: int) -> None:
        self._filler, self._full, self._free = disk / "filler", full, free

    def on_train_batch_start(self, trainer: Any, *rest: Any) -> None:
        if trainer.global_step == self._full:
            with self._filler.open("wb", buffering=0) as file:
                while True:
                    try:
                        file.write(bytes(4096))
                    except OSError:
                        break
        if trainer.global_step == self._free:
            self._filler.unlink()


def test_a_full_disk_costs_a_checkpoint_and_not_the_run(small_disk: Path, caplog: pytest.LogCaptureFixture):
    run = build_run(
        settings_of(
            small_disk.parent,
            "trainer.checkpoint_every=4",
            "trainer.max_steps=16",
            "trainer.keep_checkpoints=3",
        )
    )
    run.trainer.callbacks.insert(0, Filling(small_disk, full=5, free=9))
    run.trainer.fit(run.task, run.data)
    assert (
        f"No space left on device: '{small_disk / step_name(8)}'; this checkpoint is left out" in caplog.text
    )
    steps = [path.name for path in step_checkpoints(small_disk)]
    assert steps == [step_name(step) for step in (4, 12, 16)]
    assert not [path for path in small_disk.iterdir() if path.name.startswith(".")]


def test_a_better_model_that_a_full_disk_refused_does_not_raise_the_bar(small_disk: Path):
    """Losses of 5, 3 (refused), 4 and 4.5: the best one on the disk is that of 4."""
    options = ("trainer.validate_every=2", "trainer.checkpoint_every=100", "trainer.max_steps=8")
    run = build_run(settings_of(small_disk.parent, *options))
    given = iter([5.0, 3.0, 4.0, 4.5])

    class Given(pl.Callback):
        def on_validation_end(self, trainer: Any, module: Any) -> None:
            module.results["valid/loss"] = next(given)

    run.trainer.callbacks.insert(0, Given())
    run.trainer.callbacks.insert(0, Filling(small_disk, full=3, free=5))
    run.trainer.fit(run.task, run.data)
    assert load_plain(small_disk / "best.ckpt")["global_step"] == 6


def test_an_old_checkpoint_that_somebody_removed_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run = build_run(settings_of(tmp_path, "trainer.checkpoint_every=1", "trainer.max_steps=6"))

    class Removing(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
            for path in step_checkpoints(tmp_path / "checkpoints")[:-1]:
                path.unlink()

    run.trainer.callbacks.insert(0, Removing())
    run.trainer.fit(run.task, run.data)
    assert step_checkpoints(tmp_path / "checkpoints")[-1].name == step_name(6)


def test_a_full_disk_at_the_end_is_an_error(small_disk: Path):
    run = build_run(settings_of(small_disk.parent, "trainer.checkpoint_every=4", "trainer.max_steps=8"))
    run.trainer.callbacks.insert(0, Filling(small_disk, full=5, free=99))
    with pytest.raises(OSError, match="No space left on device"):
        run.trainer.fit(run.task, run.data)
    assert [path.name for path in step_checkpoints(small_disk)] == [step_name(4)]


@pytest.mark.slow
def test_a_terminal_has_a_bar_and_a_log_has_lines(tmp_path: Path):
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 200, 0, 0))
    options = ("trainer.max_steps=30", "trainer.log_every=10")
    process = start_protperf(
        *arguments("seen", *options), cwd=tmp_path, stdout=subprocess.PIPE, stderr=theirs
    )
    os.close(theirs)
    shown = b""
    try:
        while part := os.read(ours, 65536):
            shown += part
    except OSError:
        pass  # the other end is closed
    os.close(ours)
    assert process.communicate()[0] == "runs/seen\n"
    assert process.returncode == 0
    text = shown.decode()
    assert "training: 100%" in text
    assert "30/30" in text
    lines = [line.rpartition("\r")[2] for line in text.replace("\r\n", "\n").splitlines()]
    assert sum("tokens/s" in line and " left" in line for line in lines) == 3
    result = protperf(*arguments("unseen", *options), cwd=tmp_path)
    said = [line.split(" ", 2)[2] for line in result.stderr.splitlines()]
    assert "training:" not in result.stderr
    assert [line.split("  ")[0] for line in said if "left" in line] == [
        "step 10/30",
        "step 20/30",
        "step 30/30",
    ]
    assert all(len(line) < 140 for line in result.stderr.splitlines())


def test_the_lines_of_a_run_say_what_its_metrics_say(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO")
    train_small(tmp_path, "trainer.max_steps=10")
    metrics = read_metrics(tmp_path / "metrics.csv")
    loss, valid = metrics["train/loss"][10], metrics["valid/loss"][10]
    assert f"step 10/10  loss {loss:.4f}  " in caplog.text
    assert f"step 10  valid  loss {valid:.4f}  " in caplog.text
    assert metrics["train/tokens"] == {10: 10 * 4 * 64}
    norm = torch.nn.utils.get_total_norm(
        [
            value.double()
            for name, value in torch.load(tmp_path / "checkpoints" / step_name(10), weights_only=True)[
                "state_dict"
            ].items()
            if not name.endswith(("projection", "redraws"))
        ]
    )
    assert metrics["train/weight_norm"][10] == pytest.approx(float(norm), rel=1e-5)
