"""Heartbeat connections that detect a lost peer.

There are three ways to detect a loss, from fast to slow: the connection ends (the process died); the kernel's
``TCP_USER_TIMEOUT`` passes without an acknowledgement (node or network gone); or the process does not answer a
heartbeat although its host acknowledges (frozen).

Everything here runs in the peer service's loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from heterotrain_core.contract.plan import Rank

from heterotrain.network.authentication import Credentials, authenticate_streams, peer_role
from heterotrain.network.frames import read_frame, write_frame
from heterotrain.network.schemas import reply_problem

_log = logging.getLogger(__name__)

PeerKey = tuple[str, int]
"""A rank for its whole life: (worker uid, local rank)."""

FROZEN_FACTOR = 4.0
"""A frozen process gets this many times the time-out: a large load or a driver's start may block Python for seconds."""
CONNECT_S = 1.0
RECONNECT_S = 0.3


def key_of(rank: Rank) -> PeerKey:
    """Return the key of a rank of the plan."""
    return (rank.worker_uid, rank.local_rank)


@dataclass(slots=True)
class Heartbeat:
    """The heartbeat connection to one peer."""

    peer: Rank
    task: asyncio.Task[None] | None = None
    up: bool = False
    ever_up: bool = False
    lost: str = ""
    ping: asyncio.Event = field(default_factory=asyncio.Event)
    pong: asyncio.Event = field(default_factory=asyncio.Event)
    gone: asyncio.Event = field(default_factory=asyncio.Event)


class Heartbeats:
    """One heartbeat connection to each watched peer; every reply is passed on.

    Attributes:
        ends_expected: whether peers end because everything is done, so that their ends are no warning.
    """

    def __init__(
        self,
        *,
        timeout_s: float,
        message: Callable[[Rank], Mapping[str, Any]],
        on_reply: Callable[[Rank, Mapping[str, Any]], Awaitable[None]],
        changed: asyncio.Event,
        credentials: Credentials,
    ) -> None:
        """Start without any peers.

        Args:
            timeout_s: silence of a host after which its ranks count as lost.
            message: returns the heartbeat message for a peer.
            on_reply: receives the reply.
            changed: set whenever a connection comes up, goes down or is given up.
            credentials: of the job.
        """
        self._on_lost: Callable[[PeerKey, str], None] = lambda _key, _reason: None
        self.ends_expected = False
        self._timeout_s = timeout_s
        self._message = message
        self._on_reply = on_reply
        self._changed = changed
        self._credentials = credentials
        self._heartbeats: dict[PeerKey, Heartbeat] = {}

    def subscribe(self, on_lost: Callable[[PeerKey, str], None]) -> None:
        """Call a function with each peer that is given up, and the reason."""
        self._on_lost = on_lost

    def watch(self, peers: Mapping[PeerKey, Rank]) -> None:
        """Exchange heartbeats with exactly these peers."""
        for key in [key for key in self._heartbeats if key not in peers]:
            heartbeat = self._heartbeats.pop(key)
            if heartbeat.task is not None:
                heartbeat.task.cancel()
        for key, peer in peers.items():
            if key not in self._heartbeats:
                heartbeat = self._heartbeats[key] = Heartbeat(peer=peer)
                heartbeat.task = asyncio.get_running_loop().create_task(self._maintain(key, heartbeat))

    def is_up(self, key: PeerKey) -> bool:
        """Return whether the connection to this peer currently works."""
        heartbeat = self._heartbeats.get(key)
        return heartbeat is not None and heartbeat.up

    def is_undetermined(self, key: PeerKey) -> bool:
        """Return whether the connection neither works nor has been given up; soon it will be one or the other."""
        heartbeat = self._heartbeats.get(key)
        return heartbeat is not None and not heartbeat.up and not heartbeat.lost

    def is_lost(self, key: PeerKey) -> bool:
        """Return whether this peer has been given up and has not been reached since."""
        heartbeat = self._heartbeats.get(key)
        return heartbeat is not None and bool(heartbeat.lost)

    async def until_lost(self, key: PeerKey) -> None:
        """Return when this peer is given up the next time; never while nobody watches it."""
        heartbeat = self._heartbeats.get(key)
        await (heartbeat.gone if heartbeat is not None else asyncio.Event()).wait()

    def forget_losses(self) -> None:
        """Clear all losses: a peer that is still lost is given up again, with another call (``subscribe``)."""
        for heartbeat in self._heartbeats.values():
            heartbeat.lost = ""

    def beat_now(self) -> None:
        """Send the next heartbeat to every connected peer at once."""
        for heartbeat in self._heartbeats.values():
            heartbeat.ping.set()

    async def ping_all(self, timeout_s: float) -> None:
        """Exchange a heartbeat with every connected peer now, so that ended connections are detected."""
        waiting = []
        for heartbeat in self._heartbeats.values():
            if heartbeat.up:
                heartbeat.pong.clear()
                heartbeat.ping.set()
                waiting.append(asyncio.ensure_future(heartbeat.pong.wait()))
        if waiting:
            _, pending = await asyncio.wait(waiting, timeout=timeout_s)
            for task in pending:
                task.cancel()

    async def _maintain(self, key: PeerKey, heartbeat: Heartbeat) -> None:
        """Connect, exchange heartbeats and reconnect for as long as the peer is watched."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._timeout_s
        refused_since: float | None = None
        while True:
            patience_s = RECONNECT_S if heartbeat.ever_up else CONNECT_S
            try:
                async with asyncio.timeout(patience_s):
                    reader, writer = await asyncio.open_connection(heartbeat.peer.address, heartbeat.peer.peer_port)
            except OSError as error:
                if heartbeat.ever_up or loop.time() > deadline:
                    why = str(error) or f"it took no connection within {patience_s:g} s"
                    self._mark_lost(key, heartbeat, f"cannot be reached: {why}")
                await asyncio.sleep(0.1)
                continue
            _unacknowledged_limit(writer, self._timeout_s)
            authenticated = False
            try:
                # As patient as with a heartbeat: Python of a live peer may be blocked for seconds.
                async with asyncio.timeout(FROZEN_FACTOR * self._timeout_s):
                    role = peer_role(heartbeat.peer.worker_uid, heartbeat.peer.local_rank)
                    await authenticate_streams(reader, writer, self._credentials, role=role, listens=False)
                authenticated, refused_since = True, None
                await self._beat(heartbeat, reader, writer)
            except (asyncio.IncompleteReadError, ConnectionError, ValueError):
                # The connection ended, or the address belongs to another process: the next attempt shows whether the
                # peer is lost.
                if not authenticated:
                    refused_since = refused_since or loop.time()
                    if loop.time() - refused_since > self._timeout_s:
                        self._mark_lost(key, heartbeat, "is no longer the process at its address")
                    await asyncio.sleep(0.1)
            except OSError as error:  # frozen, or no acknowledgement: a new connection would get no answer either
                self._mark_lost(key, heartbeat, loss_reason(error, timeout_s=self._timeout_s))
            finally:
                writer.close()
            if heartbeat.up:
                heartbeat.up = False
                heartbeat.pong.set()
                self._changed.set()

    async def _beat(self, heartbeat: Heartbeat, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            heartbeat.ping.clear()
            await write_frame(writer, dict(self._message(heartbeat.peer)))
            async with asyncio.timeout(FROZEN_FACTOR * self._timeout_s):
                reply = await read_frame(reader)
            if "error" in reply:
                raise ValueError(str(reply["error"]))
            if problem := reply_problem("beat", reply):
                raise ValueError(problem)
            await self._on_reply(heartbeat.peer, reply)
            if not heartbeat.up:
                heartbeat.up = heartbeat.ever_up = True
                heartbeat.lost = ""
                self._changed.set()
            heartbeat.pong.set()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(heartbeat.ping.wait(), self._timeout_s / 4)

    def _mark_lost(self, key: PeerKey, heartbeat: Heartbeat, reason: str) -> None:
        heartbeat.up = False
        if heartbeat.lost:
            return
        heartbeat.lost = reason
        heartbeat.pong.set()
        heartbeat.gone.set()  # wakes all who wait now
        heartbeat.gone.clear()
        level = logging.DEBUG if self.ends_expected else logging.WARNING
        _log.log(level, "peer %s/%d %s", heartbeat.peer.worker, heartbeat.peer.local_rank, reason)
        self._on_lost(key, reason)
        self._changed.set()


def loss_reason(error: OSError, *, timeout_s: float) -> str:
    """Return why a peer counts as lost, for a log message, when its connection ended with ``error``.

    The kernel reports unacknowledged bytes as a ``TimeoutError`` with an error number; asyncio's ``TimeoutError`` for a
    missing reply has none.
    """
    if not isinstance(error, TimeoutError):
        return f"broke its connection: {error}"
    if error.errno is not None:
        return f"acknowledged nothing for {timeout_s:g} s"
    return f"answered no heartbeat for {FROZEN_FACTOR * timeout_s:g} s"


def _unacknowledged_limit(writer: asyncio.StreamWriter, seconds: float) -> None:
    connection = writer.get_extra_info("socket")
    option = getattr(socket, "TCP_USER_TIMEOUT", None)
    if connection is not None and option is not None:
        connection.setsockopt(socket.IPPROTO_TCP, option, int(seconds * 1000))
