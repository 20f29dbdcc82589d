"""One connection between every two ranks, for the few bytes that all ranks tell each other in every step.

Gloo hands each operation to a thread of its own, whose answer comes by way of a second one that watches the sockets: for a
hundred bytes that costs more than the bytes' way, and its all-gather goes round all ranks one after the other. Here the
training thread itself writes to every peer and reads from every peer; what peers have sent meanwhile lies ready in
the kernel. Nothing waits for the slowest but the one who reads.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
import struct
import time
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from heterotrain.errors import UsageError
from heterotrain.network.sockets import address_of

_HEAD = struct.Struct("<II")
"""Which exchange of the formation this is, and how many bytes follow."""
_HELLO = struct.Struct("<16sI")
"""What only those know who read the store, and the rank that calls."""
HELLO_S = 2.0
"""For a caller to say who it is: its greeting is on the way when the connection stands."""


class Mesh:
    """The connections of one rank. ``cut`` may be called from any thread; everything else belongs to the training thread."""

    def __init__(self, peers: Mapping[int, socket.socket], *, rank: int, limit_s: float) -> None:
        """Take connections over.

        Args:
            peers: a connected stream socket to every other rank.
            rank: this rank.
            limit_s: seconds after which a wait is given up.
        """
        self._peers = dict(sorted(peers.items()))
        self._rank = rank
        self._limit_s = limit_s
        self._exchanges = 0
        for connection in self._peers.values():
            connection.setblocking(False)
            if connection.family in (socket.AF_INET, socket.AF_INET6):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def gather(self, data: bytes) -> Gathering:
        """Send ``data`` to every rank, and begin to collect what they send: as many bytes from each.

        Raises:
            OSError: a connection is broken.
        """
        self._exchanges = (self._exchanges + 1) % 2**32
        return Gathering(
            self._peers, rank=self._rank, frame=_HEAD.pack(self._exchanges, len(data)) + data, limit_s=self._limit_s
        )

    def cut(self) -> None:
        """Make every exchange fail, now and later, here and at the peers."""
        for connection in self._peers.values():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Let go of the connections; what was sent still arrives."""
        for connection in self._peers.values():
            connection.close()


class Gathering:
    """One exchange: complete, in ``rows`` by rank, when ``wait`` has returned."""

    def __init__(self, peers: Mapping[int, socket.socket], *, rank: int, frame: bytes, limit_s: float) -> None:
        self._peers = peers
        self._rank = rank
        self._frame = frame
        self._limit_s = limit_s
        self._got = {peer: bytearray(len(frame)) for peer in peers}
        self._missing = dict.fromkeys(peers, len(frame))
        self._unsent: dict[int, memoryview] = {}
        for peer in peers:
            self._unsent[peer] = memoryview(frame)
            self._send(peer)

    @property
    def rows(self) -> list[bytes]:
        """What every rank sent, by rank."""
        rows = {peer: bytes(memoryview(got)[_HEAD.size :]) for peer, got in self._got.items()}
        rows[self._rank] = self._frame[_HEAD.size :]
        return [rows[rank] for rank in range(len(rows))]

    def wait(self) -> None:
        """Return when everything has arrived, and what this rank sends has left it.

        Raises:
            OSError: a connection is broken, or nothing moved for the time limit.
            UsageError: a peer takes part in another exchange.
        """
        for peer in self._peers:
            self._receive(peer)
        if not self._missing and not self._unsent:
            return
        poll = select.poll()
        number_of = {connection.fileno(): peer for peer, connection in self._peers.items()}
        for peer in self._missing.keys() | self._unsent.keys():
            poll.register(self._peers[peer], self._wanted(peer))
        while self._missing or self._unsent:
            ready = poll.poll(self._limit_s * 1000)
            if not ready:
                raise TimeoutError(f"nothing came from ranks {sorted(self._missing)} for {self._limit_s:g} s")
            for descriptor, _event in ready:
                peer = number_of[descriptor]
                self._send(peer)
                self._receive(peer)
                if wanted := self._wanted(peer):
                    poll.modify(descriptor, wanted)
                else:
                    poll.unregister(descriptor)

    def _wanted(self, peer: int) -> int:
        return (select.POLLIN if peer in self._missing else 0) | (select.POLLOUT if peer in self._unsent else 0)

    def _send(self, peer: int) -> None:
        left = self._unsent.get(peer)
        with contextlib.suppress(BlockingIOError):
            while left:
                left = left[self._peers[peer].send(left) :]
        if left:
            self._unsent[peer] = left
        else:
            self._unsent.pop(peer, None)

    def _receive(self, peer: int) -> None:
        missing, got = self._missing.get(peer, 0), self._got[peer]
        with contextlib.suppress(BlockingIOError):
            while missing:
                count = self._peers[peer].recv_into(memoryview(got)[len(got) - missing :])
                if not count:
                    raise ConnectionResetError(f"rank {peer} ended its connection")
                missing -= count
        if len(got) - missing >= _HEAD.size and not got.startswith(self._frame[: _HEAD.size]):
            raise UsageError(
                f"rank {peer} exchanges {_HEAD.unpack_from(got)[1]} bytes where this rank exchanges "
                f"{len(self._frame) - _HEAD.size}: every rank has to run the same model with the same layers, and to call "
                "job.sum with the same values"
            )
        if missing:
            self._missing[peer] = missing
        else:
            self._missing.pop(peer, None)


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
    with contextlib.ExitStack() as unfinished, socket.create_server(("", 0), family=family, backlog=world_size) as door:
        store.set(f"mesh-{rank}", secret + f"{door.getsockname()[1]} {own}".encode())
        for other in range(rank):
            told = bytes(store.get(f"mesh-{other}"))
            port, host = told[16:].decode().split()
            peers[other] = unfinished.enter_context(socket.create_connection((host, int(port)), _left(end_s)))
            peers[other].sendall(_HELLO.pack(told[:16], rank))
        while len(peers) < world_size - 1:
            door.settimeout(_left(end_s))
            caller = unfinished.enter_context(door.accept()[0])
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


def packed(values: Sequence[float]) -> bytes:
    """Return numbers as float64, in the byte order that all ranks have."""
    return array("d", values).tobytes()


def unpacked(data: bytes) -> list[float]:
    """Return the numbers that ``packed`` made this of."""
    values = array("d")
    values.frombytes(data)
    return values.tolist()


def _left(end_s: float) -> float:
    left_s = end_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("not every rank has connected in time")
    return left_s
