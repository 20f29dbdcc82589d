"""The operator's metrics over TLS, for tokens that the API server knows and allows; by real connections."""

from __future__ import annotations

import asyncio
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from heterotrain_operator.engine.serve import METRICS_PATH, Certificate, serve
from heterotrain_operator.kube.errors import Unavailable
from heterotrain_operator.kube.resources import Resource
from heterotrain_operator.kube.reviews import KEPT_S, MOST_TOKEN, MetricsAccess
from heterotrain_operator.settings import Settings
from prometheus_client import CollectorRegistry, Gauge
from support.executors import at_once
from support.fakes import FakeKube
from support.ports import free_port

Body = dict[str, Any]


class Reviewer(FakeKube):
    """An API server that knows two users, and allows one of them to read metrics."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Body] = []
        self.away = False

    async def create(self, _: Resource, body: Body, *, dry_run: bool = False) -> Body:
        assert not dry_run
        self.asked.append(body)
        if self.away:
            raise Unavailable("away")
        spec = body["spec"]
        if body["kind"] == "TokenReview":
            known = {"good": "prometheus", "other": "stranger"}.get(spec["token"])
            return {"status": {"authenticated": True, "user": {"username": known}} if known else {}}
        assert spec["nonResourceAttributes"] == {"path": "/metrics", "verb": "get"}
        return {"status": {"allowed": spec["user"] == "prometheus"}}


class Time:
    def __init__(self) -> None:
        self.s = 0.0

    def __call__(self) -> float:
        return self.s


def access(kube: Reviewer, time: Time | None = None) -> MetricsAccess:
    return MetricsAccess(kube, path=METRICS_PATH, monotonic=time or Time())


@pytest.mark.parametrize(
    ("token", "allowed", "questions"),
    [("good", True, 2), ("other", False, 2), ("unknown", False, 1), ("", False, 0), ("x" * (MOST_TOKEN + 1), False, 0)],
)
async def test_a_token_is_reviewed(token: str, allowed: bool, questions: int) -> None:
    kube = Reviewer()
    assert await access(kube).allows(token) is allowed
    assert len(kube.asked) == questions


async def test_an_answer_is_kept_for_a_minute_and_none_of_an_api_server_that_is_away() -> None:
    kube, time = Reviewer(), Time()
    found = access(kube, time)
    kube.away = True
    assert not await found.allows("good")
    kube.away = False
    assert await found.allows("good")
    number = len(kube.asked)
    assert all(await asyncio.gather(*(found.allows("good") for _ in range(50))))
    assert len(kube.asked) == number
    time.s = KEPT_S + 1
    assert await found.allows("good")
    assert len(kube.asked) == number + 2


async def test_many_different_tokens_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("heterotrain_operator.kube.reviews.MOST_KEPT", 10)
    found = access(Reviewer())
    for number in range(50):
        assert not await found.allows(f"token-{number}")
    assert len(found._answers) == 10


def certificate_in(folder: Path, name: str) -> None:
    """Write a self-signed certificate for the loopback address."""
    command = [
        "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2",
        "-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1",
        "-keyout", str(folder / "tls.key"), "-out", str(folder / "tls.crt"),
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True)


@pytest.fixture
async def url(tmp_path: Path) -> AsyncIterator[str]:
    """An operator's metrics over TLS, for tokens only."""
    registry = CollectorRegistry()
    Gauge("heterotrain_operator_leader", "x", registry=registry).set(1)
    certificate_in(tmp_path, "first")
    port = free_port()
    runners = await serve(
        listen="127.0.0.1", health_port=free_port(), metrics_port=port, healthy=lambda: True, ready=lambda: True,
        registry=registry, threads=at_once(), allows=access(Reviewer()).allows, certificate=Certificate(tmp_path),
    )  # fmt: skip
    yield f"https://127.0.0.1:{port}/metrics"
    for runner in runners:
        await runner.cleanup()


async def get(url: str, folder: Path, token: str | None) -> tuple[int, str]:
    """Return status and text of a new connection that trusts only the certificate in the folder."""
    trusted = ssl.create_default_context(cafile=str(folder / "tls.crt"))
    headers = {"Authorization": f"Bearer {token}"} if token is not None else {}
    async with aiohttp.ClientSession() as session, session.get(url, ssl=trusted, headers=headers) as response:
        return response.status, await response.text()


async def test_metrics_are_for_tokens_that_may_read_them(url: str, tmp_path: Path) -> None:
    status, text = await get(url, tmp_path, "good")
    assert (status, "heterotrain_operator_leader 1.0" in text) == (200, True)
    for token, expected in ((None, 401), ("other", 403), ("unknown", 403)):
        status, text = await get(url, tmp_path, token)
        assert (status, "heterotrain_operator" in text) == (expected, False)


async def test_a_renewed_certificate_is_served_without_a_restart(url: str, tmp_path: Path) -> None:
    await get(url, tmp_path, "good")
    old = tmp_path / "old"
    old.mkdir()
    (old / "tls.crt").write_bytes((tmp_path / "tls.crt").read_bytes())
    certificate_in(tmp_path, "second")
    assert (await get(url, old, "good"))[0] == 200, "this request notices the change"
    assert (await get(url, tmp_path, "good"))[0] == 200
    with pytest.raises(aiohttp.ClientConnectorCertificateError):
        await get(url, old, "good")


async def test_files_that_cannot_be_read_keep_the_present_certificate(url: str, tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.mkdir()
    (old / "tls.crt").write_bytes((tmp_path / "tls.crt").read_bytes())
    (tmp_path / "tls.crt").write_text("half a file")
    for _ in range(2):
        assert (await get(url, old, "good"))[0] == 200


async def test_an_operator_without_its_certificate_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"tls\.crt"):
        Certificate(tmp_path)


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
async def test_probes_and_scrapes_come_over_ipv4_and_ipv6() -> None:
    """In a cluster with IPv6 only, the kubelet could not reach the operator otherwise."""
    ports = free_port(), free_port()
    runners = await serve(
        listen=Settings().listen, health_port=ports[0], metrics_port=ports[1], healthy=lambda: True,
        ready=lambda: True, registry=CollectorRegistry(), threads=at_once(),
    )  # fmt: skip
    async with aiohttp.ClientSession() as session:
        for host in ("127.0.0.1", "[::1]"):
            for port, path in zip(ports, ("/healthz", METRICS_PATH), strict=True):
                async with session.get(f"http://{host}:{port}{path}") as response:
                    assert response.status == 200
    for runner in runners:
        await runner.cleanup()
