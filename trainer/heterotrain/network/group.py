"""The connections of one formation: a group for gradients, and a mesh for the ranks' own messages.

A formation gets new groups on a new store. ``cut`` may be called from any thread at any time and makes every waiting
operation fail; ``close`` belongs to the training thread.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from heterotrain.errors import PeerLost
from heterotrain.network.connection_setup import ConnectionAttempt, HostedStore, c10d, short_message
from heterotrain.network.gloo.abort import OpenSocket, connected, cut, interface_of, open_sockets
from heterotrain.network.gloo.bounded_wait import BoundedWait
from heterotrain.network.gloo.default_group import abort_nccl, publish, withdraw
from heterotrain.network.mesh.exchange import AllGather, Exchange, Payload
from heterotrain.network.mesh.mesh import Mesh, pack_floats, unpack_floats

_log = logging.getLogger(__name__)
_Work = TypeVar("_Work")


@dataclass(frozen=True, slots=True, kw_only=True)
class SocketFilter:
    """Distinguishes a group's sockets from all others of the process.

    Attributes:
        members: the members' IP addresses; empty where they are not known.
        excluded_ports: a connection with one of these ports on either side does not belong to the group.
    """

    members: frozenset[str]
    excluded_ports: frozenset[int]


@dataclass(frozen=True, slots=True, eq=False)
class Waiting:
    """The operation that the training thread waits for, and the start of the wait on the monotonic clock."""

    what: str
    since_s: float


class Group:
    """The connections of one formation, from this rank's side.

    Attributes:
        waiting: the current wait of the training thread, for the hang watch; ``None`` when it does not wait.
    """

    def __init__(self, *, rank: int, world_size: int, sockets: SocketFilter, hosted: HostedStore | None = None) -> None:
        """Make a group that is not connected yet.

        Args:
            rank: this rank in the formation.
            world_size: number of ranks.
            sockets: distinguishes the group's sockets from others.
            hosted: the store, on the rank that hosts it.
        """
        self.rank = rank
        self.world_size = world_size
        self.waiting: Waiting | None = None
        self._sockets = sockets
        self._sockets_before = hosted.sockets_before if hosted else open_sockets()
        self._store: Any = hosted.store if hosted else None
        self._own_sockets: frozenset[OpenSocket] | None = None
        self._lock = threading.Lock()
        self._cut = ""
        self._backend = ""
        self._mesh: Mesh | None = None
        self._peer_sockets: frozenset[OpenSocket] = frozenset()

    # -- life --------------------------------------------------------------------------------------------------------

    def build(self, *, connect: Callable[[], Any], backend: str, own_address: str | None) -> None:
        """Connect to all other ranks.

        Args:
            connect: connects to the store, where this rank does not host it.
            backend: ``gloo`` or ``nccl`` for the gradients.
            own_address: address of this rank, which determines the interface for gloo; ``None`` leaves it to gloo.

        Raises:
            PeerLost: a member was lost meanwhile.
        """
        self._backend = backend
        if backend == "nccl":
            # NCCL's watchdog would end the process when a peer is lost; here heartbeats detect it and ``cut`` aborts.
            os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        name = interface_of(own_address) if own_address else None
        if name is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        store = self._store
        self.check()
        attempt = ConnectionAttempt(
            lambda: store or connect(), rank=self.rank, world_size=self.world_size, address=own_address
        )
        connections = attempt.result(self.check)
        self._store, self._mesh = connections.store, connections.mesh
        publish(connections, backend=backend, rank=self.rank, world_size=self.world_size)
        with self._lock:
            self._own_sockets = open_sockets() - self._sockets_before
        # Without the store's sockets and those of other threads, which may close while the group is intact.
        self._peer_sockets = connected(
            self._own_sockets,
            addresses=self._addresses if self._sockets.members else None,
            excluded_ports=self._sockets.excluded_ports | {getattr(self._store, "port", 0)},
        )
        self.check()

    def cut(self, reason: str) -> None:
        """Make every operation of this group fail, now and later; safe from any thread."""
        with self._lock:
            first, self._cut = not self._cut, self._cut or reason
            candidates = self._own_sockets if self._own_sockets is not None else open_sockets() - self._sockets_before
        if first and self._backend == "nccl":
            abort_nccl()
        count = cut(candidates, addresses=self._addresses, excluded_ports=self._sockets.excluded_ports)
        if self._mesh is not None:
            self._mesh.cut()
        if first:
            _log.info("cut %d connections of the group: %s", count, reason)

    @property
    def is_cut(self) -> bool:
        """Whether the group has been cut."""
        return bool(self._cut)

    def check(self) -> None:
        """Fail early when the group has been cut.

        Raises:
            PeerLost: the group has been cut.
        """
        if self._cut:
            raise PeerLost(self._cut)

    def close(self) -> None:
        """Drop the groups. Waits for their threads, so call it after ``cut`` or after the last operation."""
        if self._mesh is not None:
            self._mesh.close()
        withdraw()
        self._store = None

    # -- operations --------------------------------------------------------------------------------------------------

    def all_reduce(self, flat: torch.Tensor) -> dist.Work:
        """Start to sum ``flat`` (one dimension, of the same length and format on every rank) over all ranks in place.

        Raises:
            PeerLost: the group is broken.
        """
        # The same as dist.all_reduce, without its checks for cases that cannot occur here.
        work: dist.Work = self._guarded(
            lambda: c10d.group.WORLD.allreduce([flat], c10d.AllreduceOptions()), RuntimeError
        )
        return work

    def gather(self, data: bytes) -> AllGather:
        """Start to collect the same number of bytes from every rank; ``rows`` holds them after ``wait``.

        Raises:
            PeerLost: the group is broken.
        """
        return self._guarded(lambda: self._require_mesh().gather(data), OSError)

    def gather_now(self, values: Sequence[float]) -> list[list[float]]:
        """Return every rank's values, by rank.

        Raises:
            PeerLost: the group is broken.
        """
        gathering = self.gather(pack_floats(values))
        self.wait(gathering, "an all-gather of numbers")
        return [unpack_floats(row) for row in gathering.rows]

    def broadcast_bytes(self, data: bytes | None, *, size_bytes: int, source: int) -> bytes:
        """Return the ``size_bytes`` bytes of rank ``source``; ``data`` is read on that rank only.

        Raises:
            PeerLost: the group is broken.
        """
        outgoing, incoming, got = {}, {}, bytearray(size_bytes)
        if self.rank == source:
            got[:] = data or b""
            others = (rank for rank in range(self.world_size) if rank != source)
            outgoing = {rank: Payload(size_bytes, [memoryview(got)]) for rank in others}
        else:
            incoming = {source: Payload(size_bytes, [memoryview(got)])}
        self.send_receive(outgoing, incoming, f"a broadcast of rank {source}")
        return bytes(got)

    def send_receive(self, outgoing: Mapping[int, Payload], incoming: Mapping[int, Payload], what: str) -> None:
        """Send to some ranks and fill memory from others; every rank calls this at the same point.

        Args:
            outgoing: payload by receiving rank.
            incoming: payload by sending rank, of the size that the sender sends.
            what: name of the operation, for the hang watch.

        Raises:
            PeerLost: the group is broken.
        """
        start = self._require_mesh().send_receive
        self.wait(self._guarded(lambda: start(outgoing=outgoing, incoming=incoming), OSError), what)

    def wait(self, work: dist.Work | Exchange, what: str = "an exchange between ranks") -> None:
        """Wait for an operation; ``what`` names it for the hang watch.

        Raises:
            PeerLost: the group is broken.
        """
        waited: Any = work
        broken: type[Exception] = RuntimeError if isinstance(work, dist.Work) else OSError
        # NCCL needs no bounded wait: its operations can be aborted and wait on the device.
        if isinstance(work, dist.Work) and self._backend != "nccl":
            waited = BoundedWait(work, is_over=self._is_over)
        self.waiting = Waiting(what, time.monotonic())
        try:
            waited.wait()
        except broken as error:
            raise PeerLost(self._cut or short_message(error)) from error
        finally:
            self.waiting = None

    def finish_device(self) -> None:
        """Wait until the accelerator has finished all queued work, then check that the group is intact.

        On CUDA an aborted reduction looks finished; the optimizer must not run on its incomplete result.

        Raises:
            PeerLost: the group is broken.
        """
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch leaves it untyped
            self.waiting = Waiting("the accelerator, and the reductions queued on it", time.monotonic())
            try:
                torch.cuda.current_stream().synchronize()
            finally:
                self.waiting = None
            self.check()

    @property
    def _addresses(self) -> frozenset[str]:
        """Remote addresses of the group's connections; a store on this rank's own host is reached over loopback."""
        return self._sockets.members | {"127.0.0.1", "::1"}

    def _is_over(self) -> bool:
        """Return whether the group has been cut.

        Gloo closes a connection of this process when it broke; the group is then cut here.
        """
        if not self._cut and self._peer_sockets - open_sockets():
            self.cut("a connection broke")
        return self.is_cut

    def _require_mesh(self) -> Mesh:
        if self._mesh is None:
            raise PeerLost("the group is closed")
        return self._mesh

    def _guarded(self, start: Callable[[], _Work], broken: type[Exception]) -> _Work:
        """Start an operation that raises ``broken`` when a connection is broken; any other error is the caller's."""
        self.check()
        try:
            return start()
        except broken as error:
            raise PeerLost(self._cut or short_message(error)) from error
