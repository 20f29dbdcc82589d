"""Simultaneous transfers between ranks, each pair over its own connection, driven by the waiting thread.

Every exchange of a formation has a number, and every rank starts them in the same order. So data read from a connection
always belong to the current exchange. Each frame still carries that number, its purpose and its length, in case the
ranks' scripts differ: the error then names what each of the two ranks does.
"""

from __future__ import annotations

import select
import socket
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum

from heterotrain.errors import UsageError

HEAD = struct.Struct("<IIQ")
"""Header of every frame: the number of the exchange in its formation, its purpose, and the bytes that follow."""
ONE_CALL_BYTES = 64 * 1024
"""Frames up to this size are received in one call, if they have arrived."""
TURNS = 16
"""Reads or writes on one connection before the others get a turn, so that a fast peer does not delay the rest."""


class Purpose(IntEnum):
    """What an exchange is for."""

    LIBRARY = 0
    VOTE = 1
    SUM = 2
    BATCH_NORM = 3
    SCRIPT = 4
    ROUNDS = 5
    GATHER = 6
    CONFIRM = 7
    STREAM = 8


CALLS = {
    Purpose.LIBRARY: "an exchange of the library",
    Purpose.VOTE: "step.apply",
    Purpose.SUM: "job.sum",
    Purpose.BATCH_NORM: "the forward or backward pass of a BatchNorm layer",
    Purpose.SCRIPT: "a collective of torch.distributed",
    Purpose.ROUNDS: "step.micro_batches",
    Purpose.GATHER: "step.all_gather, or its backward pass",
    Purpose.CONFIRM: "the end of step.apply",
    Purpose.STREAM: "the samples of a stream",
}
"""The call of the script behind each purpose, for error messages."""


@dataclass(frozen=True, slots=True)
class Payload:
    """The data sent in one direction between two ranks.

    Attributes:
        size_bytes: total size of all views.
        views: the memory to send or fill, in order; each view is requested only when it is needed.
    """

    size_bytes: int
    views: Iterable[memoryview]


class MessageExchange:
    """Sends and receives until all data have been transferred; ``wait`` belongs to the training thread.

    Attributes:
        is_done: whether ``wait`` has ended.
    """

    def __init__(
        self, peers: Mapping[int, socket.socket], *, number: int, limit_s: float, purpose: Purpose = Purpose.LIBRARY
    ) -> None:
        """Prepare an exchange.

        Args:
            peers: connected, non-blocking sockets, by rank, ascending.
            number: number of this exchange in its formation.
            purpose: what it is for; the same on every rank.
            limit_s: seconds without any progress after which ``wait`` gives up.
        """
        self._peers = peers
        self._number = number
        self._purpose = purpose
        self._limit_s = limit_s
        self._unsent: dict[int, memoryview] = {}
        self._missing: dict[int, memoryview] = {}
        self._to_send: dict[int, Iterator[memoryview]] = {}
        self._to_fill: dict[int, Iterator[memoryview]] = {}
        self._heads: dict[int, tuple[memoryview, bytes]] = {}
        self.is_done = False

    def send(self, peer: int, first: bytes, then: Iterable[memoryview] = ()) -> None:
        """Start sending to a peer; ``first`` starts with the frame's header.

        Raises:
            OSError: the connection is broken.
        """
        self._unsent[peer] = memoryview(first)
        self._to_send[peer] = iter(then)
        self._push(peer)

    def fill(self, peer: int, first: bytearray, then: Iterable[memoryview] = (), *, size_bytes: int) -> None:
        """Expect a frame with ``size_bytes`` after its header; ``first`` takes the header and perhaps more."""
        whole = self._missing[peer] = memoryview(first)
        self._to_fill[peer] = iter(then)
        self._heads[peer] = (whole, HEAD.pack(self._number, self._purpose, size_bytes))

    def wait(self) -> None:
        """Return when all data have arrived and all outgoing data have been sent.

        Raises:
            OSError: a connection is broken, or (``TimeoutError``) no data moved within the time limit.
            UsageError: a peer takes part in a different exchange.
        """
        try:
            self._finish()
        finally:
            self.is_done = True

    def _finish(self) -> None:
        for peer in tuple(self._missing):
            self._pull(peer)
        if not self._missing and not self._unsent:
            return
        poll = select.poll()
        number_of = {connection.fileno(): peer for peer, connection in self._peers.items()}
        for peer in self._missing.keys() | self._unsent.keys():
            poll.register(self._peers[peer], self._wanted(peer))
        while self._missing or self._unsent:
            ready = poll.poll(self._limit_s * 1000)
            if not ready:
                raise TimeoutError(f"no data came from ranks {sorted(self._missing)} for {self._limit_s:g} s")
            for descriptor, _event in ready:
                peer = number_of[descriptor]
                self._push(peer)
                self._pull(peer)
                if wanted := self._wanted(peer):
                    poll.modify(descriptor, wanted)
                else:
                    poll.unregister(descriptor)

    def _wanted(self, peer: int) -> int:
        return (select.POLLIN if peer in self._missing else 0) | (select.POLLOUT if peer in self._unsent else 0)

    def _push(self, peer: int) -> None:
        left = self._unsent.pop(peer, None)
        for _ in range(TURNS):
            if left is None:
                return
            try:
                count = self._peers[peer].send(left)
            except BlockingIOError:
                break
            left = _rest(left[count:], self._to_send[peer])
        if left is not None:
            self._unsent[peer] = left

    def _pull(self, peer: int) -> None:
        missing = self._missing.pop(peer, None)
        for _ in range(TURNS):
            if missing is None:
                return
            try:
                count = self._peers[peer].recv_into(missing)
            except BlockingIOError:
                break
            if not count:
                raise ConnectionResetError(f"rank {peer} ended its connection")
            missing = missing[count:]
            if peer in self._heads:
                self._check(peer, missing)
            missing = _rest(missing, self._to_fill[peer])
        if missing is not None:
            self._missing[peer] = missing

    def _check(self, peer: int, missing: memoryview) -> None:
        """Check the frame's header as soon as it is complete: a frame of another length might never be."""
        whole, head = self._heads[peer]
        if len(whole) - len(missing) < HEAD.size:
            return
        received = bytes(whole[: HEAD.size])
        if received != head:
            raise UsageError(_difference(peer, theirs=HEAD.unpack(received), own=HEAD.unpack(head)))
        del self._heads[peer]


def _difference(peer: int, *, theirs: tuple[int, int, int], own: tuple[int, int, int]) -> str:
    """Return the error message for a frame that does not belong to this rank's exchange."""
    known = {int(purpose) for purpose in Purpose}
    if theirs[1] != own[1] and theirs[1] in known:
        return (
            f"rank {peer} is in {CALLS[Purpose(theirs[1])]} while this rank is in {CALLS[Purpose(own[1])]}: every rank "
            "has to make the same calls in the same order. If they are made for each micro-batch, use "
            "job.steps(..., lockstep=True), because shares differ by rank."
        )
    return (
        f"rank {peer} exchanges {theirs[2]} bytes where this rank exchanges {own[2]}: "
        "run the same model with the same layers on every rank, and call job.sum with the same values"
    )


def _rest(view: memoryview | None, then: Iterator[memoryview]) -> memoryview | None:
    """Return the rest to transfer: this view, or the next one that is not empty; ``None`` when nothing is left."""
    while view is not None and not view:
        view = next(then, None)
    return view


class AllGather(MessageExchange):
    """Every rank sends the same number of bytes to all others; ``rows`` holds them after ``wait``."""

    def __init__(
        self, peers: Mapping[int, socket.socket], *, rank: int, number: int, data: bytes, limit_s: float,
        purpose: Purpose = Purpose.LIBRARY,
    ) -> None:  # fmt: skip
        """Start sending ``data``; the same number of bytes is expected from every rank.

        Args:
            peers: see ``MessageExchange``.
            rank: this rank.
            number: see ``MessageExchange``.
            data: the bytes of this rank.
            limit_s: see ``MessageExchange``.
            purpose: see ``MessageExchange``.

        Raises:
            OSError: a connection is broken.
        """
        super().__init__(peers, number=number, limit_s=limit_s, purpose=purpose)
        self._rank, self._data, self._head = rank, data, HEAD.pack(number, purpose, len(data))
        self._frames: dict[int, bytes | bytearray] = dict.fromkeys(peers, b"")
        self._pending = peers
        frame = self._head + data
        for peer, connection in peers.items():  # a frame mostly goes in one call; the general way takes twice as long
            try:
                count = connection.send(frame)
            except BlockingIOError:
                count = 0
            if count < len(frame):
                self._unsent[peer], self._to_send[peer] = memoryview(frame)[count:], iter(())

    def _finish(self) -> None:
        pending, self._pending = self._pending, {}
        head, size = self._head, HEAD.size + len(self._data)
        for peer, connection in pending.items():
            found = b""
            if size <= ONE_CALL_BYTES:
                try:
                    found = connection.recv(size)
                except BlockingIOError:
                    pass
                else:
                    if not found:
                        raise ConnectionResetError(f"rank {peer} ended its connection")
            if len(found) == size and found.startswith(head):
                self._frames[peer] = found
                continue
            frame = self._frames[peer] = bytearray(found.ljust(size))
            self.fill(peer, frame, size_bytes=len(self._data))
            self._missing[peer] = memoryview(frame)[len(found) :]
            self._check(peer, self._missing[peer])
        super()._finish()

    @property
    def rows(self) -> list[bytes]:
        """The bytes of every rank, by rank."""
        rows = [bytes(frame[HEAD.size :]) for frame in self._frames.values()]
        rows.insert(self._rank, self._data)
        return rows


class SendReceive(MessageExchange):
    """Every rank sends payloads of its own to some of the others; they are in place after ``wait``."""

    def __init__(
        self, peers: Mapping[int, socket.socket], *, number: int, limit_s: float,
        outgoing: Mapping[int, Payload], incoming: Mapping[int, Payload], purpose: Purpose = Purpose.LIBRARY,
    ) -> None:  # fmt: skip
        """Start sending.

        Args:
            peers: see ``MessageExchange``.
            number: see ``MessageExchange``.
            limit_s: see ``MessageExchange``.
            outgoing: payload by receiving rank.
            incoming: payload by sending rank, with memory to fill; the sender's payload has the same size.
            purpose: see ``MessageExchange``.

        Raises:
            OSError: a connection is broken.
        """
        super().__init__(peers, number=number, limit_s=limit_s, purpose=purpose)
        for peer, payload in incoming.items():
            self.fill(peer, bytearray(HEAD.size), payload.views, size_bytes=payload.size_bytes)
        for peer, payload in outgoing.items():
            self.send(peer, HEAD.pack(number, purpose, payload.size_bytes), payload.views)
