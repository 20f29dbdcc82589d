"""Instant queries over HTTP."""

from __future__ import annotations

import base64
import ssl
import zlib
from pathlib import Path

import aiohttp

from heterotrain_operator.prom.errors import PromBadAnswer, PromUnavailable
from heterotrain_operator.prom.vector import Vector, parse_answer
from heterotrain_operator.threads import Threads

MAX_ANSWER_BYTES = 32 * 1024 * 1024
"""Bytes of an answer, also after decompression; more would not fit next to the rest in the operator's memory."""
BYTES_AT_ONCE = 32 * 1024
"""So many bytes are parsed within a millisecond. More are parsed in a thread, so that passes go on meanwhile."""
_GZIP = 16 + zlib.MAX_WBITS


class PromClient:
    """A client of Prometheus, or of any server with its query API.

    Args:
        url: base URL.
        timeout_s: longest wait for an answer, in seconds.
        auth_dir: folder with the file ``token``, or the files ``username`` and ``password``; read again for each query,
            because mounted secrets rotate.
        ca_file: certificate authority of a private server.
    """

    def __init__(
        self, url: str, *, threads: Threads, timeout_s: float, auth_dir: Path | None = None, ca_file: Path | None = None
    ) -> None:
        self._url = url.rstrip("/")
        self._timeout_s = timeout_s
        self._threads = threads
        self._auth_dir = auth_dir
        self._ssl = ssl.create_default_context(cafile=str(ca_file)) if ca_file else None
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()

    async def query(self, promql: str) -> Vector:
        """Return the answer to an instant query.

        Raises:
            PromUnavailable: there is no answer.
            PromBadAnswer: the answer is invalid.
        """
        if self._session is None:
            connector = aiohttp.TCPConnector(ssl=self._ssl) if self._ssl else aiohttp.TCPConnector()
            timeout = aiohttp.ClientTimeout(total=self._timeout_s)
            # Decompressed here, where the size is bounded.
            self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False)
        try:
            headers = self._headers()
            url = f"{self._url}/api/v1/query"
            async with self._session.post(url, data={"query": promql}, headers=headers) as response:
                if response.status in (401, 403):
                    raise PromUnavailable(f"Prometheus denies access (HTTP {response.status}): check prometheus.auth")
                body, encoding = await _read(response), response.headers.get("Content-Encoding", "identity")
                status = response.status
        except TimeoutError as error:
            raise PromUnavailable(f"Prometheus did not answer within {self._timeout_s:.0f} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise PromUnavailable(f"Prometheus can't be reached: {error}") from error
        try:
            if encoding == "identity" and len(body) <= BYTES_AT_ONCE:
                return parse_answer(body)
            return await self._threads.run(lambda: parse_answer(_plain(body, encoding)))
        except ValueError as error:
            raise PromBadAnswer(f"Prometheus answers HTTP {status} without JSON") from error

    def _headers(self) -> dict[str, str]:
        headers = {"Accept-Encoding": "gzip"}
        if self._auth_dir is None:
            return headers
        token, user = self._auth_dir / "token", self._auth_dir / "username"
        if token.exists():
            return {**headers, "Authorization": f"Bearer {token.read_text().strip()}"}
        if user.exists():
            password = (self._auth_dir / "password").read_text().strip()
            credentials = base64.b64encode(f"{user.read_text().strip()}:{password}".encode()).decode()
            return {**headers, "Authorization": f"Basic {credentials}"}
        raise PromUnavailable(f"{self._auth_dir} holds neither the file token nor the files username and password")


async def _read(response: aiohttp.ClientResponse) -> bytes:
    """Return the body of an answer.

    Raises:
        PromBadAnswer: it is too large.
    """
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > MAX_ANSWER_BYTES:
            raise PromBadAnswer(_too_large())
    return bytes(body)


def _plain(body: bytes, encoding: str) -> bytes:
    """Return the body of an answer, decompressed.

    Raises:
        PromBadAnswer: it is too large, or not compressed as requested.
    """
    if encoding == "identity":
        return body
    try:
        plain = zlib.decompressobj(_GZIP).decompress(body, MAX_ANSWER_BYTES + 1)
    except zlib.error as error:
        raise PromBadAnswer("the answer of Prometheus is not compressed by gzip") from error
    if len(plain) > MAX_ANSWER_BYTES:
        raise PromBadAnswer(_too_large())
    return plain


def _too_large() -> str:
    return f"the answer of Prometheus is larger than {MAX_ANSWER_BYTES // 1024**2} MiB"
