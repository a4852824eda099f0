"""The part of docker's command line that docs/docker.md types, without an engine and without a registry.

buildah builds and keeps images; the base that `FROM` names is made by mmdebstrap. A container is a process in namespaces of
its own over the image's root, with the user, the entry point and the variables that the image says. As a program:

    engine.py build -f FILE -t TAG FOLDER
    engine.py run [--read-only] [--tmpfs PATH[:OPTIONS]] [-v FROM:TO] [--user U:G] [--shm-size N] IMAGE [ARGUMENT...]
    engine.py compose -f FILE run SERVICE [ARGUMENT...]

Needs root, buildah and mmdebstrap. All containers of an image share one root: what is written into it stays.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

PROGRAMS = ("buildah", "mmdebstrap", "unshare", "mount", "chroot")
BASE = re.compile(r"^FROM (python:(3\.\d+)-slim-(\w+))( AS \w+)?$", re.MULTILINE)
"""The base of a Dockerfile: its name, its Python, its Debian."""

DEVICES = ("null", "zero", "full", "random", "urandom", "tty")


class Engine:
    """Images and containers in a folder.

    Args:
        folder: where all is kept; `ENGINE_FOLDER` says it to the program. `ENGINE_BUILD_ARGS` are further build arguments,
            `ENGINE_ENV` further variables of every container.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        store = ["--root", str(folder / "store"), "--runroot", str(folder / "run")]
        self._buildah = ["buildah", *store, "--storage-driver", os.environ.get("ENGINE_STORAGE", "overlay")]

    def buildah(self, *arguments: str) -> str:
        """Run buildah; return what it prints."""
        done = subprocess.run([*self._buildah, *arguments], stdout=subprocess.PIPE, text=True, check=True)
        return done.stdout.strip()

    def make_base(self, dockerfile: str) -> None:
        """Make the base image that a Dockerfile begins with: the same Debian with its own Python of the same version."""
        ((name, version, suite),) = {match[:3] for match in BASE.findall(dockerfile)}
        container = self.buildah("from", "scratch")
        root = Path(self.buildah("mount", container))
        packages = "python3-venv,python3-dev,ca-certificates"
        made = ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={packages}", suite, str(root)]
        subprocess.run(made, stdout=sys.stderr, check=True)
        (root / "usr/local/bin/python").symlink_to("/usr/bin/python3")
        said = subprocess.run(["chroot", root, "python3", "--version"], capture_output=True, text=True)
        assert said.stdout.startswith(f"Python {version}."), said
        self.buildah(
            "config", "--env", "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", container
        )
        self.buildah("commit", "--quiet", "--rm", container, name)

    def build(self, options: argparse.Namespace) -> int:
        """Build an image; pip in it finds what pip finds here."""
        self.make_base(Path(options.file).read_text())
        given = [*options.build_arg, *os.environ.get("ENGINE_BUILD_ARGS", "").split()]
        arguments = [f"--build-arg={each}" for each in given]
        self.buildah(
            *("bud", "--isolation", "chroot", "--pull-never", "--format", "oci", *arguments),
            *self._pip_volumes(),
            *("-f", options.file, "-t", options.tag, options.context),
        )
        return 0

    def _pip_volumes(self) -> list[str]:
        """Return volumes that tell pip in an image where pip looks here, and to leave out bytecode, which takes long."""
        command = [sys.executable, "-m", "pip", "config", "list"]
        listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        values = dict(re.findall(r"^(?:global|:env:)\.(\S+?)='(.*)'$", listed, re.MULTILINE))
        config = self.folder / "pip.conf"
        lines = [f"{key} = {value}" for key, value in values.items()]
        config.write_text("\n".join(["[global]", *lines, "[install]", "no-compile = true", ""]))
        paths = {word.removeprefix("file://") for value in values.values() for word in value.split()}
        roots = {
            str(Path(path).parent) if path.endswith("/simple") else path
            for path in paths
            if Path(path).exists()
        }
        volumes = [f"{path}:{path}:ro" for path in sorted(roots)]
        return [f"--volume={volume}" for volume in (*volumes, f"{config}:/etc/pip.conf:ro")]

    def run(self, options: argparse.Namespace) -> int:
        """Become a container."""
        place = self.folder / f"container-{options.image.replace('/', '-')}"
        if not place.exists():
            place.write_text(self.buildah("from", "--pull-never", options.image))
        root = self.buildah("mount", place.read_text())
        config = json.loads(self.buildah("inspect", place.read_text()))["OCIv1"]["config"]
        script = "\n".join([*mounts(root, options), command_line(root, config, options)])
        new = ["--mount", "--pid", "--ipc", "--uts", "--fork", "--kill-child"]
        os.execvp("unshare", ["unshare", *new, "sh", "-euc", script])

    def close(self) -> None:
        """Unmount all, so that the folder can be removed."""
        mounted = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
        for path in sorted((path for path in mounted if path.startswith(f"{self.folder}/")), reverse=True):
            subprocess.run(["umount", path], check=True)


def mounts(root: str, options: argparse.Namespace) -> list[str]:
    """Return the shell lines that make a container's mounts, as docker makes them."""
    lines = [f"cd {shlex.quote(root)}", "mount --bind . .", f"cd {shlex.quote(root)}"]
    lines += [
        "mount -t proc proc proc",
        "mount --bind -o ro /sys sys",
        "mount -t tmpfs -o mode=755 tmpfs dev",
    ]
    lines += [f"touch dev/{name}; mount --bind /dev/{name} dev/{name}" for name in DEVICES]
    lines += ["ln -s /proc/self/fd dev/fd", "mkdir dev/shm"]
    lines += [f"mount -t tmpfs -o nosuid,nodev,noexec,mode=1777,size={options.shm_size} shm dev/shm"]
    for each in options.tmpfs:
        path, _, more = each.partition(":")
        lines += [
            f"mkdir -p .{path}",
            f"mount -t tmpfs -o {','.join(filter(None, ('nosuid,nodev,noexec', more)))} tmpfs .{path}",
        ]
    for volume in options.volume:
        source, target = map(shlex.quote, volume.split(":")[:2])
        lines += [f"mkdir -p .{target}", f"mount --bind {source} .{target}"]
    return [*lines, *(["mount -o remount,bind,ro ."] if options.read_only else [])]


def command_line(root: str, config: dict[str, Any], options: argparse.Namespace) -> str:
    """Return the shell line that becomes process 1: as the user, without rights, with the image's variables alone."""
    user, _, group = (options.user or config["User"]).partition(":")
    entry = config["Entrypoint"] if options.entrypoint is None else options.entrypoint
    words = [*entry, *(options.arguments or (config.get("Cmd", []) if options.entrypoint is None else []))]
    become = ["setpriv", f"--reuid={user}", f"--regid={group}", "--clear-groups", "--no-new-privs"]
    become += ["--bounding-set=-all", "--inh-caps=-all"]
    env = [
        "env",
        "-i",
        "-C",
        config["WorkingDir"],
        *config["Env"],
        *options.env,
        *os.environ.get("ENGINE_ENV", "").split(),
    ]
    return shlex.join(["exec", "chroot", root, *become, *env, *words])


def compose(options: argparse.Namespace) -> argparse.Namespace:
    """Return the options of `run` for a service of a compose file."""
    text = re.sub(
        r"\$\{(\w+):-((?:[^${}]|\$\w+)*)\}",
        lambda m: os.environ.get(m[1]) or m[2],
        Path(options.file).read_text(),
    )
    text = re.sub(r"(?<!\$)\$(\w+)", lambda m: os.environ.get(m[1], ""), text).replace("$$", "$")
    service = yaml.safe_load(text)["services"][options.service]
    assert not service.get("deploy"), "no GPUs here"
    beside = Path(options.file).resolve().parent  # where Compose looks for what is no full path
    binds = [(str(beside / each["source"]), each["target"]) for each in service["volumes"]]
    assert all(Path(source).is_dir() for source, _ in binds), binds  # create_host_path: false
    variables = {key: value or os.environ.get(key) for key, value in service["environment"].items()}
    return argparse.Namespace(
        image=service["image"],
        read_only=service["read_only"],
        tmpfs=service["tmpfs"],
        volume=[":".join(bind) for bind in binds],
        user=service["user"],
        shm_size=service.get("shm_size", "64m"),
        entrypoint=service["entrypoint"],
        env=[f"{key}={value}" for key, value in variables.items() if value is not None],
        arguments=options.arguments or service["command"],
    )


def parse(argv: list[str]) -> argparse.Namespace:
    """Parse a command line of docker's."""
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(dest="command", required=True)
    build = commands.add_parser("build")
    build.add_argument("-f", "--file", required=True)
    build.add_argument("-t", "--tag", required=True)
    build.add_argument("--build-arg", action="append", default=[])
    build.add_argument("context")
    run = commands.add_parser("run")
    run.add_argument("--rm", action="store_true")
    run.add_argument("--read-only", action="store_true")
    run.add_argument("--tmpfs", action="append", default=[])
    run.add_argument("-v", "--volume", action="append", default=[])
    run.add_argument("-e", "--env", action="append", default=[])
    run.add_argument("--user", default="")
    run.add_argument("--shm-size", default="64m")
    run.add_argument("--entrypoint", type=lambda word: [word])
    run.add_argument("image")
    run.add_argument("arguments", nargs=argparse.REMAINDER)
    several = commands.add_parser("compose")
    several.add_argument("-f", "--file", required=True)
    several.add_argument("verb", choices=["run"])
    several.add_argument("--rm", action="store_true")
    several.add_argument("service")
    several.add_argument("arguments", nargs=argparse.REMAINDER)
    return parser.parse_args(argv)


def install(folder: Path, target: Path) -> None:
    """Make the folder of an engine, and one with a program `docker` that is this engine."""
    folder.mkdir()
    target.mkdir()
    program = target / "docker"
    program.write_text(
        f'#!/bin/sh\nENGINE_FOLDER={shlex.quote(str(folder))} exec {sys.executable} {__file__} "$@"\n'
    )
    program.chmod(0o755)


def main() -> int:
    """Do what the command line says."""
    options = parse(sys.argv[1:])
    engine = Engine(Path(os.environ["ENGINE_FOLDER"]))
    if options.command == "build":
        return engine.build(options)
    return engine.run(compose(options) if options.command == "compose" else options)


if __name__ == "__main__":
    sys.exit(main())
