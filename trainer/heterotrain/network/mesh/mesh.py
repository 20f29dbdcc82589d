"""One connection between every two ranks, for all that ranks tell each other themselves: votes, statistics, plans, states.

Gloo hands each operation to a thread of its own, whose answer comes by way of a second one that watches the sockets: for a
hundred bytes that costs more than the bytes' way, and its all-gather goes round all ranks one after the other. Here the
training thread itself writes to every peer and reads from every peer; what peers have sent meanwhile lies ready in
the kernel. Nothing waits for the slowest but the one who reads.
"""

from __future__ import annotations

import contextlib
import socket
from array import array
from collections.abc import Mapping, Sequence

from heterotrain.network.mesh.exchange import AllGather, Payload, SendReceive


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

    def gather(self, data: bytes) -> AllGather:
        """Send ``data`` to every rank, and begin to collect what they send: as many bytes from each.

        Raises:
            OSError: a connection is broken.
        """
        return AllGather(self._peers, rank=self._rank, number=self._next(), data=data, limit_s=self._limit_s)

    def send_receive(self, *, outgoing: Mapping[int, Payload], incoming: Mapping[int, Payload]) -> SendReceive:
        """Begin to send cargo, and to take what others send; every rank calls this, those without cargo as well.

        Args:
            outgoing: what goes to which rank.
            incoming: what is expected from which rank: as many bytes as that one sends.

        Raises:
            OSError: a connection is broken.
        """
        return SendReceive(
            self._peers, number=self._next(), limit_s=self._limit_s, outgoing=outgoing, incoming=incoming
        )  # fmt: skip

    def cut(self) -> None:
        """Make every exchange fail, now and later, here and at the peers."""
        for connection in self._peers.values():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Let go of the connections; what was sent still arrives."""
        for connection in self._peers.values():
            connection.close()

    def _next(self) -> int:
        self._exchanges = (self._exchanges + 1) % 2**32
        return self._exchanges


def pack_floats(values: Sequence[float]) -> bytes:
    """Return numbers as float64, 8 bytes each, in the byte order that all ranks have."""
    return array("d", values).tobytes()


def unpack_floats(data: bytes) -> list[float]:
    """Return the numbers that ``packed`` made this of."""
    values = array("d")
    values.frombytes(data)
    return values.tolist()
