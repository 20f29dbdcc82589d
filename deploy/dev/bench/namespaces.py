"""Network namespaces of one machine, joined by a bridge; one of them can be unplugged like a host that goes silent.

A token bucket (``tc tbf``) on both ends of a cable can limit its rate. Needs root, and ``ip`` and ``tc`` of iproute2.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

BRIDGE = "htbench"
NETWORK = "10.213.0"
"""The first three parts of all addresses; the bridge has .1."""
CLONE_NEWNET = 0x40000000


def enter(name: str) -> None:
    """Move the calling thread, which must be the only one, into a namespace."""
    with Path(f"/run/netns/{name}").open("rb") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


@dataclass(slots=True)
class Bridge:
    """A bridge with namespaces; all of it is removed at the end."""

    rate: str = ""
    """Limit of each namespace's cable in both directions, as ``tc`` takes it (``1gbit``); empty for none."""
    names: list[str] = field(default_factory=list)

    def __enter__(self) -> Self:
        """Create the bridge."""
        _ip("link", "add", BRIDGE, "type", "bridge")
        _ip("address", "add", f"{NETWORK}.1/24", "dev", BRIDGE)
        _ip("link", "set", BRIDGE, "up")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove everything; the processes inside have ended."""
        for name in self.names:
            # A namespace with connections that are not over stays for a while, with its end of the cable.
            _ip("link", "delete", name)
            _ip("netns", "delete", name)
        _ip("link", "delete", BRIDGE)

    def add(self) -> tuple[str, str]:
        """Add a namespace, at most 250; return its name and address."""
        number = len(self.names) + 2
        name, address = f"{BRIDGE}{number}", f"{NETWORK}.{number}"
        self.names.append(name)
        _ip("netns", "add", name)
        _ip("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
        _ip("link", "set", name, "master", BRIDGE, "up")
        for command in (("address", "add", f"{address}/24", "dev", "eth0"), ("link", "set", "eth0", "up")):
            _ip("-n", name, *command)
        _ip("-n", name, "link", "set", "lo", "up")
        if self.rate:
            limit = ("root", "tbf", "rate", self.rate, "burst", "256kb", "latency", "50ms")
            subprocess.run(["tc", "qdisc", "add", "dev", name, *limit], check=True)
            subprocess.run(["tc", "-n", name, "qdisc", "add", "dev", "eth0", *limit], check=True)
        return name, address


def unplug(name: str) -> None:
    """Cut a namespace off: nothing that it sends or is sent arrives, and nobody is told."""
    _ip("link", "set", name, "nomaster")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)
