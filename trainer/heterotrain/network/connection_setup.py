"""How a formation's ranks find each other and connect, in a thread that can be abandoned.

Gloo's constructor waits for connections from its peers, cannot be interrupted, and retries several times. So it runs in
a thread of its own: when a member is lost meanwhile, the training thread continues at once, and the result of the
abandoned thread is dropped once its time-outs have passed.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from heterotrain_core.contract.plan import Rank

from heterotrain.errors import PeerLost
from heterotrain.network.authentication import Credentials, authenticate, peer_role
from heterotrain.network.frames import to_frame
from heterotrain.network.gloo.abort import OpenSocket
from heterotrain.network.gloo.listeners import GuardedDevices
from heterotrain.network.gloo.tunnels import Route, Tunnels, TunnelStore, loopback_of
from heterotrain.network.key_store import HostedKeyStore, RemoteKeyStore
from heterotrain.network.mesh.connect import connect, connect_peers
from heterotrain.network.mesh.mesh import Mesh

_T = TypeVar("_T")

c10d: Any = dist
"""torch.distributed, whose type information lacks half of what it exports."""

CONNECT_S = 2.0
"""Limit for a connection to the store, which exists before it is announced."""
SETUP_S = 10.0
"""Limit for the store's keys and the ranks' connections. All have promised to come; heartbeats detect losses."""
COLLECTIVE_S = 1800.0
"""Limit for operations. Long on purpose: heartbeats detect lost peers, and a slow rank is not lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostedStore:
    """A store that this process hosts.

    Attributes:
        store: the store.
        number: what tells it apart from earlier ones of this process.
        sockets_before: sockets that were open before it was made; all later ones may belong to the group.
    """

    store: HostedKeyStore
    number: int
    sockets_before: frozenset[OpenSocket]


def connect_store(host: Rank, request: Mapping[str, Any], credentials: Credentials) -> RemoteKeyStore:
    """Connect to a store that another rank hosts, over that rank's peer port.

    Args:
        host: the other rank.
        request: what its peer service takes as the wish to use the store.
        credentials: of the job.

    Raises:
        OSError: it cannot be reached, or is not a rank of this job.
    """
    connection = socket.create_connection((host.address, host.peer_port), timeout=CONNECT_S)
    try:
        role = peer_role(host.worker_uid, host.local_rank)
        connection = authenticate(connection, credentials, role=role, listens=False, end_s=time.monotonic() + SETUP_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(to_frame(dict(request)))
    except BaseException:
        connection.close()
        raise
    return RemoteKeyStore(connection, limit_s=SETUP_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupConnections:
    """The parts of a group: the store, the mesh for the ranks' own messages, and the group for gradients."""

    store: Any
    mesh: Mesh
    gradients: Any


class Attempt(Generic[_T]):
    """One attempt to connect, in a thread of its own, on the same accelerator as the caller's."""

    def __init__(self, make: Callable[[], _T]) -> None:
        """Start ``make``, which returns what the training thread waits for."""
        self._make = make
        self._device = torch.cuda.current_device() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]  # torch leaves it untyped
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
            if self._device is not None:
                torch.cuda.set_device(self._device)  # each thread has its own current device, at first the first one
            self._made.append(self._make())
        except Exception as error:  # noqa: BLE001  # whatever it is, the training thread gets it
            self._error = error
        self._done.set()


def connect_ranks(
    store: Callable[[], Any], *, rank: int, world_size: int, address: str | None, backend: str, credentials: Credentials
) -> GroupConnections:
    """Connect to all other ranks.

    Args:
        store: returns the store, connecting to it where another rank hosts it.
        rank: this rank.
        world_size: number of ranks.
        address: address at which the others reach this rank; ``None`` for that of gloo's interface.
        backend: ``gloo`` or ``nccl`` for the gradients; NCCL makes its connections in ``join_nccl``.
        credentials: of the job.

    Raises:
        OSError, RuntimeError: a rank did not connect.
    """
    found = store()
    mesh = connect(
        found, rank=rank, world_size=world_size, address=address, within_s=SETUP_S, limit_s=COLLECTIVE_S,
        credentials=credentials,
    )  # fmt: skip
    if backend == "nccl":
        gradients = nccl_group(found, "gradients", rank=rank, world_size=world_size)
    else:
        route = route_of(address, credentials)
        gradients = gloo_group(found, "gradients", rank=rank, world_size=world_size, route=route)
    return GroupConnections(store=found, mesh=mesh, gradients=gradients)


def route_of(address: str | None, credentials: Credentials) -> Route | None:
    """Return how gloo's connections reach other ranks: ``None`` for directly, without encryption."""
    return None if credentials.tls is None else Route(address=address, credentials=credentials)


def gloo_group(store: Any, name: str, *, rank: int, world_size: int, route: Route | None) -> Any:
    """Connect a gloo group over keys of the store that begin with ``name``.

    Args:
        store: reached by all ranks.
        name: of the group, once in each formation.
        rank: this rank in the group.
        world_size: number of its ranks.
        route: carries its connections; ``None`` for none, so that they are not encrypted.

    Raises:
        OSError, RuntimeError: a rank did not connect.
    """
    if route is None:
        return _gloo_group(store, name, GuardedDevices(), rank=rank, world_size=world_size)
    peers = connect_peers(
        store, f"tunnel {name}", rank=rank, world_size=world_size, address=route.address, within_s=SETUP_S,
        credentials=route.credentials,
    )  # fmt: skip
    tunnels = Tunnels(peers, rank=rank)
    try:
        view = TunnelStore(store, tunnels)
        return _gloo_group(view, name, GuardedDevices(address=loopback_of(rank)), rank=rank, world_size=world_size)
    except BaseException:
        tunnels.cut()
        raise


def _gloo_group(store: Any, name: str, guard: GuardedDevices, *, rank: int, world_size: int) -> Any:
    limit = timedelta(seconds=SETUP_S)
    with guard as devices:
        options = c10d.ProcessGroupGloo._Options()  # noqa: SLF001  # torch has no public way to choose the devices
        options._devices, options._timeout = devices, limit  # noqa: SLF001
        options._threads = 2 * len(devices)  # noqa: SLF001  # as many as torch itself takes
        group = c10d.ProcessGroupGloo(c10d.PrefixStore(name, store), rank, world_size, options)
    group._set_default_timeout(timedelta(seconds=COLLECTIVE_S))  # noqa: SLF001  # torch has no public way
    return group


def nccl_group(store: Any, name: str, *, rank: int, world_size: int) -> Any:
    """Make an NCCL group over keys of the store that begin with ``name``."""
    options = c10d.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=COLLECTIVE_S)  # noqa: SLF001  # torch has no public way
    return c10d.ProcessGroupNCCL(c10d.PrefixStore(name, store), rank, world_size, options)


def join_nccl(group: Any, check: Callable[[], None]) -> None:
    """Let an NCCL group connect its ranks now, and not in the first backward pass.

    A rank that waits for a lost one inside NCCL cannot be woken: a communicator that is not complete cannot be aborted.
    So it waits in a thread that can be abandoned.

    Args:
        group: of ``nccl_group``.
        check: called while waiting; may raise to abandon the attempt.

    Raises:
        PeerLost: a rank did not connect.
    """
    Attempt(lambda: group.eager_connect_single_device(torch.device("cuda", torch.cuda.current_device()))).result(check)


def short_message(error: BaseException | None) -> str:
    """Return the first sentence of a library's error message, without source position and advice."""
    text = str(error).partition("\n")[0]
    place, bracket, rest = text.partition("] ")
    if bracket and place.startswith("[") and ".cc:" in place:
        text = rest
    return text.partition(". This is typically")[0]
