"""How a formation's ranks find each other and connect, in a thread that can be abandoned.

Gloo's constructor waits for connections from its peers, cannot be interrupted, and retries several times. So it runs in
a thread of its own: when a member is lost meanwhile, the training thread continues at once, and the result of the
abandoned thread is dropped once its time-outs have passed.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from heterotrain.errors import PeerLost
from heterotrain.network.gloo.abort import OpenSocket, open_sockets
from heterotrain.network.mesh.connect import connect
from heterotrain.network.mesh.mesh import Mesh

c10d: Any = dist
"""torch.distributed, whose type information lacks half of what it exports."""

CONNECT_S = 2.0
"""Limit for a connection to the store, which exists before its address is announced."""
SETUP_S = 10.0
"""Limit for the store's keys and the ranks' connections. All have promised to come; heartbeats detect losses."""
COLLECTIVE_S = 1800.0
"""Limit for operations. Long on purpose: heartbeats detect lost peers, and a slow rank is not lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostedStore:
    """A store that this process hosts.

    Attributes:
        store: the store.
        port: its port on this host.
        sockets_before: sockets that were open before it was started; all later ones may belong to the group.
    """

    store: Any
    port: int
    sockets_before: frozenset[OpenSocket]


def host_store() -> HostedStore:
    """Start a store on a free port of this host."""
    sockets_before = open_sockets()
    limit = timedelta(seconds=SETUP_S)
    store = c10d.TCPStore("localhost", 0, None, is_master=True, timeout=limit, wait_for_workers=False)
    return HostedStore(store=store, port=int(store.port), sockets_before=sockets_before)


def connect_store(host: str, port: int) -> Any:
    """Connect to a store that another rank hosts; gives up after ``CONNECT_S``.

    Raises:
        OSError, RuntimeError: it cannot be reached.
    """
    # torch's own client would retry a dead host until its time-out, more than once.
    socket.create_connection((host, port), timeout=CONNECT_S).close()
    store = c10d.TCPStore(host, port, None, is_master=False, timeout=timedelta(seconds=CONNECT_S))
    store.set_timeout(timedelta(seconds=SETUP_S))
    return store


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupConnections:
    """The parts of a group: the store, the mesh for the ranks' own messages, and a gloo group for gradients."""

    store: Any
    mesh: Mesh
    gradients: Any


class ConnectionAttempt:
    """One attempt to connect to all other ranks."""

    def __init__(self, store: Callable[[], Any], *, rank: int, world_size: int, address: str | None) -> None:
        """Start the attempt in a thread of its own.

        Args:
            store: returns the store, connecting to it where another rank hosts it.
            rank: this rank.
            world_size: number of ranks.
            address: address at which the others reach this rank; ``None`` for that of gloo's interface.
        """
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._address = address
        self._done = threading.Event()
        self._connections: GroupConnections | None = None
        self._error: Exception | None = None
        threading.Thread(target=self._run, name="heterotrain-connect", daemon=True).start()

    def result(self, check: Callable[[], None]) -> GroupConnections:
        """Return the connections; ``check`` is called while waiting and may raise to abandon the attempt.

        Raises:
            PeerLost: a rank did not connect.
        """
        while not self._done.wait(0.01):
            check()
        if self._connections is None:
            raise PeerLost(f"the group could not be built: {short_message(self._error)}") from self._error
        return self._connections

    def _run(self) -> None:
        try:
            store = self._store()
            mesh = connect(
                store, rank=self._rank, world_size=self._world_size, address=self._address, within_s=SETUP_S,
                limit_s=COLLECTIVE_S,
            )  # fmt: skip
            self._connections = GroupConnections(store=store, mesh=mesh, gradients=self._gloo(store))
        except Exception as error:  # noqa: BLE001  # whatever it is, the training thread gets it
            self._error = error
        self._done.set()

    def _gloo(self, store: Any) -> Any:
        limit = timedelta(seconds=SETUP_S)
        group = c10d.ProcessGroupGloo(c10d.PrefixStore("gradients", store), self._rank, self._world_size, limit)
        group._set_default_timeout(timedelta(seconds=COLLECTIVE_S))  # noqa: SLF001  # torch has no public way
        return group


def short_message(error: BaseException | None) -> str:
    """Return the first sentence of a library's error message, without source position and advice."""
    text = str(error).partition("\n")[0]
    place, bracket, rest = text.partition("] ")
    if bracket and place.startswith("[") and ".cc:" in place:
        text = rest
    return text.partition(". This is typically")[0]
