"""One connection between every two ranks, for the ranks' own messages: votes, statistics, plans, states.

Gloo hands each operation to a thread, and a second thread that watches the sockets delivers the result. For a hundred
bytes this costs more than the transfer, and gloo's all-gather passes through all ranks in turn. Here the training
thread itself writes to every peer and reads from every peer; data that peers have sent meanwhile wait in the kernel.
Sends never block; only a rank that reads from a slow peer waits for it.
"""

from __future__ import annotations

import socket
from array import array
from collections.abc import Mapping, Sequence

from heterotrain.errors import UsageError
from heterotrain.network.authentication import shut_down
from heterotrain.network.mesh.exchange import AllGather, MessageExchange, Payload, Purpose, SendReceive


class Mesh:
    """The connections of one rank. ``cut`` may be called from any thread, all else only from the training thread."""

    def __init__(self, peers: Mapping[int, socket.socket], *, rank: int, limit_s: float) -> None:
        """Take over connections.

        Args:
            peers: a connected stream socket to every other rank.
            rank: this rank.
            limit_s: seconds after which a wait is given up.
        """
        self._peers = dict(sorted(peers.items()))
        self._rank = rank
        self._limit_s = limit_s
        self._exchanges = 0
        self._newest: MessageExchange | None = None
        for connection in self._peers.values():
            connection.setblocking(False)
            if connection.family in (socket.AF_INET, socket.AF_INET6):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def gather(self, data: bytes, purpose: Purpose = Purpose.LIBRARY) -> AllGather:
        """Start sending ``data`` to every rank and collecting the same number of bytes from each.

        Raises:
            OSError: a connection is broken.
            UsageError: another exchange has not ended.
        """
        started = AllGather(
            self._peers, rank=self._rank, number=self._next(), data=data, limit_s=self._limit_s, purpose=purpose
        )
        self._newest = started
        return started

    def send_receive(
        self,
        *,
        outgoing: Mapping[int, Payload],
        incoming: Mapping[int, Payload],
        purpose: Purpose = Purpose.LIBRARY,
    ) -> SendReceive:
        """Start sending and receiving payloads; every rank calls this, also one without payloads.

        Args:
            outgoing: payload by receiving rank.
            incoming: payload by sending rank, of the size that the sender sends.
            purpose: what the exchange is for; the same on every rank.

        Raises:
            OSError: a connection is broken.
            UsageError: another exchange has not ended.
        """
        started = SendReceive(
            self._peers, number=self._next(), limit_s=self._limit_s, outgoing=outgoing, incoming=incoming,
            purpose=purpose,
        )  # fmt: skip
        self._newest = started
        return started

    def cut(self) -> None:
        """Make every exchange fail, now and later, on this rank and on its peers."""
        for connection in self._peers.values():
            shut_down(connection)

    def close(self) -> None:
        """Close the connections; data already sent still arrive."""
        for connection in self._peers.values():
            connection.close()

    def _next(self) -> int:
        if self._newest is not None and not self._newest.is_done:
            raise UsageError(
                "two exchanges between ranks overlap: call job.sum, step.all_gather and torch.distributed from the "
                "thread that runs the training loop only"
            )
        self._exchanges = (self._exchanges + 1) % 2**32
        return self._exchanges


def pack_floats(values: Sequence[float]) -> bytes:
    """Return numbers as float64, 8 bytes each, in native byte order, which all ranks share."""
    return array("d", values).tobytes()


def unpack_floats(data: bytes) -> list[float]:
    """Return the numbers in the result of ``pack_floats``."""
    values = array("d")
    values.frombytes(data)
    return values.tolist()
