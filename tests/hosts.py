"""Two hosts for tests: network namespaces of this machine joined by a cable of their own; needs root and iproute2."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

from programs import absent, path_of, skip

PORT = 29400
_numbers = itertools.count()


@dataclass(frozen=True)
class Host:
    """A namespace with an interface and an address; loopback and the file system are as everywhere."""

    name: str
    interface: str
    address: str

    def command(self, *command: str) -> list[str]:
        """Return a command line that runs another one on this host."""
        return [path_of("ip"), "netns", "exec", self.name, *command]

    def variables(self) -> dict[str, str]:
        """Return the environment variables with which gloo speaks over the cable, and a torchrun may come later.

        The first torchrun keeps the address of the store that it shares from one round of meeting to the next and tells
        it in the first round only (torch 2.13): whoever comes later would wait for it in vain. An unshared store is told
        of in each.
        """
        return {
            "GLOO_SOCKET_IFNAME": self.interface,
            "TP_SOCKET_IFNAME": self.interface,
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }

    def kill(self) -> None:
        """Kill everything on this host at once, as a power cut does."""
        for pid in map(int, _ip("netns", "pids", self.name).split()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Make two hosts that reach each other and nothing else; remove them and all that runs there.

    Where that cannot be done the test that asks is skipped with the reason.
    """
    if os.geteuid():
        skip("two hosts need root")
    if absent("ip"):
        skip("two hosts need `ip`: apt-get install iproute2")
    mark = f"pp{os.getpid()}x{next(_numbers)}"  # an interface's name has 15 letters at most
    hosts = tuple(
        Host(mark + letter, f"{mark}v{letter}", f"10.77.0.{last}") for letter, last in (("a", 1), ("b", 2))
    )
    with contextlib.ExitStack() as stack:
        try:
            for host in hosts:
                _ip("netns", "add", host.name)
                stack.callback(_ip, "netns", "delete", host.name)
                stack.callback(host.kill)
            one, other = hosts
            _ip("link", "add", one.interface, "netns", one.name, "type", "veth",
                "peer", "name", other.interface, "netns", other.name)  # fmt: skip
            for host in hosts:
                _ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", host.interface)
                for interface in ("lo", host.interface):
                    _ip("-n", host.name, "link", "set", interface, "up")
        except subprocess.CalledProcessError as error:
            skip(f"no two hosts here: {error.stderr.strip()}")
        yield one, other


def _ip(*arguments: str) -> str:
    return subprocess.run([path_of("ip"), *arguments], capture_output=True, text=True, check=True).stdout
