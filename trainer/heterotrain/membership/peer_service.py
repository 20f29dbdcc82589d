"""The peer service of a rank: a listener for the whole life of the process, requests to peers, and heartbeats.

It runs an asyncio loop in a thread of its own, so that a rank answers its peers while it computes. Nothing is read from
a connection before both sides have proved that they are ranks of this job (``network.authentication``). What is read is
checked before it is used (``network.schemas``).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from heterotrain_core.contract.plan import Rank

from heterotrain.clock import Clock, ClockLoop
from heterotrain.errors import UsageError
from heterotrain.identity import Identity
from heterotrain.membership.plan_source import PlanSource
from heterotrain.network.authentication import Credentials, authenticate_streams, peer_role
from heterotrain.network.callers import Callers
from heterotrain.network.connection_setup import HostedStore, connect_store
from heterotrain.network.frames import read_frame, write_frame
from heterotrain.network.gloo.abort import open_sockets
from heterotrain.network.heartbeat import CONNECT_S, Heartbeats, PeerKey, key_of
from heterotrain.network.key_store import KeyStore, KeyTable, serve
from heterotrain.network.schemas import checked_request, reply_problem

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

Handler = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]
CLOSE_S = 2.0
"""Limit for the end of the connections, and for that of the thread, when a service is closed."""


class PeerService:
    """Listener, heartbeats and requests. ``async`` methods run in its loop; ``call`` bridges from other threads."""

    def __init__(
        self,
        identity: Identity,
        source: PlanSource,
        *,
        timeout_s: float,
        credentials: Credentials,
        clock: Clock = time.monotonic,
    ) -> None:
        """Make a service that does not listen yet.

        Args:
            identity: this rank.
            source: the plans; a new one wakes all waits, and one from the mount goes to the peers at once.
            timeout_s: silence of a host after which its ranks count as lost.
            credentials: of the job.
            clock: measures all limits in the service's loop.
        """
        self.identity = identity
        self.source = source
        self.timeout_s = timeout_s
        self._credentials = credentials
        self.handlers: dict[str, Handler] = {"beat": self._on_beat, "plan": self._on_plan, "offer": self._on_offer}
        self._reply_fields: Callable[[], Mapping[str, Any]] = dict
        self.on_reply: Callable[[Mapping[str, Any]], None] = lambda _answer: None
        self.loop = ClockLoop(clock)
        self._changed = asyncio.Event()
        self.heartbeats = Heartbeats(
            timeout_s=timeout_s,
            message=lambda peer: self._envelope(peer, "beat"),
            on_reply=self._gossip,
            changed=self._changed,
            credentials=self._credentials,
        )
        role = peer_role(identity.worker_uid, identity.local_rank)
        self.callers = Callers(self._credentials, role=role, where="the peer port")
        self._tables: dict[int, KeyTable] = {}
        self._thread = threading.Thread(target=self._run, name="heterotrain-peers", daemon=True)
        self._server: asyncio.Server | None = None
        source.subscribe(self.notify, self.spread)

    def subscribe(
        self,
        *,
        on_lost: Callable[[PeerKey, str], None],
        on_reply: Callable[[Mapping[str, Any]], None],
        reply_fields: Callable[[], Mapping[str, Any]],
    ) -> None:
        """Hear of peers, before the service starts.

        Args:
            on_lost: called with a peer that is given up, and the reason.
            on_reply: receives every reply of a peer.
            reply_fields: returns fields that every reply to a peer carries in addition to the plan's version.
        """
        self.on_reply, self._reply_fields = on_reply, reply_fields
        self.heartbeats.subscribe(on_lost)

    # -- from other threads ------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Listen on the peer port.

        Raises:
            UsageError: the port cannot be used.
        """
        self._thread.start()
        self.call(self._listen()).result()

    def close(self) -> None:
        """Stop listening and close every heartbeat connection."""
        if self.loop.is_closed() or not self._thread.is_alive():
            return
        with contextlib.suppress(Exception):
            self.call(self._close_all()).result(timeout=CLOSE_S)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(timeout=CLOSE_S)

    def call(self, work: Coroutine[Any, Any, _T]) -> Future[_T]:
        """Run a coroutine in the service's loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def notify(self) -> None:
        """Wake all waits for a change; safe from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nothing waits
            self.loop.call_soon_threadsafe(self._changed.set)

    def spread(self) -> None:
        """Let every watched peer learn of this rank's plan at once; safe from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
            self.loop.call_soon_threadsafe(self.heartbeats.beat_now)

    # -- in the loop -------------------------------------------------------------------------------------------------

    async def wait_change(self, timeout_s: float) -> None:
        """Return when something has changed, or after ``timeout_s``."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), timeout_s)
        self._changed.clear()

    def watch(self, peers: Iterable[Rank]) -> None:
        """Exchange heartbeats with exactly these peers; this rank itself is left out."""
        me = (self.identity.worker_uid, self.identity.local_rank)
        self.heartbeats.watch({key_of(peer): peer for peer in peers if key_of(peer) != me})

    async def request(
        self, peer: Rank, op: str, body: Mapping[str, Any], *, timeout_s: float = CONNECT_S
    ) -> dict[str, Any] | None:
        """Send one request; ``None`` when the peer did not answer, refused, or is another pod by now."""
        try:
            async with asyncio.timeout(timeout_s):
                reader, writer = await asyncio.open_connection(peer.address, peer.peer_port)
                try:
                    role = peer_role(peer.worker_uid, peer.local_rank)
                    await authenticate_streams(reader, writer, self._credentials, role=role, listens=False)
                    await write_frame(writer, self._envelope(peer, op) | dict(body))
                    reply = await read_frame(reader)
                finally:
                    writer.close()
        except (OSError, ValueError, TimeoutError, asyncio.IncompleteReadError):
            return None
        if problem := reply_problem(op, reply):
            _log.warning("the reply of peer %s/%d to %r is left out: %s", peer.worker, peer.local_rank, op, problem)
            return None
        if op not in ("plan", "offer"):
            await self._gossip(peer, reply)
        return reply if "error" not in reply else None

    async def ask_all(
        self, peers: Sequence[Rank], op: str, body: Mapping[str, Any], *, timeout_s: float = CONNECT_S
    ) -> dict[PeerKey, dict[str, Any]]:
        """Send a request to several peers at once.

        Peers that did not answer are left out, as are those that are given up meanwhile: a host that falls silent would
        hold up a vote for the whole time limit.
        """
        asked = (self._request_unless_lost(peer, op, body, timeout_s=timeout_s) for peer in peers)
        replies = await asyncio.gather(*asked)
        return {key_of(peer): reply for peer, reply in zip(peers, replies, strict=True) if reply is not None}

    async def _request_unless_lost(
        self, peer: Rank, op: str, body: Mapping[str, Any], *, timeout_s: float
    ) -> dict[str, Any] | None:
        answer = self.loop.create_task(self.request(peer, op, body, timeout_s=timeout_s))
        lost = self.loop.create_task(self.heartbeats.until_lost(key_of(peer)))
        try:
            await asyncio.wait({answer, lost}, return_when=asyncio.FIRST_COMPLETED)
            return answer.result() if answer.done() else None
        finally:
            answer.cancel()
            lost.cancel()

    # -- stores of formations ----------------------------------------------------------------------------------------

    def host_store(self) -> HostedStore:
        """Make a store for one formation, which its ranks reach by its number; safe from any thread."""
        table, number = KeyTable(self.loop), secrets.randbits(48)
        self._tables = {n: each for n, each in self._tables.items() if not each.is_closed} | {number: table}
        return HostedStore(table=table, number=number, sockets_before=open_sockets())

    def connect_store(self, host: Rank, number: int) -> KeyStore:
        """Connect to the store ``number`` that a rank hosts; blocks, and may be called from any thread.

        Raises:
            OSError: it cannot be reached, or is not a rank of this job.
        """
        return connect_store(host, self._envelope(host, "keys") | {"number": number}, self._credentials)

    # -- listener ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        self.loop.close()

    async def _listen(self) -> None:
        port = self.identity.peer_port
        try:
            self._server = await asyncio.start_server(self._serve, host=None, port=port)
        except OSError as error:
            raise UsageError(f"the peer port {port} cannot be used: {error}") from error

    async def _close_all(self) -> None:
        if self._server is not None:
            self._server.close()
        self.heartbeats.watch({})
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if not await self.callers.authenticate(reader, writer):
                return
            while True:
                message = checked_request(await read_frame(reader))
                if message.get("op") == "keys" and (table := self._tables.get(message["number"])) is not None:
                    await serve(table, reader, writer)
                await write_frame(writer, await self._answer(message))
        except (OSError, asyncio.IncompleteReadError):
            pass  # the peer is gone
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError) as error:
            _log.warning("a peer sent something that this version does not understand: %r", error)
        except asyncio.CancelledError:
            pass  # closing
        finally:
            writer.close()

    async def _answer(self, message: dict[str, Any]) -> dict[str, Any]:
        if message.get("job") != self.identity.job_uid:
            return {"error": "another job"}
        if message.get("to") != [self.identity.worker_uid, self.identity.local_rank]:
            # The address has been given to another pod since.
            return {"error": f"this is {self.identity.worker_uid}"}
        handler = self.handlers.get(str(message.get("op")))
        if handler is None:
            return {"error": f"unknown request {message.get('op')!r}"}
        return {**await handler(message), **self._reply_fields(), "version": self._version()}

    async def _on_beat(self, _message: dict[str, Any]) -> dict[str, Any]:
        return {}

    async def _on_plan(self, _message: dict[str, Any]) -> dict[str, Any]:
        held = self.source.newest
        return {"text": held.text if held else None}

    async def _on_offer(self, message: dict[str, Any]) -> dict[str, Any]:
        self.source.offer(str(message["text"]))
        return {}

    # -- plans spread with every reply -------------------------------------------------------------------------------

    def _version(self) -> list[int]:
        held = self.source.newest
        return list(held.plan.version) if held else [-1, -1]

    def _envelope(self, peer: Rank, op: str) -> dict[str, Any]:
        return {
            "op": op,
            "job": self.identity.job_uid,
            "to": [peer.worker_uid, peer.local_rank],
            "from": [self.identity.worker_uid, self.identity.local_rank],
        }

    async def _gossip(self, peer: Rank, reply: Mapping[str, Any]) -> None:
        self.on_reply(reply)
        theirs, mine = list(reply.get("version", [-1, -1])), self._version()
        if theirs > mine:
            answer = await self.request(peer, "plan", {})
            if answer and answer.get("text"):
                self.source.offer(answer["text"])
        elif theirs < mine and "version" in reply:
            held = self.source.newest
            if held is not None:
                await self.request(peer, "offer", {"text": held.text})
