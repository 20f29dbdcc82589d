"""Connections between the ranks of a formation that end together: their own messages, and the end of all of them.

``cut`` may be called from any thread at any time and makes every waiting operation fail.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from heterotrain.clock import Clock
from heterotrain.errors import PeerLost
from heterotrain.network.abort_flag import AbortFlag
from heterotrain.network.connection_attempt import short_message
from heterotrain.network.connection_setup import HostedStore
from heterotrain.network.gloo.abort import OpenSocket
from heterotrain.network.key_store import close_store
from heterotrain.network.mesh.exchange import CALLS, AllGather, MessageExchange, Payload, Purpose
from heterotrain.network.mesh.mesh import Mesh, pack_floats, unpack_floats
from heterotrain.network.peer_sockets import PeerSockets, SocketFilter
from heterotrain.network.sums import Reduction

_log = logging.getLogger(__name__)
_Work = TypeVar("_Work")


@dataclass(frozen=True, slots=True, eq=False)
class Waiting:
    """The operation that the training thread waits for, and the start of the wait on the group's clock."""

    what: str
    since_s: float


class Connections:
    """The ranks' own messages, and the end of all connections.

    Attributes:
        rank: this rank in the formation.
        world_size: number of ranks.
        waiting: the current wait of the training thread, for the hang watch; ``None`` when it does not wait.
        flag: raised before a communicator of this formation is aborted, this rank's member's included.
        store: reached by all ranks; ``None`` until they are connected.
        gloo_address: see ``gloo_device_address``.
    """

    def __init__(
        self, *, rank: int, world_size: int, sockets: SocketFilter, hosted: HostedStore | None, clock: Clock
    ) -> None:
        """Make connections that do not exist yet.

        Args:
            rank: this rank in the formation.
            world_size: number of ranks.
            sockets: distinguishes the group's sockets from others.
            hosted: the store, on the rank that hosts it.
            clock: measures waits.
        """
        self.rank, self.world_size = rank, world_size
        self.waiting: Waiting | None = None
        self.flag = AbortFlag()
        self.store: Any = None
        self.gloo_address = ""
        self.clock = clock
        self._hosted = hosted
        self._sockets = PeerSockets(sockets, before=hosted.sockets_before if hosted else None)
        self._lock = threading.Lock()
        self._cut = ""
        self._mesh: Mesh | None = None

    # -- the end -----------------------------------------------------------------------------------------------------

    def cut(self, reason: str) -> None:
        """Make every operation fail, now and later; safe from any thread."""
        with self._lock:
            first, self._cut = not self._cut, self._cut or reason
        if first:
            self._abort()
        count = self._sockets.cut()
        if self._mesh is not None:
            self._mesh.cut()
        self.end_store()
        if first:
            _log.info("cut %d connections of the group: %s", count, reason)

    def end_store(self) -> None:
        """Leave the store; on the rank that hosts it, end it for all ranks."""
        close_store(self.store)
        if self._hosted is not None:
            self._hosted.table.close()

    def _abort(self) -> None:
        """End the operations that no closed connection ends."""

    @property
    def why_cut(self) -> str:
        """Why the group has been cut; empty if it has not."""
        return self._cut

    @property
    def is_cut(self) -> bool:
        """Whether the group has been cut."""
        return bool(self._cut)

    def is_over(self) -> bool:
        """Return whether the group has been cut.

        Gloo closes a connection of this process when it broke; the group is then cut here.
        """
        if not self._cut and self._sockets.is_one_closed():
            self.cut("a connection broke")
        return bool(self._cut)

    def check(self) -> None:
        """Fail early when the group has been cut.

        Raises:
            PeerLost: the group has been cut.
        """
        if self._cut:
            raise PeerLost(self._cut)

    def own_sockets(self, before: frozenset[OpenSocket], watched: frozenset[OpenSocket] | None = None) -> None:
        """Count all sockets that were opened since ``before`` as the group's; the end of a watched one breaks it."""
        self._sockets.own(before, watched, store_port=getattr(self.store, "port", 0))

    # -- operations --------------------------------------------------------------------------------------------------

    def gather(self, data: bytes, purpose: Purpose = Purpose.LIBRARY) -> AllGather:
        """Start to collect the same number of bytes from every rank; ``rows`` holds them after ``wait``.

        Raises:
            PeerLost: the group is broken.
        """
        return self.guarded(lambda: self._require_mesh().gather(data, purpose), OSError)

    def gather_now(self, values: Sequence[float], purpose: Purpose = Purpose.LIBRARY) -> list[list[float]]:
        """Return every rank's values, by rank.

        Raises:
            PeerLost: the group is broken.
        """
        gathering = self.gather(pack_floats(values), purpose)
        self.wait(gathering, "an all-gather of numbers" if purpose is Purpose.LIBRARY else CALLS[purpose])
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

    def send_receive(
        self,
        outgoing: Mapping[int, Payload],
        incoming: Mapping[int, Payload],
        what: str,
        purpose: Purpose = Purpose.LIBRARY,
    ) -> None:
        """Send to some ranks and fill memory from others; every rank calls this at the same point.

        Args:
            outgoing: payload by receiving rank.
            incoming: payload by sending rank, of the size that the sender sends.
            what: name of the operation, for the hang watch.
            purpose: what the exchange is for; the same on every rank.

        Raises:
            PeerLost: the group is broken.
        """
        start = self._require_mesh().send_receive
        self.wait(self.guarded(lambda: start(outgoing=outgoing, incoming=incoming, purpose=purpose), OSError), what)

    def wait(self, work: Reduction | MessageExchange, what: str = "an exchange between ranks") -> None:
        """Wait for an operation.

        Args:
            work: the operation.
            what: its name for the hang watch.

        Raises:
            PeerLost: the group is broken.
        """
        broken = OSError if isinstance(work, MessageExchange) else RuntimeError
        self.waiting = Waiting(what, self.clock())  # as ``named_wait``, with fewer calls
        try:
            work.wait()
        except broken as error:
            raise PeerLost(self._cut or short_message(error)) from error
        finally:
            self.waiting = None

    @contextmanager
    def named_wait(self, what: str) -> Iterator[None]:
        """Name what the training thread waits for inside, for the hang watch."""
        self.waiting = Waiting(what, self.clock())
        try:
            yield
        finally:
            self.waiting = None

    def guarded(self, start: Callable[[], _Work], broken: type[Exception]) -> _Work:
        """Start an operation that raises ``broken`` when a connection is broken; any other error is the caller's."""
        self.check()
        try:
            return start()
        except broken as error:
            raise PeerLost(self._cut or short_message(error)) from error

    def _require_mesh(self) -> Mesh:
        if self._mesh is None:
            raise PeerLost("the group is closed")
        return self._mesh
