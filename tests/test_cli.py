"""The front door: fast, one line for a user's mistake, a traceback on request; mistakes of `train` among them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pages import programs_anew
from training import SMALL, clean_environment, protperf, small_dataset

from protperf import __version__
from protperf.cli import COMMANDS, main

HEAVY = ("torch", "numpy", "hydra", "omegaconf", "h5py", "pytorch_lightning", "wandb", "matplotlib")


def run_main(*arguments: str, monkeypatch: pytest.MonkeyPatch) -> int | str | None:
    """Run the command in this process, as the console script would, and return its exit status."""
    monkeypatch.setattr(sys, "argv", ["protperf", *arguments])
    try:
        with programs_anew():
            return main()
    except SystemExit as stop:
        if isinstance(stop.code, str):  # what the interpreter does with it
            print(stop.code, file=sys.stderr)
            return 1
        return stop.code


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["nonsense"]])
def test_the_front_door_imports_nothing_heavy(arguments: list[str]):
    code = (
        "import sys; sys.argv = ['protperf', *sys.argv[1:]]\n"
        "from protperf.cli import main\n"
        "main()\n"
        f"found = [name for name in {HEAVY!r} if name in sys.modules]\n"
        "print('heavy:', found)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True
    )
    assert result.stdout.splitlines()[-1] == "heavy: []"


def test_help_lists_every_command_on_one_line_each(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    for word in ("--help", "-h", "help"):
        assert run_main(word, monkeypatch=monkeypatch) == 0
        lines = capsys.readouterr().out.splitlines()
        for name, (_, text) in COMMANDS.items():
            assert sum(line.split()[:1] == [name] and line.endswith(text) for line in lines) == 1


def test_without_a_command_the_help_is_shown_as_wrong_usage(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    assert run_main(monkeypatch=monkeypatch) == 2
    assert "usage: protperf COMMAND" in capsys.readouterr().out


def test_an_unknown_command_is_wrong_usage(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    assert run_main("trian", monkeypatch=monkeypatch) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error == f"protperf: no command 'trian'; there are: {', '.join(COMMANDS)}\n"


def test_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    assert run_main("--version", monkeypatch=monkeypatch) == 0
    assert capsys.readouterr().out == f"{__version__}\n"


@pytest.mark.parametrize("arguments", [["--help"], ["no-such-command"]])
def test_the_module_is_the_command(arguments: list[str], tmp_path: Path):
    result = protperf(*arguments, cwd=tmp_path)
    script = subprocess.run(
        [Path(sys.executable).with_name("protperf"), *arguments],
        cwd=tmp_path,
        env=clean_environment(tmp_path),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (result.returncode, result.stdout, result.stderr) == (
        script.returncode,
        script.stdout,
        script.stderr,
    )


def foreign_vocabulary(tmp_path: Path) -> str:
    """Copy the small dataset's manifest under another vocabulary's fingerprint."""
    manifest = json.loads((small_dataset() / "manifest.json").read_text())
    (tmp_path / "foreign").mkdir()
    text = json.dumps({**manifest, "fingerprint": "0" * 64})
    (tmp_path / "foreign" / "manifest.json").write_text(text)
    return "data.path=foreign"


MISTAKES = [
    (["data.path=DATA", "trainer.max_step=5"], "no key 'trainer.max_step'.*did you mean 'trainer.max_steps'"),
    (["data.path=DATA", "xyzzy=1"], "no key 'xyzzy' in the configuration"),
    (["data.path=DATA", "+xyzzy=1"], "xyzzy"),
    (["data.path=DATA", "+model.xyzzy=1"], "xyzzy.*allowed keys: attention"),
    (["data.path=DATA", "model=performer_37l"], "performer_36l"),
    (["data.path=DATA", "experiment=nothing"], "trembl_masked_36l"),
    (["data.path=DATA", "modle=tiny"], "modle"),
    (["data.path=DATA", "model.num_layers=two"], "num_layers"),
    (["data.path=DATA", "model.attention=favour"], "attention is 'favour'; allowed: favor,"),
    (["data.path=DATA", "resume=perhaps"], "resume"),
    (["data.path=DATA", "name=a=b"], "name=a=b"),
    (["data.path=DATA", "name="], "name"),
    ([], "data.path is not set; give data.path=VALUE"),
    (["data.path=nowhere"], "nowhere: no such dataset folder; `protperf prepare"),
    (["data.path=."], r"no manifest.json.*prepare"),
    (["FOREIGN"], "another vocabulary.* again"),
    (["data.path=DATA", "data.valid_sets=[ood]"], "split 'ood' holds no protein"),
    (["data.path=DATA", "trainer.accelerator=gpu"], "trainer.accelerator"),
    (["data.path=DATA", "trainer.seed=4294967296"], "seed"),
    (["data.path=DATA", "optim.learning_rate=1e30", "optim.warmup_steps=0"], "lower optim.learning_rate"),
]


@pytest.mark.parametrize(
    ("arguments", "message"), MISTAKES, ids=[" ".join(a) or "nothing" for a, _ in MISTAKES]
)
def test_a_mistake_ends_training_with_one_line(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture,
):
    monkeypatch.chdir(tmp_path)
    if arguments == ["FOREIGN"]:
        arguments = [foreign_vocabulary(tmp_path)]
    given = [argument.replace("DATA", f"'{small_dataset()}'") for argument in arguments]
    small = (
        []
        if any(each.startswith(("model=", "modle")) for each in given)
        else [*SMALL, "trainer.max_steps=20"]
    )
    capfd.readouterr()
    status = run_main("train", *small, *given, monkeypatch=monkeypatch)
    out, error = capfd.readouterr()
    assert status == 1, error
    assert out == ""
    lines = [line for line in error.splitlines() if not line.startswith("20")]  # log lines begin with a date
    assert len(lines) == 1, error
    assert lines[0].startswith("protperf train: ")

    assert re.search(message, lines[0]), lines[0]
    assert not os.path.exists("runs/run/checkpoints") or not os.listdir("runs/run/checkpoints")


def test_a_sweep_over_several_processes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
):
    monkeypatch.chdir(tmp_path)
    arguments = ("--multirun", *SMALL, f"data.path={small_dataset()}", "trainer.devices=2")
    assert run_main("train", *arguments, monkeypatch=monkeypatch) == 1
    assert capfd.readouterr().err.startswith(
        "protperf train: --multirun trains each run with one process: trainer.devices=1"
    )


def test_debug_shows_the_traceback_instead(tmp_path: Path):
    result = protperf("--debug", "train", "data.path=nowhere", cwd=tmp_path)
    assert result.returncode == 1
    assert "Traceback" in result.stderr
    assert "no such dataset folder" in result.stderr.splitlines()[-1]


def test_a_mistake_in_a_process_of_its_own_is_one_line_too(tmp_path: Path):
    result = protperf("train", "data.path=nowhere", cwd=tmp_path)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith("protperf train: nowhere: no such dataset folder")
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        ("RuntimeError('two\\nlines')", "internal error: RuntimeError: two lines; --debug shows where"),
        ("MemoryError", "out of memory; --help tells which sizes can be lowered"),
        ("KeyboardInterrupt", "interrupted"),
    ],
)
def test_a_failure_of_any_kind_is_one_line(
    raised: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    (tmp_path / "failing.py").write_text(f"raise {raised}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(COMMANDS, "fail", ("failing", "fails"))
    assert run_main("fail", monkeypatch=monkeypatch) in (1, 130)
    assert capsys.readouterr().err == f"protperf fail: {said}\n"


@pytest.mark.parametrize(
    "code",
    [
        "import sys\nprint('one', flush=True)\nsys.stdin.read()\nprint('two' * 9)",  # only the last flush meets it
        "import sys\nprint('one', flush=True)\nsys.stdin.read()\nfor _ in range(9999): print('two' * 99)",
        "import sys\nprint('one', flush=True)\nsys.stdin.read()\nprint('two', flush=True)\nsys.exit(0)",
        "import sys\nprint('one', flush=True)\nsys.stdin.read()\nprint('two')\nsys.exit(3)",
    ],
)
def test_a_reader_that_stops_early_ends_a_command_quietly(tmp_path: Path, code: str):
    (tmp_path / "talking.py").write_text(code)
    start = (
        "from protperf import cli; cli.COMMANDS['talk'] = ('talking', 'talks'); raise SystemExit(cli.main())"
    )
    with subprocess.Popen(
        [sys.executable, "-c", start, "talk"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])},
    ) as talking:
        assert talking.stdout.readline() == b"one\n"
        talking.stdout.close()  # as `head -1` does
        talking.stdin.close()
        assert talking.stderr.read() == b""
    assert talking.returncode == 141


def test_another_broken_pipe_than_stdout_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    (tmp_path / "failing.py").write_text("raise BrokenPipeError(32, 'Broken pipe')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(COMMANDS, "fail", ("failing", "fails"))
    assert run_main("fail", monkeypatch=monkeypatch) == 1
    assert "Broken pipe" in capfd.readouterr().err


def test_a_full_disk_behind_stdout_is_one_line(tmp_path: Path):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "protperf", "--help"], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert (done.returncode, done.stderr) == (1, "protperf: <stdout>: No space left on device\n")
