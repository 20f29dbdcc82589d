"""Carries the connections of a gloo group inside authenticated, encrypted ones.

Gloo of torch's wheels is built without TLS. So with encryption, its device listens on a loopback address, and a thread
moves the bytes between gloo's local connections and connections of TLS between the ranks::

    gloo of rank 2 -> door of rank 2 for rank 0 ==TLS==> rank 0 -> listener of gloo of rank 0

Rank r has the loopback address 127.1.0.0 + r + 1 on every host. Gloo publishes address and port of its listener in the
store. What a rank reads of another one gets the port of its own door to that rank instead. Of two ranks, the one with
the higher address calls the other, and addresses are in the order of the ranks, so all agree on it.

The bytes of one step pass through the kernel once more and are encrypted by the processor (docs/benchmarks.md).
"""

from __future__ import annotations

import logging
import select
import socket
import struct
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from heterotrain.network.authentication import Credentials
from heterotrain.network.encryption import WOULD_BLOCK, shut_down

_log = logging.getLogger(__name__)

_Store: Any = dist.Store  # type: ignore[attr-defined]  # not in torch's type information
BUFFER_BYTES = 128 * 1024
"""For each direction of each connection."""
TURNS = 16
"""Reads and writes of one direction before the others get a turn."""
_FIRST_ADDRESS = int.from_bytes(socket.inet_aton("127.1.0.0"), "big") + 1
_FAMILY = struct.pack("=H", socket.AF_INET)
_PORT = struct.Struct("!H")


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """How gloo's connections reach other ranks of an encrypted job, or of one over IPv6.

    Attributes:
        address: at which other ranks reach this one; ``None`` for that of gloo's interface.
        credentials: of the job; with TLS, tunnels carry the connections.
    """

    address: str | None
    credentials: Credentials


def loopback_of(rank: int) -> str:
    """Return the loopback address that stands for a rank of a group."""
    return socket.inet_ntoa((_FIRST_ADDRESS + rank).to_bytes(4, "big"))


class Tunnels:
    """The connections of one rank's gloo group; they end when gloo ends them, or with ``cut``."""

    def __init__(self, peers: Mapping[int, socket.socket], *, rank: int) -> None:
        """Take over connections, and open a door for gloo to each of the ranks below.

        Args:
            peers: a connected stream socket to every other rank of the group, authenticated and encrypted.
            rank: this rank in the group.
        """
        self.own_port = 0
        self._rank = rank
        self._lock = threading.Lock()
        self._pairs = {peer: _Pair(connection) for peer, connection in peers.items()}
        for peer in range(rank):
            self._pairs[peer].door = socket.create_server((loopback_of(peer), 0), backlog=1)
        self._doors = {peer: pair.door.getsockname()[1] for peer, pair in self._pairs.items() if pair.door}
        threading.Thread(target=self._run, name="heterotrain-tunnels", daemon=True).start()

    def learn(self, value: bytes) -> None:
        """Find the port of this rank's gloo in what gloo publishes."""
        for place in _places(value, self._rank):
            (self.own_port,) = _PORT.unpack_from(value, place)

    def with_doors(self, value: bytes) -> bytes:
        """Return what another rank's gloo has published, with the ports of this rank's doors."""
        changed = bytearray(value)
        for peer, port in self._doors.items():
            for place in _places(value, peer):
                _PORT.pack_into(changed, place, port)
        return bytes(changed)

    def cut(self) -> None:
        """End all connections; safe from any thread."""
        with self._lock:
            for pair in self._pairs.values():
                for each in pair.sockets():
                    shut_down(each)

    def _run(self) -> None:
        """Move bytes until every connection has ended; whatever happens, no connection outlives the thread."""
        try:
            self._move_all()
        except Exception:  # noqa: BLE001  # gloo would wait for this thread for half an hour
            _log.exception("the tunnels of rank %d failed", self._rank)
        finally:
            with self._lock:
                for pair in self._pairs.values():
                    pair.close()

    def _move_all(self) -> None:
        open_pairs = list(self._pairs.values())
        while open_pairs:
            poll, more = select.poll(), False
            for pair in open_pairs:
                for descriptor, events in pair.wanted().items():
                    poll.register(descriptor, events)
                more = more or pair.has_more
            ready = {descriptor for descriptor, _ in poll.poll(0 if more else None)}
            for pair in open_pairs:
                if not pair.has_more and not ready.intersection(pair.wanted()):
                    continue
                try:
                    pair.move(self._own_gloo)
                except OSError:
                    pair.is_over = True
                if pair.is_over:
                    with self._lock:
                        pair.close()
            open_pairs = [pair for pair in open_pairs if not pair.is_over]

    def _own_gloo(self) -> tuple[str, int]:
        return loopback_of(self._rank), self.own_port


class TunnelStore(_Store):  # type: ignore[misc]  # as above
    """The store as gloo sees it: published addresses lead to the doors."""

    def __init__(self, store: Any, tunnels: Tunnels) -> None:
        super().__init__()
        self._store, self._tunnels = store, tunnels

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key, and note the port of this rank's gloo in it."""
        plain = value.encode() if isinstance(value, str) else bytes(value)
        self._tunnels.learn(plain)
        self._store.set(key, plain)

    def get(self, key: str) -> bytes:
        """Return a key's value."""
        return self._tunnels.with_doors(bytes(self._store.get(key)))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:  # noqa: ARG002  # torch's signature
        """Return when all these keys are set."""
        for key in keys:
            self._store.get(key)


class _Pair:
    """The connection between two ranks: gloo's local one, and the encrypted one."""

    def __init__(self, encrypted: socket.socket) -> None:
        encrypted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        encrypted.setblocking(False)
        self.encrypted = encrypted
        self.door: socket.socket | None = None
        self.local: socket.socket | None = None
        self.is_over = False
        self.has_more = False
        self._flows: tuple[_Flow, ...] = ()

    def sockets(self) -> Iterable[socket.socket]:
        """Return the sockets that are open."""
        return [each for each in (self.encrypted, self.door, self.local) if each is not None]

    def wanted(self) -> dict[int, int]:
        """Return the events to wait for, by descriptor."""
        if self.door is not None:
            return {self.door.fileno(): select.POLLIN, self.encrypted.fileno(): select.POLLIN}
        if self.local is None:
            return {self.encrypted.fileno(): select.POLLIN}
        events = {self.encrypted.fileno(): 0, self.local.fileno(): 0}
        for flow in self._flows:
            events[flow.source.fileno()] |= select.POLLIN if flow.has_room else 0
            events[flow.sink.fileno()] |= select.POLLOUT if flow.has_data else 0
        return {descriptor: wanted for descriptor, wanted in events.items() if wanted}

    def move(self, own_gloo: Any) -> None:
        """Move what can be moved without waiting.

        Raises:
            OSError: a connection broke.
        """
        if self.local is None:
            self.local = self._connected(own_gloo)
            if self.local is None:
                return
            self.local.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.local.setblocking(False)
            self._flows = _Flow(self.local, self.encrypted), _Flow(self.encrypted, self.local)
        moved = [flow.move() for flow in self._flows]  # both, whatever the first one says
        self.has_more = any(moved)
        self.is_over = any(flow.is_over for flow in self._flows)

    def close(self) -> None:
        """Close all sockets."""
        for each in self.sockets():
            each.close()

    def _connected(self, own_gloo: Any) -> socket.socket | None:
        """Return the connection with this rank's gloo, as soon as it has called or the other rank's gloo has."""
        if self.door is None:
            return socket.create_connection(own_gloo())
        self.door.setblocking(False)
        try:
            connection, _ = self.door.accept()
        except BlockingIOError:
            try:
                first = self.encrypted.recv(1)
            except WOULD_BLOCK:
                return None
            raise ConnectionResetError("both ranks call" if first else "the other rank left") from None
        self.door.close()
        self.door = None
        return connection


class _Flow:
    """One direction of a pair."""

    def __init__(self, source: socket.socket, sink: socket.socket) -> None:
        self.source, self.sink = source, sink
        self._buffer = memoryview(bytearray(BUFFER_BYTES))
        self._start = self._stop = 0
        self._ended = False

    @property
    def has_room(self) -> bool:
        """Whether more can be read."""
        return not self._ended and self._stop < len(self._buffer)

    @property
    def has_data(self) -> bool:
        """Whether something waits to be written."""
        return self._start < self._stop

    @property
    def is_over(self) -> bool:
        """Whether the source has ended and everything has been passed on."""
        return self._ended and not self.has_data

    def move(self) -> bool:
        """Move bytes; return whether more could be moved at once.

        Raises:
            OSError: a connection broke.
        """
        return all(self._read() | self._write() for _ in range(TURNS))

    def _read(self) -> bool:
        if not self.has_data:
            self._start = self._stop = 0
        if not self.has_room:
            return False
        try:
            count = self.source.recv_into(self._buffer[self._stop :])
        except WOULD_BLOCK:
            return False
        self._stop += count
        self._ended = not count
        return bool(count)

    def _write(self) -> bool:
        if not self.has_data:
            return False
        try:
            self._start += self.sink.send(self._buffer[self._start : self._stop])
        except WOULD_BLOCK:
            return False
        return True


def _places(value: bytes, rank: int) -> Iterable[int]:
    """Yield where the port of a rank stands in serialised socket addresses: family, port, address."""
    address = socket.inet_aton(loopback_of(rank))
    found = value.find(address)
    while found >= 0:
        if found >= 4 and value[found - 4 : found - 2] == _FAMILY:  # noqa: PLR2004  # two numbers of two bytes
            yield found - 2
        found = value.find(address, found + 1)
