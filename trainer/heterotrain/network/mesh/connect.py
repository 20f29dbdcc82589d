"""Makes the connections of a mesh: each rank listens, publishes its port and connects to the ranks below it."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
import time
from typing import Any

from heterotrain.network.gloo.abort import address_of
from heterotrain.network.mesh.mesh import Mesh

_HELLO = struct.Struct("<16sI")
"""A secret known only to readers of the store, and the rank that connects."""
HELLO_S = 2.0
"""Limit for the greeting of a connecting rank, which is sent as soon as the connection is established."""


def connect(store: Any, *, rank: int, world_size: int, address: str | None, within_s: float, limit_s: float) -> Mesh:
    """Connect to every other rank: a rank connects to those below it and accepts connections from those above.

    Args:
        store: the store of this formation, in which ranks publish their ports.
        rank: this rank.
        world_size: number of ranks.
        address: address at which the others reach this rank; ``None`` for that of gloo's interface.
        within_s: seconds within which all ranks have to be connected.
        limit_s: seconds after which a later wait is given up.

    Raises:
        OSError, RuntimeError: a rank did not connect.
    """
    end_s = time.monotonic() + within_s
    own = address or gloo_address()
    secret = secrets.token_bytes(16)
    family = socket.AF_INET6 if ":" in own else socket.AF_INET
    peers: dict[int, socket.socket] = {}
    with (
        contextlib.ExitStack() as unfinished,
        socket.create_server(("", 0), family=family, backlog=world_size) as listener,
    ):
        store.set(f"mesh-{rank}", secret + f"{listener.getsockname()[1]} {own}".encode())
        for other in range(rank):
            published = bytes(store.get(f"mesh-{other}"))
            port, host = published[16:].decode().split()
            peers[other] = unfinished.enter_context(socket.create_connection((host, int(port)), _left(end_s)))
            peers[other].sendall(_HELLO.pack(published[:16], rank))
        while len(peers) < world_size - 1:
            listener.settimeout(_left(end_s))
            accepted = unfinished.enter_context(listener.accept()[0])
            accepted.settimeout(HELLO_S)
            with contextlib.suppress(OSError, struct.error):
                received, other = _HELLO.unpack(accepted.recv(_HELLO.size, socket.MSG_WAITALL))
                if secrets.compare_digest(received, secret):
                    peers[other] = accepted
        mesh = Mesh(peers, rank=rank, limit_s=limit_s)
        unfinished.pop_all()
    return mesh


def gloo_address() -> str:
    """Return the address that torch's gloo chooses: its configured interface's, else the host name's, else loopback."""
    names = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")
    if names[0]:
        return address_of(names[0])
    with contextlib.suppress(OSError):
        host = socket.gethostbyname(socket.gethostname())
        socket.create_server((host, 0)).close()
        return host
    return "127.0.0.1"


def _left(end_s: float) -> float:
    left_s = end_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("not every rank has connected in time")
    return left_s
