"""The seven verbs on the official asyncio client, in plain JSON.

The client's generated models are not used: they cost memory and time for every object, and server-side apply needs
exactly the intended fields, which plain dictionaries express best.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from asyncio import sslproto
from collections.abc import AsyncIterator, Coroutine, Mapping
from typing import Any, Final
from urllib.request import getproxies

import aiohttp
from heterotrain_core.contract import keys
from kubernetes.aio.client.api_client import ApiClient
from kubernetes.aio.client.configuration import Configuration

from heterotrain_operator.kube.errors import Conflict, KubeError, NotFound, Rejected, Throttled, Unavailable
from heterotrain_operator.kube.resources import Resource
from heterotrain_operator.kube.server_clock import ServerClock, retry_after_s
from heterotrain_operator.kube.verbs import Body, Kube

TIMEOUT_S: Final = 30.0
LIST_TIMEOUT_S: Final = 120.0
PAGE_SIZE: Final = 100
"""Objects of one answer: decoding 500 jobs with their status would keep the event loop for 0.1 s."""

TLS_BUFFER_BYTES: Final = 32 * 1024
"""Python's own buffer for each connection with TLS is 256 KiB, and under load the operator has a hundred of them."""

_APPLY: Final = "application/apply-patch+yaml"
_MERGE: Final = "application/merge-patch+json"
_JSON: Final = "application/json"


def use_small_tls_buffers() -> None:
    """Let all later connections of this process have buffers of ``TLS_BUFFER_BYTES``: two records of TLS fit."""
    sslproto.SSLProtocol.max_size = TLS_BUFFER_BYTES


class KubeClient(Kube):
    """``Kube`` over HTTP.

    Attributes:
        clock: the API server's time, as its answers tell it.
    """

    def __init__(self, configuration: Configuration, *, clock: ServerClock | None = None) -> None:
        self.clock = clock or ServerClock()
        # With trust_env, aiohttp looks for a .netrc before every request; only proxies need trust_env.
        configuration.client_session_kwargs = {"trust_env": bool(getproxies())}
        self._client = ApiClient(configuration)

    async def close(self) -> None:
        """Close all connections."""
        await self._client.close()

    async def list(
        self, resource: Resource, namespace: str | None = None, *, labels: str = "", fields: str = ""
    ) -> AsyncIterator[Body]:
        def ask(after: str = "") -> Coroutine[Any, Any, Body]:
            query = {"limit": str(PAGE_SIZE), "labelSelector": labels, "fieldSelector": fields, "continue": after}
            return self._call("GET", resource.path(namespace), query=query, timeout_s=LIST_TIMEOUT_S)

        page = await ask()
        while True:
            token = page["metadata"].get("continue")
            # The API server prepares the next page while the caller takes this one.
            following = asyncio.ensure_future(ask(token)) if token else None
            try:
                for item in page["items"]:
                    yield item
                if following is None:
                    return
                page = await following
            finally:
                if following is not None and not following.done():
                    following.cancel()

    async def get(self, resource: Resource, namespace: str | None, name: str) -> Body:
        return await self._call("GET", resource.path(namespace, name))

    async def create(self, resource: Resource, body: Body, *, dry_run: bool = False) -> Body:
        query = {"fieldManager": keys.FIELD_MANAGER, "fieldValidation": "Strict", "dryRun": "All" if dry_run else ""}
        return await self._call("POST", resource.path(body["metadata"]["namespace"]), query=query, body=body)

    async def replace(self, resource: Resource, body: Body) -> Body:
        metadata = body["metadata"]
        path = resource.path(metadata["namespace"], metadata["name"])
        return await self._call("PUT", path, query={"fieldManager": keys.FIELD_MANAGER}, body=body)

    async def apply(self, resource: Resource, body: Body, *, subresource: str = "", force: bool = True) -> Body:
        metadata = body["metadata"]
        path = resource.path(metadata["namespace"], metadata["name"], subresource)
        query = {"fieldManager": keys.FIELD_MANAGER, "force": "true" if force else ""}
        return await self._call("PATCH", path, query=query, body=body, content_type=_APPLY)

    async def merge(self, resource: Resource, namespace: str, name: str, patch: Body, *, subresource: str = "") -> Body:
        path = resource.path(namespace, name, subresource)
        query = {"fieldManager": keys.FIELD_MANAGER}
        return await self._call("PATCH", path, query=query, body=patch, content_type=_MERGE)

    async def delete(self, resource: Resource, namespace: str, name: str, *, uid: str) -> None:
        options: Body = {"preconditions": {"uid": uid}, "propagationPolicy": "Background"}
        await self._call("DELETE", resource.path(namespace, name), body=options)

    async def _call(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Body | None = None,
        content_type: str = _JSON,
        timeout_s: float = TIMEOUT_S,
    ) -> Body:
        request = await self._client.param_serialize(
            method,
            path,
            query_params=[(name, value) for name, value in (query or {}).items() if value],
            header_params={"Accept": _JSON, "Content-Type": content_type},
            body=body,
            auth_settings=["BearerToken"],
        )
        sent_s = self.clock.begin()
        try:
            async with asyncio.timeout(timeout_s):
                response = await self._client.call_api(
                    *request, _request_timeout=aiohttp.ClientTimeout(total=timeout_s)
                )
                self.clock.note(response.headers.get("Date", ""), sent_s=sent_s)
                raw = await response.read()
        except TimeoutError as error:
            raise Unavailable(f"the API server did not answer within {timeout_s:.0f} s") from error
        except aiohttp.ClientError as error:
            raise Unavailable(f"the API server can't be reached: {error}") from error
        if response.status >= 400:  # noqa: PLR2004  # the first HTTP status that is an error
            raise _error(response.status, raw, response.headers, now_s=self.clock.now_s())
        try:
            answer: Body = json.loads(raw)
        except ValueError as error:  # a proxy or a load balancer answered in the API server's place
            raise Unavailable("the answer is not JSON: something between operator and API server answered") from error
        return answer


def _error(status: int, raw: bytes, headers: Mapping[str, str], *, now_s: float) -> KubeError:
    message = raw.decode(errors="replace").strip() or f"HTTP {status}"
    with contextlib.suppress(ValueError, KeyError, TypeError):
        message = json.loads(raw)["message"]
    match status:
        case 404 | 410:
            return NotFound(message)
        case 409:
            return Conflict(message)
        case 429:
            return Throttled(message, retry_after_s=retry_after_s(headers.get("Retry-After", ""), now_s=now_s))
        case _ if status >= 500:  # noqa: PLR2004  # the server's own failures
            return Unavailable(message)
        case _:
            return Rejected(message, status_code=status)
