"""Cut a process group's connections from outside.

Gloo cannot be aborted: neither ``abort`` nor ``destroy_process_group`` wakes a thread that waits for a peer. Shutting
down the group's sockets does, within milliseconds, and also wakes every peer that waits for this rank. Closing is left
to their owner. A file descriptor is never closed here, so a number that has been reused is never affected.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

_FOLDER = "/proc/self/fd"
_V6_TABLE = Path("/proc/net/if_inet6")


@dataclass(frozen=True, slots=True)
class OpenSocket:
    """A socket of this process: descriptor and inode, so that a reused number is noticed."""

    descriptor: int
    inode: int


def open_sockets() -> frozenset[OpenSocket]:
    """Return the open sockets of this process; an empty set on systems without ``/proc``."""
    found = set()
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(_FOLDER):  # noqa: PTH208  # called while survivors wait: the cheapest call
            with contextlib.suppress(OSError, ValueError):
                target = os.readlink(f"{_FOLDER}/{name}")  # noqa: PTH115  # as above
                if target.startswith("socket:["):
                    found.add(OpenSocket(int(name), int(target[8:-1])))
    return frozenset(found)


def is_open(candidate: OpenSocket) -> bool:
    """Return whether the process still has this socket open.

    It takes a microsecond. A list of all sockets takes some hundred, and steps and waits ask all the time.
    """
    try:
        status = os.fstat(candidate.descriptor)
    except OSError:
        return False
    return status.st_ino == candidate.inode and stat.S_ISSOCK(status.st_mode)


def cut(sockets: Collection[OpenSocket], *, addresses: Collection[str], excluded_ports: Collection[int]) -> int:
    """Shut down the sockets that are connected to one of ``addresses``; return their number.

    Args:
        sockets: candidates.
        addresses: IP addresses of the group's members.
        excluded_ports: a socket with one of these ports on either side is left alone (heartbeat connections).
    """
    count = 0
    for candidate in sockets:
        if not is_open(candidate):
            continue
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(candidate.descriptor)) as duplicate:
            if _leads_to(duplicate, addresses=addresses, excluded_ports=excluded_ports):
                duplicate.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


def address_of(interface: str) -> str:
    """Return the address of a network interface, IPv4 where it has one.

    Raises:
        OSError: it has no address that others could reach.
    """
    import fcntl  # noqa: PLC0415  # not on every system

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        request = struct.pack("256s", interface[:15].encode())
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), 0x8915, request)[20:24])  # SIOCGIFADDR
    for line in _V6_TABLE.read_text(encoding="ascii").splitlines():
        fields = line.split()
        if fields[-1] == interface and fields[3] != "20":  # a link-local address needs a scope that differs by host
            return socket.inet_ntop(socket.AF_INET6, bytes.fromhex(fields[0]))
    raise OSError(f"the network interface {interface} has no address")


def connected(
    sockets: Collection[OpenSocket], *, addresses: Collection[str] | None, excluded_ports: Collection[int]
) -> frozenset[OpenSocket]:
    """Return the sockets that are connected to one of ``addresses``, or to any for ``None``; see ``cut``."""
    found = set()
    for candidate in sockets:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(candidate.descriptor)) as duplicate:
            if _leads_to(duplicate, addresses=addresses, excluded_ports=excluded_ports):
                found.add(candidate)
    return frozenset(found)


def interface_of(address: str) -> str | None:
    """Return the network interface that has this address, or ``None``."""
    import fcntl  # noqa: PLC0415  # not on every system

    for _, name in socket.if_nameindex():
        if ":" in address:
            continue
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
            request = struct.pack("256s", name[:15].encode())
            answer = fcntl.ioctl(probe.fileno(), 0x8915, request)  # SIOCGIFADDR
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return _interface_of_v6(address) if ":" in address else None


def _interface_of_v6(address: str) -> str | None:
    wanted = socket.inet_pton(socket.AF_INET6, address).hex()
    with contextlib.suppress(OSError):
        for line in _V6_TABLE.read_text(encoding="ascii").splitlines():
            fields = line.split()
            if fields and fields[0] == wanted:
                return fields[-1]
    return None


def _leads_to(one: socket.socket, *, addresses: Collection[str] | None, excluded_ports: Collection[int]) -> bool:
    """Return whether a socket is connected to one of the addresses, with no excluded port on either side.

    Raises:
        OSError: the socket has no peer, like a listener.
    """
    if one.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    here, there = one.getsockname(), one.getpeername()
    known = addresses is None or _plain(there[0]) in addresses
    return known and not {here[1], there[1]} & set(excluded_ports)


def _plain(address: str) -> str:
    return address.removeprefix("::ffff:")
