"""Makes the connections of a mesh: each rank listens, publishes its port and connects to the ranks below it."""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import socket
import struct
import threading
import time
from typing import Any, Self

from heterotrain.network.authentication import (
    MOST_HALF_OPEN,
    REFUSALS,
    Credentials,
    authenticate,
    receive,
    seconds_left,
    shut_down,
)
from heterotrain.network.gloo.abort import address_of
from heterotrain.network.mesh.mesh import Mesh

_RANK = struct.Struct("!I")
"""The rank that connects, once it has proved that it belongs to the job."""
_LOOK_S = 0.1
"""Time after which the accepting thread notices that it is no longer needed."""


def connect(
    store: Any,
    *,
    rank: int,
    world_size: int,
    address: str | None,
    within_s: float,
    limit_s: float,
    credentials: Credentials,
) -> Mesh:
    """Connect a mesh to every other rank: a rank calls those below it and is called by those above.

    Args:
        store: the store of this formation, in which ranks publish their ports.
        rank: this rank.
        world_size: number of ranks.
        address: address at which the others reach this rank; ``None`` for that of gloo's interface.
        within_s: seconds within which all ranks have to be connected.
        limit_s: seconds after which a later wait is given up.
        credentials: of the job.

    Raises:
        OSError, RuntimeError: a rank did not connect.
    """
    end_s = time.monotonic() + within_s
    own = address or gloo_address()
    role = f"mesh {secrets.token_hex(16)}"  # new for each mesh: no proof is good for another formation
    peers: dict[int, socket.socket] = {}
    with contextlib.ExitStack() as unfinished:
        listener = unfinished.enter_context(
            _Listener(own, credentials, role, expected=world_size - 1 - rank, end_s=end_s)
        )
        store.set(f"mesh-{rank}", f"{listener.port} {own} {role}".encode())
        for other in range(rank):
            port, host, theirs = bytes(store.get(f"mesh-{other}")).decode().split(" ", 2)
            connection = socket.create_connection((host, int(port)), seconds_left(end_s))
            authenticate(connection, credentials, role=theirs, listens=False, end_s=end_s)
            peers[other] = unfinished.enter_context(connection)
            connection.sendall(_RANK.pack(rank))
        while len(peers) < world_size - 1:
            other, connection = listener.next()
            peers[other] = unfinished.enter_context(connection)
        unfinished.pop_all()
        listener.close()
    return Mesh(peers, rank=rank, limit_s=limit_s)


class _Listener:
    """Accepts and authenticates connections, each in a thread of its own, so that a stranger delays nobody."""

    def __init__(self, address: str, credentials: Credentials, role: str, *, expected: int, end_s: float) -> None:
        """Listen at ``address``, with room for ``expected`` ranks at the same time."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.create_server((address, 0), family=family, backlog=expected + MOST_HALF_OPEN)
        self._socket.settimeout(_LOOK_S)
        self.port = int(self._socket.getsockname()[1])
        self._credentials, self._role, self._end_s = credentials, role, end_s
        self._most = expected + MOST_HALF_OPEN
        self._half_open: dict[socket.socket, None] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._ready: queue.Queue[tuple[int, socket.socket]] = queue.Queue()
        if expected:
            threading.Thread(target=self._accept, name="heterotrain-mesh", daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def next(self) -> tuple[int, socket.socket]:
        """Return the next rank with its connection.

        Raises:
            TimeoutError: none has connected in time.
        """
        try:
            return self._ready.get(timeout=seconds_left(self._end_s))
        except queue.Empty:
            raise TimeoutError("not every rank has connected in time") from None

    def close(self) -> None:
        """Stop listening, and drop connections that nobody took."""
        with self._lock:
            self._closed = True
            waiting = [*self._half_open]
        self._socket.close()
        for connection in waiting:
            shut_down(connection)
        while not self._ready.empty():
            self._ready.get_nowait()[1].close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, address = self._socket.accept()
            except TimeoutError:
                continue
            except OSError:
                return  # closed
            with self._lock:
                oldest = next(iter(self._half_open)) if len(self._half_open) >= self._most else None
                self._half_open[connection] = None
            if oldest is not None:
                shut_down(oldest)
            threading.Thread(target=self._greet, args=(connection, address), daemon=True).start()

    def _greet(self, connection: socket.socket, address: object) -> None:
        try:
            authenticate(connection, self._credentials, role=self._role, listens=True, end_s=self._end_s)
            try:
                (rank,) = _RANK.unpack(receive(connection, _RANK.size, end_s=self._end_s))
            except BaseException:
                connection.close()
                raise
        except OSError as error:
            if not self._forget(connection):
                REFUSALS.add("the port of a formation", address, str(error))
            return
        connection.settimeout(None)
        if self._forget(connection, rank):
            connection.close()

    def _forget(self, connection: socket.socket, rank: int | None = None) -> bool:
        """Drop a connection that is no longer half open, or hand over that of a rank; return whether it is too late."""
        with self._lock:
            self._half_open.pop(connection, None)
            if rank is not None and not self._closed:
                self._ready.put((rank, connection))
            return self._closed


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
