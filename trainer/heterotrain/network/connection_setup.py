"""How a formation's ranks find and connect to each other, in a thread that can be left behind.

Gloo's constructor waits for its peers' connections with nothing that could be cut, and tries several times over. So it
runs in a thread of its own: when a member is lost meanwhile, the training thread walks away at once, and what the thread
still brings about is dropped when its time-outs have passed.
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
"""For a connection to the store, which is there before anybody is told of it."""
SETUP_S = 10.0
"""For the store's keys and the ranks' connections. Everybody has promised to come; losses are noticed by the links."""
COLLECTIVE_S = 1800.0
"""For operations. Long on purpose: lost peers are noticed by their links, and a slow rank is no lost rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostedStore:
    """A store that this process hosts.

    Attributes:
        store: the store.
        port: where the others find it.
        before: sockets that were open before it: all later ones may belong to the group.
    """

    store: Any
    port: int
    before: frozenset[OpenSocket]


def host_store() -> HostedStore:
    """Start a store on a free port of this host."""
    before = open_sockets()
    limit = timedelta(seconds=SETUP_S)
    store = c10d.TCPStore("localhost", 0, None, is_master=True, timeout=limit, wait_for_workers=False)
    return HostedStore(store=store, port=int(store.port), before=before)


def connect_store(host: str, port: int) -> Any:
    """Connect to a store that another rank hosts; gives up after ``CONNECT_S``.

    Raises:
        OSError, RuntimeError: it cannot be reached.
    """
    # torch's own client knocks at a dead host's port until its time-out, and more than once.
    socket.create_connection((host, port), timeout=CONNECT_S).close()
    store = c10d.TCPStore(host, port, None, is_master=False, timeout=timedelta(seconds=CONNECT_S))
    store.set_timeout(timedelta(seconds=SETUP_S))
    return store


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupConnections:
    """What a group is made of: the store, the mesh for what ranks tell each other, and a gloo group for gradients."""

    store: Any
    mesh: Mesh
    gradients: Any


class ConnectionAttempt:
    """The attempt to connect to everybody."""

    def __init__(self, store: Callable[[], Any], *, rank: int, world_size: int, address: str | None) -> None:
        """Begin.

        Args:
            store: returns the store, connecting to it where another rank hosts it.
            rank: this rank.
            world_size: ranks in all.
            address: where the others reach this rank; ``None`` leaves that to the interface that gloo uses.
        """
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._address = address
        self._done = threading.Event()
        self._connections: GroupConnections | None = None
        self._error: Exception | None = None
        threading.Thread(target=self._run, name="heterotrain-rendezvous", daemon=True).start()

    def result(self, check: Callable[[], None]) -> GroupConnections:
        """Return the connections; ``check`` is called meanwhile and may raise to walk away.

        Raises:
            PeerLost: somebody did not come.
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
        except Exception as error:  # noqa: BLE001  # whatever it is, the training thread hears of it
            self._error = error
        self._done.set()

    def _gloo(self, store: Any) -> Any:
        limit = timedelta(seconds=SETUP_S)
        group = c10d.ProcessGroupGloo(c10d.PrefixStore("gradients", store), self._rank, self._world_size, limit)
        group._set_default_timeout(timedelta(seconds=COLLECTIVE_S))  # noqa: SLF001  # torch has no public way
        return group


def short_message(error: BaseException | None) -> str:
    """Return what the library's message says, without where in its source it says so and without its advice."""
    text = str(error).partition("\n")[0]
    place, bracket, rest = text.partition("] ")
    if bracket and place.startswith("[") and ".cc:" in place:
        text = rest
    return text.partition(". This is typically")[0]
