"""The network between one operator process and the API server: it fails in all the ways in which networks do."""

from __future__ import annotations

import asyncio
import errno
import json
import random
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from email.utils import formatdate
from types import SimpleNamespace
from typing import Any

import aiohttp
from aiohttp.client_reqrep import ConnectionKey
from heterotrain_core.contract import keys
from heterotrain_operator.kube.client import KubeClient
from heterotrain_operator.kube.server_clock import ServerClock

from support.chaos.api_server import ApiServer, Body, Refused

INACTIVE_S = 70.0
"""kopf opens a watch again that delivers nothing for this long."""
BOOKMARK_S = 60.0
"""The API server sends a bookmark to each watch about this often."""
PROXY_ANSWERS: list[tuple[int, Any]] = [
    (500, "internal error"),
    (503, "<html>no backend</html>"),
    (429, "slow down"),
    (504, "timeout"),
    (200, "<html>please log in</html>"),
    (403, {"message": "not authorised yet"}),
]
_MANAGED = f"{keys.LABEL_MANAGED_BY}={keys.MANAGED_BY}"
_SELECTORS = {"pods": _MANAGED, "configmaps": _MANAGED}
_HOST = ConnectionKey("api", 443, is_ssl=True, ssl=True, proxy=None, proxy_auth=None, proxy_headers_hash=None)


@dataclass
class Network:
    """The state of the network now; all processes share one, and each process has one of its own.

    Attributes:
        away: ``refused``, ``dns`` or ``silent`` while no request arrives.
        delay_s: seconds until a request arrives, and the same for its answer.
        failing: chance that a proxy answers with an error instead.
        lossy: chance that an answer is lost after its request was carried out.
        deaf: kinds whose watches deliver nothing, without an error.
    """

    away: str = ""
    delay_s: float = 0.0
    failing: float = 0.0
    lossy: float = 0.0
    deaf: set[str] = field(default_factory=set)


def unreachable(why: str) -> aiohttp.ClientError:
    """Return the error of a connection that can't be opened."""
    if why == "dns":
        return aiohttp.ClientConnectorDNSError(_HOST, socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name"))
    return aiohttp.ClientConnectorError(_HOST, OSError(errno.ECONNREFUSED, "Connection refused"))


class Link:
    """One process's requests and watches; stands for the HTTP client inside ``KubeClient``.

    Attributes:
        dead: the process was killed, so nothing it still does reaches anybody.
        crash_at: the process is killed around this write, counted from now; ``None`` for never.
        crash_after: whether that write is carried out before.
    """

    def __init__(
        self, who: str, server: ApiServer, networks: tuple[Network, ...], rng: random.Random, kill: Callable[[], None]
    ) -> None:
        self.who = who
        self.dead = False
        self.crash_at: int | None = None
        self.crash_after = False
        self._server = server
        self._networks = networks
        self._rng = rng
        self._kill = kill

    # --- the interface of kubernetes.aio.client.ApiClient ------------------------------------------------------------

    async def param_serialize(self, method: str, path: str, **parts: Any) -> tuple[Any, ...]:
        return method, path, dict(parts["query_params"]), parts["header_params"]["Content-Type"], parts["body"]

    async def call_api(
        self, method: str, path: str, query: dict[str, str], form: str, body: Body | None, **_: Any
    ) -> SimpleNamespace:
        status, answer = await self._exchange(method, path, query, form, body)
        raw = (answer if isinstance(answer, str) else json.dumps(answer)).encode()
        headers = {"Date": formatdate(self._server.now_s(), usegmt=True)}
        if status == 429:
            headers["Retry-After"] = "3"

        async def read() -> bytes:
            return raw

        return SimpleNamespace(status=status, headers=headers, read=read)

    async def close(self) -> None:
        """Close nothing."""

    async def _exchange(
        self, method: str, path: str, query: dict[str, str], form: str, body: Body | None
    ) -> tuple[int, Any]:
        await self._travel()
        if self._happens("failing"):
            return self._rng.choice(PROXY_ANSWERS)
        changes = method != "GET" and "dryRun" not in query and not path.endswith("/events")
        if changes and self._crashes_now(after=False):
            await self._die()
        try:
            status, answer = 200, self._server.request(self.who, method, path, query=query, form=form, body=body)
        except Refused as error:
            status, answer = error.status, {"kind": "Status", "code": error.status, "message": str(error)}
        if changes and self._crashes_now(after=True):
            await self._die()
        if self._happens("lossy"):
            raise aiohttp.ServerDisconnectedError
        await self._travel()
        return status, answer

    async def _travel(self) -> None:
        """Bring a request to the server or an answer back."""
        if self.dead:
            await asyncio.Future()
        for network in self._networks:
            if network.away == "silent":
                await asyncio.sleep(3600.0)
            if network.away:
                await asyncio.sleep(0.05)
                raise unreachable(network.away)
        await asyncio.sleep(max(network.delay_s for network in self._networks) / 2 + self._rng.uniform(0.001, 0.02))
        if self.dead:
            await asyncio.Future()

    def _happens(self, what: str) -> bool:
        return any(self._rng.random() < chance for network in self._networks if (chance := getattr(network, what)))

    def _crashes_now(self, *, after: bool) -> bool:
        if self.crash_at is None:
            return False
        if not after:
            self.crash_at -= 1
        return self.crash_at < 0 and after is self.crash_after

    async def _die(self) -> None:
        self.dead = True
        self._kill()
        await asyncio.Future()

    # --- watches, as kopf keeps them ---------------------------------------------------------------------------------

    async def watch(self, plural: str) -> AsyncIterator[tuple[str | None, Body]]:
        """Yield the events of a kind for ever: a list as events of type ``None``, then changes, then a list again."""
        pause_s = 1.0
        while True:
            try:
                await self._travel()
                selector = {"labelSelector": _SELECTORS[plural]} if plural in _SELECTORS else {}
                path = f"/api/v1/{plural}" if plural != keys.PLURAL else f"/apis/{keys.GROUP}/{keys.VERSION}/{plural}"
                listed = self._server.request(self.who, "GET", path, query=selector)
                found = [json.loads(json.dumps(body)) for body in listed["items"]]
                await self._travel()
            except aiohttp.ClientError:
                await asyncio.sleep(pause_s)
                pause_s = min(10.0, pause_s + 1.0)
                continue
            pause_s = 1.0
            for body in found:
                yield None, body
            try:
                async for event in self._follow(plural, int(listed["metadata"]["resourceVersion"])):
                    yield event
            except Refused:
                await asyncio.sleep(0.1)

    async def _follow(self, plural: str, version: int) -> AsyncIterator[tuple[str, Body]]:
        """Yield changes, over as many connections as needed.

        Raises:
            Refused: the past is forgotten.
        """
        loop = asyncio.get_running_loop()
        while True:
            heard_s = loop.time()
            while loop.time() - heard_s < INACTIVE_S:
                if self.dead:
                    await asyncio.Future()
                if any(network.away in ("refused", "dns") for network in self._networks):
                    break  # the connection is reset
                news = self._server.news
                if not any(plural in network.deaf or network.away for network in self._networks):
                    for change in list(self._server.since(version, plural)):
                        version, heard_s = change.version, loop.time()
                        body = json.loads(change.text)
                        if _managed(plural, body):
                            yield change.kind, body
                    if loop.time() - heard_s >= BOOKMARK_S:
                        version, heard_s = self._server.version, loop.time()
                try:
                    async with asyncio.timeout(1.0):
                        await news.wait()
                except TimeoutError:
                    pass
            await asyncio.sleep(1.0)
            while any(network.away for network in self._networks):  # noqa: ASYNC110  # a client polls, too
                await asyncio.sleep(self._rng.uniform(1.0, 10.0))
            for network in self._networks:
                network.deaf.discard(plural)  # the new connection works


class ChaosClient(KubeClient):
    """The operator's own client over a simulated network."""

    def __init__(self, link: Link, clock: ServerClock) -> None:
        self.clock = clock
        self._client = link  # type: ignore[assignment]  # a double with the three methods that are called


def _managed(plural: str, body: Body) -> bool:
    labels = body["metadata"].get("labels") or {}
    return plural not in _SELECTORS or labels.get(keys.LABEL_MANAGED_BY) == keys.MANAGED_BY
