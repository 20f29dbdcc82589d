"""Free TCP ports for tests that run side by side."""

from __future__ import annotations

import socket

BLOCK_PORTS = 200
_ports: list[int] = []
_guards: list[socket.socket] = []
"""The first port of each claimed block, bound for as long as this process lives."""


def free_port() -> int:
    """Return a free port outside the kernel's range for clients; no other test process uses it."""
    while True:
        if not _ports:
            _claim_ports()
        port = _ports.pop(0)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port


def free_ports(count: int) -> int:
    """Return the first of ``count`` free ports that follow each other."""
    found = [free_port()]
    while len(found) < count:
        port = free_port()
        found = [*found, port] if port == found[-1] + 1 else [port]
    return found[0]


def _claim_ports() -> None:
    """Claim a block of ports by binding its first one; once all blocks are claimed, reuse those of this process."""
    for first in range(20000, 32000, BLOCK_PORTS):
        guard = socket.socket()
        try:
            guard.bind(("", first))
        except OSError:
            guard.close()
            continue
        _guards.append(guard)
        _ports.extend(range(first + 1, first + BLOCK_PORTS))
        return
    assert _guards, "other test processes have claimed every block of ports below 32000"
    for guard in _guards:
        first = guard.getsockname()[1]
        _ports.extend(range(first + 1, first + BLOCK_PORTS))
