"""A real SLURM of one node, in a folder of its own, for the tests; needs slurmctld, slurmd, munged and root."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "squeue", "scancel")

CONFIG = """
ClusterName=tests
SlurmctldHost={host}
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
MpiDefault=none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=2
NodeName={host} CPUs=4 RealMemory=4096 State=UNKNOWN
PartitionName=tests Nodes={host} Default=YES MaxTime=60 State=UP
"""


class NotReadyError(Exception):
    """SLURM's daemons are installed but do not get ready on this machine."""


def missing() -> str:
    """Return why there can be no SLURM here; empty if there can."""
    if os.geteuid():
        return "needs root"
    path = os.pathsep.join((os.environ["PATH"], "/usr/sbin"))
    absent = [name for name in PROGRAMS if not shutil.which(name, path=path)]
    return f"no {' '.join(absent)}: apt-get install slurm-wlm munge" if absent else ""


@contextlib.contextmanager
def one_node(folder: Path) -> Iterator[dict[str, str]]:
    """Start a SLURM; yield the environment variables that lead to it; end it and all it started."""
    for name in ("state", "spool"):
        (folder / name).mkdir()
    config = folder / "slurm.conf"
    ports = free_ports(2)
    config.write_text(
        CONFIG.format(
            host=socket.gethostname().split(".")[0],
            folder=folder,
            controller_port=ports[0],
            node_port=ports[1],
        )
    )
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o400)
    environment = {"SLURM_CONF": str(config)}
    files = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
    commands = [
        ["/usr/sbin/munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *files],
        ["/usr/sbin/slurmctld", "-D", "-i", "-f", str(config)],
        ["/usr/sbin/slurmd", "-D", "-f", str(config)],
    ]
    with contextlib.ExitStack() as stack:
        for command in commands:
            stack.enter_context(daemon(command, folder, environment))
            if "munged" in command[0]:
                wait_for(lambda: (folder / "munge.socket").exists(), folder)
        wait_for(lambda: b"idle" in ask(["sinfo", "--noheader"], environment), folder)
        yield environment
        ask(["scancel", "--partition=tests"], environment)
        wait_for(lambda: not ask(["squeue", "--noheader"], environment).strip(), folder)


@contextlib.contextmanager
def daemon(command: list[str], folder: Path, environment: dict[str, str]) -> Iterator[None]:
    """Run a daemon with its output in a file."""
    with open(folder / f"{Path(command[0]).name}.out", "wb") as log:
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
