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
from typing import Any, Generic, TypeVar

import torch.distributed as dist

from heterotrain.errors import PeerLost
from heterotrain.network.gloo.abort import OpenSocket, open_sockets
from heterotrain.network.mesh.connect import connect
from heterotrain.network.mesh.mesh import Mesh

_T = TypeVar("_T")

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
    """The parts of a group: the store, the mesh for the ranks' own messages, and the group for gradients."""

    store: Any
    mesh: Mesh
    gradients: Any


class Attempt(Generic[_T]):
    """One attempt to connect, in a thread of its own."""

    def __init__(self, make: Callable[[], _T]) -> None:
        """Start ``make``, which returns what the training thread waits for."""
        self._make = make
        self._done = threading.Event()
        self._made: list[_T] = []
        self._error: Exception | None = None
        threading.Thread(target=self._run, name="heterotrain-connect", daemon=True).start()

    def result(self, check: Callable[[], None]) -> _T:
        """Return the result; ``check`` is called while waiting and may raise to abandon the attempt.

        Raises:
            PeerLost: a rank did not connect.
        """
        while not self._done.wait(0.01):
            check()
        if not self._made:
            raise PeerLost(f"the group could not be built: {short_message(self._error)}") from self._error
        return self._made[0]

    def _run(self) -> None:
        try:
            self._made.append(self._make())
        except Exception as error:  # noqa: BLE001  # whatever it is, the training thread gets it
            self._error = error
        self._done.set()


def connect_ranks(
    store: Callable[[], Any], *, rank: int, world_size: int, address: str | None, backend: str
) -> GroupConnections:
    """Connect to all other ranks.

    Args:
        store: returns the store, connecting to it where another rank hosts it.
        rank: this rank.
        world_size: number of ranks.
        address: address at which the others reach this rank; ``None`` for that of gloo's interface.
        backend: ``gloo`` or ``nccl`` for the gradients; NCCL makes its connections later, with the first reduction.

    Raises:
        OSError, RuntimeError: a rank did not connect.
    """
    found = store()
    mesh = connect(found, rank=rank, world_size=world_size, address=address, within_s=SETUP_S, limit_s=COLLECTIVE_S)
    make = nccl_group if backend == "nccl" else gloo_group
    return GroupConnections(
        store=found, mesh=mesh, gradients=make(found, "gradients", rank=rank, world_size=world_size)
    )


def gloo_group(store: Any, name: str, *, rank: int, world_size: int) -> Any:
    """Connect a gloo group over keys of the store that begin with ``name``."""
    limit = timedelta(seconds=SETUP_S)
    group = c10d.ProcessGroupGloo(c10d.PrefixStore(name, store), rank, world_size, limit)
    group._set_default_timeout(timedelta(seconds=COLLECTIVE_S))  # noqa: SLF001  # torch has no public way
    return group


def nccl_group(store: Any, name: str, *, rank: int, world_size: int) -> Any:
    """Make an NCCL group over keys of the store that begin with ``name``."""
    options = c10d.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=COLLECTIVE_S)  # noqa: SLF001  # torch has no public way
    return c10d.ProcessGroupNCCL(c10d.PrefixStore(name, store), rank, world_size, options)


def short_message(error: BaseException | None) -> str:
    """Return the first sentence of a library's error message, without source position and advice."""
    text = str(error).partition("\n")[0]
    place, bracket, rest = text.partition("] ")
    if bracket and place.startswith("[") and ".cc:" in place:
        text = rest
    return text.partition(". This is typically")[0]
