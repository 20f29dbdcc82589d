"""Links to peers that notice a lost one.

Three ways to notice a loss, from fast to slow: the connection ends (the process died), the kernel's ``TCP_USER_TIMEOUT``
passes without an acknowledgement (node or network gone), or the process answers no beat although its host does (frozen).

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

from heterotrain_core.contract.plan import Member

from heterotrain.network.frames import read_frame, write_frame

_log = logging.getLogger(__name__)

PeerKey = tuple[str, int]
"""A rank for its whole life: (worker uid, local rank)."""

FROZEN_FACTOR = 4.0
"""A process may hold the interpreter for seconds (a large load, a driver's start); its host still acknowledges."""
CONNECT_S = 1.0
RECONNECT_S = 0.3


def key_of(member: Member) -> PeerKey:
    """Return the key of a plan's member."""
    return (member.worker_uid, member.local_rank)


@dataclass(slots=True)
class Link:
    """This rank's view of one peer."""

    member: Member
    task: asyncio.Task[None] | None = None
    up: bool = False
    ever_up: bool = False
    lost: str = ""
    ping: asyncio.Event = field(default_factory=asyncio.Event)
    pong: asyncio.Event = field(default_factory=asyncio.Event)


class Links:
    """One link to each watched peer; every answer to a beat is handed on."""

    def __init__(
        self,
        *,
        timeout_s: float,
        beat: Callable[[Member], Mapping[str, Any]],
        heard: Callable[[Member, Mapping[str, Any]], Awaitable[None]],
        changed: asyncio.Event,
    ) -> None:
        """Watch nobody yet.

        Args:
            timeout_s: silence of a host after which its ranks count as lost.
            beat: makes the message for a peer.
            heard: takes its answer.
            changed: set whenever a link comes up, goes down or is given up.
        """
        self.on_lost: Callable[[PeerKey, str], None] = lambda _key, _reason: None
        self._timeout_s = timeout_s
        self._message = beat
        self._heard = heard
        self._changed = changed
        self._links: dict[PeerKey, Link] = {}

    def watch(self, members: Mapping[PeerKey, Member]) -> None:
        """Keep a link to exactly these peers."""
        for key in [key for key in self._links if key not in members]:
            link = self._links.pop(key)
            if link.task is not None:
                link.task.cancel()
        for key, member in members.items():
            if key not in self._links:
                link = self._links[key] = Link(member=member)
                link.task = asyncio.get_running_loop().create_task(self._keep(key, link))

    def is_up(self, key: PeerKey) -> bool:
        """Return whether the link to this peer works at the moment."""
        link = self._links.get(key)
        return link is not None and link.up

    def is_undetermined(self, key: PeerKey) -> bool:
        """Return whether the link neither works nor has been given up: it soon will be one or the other."""
        link = self._links.get(key)
        return link is not None and not link.up and not link.lost

    def is_lost(self, key: PeerKey) -> bool:
        """Return whether the link to this peer has been given up and has not come back since."""
        link = self._links.get(key)
        return link is not None and bool(link.lost)

    def begin_anew(self) -> None:
        """Forget who was lost: whoever still is, is given up once more, and ``on_lost`` hears of it again."""
        for link in self._links.values():
            link.lost = ""

    async def ping_all(self, timeout_s: float) -> None:
        """Exchange a beat with every linked peer now, so that connections that ended are known to have ended."""
        waiting = []
        for link in self._links.values():
            if link.up:
                link.pong.clear()
                link.ping.set()
                waiting.append(asyncio.ensure_future(link.pong.wait()))
        if waiting:
            _, pending = await asyncio.wait(waiting, timeout=timeout_s)
            for task in pending:
                task.cancel()

    async def _keep(self, key: PeerKey, link: Link) -> None:
        """Connect, beat, and connect again for as long as the peer is watched."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._timeout_s
        while True:
            patience_s = RECONNECT_S if link.ever_up else CONNECT_S
            try:
                async with asyncio.timeout(patience_s):
                    reader, writer = await asyncio.open_connection(link.member.address, link.member.peer_port)
            except OSError as error:
                if link.ever_up or loop.time() > deadline:
                    why = str(error) or f"it took no connection within {patience_s:g} s"
                    self._lose(key, link, f"cannot be reached: {why}")
                await asyncio.sleep(0.1)
                continue
            _unacknowledged_limit(writer, self._timeout_s)
            try:
                await self._beat(link, reader, writer)
            except (asyncio.IncompleteReadError, ConnectionError, ValueError):
                pass  # it ended, hung up, or is somebody else: whether it is lost shows when it is called again
            except OSError as error:  # frozen, or no acknowledgement: a new connection would wait in vain as well
                self._lose(key, link, silence(error, timeout_s=self._timeout_s))
            finally:
                writer.close()
            if link.up:
                link.up = False
                link.pong.set()
                self._changed.set()

    async def _beat(self, link: Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            link.ping.clear()
            await write_frame(writer, dict(self._message(link.member)))
            async with asyncio.timeout(FROZEN_FACTOR * self._timeout_s):
                reply = await read_frame(reader)
            if "error" in reply:
                raise ValueError(str(reply["error"]))
            await self._heard(link.member, reply)
            if not link.up:
                link.up = link.ever_up = True
                link.lost = ""
                self._changed.set()
            link.pong.set()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(link.ping.wait(), self._timeout_s / 4)

    def _lose(self, key: PeerKey, link: Link, reason: str) -> None:
        link.up = False
        if link.lost:
            return
        link.lost = reason
        link.pong.set()
        _log.warning("peer %s/%d %s", link.member.worker, link.member.local_rank, reason)
        self.on_lost(key, reason)
        self._changed.set()


def silence(error: OSError, *, timeout_s: float) -> str:
    """Return what a peer did not do, and for how long, when its link ended by ``error``.

    The kernel reports unacknowledged bytes as a ``TimeoutError`` with a number; asyncio's own, for a beat, has none.
    """
    if not isinstance(error, TimeoutError):
        return f"broke its connection: {error}"
    if error.errno is not None:
        return f"acknowledged nothing for {timeout_s:g} s"
    return f"answered no beat for {FROZEN_FACTOR * timeout_s:g} s"


def _unacknowledged_limit(writer: asyncio.StreamWriter, seconds: float) -> None:
    connection = writer.get_extra_info("socket")
    option = getattr(socket, "TCP_USER_TIMEOUT", None)
    if connection is not None and option is not None:
        connection.setsockopt(socket.IPPROTO_TCP, option, int(seconds * 1000))
