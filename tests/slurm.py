"""A real SLURM on this machine, in a folder of its own, for the tests; needs slurmctld, slurmd, munged and root."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from programs import absent, path_of, skip

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "squeue", "scancel", "scontrol")

CONFIG = """
ClusterName=tests
SlurmctldHost={host}
SlurmctldPort={controller_port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
MpiDefault=none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SlurmdParameters=config_overrides
ReturnToService=2
{scheduling}
KillWait={kill_wait}
{nodes}
PartitionName=tests Nodes=ALL Default=YES MaxTime=60 State=UP
"""

SOON = "SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0"
"""Jobs start as they come, not every few seconds."""

NODE = (
    "NodeName={name} NodeHostname={host} NodeAddr={address} Port={port} CPUs=4 RealMemory=4096 State=UNKNOWN"
)


class NotReadyError(Exception):
    """SLURM's daemons are installed but do not get ready on this machine."""


def missing() -> str:
    """Return why there can be no SLURM here; empty if there can."""
    if os.geteuid():
        return "needs root"
    names = absent(*PROGRAMS)
    return f"no {' '.join(names)}: apt-get install slurm-wlm munge" if names else ""


@contextlib.contextmanager
def start_or_skip(folder: Path, **more: int) -> Iterator[dict[str, str]]:
    """`start`; where there can be no SLURM the test that asks for it is skipped with the reason."""
    if missing():
        skip(f"no SLURM can be started here: {missing()}")
    with contextlib.ExitStack() as stack:
        try:
            environment = stack.enter_context(start(folder, **more))
        except NotReadyError as error:
            skip(str(error))
        yield environment


@contextlib.contextmanager
def start(folder: Path, *, nodes: int = 1, kill_wait: int = 2) -> Iterator[dict[str, str]]:
    """Start a SLURM; yield the environment variables that lead to it; end it and all it started.

    Args:
        folder: where all its files go.
        nodes: one is called as this machine; several are n1, n2, ..., names that nobody resolves.
        kill_wait: seconds between SIGTERM and SIGKILL.
    """
    host = socket.gethostname().split(".")[0]
    names = [host] if nodes == 1 else [f"n{number}" for number in range(1, nodes + 1)]
    config = write_config(folder, host, names, kill_wait)
    environment = {"SLURM_CONF": str(config)}
    files = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
    with contextlib.ExitStack() as stack:

        def run(name: str, *command: str) -> None:
            stack.enter_context(daemon(command, folder / f"{name}.out", environment))

        run("munged", path_of("munged"), "--foreground", "--force", f"--socket={folder}/munge.socket", *files)
        wait_for(lambda: (folder / "munge.socket").exists(), folder)
        run("slurmctld", path_of("slurmctld"), "-D", "-i", "-f", str(config))
        for name in names:
            run(f"slurmd-{name}", path_of("slurmd"), "-D", "-N", name, "-f", str(config))
        states = ["sinfo", "--noheader", "--Node", "--format=%T"]
        wait_for(lambda: ask(states, environment).split() == [b"idle"] * nodes, folder)
        yield environment
        ask(["scancel", "--partition=tests"], environment)
        wait_for(lambda: not ask(["squeue", "--noheader"], environment).strip(), folder)


def write_config(folder: Path, host: str, names: list[str], kill_wait: int) -> Path:
    """Write the files that SLURM and munge read at their start; return the one that leads to the others."""
    (folder / "state").mkdir()
    for name in names:
        (folder / f"spool-{name}").mkdir()
    controller_port, *ports = free_ports(1 + len(names))
    address = host if names == [host] else "127.0.0.1"
    nodes = [
        NODE.format(name=name, host=host, address=address, port=port)
        for name, port in zip(names, ports, strict=True)
    ]
    config = folder / "slurm.conf"
    config.write_text(
        CONFIG.format(
            host=host,
            folder=folder,
            controller_port=controller_port,
            kill_wait=kill_wait,
            scheduling=SOON if len(names) > 1 else "",
            nodes="\n".join(nodes),
        )
    )
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o400)
    return config


@contextlib.contextmanager
def daemon(command: Sequence[str], out: Path, environment: dict[str, str]) -> Iterator[None]:
    """Run a daemon with its output in a file."""
    with open(out, "wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **environment}
        )
        try:
            yield
        finally:
            process.terminate()
            process.wait(timeout=30)


def ask(command: list[str], environment: dict[str, str]) -> bytes:
    """Return what a SLURM command prints; nothing if it fails."""
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, check=False).stdout


def wait_for(condition, folder: Path, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        logs = {path.name: path.read_text()[-2000:] for path in folder.glob("*.out")}
        if time.monotonic() > end:
            raise NotReadyError(f"SLURM does not get ready here: {logs}")
        time.sleep(0.2)


def free_ports(number: int) -> list[int]:
    """Return ports that are free now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for each in sockets:
            each.bind(("", 0))
        return [each.getsockname()[1] for each in sockets]
