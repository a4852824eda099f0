"""The image is built and run for real, by the blocks of docs/docker.md: as an ordinary user, over a root that is read-only."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import engine
import pytest
from conftest import REPOSITORY
from programs import absent, skip
from training import load_plain

from protperf.checkpoint import step_checkpoints, step_of
from protperf.formats.metrics_file import read_metrics

pytestmark = pytest.mark.slow(minutes=2)

PAGE = (REPOSITORY / "docs" / "docker.md").read_text()
BLOCKS = re.findall(r"^```bash\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)
USER = 1000
"""Of the image; whose folders `data` and `runs` are."""


class Workplace:
    """A clone of the repository in which somebody types."""

    def __init__(self, folder: Path) -> None:
        self.clone = folder / "clone"
        self.programs = folder / "programs"
        self.engine = engine.Engine(folder / "engine")
        engine.install(self.engine.folder, self.programs)
        copy_tracked(self.clone)

    def environment(self) -> dict[str, str]:
        """Return the variables of the shell; the smallest of the extras will do, and what Python compiles is kept."""
        path = f"{self.programs}{os.pathsep}{os.environ['PATH']}"
        inside = "OMP_NUM_THREADS=1 PYTHONPYCACHEPREFIX=/workspace/runs/.compiled"
        own = {"PATH": path, "ENGINE_BUILD_ARGS": "EXTRAS=fast", "ENGINE_ENV": inside}
        return {**os.environ, **own}

    def shell(self, script: str) -> str:
        """Type a script; return what it says."""
        log = self.clone.parent / "said"
        with self.start(f"set -euo pipefail\n{script}", log) as process:
            status = process.wait(1800)
        said = log.read_text()
        assert status == 0, f"{script}\n{said[-5000:]}"
        return said

    @contextmanager
    def start(self, script: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
        """Type a script and go on; whatever it has started ends with it."""
        with open(log, "wb") as out:
            process = subprocess.Popen(
                ["bash", "-c", script],
                cwd=self.clone,
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
            try:
                yield process
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def copy_tracked(target: Path) -> None:
    """Copy what git tracks, or would."""
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    for name in filter(None, names.split("\0")):
        if (REPOSITORY / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPOSITORY / name, target / name)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workplace]:
    """A clone after the page's first blocks: the image is built, the folders are there."""
    if os.geteuid():
        skip("no image can be built here: needs root")
    if names := absent(*engine.PROGRAMS):
        skip(f"no image can be built here: no {' '.join(names)}: apt-get install buildah mmdebstrap")
    folder = tmp_path_factory.mktemp("image")
    place = Workplace(folder)
    try:
        build, folders, *_ = BLOCKS
        assert build.startswith("docker build ")
        assert folders == "mkdir -p data runs\n"
        place.shell(build + folders)
        for name in ("data", "runs"):
            os.chown(place.clone / name, USER, USER)  # whoever types has the image's number
        yield place
    finally:
        place.engine.close()
        subprocess.run(["rm", "-rf", folder], check=True)  # of 200,000 files


def test_the_blocks_of_the_page_train_the_demo_and_a_stop_leaves_a_checkpoint_to_go_on_from(
    workplace: Workplace, tmp_path: Path
):
    _, _, demo, function, train = BLOCKS
    assert demo.startswith("docker compose ")
    assert "experiment=demo" in train
    assert " name=mine " in train
    workplace.shell(demo)
    assert step_checkpoints(workplace.clone / "runs" / "demo" / "checkpoints")

    run_dir = workplace.clone / "runs" / "mine"
    with workplace.start(f"{function}{train.strip()} trainer.max_steps=100000", tmp_path / "log") as process:
        wait_for_step(run_dir, 1, process, tmp_path / "log")
        os.kill(first_process(process.pid), signal.SIGTERM)
        assert process.wait(60) == 75, (tmp_path / "log").read_text()
    (checkpoint,) = step_checkpoints(run_dir / "checkpoints")
    assert step_of(checkpoint) == load_plain(checkpoint)["global_step"]
    said = workplace.shell(function + train)
    assert f"going on from runs/mine/checkpoints/{checkpoint.name}" in said
    files = list(workplace.clone.glob("runs/**/*"))
    assert {(path.stat().st_uid, path.stat().st_gid) for path in files} == {(USER, USER)}


def test_the_image_compiles_and_has_a_root_that_its_user_cannot_write(workplace: Workplace):
    _, _, _, function, _ = BLOCKS
    bash = function.replace(" protperf ", " --entrypoint bash protperf ")
    assert bash != function
    compiled = "import torch; print(torch.compile(lambda x: (x.sin() + 1).sum())(torch.zeros(9)).item())"
    look = f"id -u; gcc --version; python -c {compiled!r}; ls -d /tmp/torchinductor*; cat /proc/1/comm; touch /opt/protperf/x /workspace/x 2>&1 || true; touch /tmp/x /workspace/runs/x"
    said = workplace.shell(f"{bash}protperf -c {shlex.quote(look)}").splitlines()
    assert said[0] == str(USER)
    assert said[1].startswith("gcc ")
    assert said[-5:] == [
        "9.0",
        "/tmp/torchinductor_protperf",  # the user's own
        "bash",
        "touch: cannot touch '/opt/protperf/x': Read-only file system",
        "touch: cannot touch '/workspace/x': Read-only file system",
    ]


def wait_for_step(run_dir: Path, step: int, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until a run has reported a step."""
    deadline = time.monotonic() + 300
    path = run_dir / "metrics.csv"
    while not path.exists() or max(read_metrics(path).get("train/loss", {0: 0.0})) < step:
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.2)


def first_process(pid: int) -> int:
    """Return the process below this one that is the first of its namespace: to which an engine sends its signals."""
    while True:
        fields = dict(
            line.split(":\t")
            for line in Path(f"/proc/{pid}/status").read_text().splitlines()
            if ":\t" in line
        )
        numbers = fields["NSpid"].split()
        if len(numbers) > 1:
            assert numbers[1:] == ["1"]
            assert fields["Name"] == "tini"
            return pid
        (pid,) = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
