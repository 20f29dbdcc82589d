"""Answers over real HTTP: compressed and plain, too large, too deep, and not JSON."""

from __future__ import annotations

import gzip
import json
from collections.abc import AsyncIterator

import pytest
from aiohttp import web
from heterotrain_operator.prom import client as prom_client
from heterotrain_operator.prom.client import PromClient
from heterotrain_operator.prom.errors import PromBadAnswer
from heterotrain_operator.prom.vector import VectorSample
from support.executors import at_once
from support.ports import free_port

GOOD = json.dumps(
    {"status": "success", "data": {"resultType": "vector", "result": [{"metric": {"a": "b"}, "value": [1, "1.5"]}]}}
).encode()


class Server:
    """Answers every query with the same body."""

    def __init__(self) -> None:
        self.body, self.headers = GOOD, {"Content-Type": "application/json"}
        self.accepted = ""
        self.url = ""

    async def answer(self, request: web.Request) -> web.Response:
        self.accepted = request.headers.get("Accept-Encoding", "")
        return web.Response(body=self.body, headers=self.headers)


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    found, port = Server(), free_port()
    app = web.Application()
    app.router.add_post("/api/v1/query", found.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    found.url = f"http://127.0.0.1:{port}"
    yield found
    await runner.cleanup()


@pytest.fixture
async def client(server: Server) -> AsyncIterator[PromClient]:
    found = PromClient(server.url, threads=at_once(), timeout_s=10.0)
    yield found
    await found.close()


async def test_plain_and_compressed_answers_are_read(server: Server, client: PromClient) -> None:
    assert tuple(await client.query("up")) == (VectorSample({"a": "b"}, 1.5),)
    assert server.accepted == "gzip"
    server.body, server.headers = gzip.compress(GOOD), {"Content-Encoding": "gzip"}
    assert tuple(await client.query("up")) == (VectorSample({"a": "b"}, 1.5),)


@pytest.mark.parametrize("compressed", [False, True])
async def test_an_answer_that_is_too_large_is_refused(
    server: Server, client: PromClient, monkeypatch: pytest.MonkeyPatch, *, compressed: bool
) -> None:
    monkeypatch.setattr(prom_client, "MAX_ANSWER_BYTES", 1024**2)
    body = b" " * (4 * 1024**2) + GOOD
    server.body = gzip.compress(body) if compressed else body
    server.headers = {"Content-Encoding": "gzip"} if compressed else {}
    with pytest.raises(PromBadAnswer, match="larger than 1 MiB"):
        await client.query("up")


@pytest.mark.parametrize("body", [b"<html>", b"[" * 200_000, b"9" * 5000 + b"x", b"\xff\xfe\x00", b""])
async def test_an_answer_that_is_not_json_is_refused(server: Server, client: PromClient, body: bytes) -> None:
    server.body = body
    with pytest.raises(PromBadAnswer):
        await client.query("up")


async def test_an_answer_that_claims_to_be_compressed_is_refused(server: Server, client: PromClient) -> None:
    server.headers = {"Content-Encoding": "gzip"}
    with pytest.raises(PromBadAnswer, match="gzip"):
        await client.query("up")
