"""How the connections of a mesh come about: each rank opens a door, tells where it is, and calls at those below it."""

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
"""What only those know who read the store, and the rank that calls."""
HELLO_S = 2.0
"""For a caller to say who it is: its greeting is on the way when the connection stands."""


def connect(store: Any, *, rank: int, world_size: int, address: str | None, within_s: float, limit_s: float) -> Mesh:
    """Connect to every other rank: a rank calls those below it and is called by those above.

    Args:
        store: of this formation alone; where ranks tell their ports.
        rank: this rank.
        world_size: ranks in all.
        address: where the others reach this rank; ``None`` for that of the interface that gloo uses.
        within_s: seconds for everybody to be connected.
        limit_s: seconds after which a later wait is given up.

    Raises:
        OSError, RuntimeError: somebody did not come.
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
            told = bytes(store.get(f"mesh-{other}"))
            port, host = told[16:].decode().split()
            peers[other] = unfinished.enter_context(socket.create_connection((host, int(port)), _left(end_s)))
            peers[other].sendall(_HELLO.pack(told[:16], rank))
        while len(peers) < world_size - 1:
            listener.settimeout(_left(end_s))
            caller = unfinished.enter_context(listener.accept()[0])
            caller.settimeout(HELLO_S)
            with contextlib.suppress(OSError, struct.error):
                said, other = _HELLO.unpack(caller.recv(_HELLO.size, socket.MSG_WAITALL))
                if secrets.compare_digest(said, secret):
                    peers[other] = caller
        mesh = Mesh(peers, rank=rank, limit_s=limit_s)
        unfinished.pop_all()
    return mesh


def gloo_address() -> str:
    """Return the address that torch's gloo chooses: of the interface that is named to it, else the host name's, else local."""
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
