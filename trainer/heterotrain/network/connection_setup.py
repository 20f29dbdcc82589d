"""Connects a formation's ranks, in a thread that can be abandoned.

Gloo's constructor waits for connections from its peers, cannot be interrupted, and retries several times. So it runs in
a thread of its own: when a member is lost meanwhile, the training thread continues at once, and the result of the
abandoned thread is dropped once its time-outs have passed. NCCL's groups are described in ``nccl.py``.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist
from heterotrain_core.contract.plan import Rank

from heterotrain.network.authentication import Credentials, authenticate, peer_role
from heterotrain.network.frames import to_frame
from heterotrain.network.gloo.abort import OpenSocket
from heterotrain.network.gloo.listeners import GuardedDevices
from heterotrain.network.key_store import KeyStore, KeyTable
from heterotrain.network.nccl import COLLECTIVE_S, nccl_group

c10d: Any = dist
"""torch.distributed, whose type information lacks half of what it exports."""

CONNECT_S = 2.0
"""Limit for a connection to the store, which exists before it is announced."""
SETUP_S = 10.0
"""Limit for the store's keys and the ranks' connections. All have promised to come; heartbeats detect losses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostedStore:
    """A store that this process hosts.

    Attributes:
        table: its keys; closing it ends the store for all ranks.
        number: what tells it apart from earlier ones of this process.
        sockets_before: sockets that were open before it was made; all later ones may belong to the group.
    """

    table: KeyTable
    number: int
    sockets_before: frozenset[OpenSocket]


def connect_store(host: Rank, request: Mapping[str, Any], credentials: Credentials) -> KeyStore:
    """Connect to a store that a rank hosts, over that rank's peer port.

    Args:
        host: the rank; perhaps this one.
        request: what its peer service takes as the wish to use the store.
        credentials: of the job.

    Raises:
        OSError: it cannot be reached, or is not a rank of this job.
    """
    connection = socket.create_connection((host.address, host.peer_port), timeout=CONNECT_S)
    try:
        role = peer_role(host.worker_uid, host.local_rank)
        authenticate(connection, credentials, role=role, listens=False, end_s=time.monotonic() + SETUP_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(to_frame(dict(request)))
    except BaseException:
        connection.close()
        raise
    return KeyStore(connection, limit_s=SETUP_S)


def make_group(backend: str, address: str) -> Callable[..., Any]:
    """Return the function that makes groups of a backend, ``gloo`` (listening at ``address``) or ``nccl``."""
    return nccl_group if backend == "nccl" else partial(gloo_group, address=address)


def gloo_device_address(address: str | None) -> str:
    """Return at which address of this rank gloo listens: empty for that of the interface which the environment names.

    Of an interface with both families, gloo takes the IPv4 address. So it gets a rank's IPv6 address itself, unless an
    interface was configured: the job may have IPv6 only, and a lost peer's connections are found by its address.
    """
    return address if address and ":" in address and not os.environ.get("GLOO_SOCKET_IFNAME") else ""


def gloo_group(store: Any, name: str, *, rank: int, world_size: int, address: str = "") -> Any:
    """Connect a gloo group over keys of the store that begin with ``name``.

    Args:
        store: reached by all ranks.
        name: of the group, once in each formation.
        rank: this rank in the group.
        world_size: number of its ranks.
        address: see ``gloo_device_address``.

    Raises:
        OSError, RuntimeError: a rank did not connect.
    """
    limit = timedelta(seconds=SETUP_S)
    with GuardedDevices(address=address) as devices:
        options = c10d.ProcessGroupGloo._Options()  # noqa: SLF001  # torch has no public way to choose the devices
        options._devices, options._timeout = devices, limit  # noqa: SLF001  # the constructor takes neither
        options._threads = 2 * len(devices)  # noqa: SLF001  # as many as torch itself takes
        group = c10d.ProcessGroupGloo(c10d.PrefixStore(name, store), rank, world_size, options)
    group._set_default_timeout(timedelta(seconds=COLLECTIVE_S))  # noqa: SLF001  # torch has no public way
    return group
