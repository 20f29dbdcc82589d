"""Processes without the job's secret at the peer port of a rank: nothing is read from them, and little is kept."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import Iterator

import pytest
from heterotrain.identity import Identity, Mode
from heterotrain.membership.peer_service import PeerService
from heterotrain.membership.plan_source import PlanSource
from heterotrain.network.authentication import GREETING, MOST_HALF_OPEN, NONCE_BYTES, REFUSALS, Credentials
from heterotrain_core.contract.codec import encode_plan
from heterotrain_core.contract.plan import Plan, Rank
from support.ports import free_port
from support.waiting import UNLIMITED_S, wait_until


def service_of(name: str, secret: bytes) -> PeerService:
    """Start a rank's peer service."""
    identity = Identity(
        mode=Mode.OPERATED, job_uid="j", worker=name, worker_uid=f"{name}-uid", peer_port=free_port(), secret=secret
    )
    service = PeerService(
        identity, PlanSource(None, job_uid="j"), timeout_s=1.0, credentials=Credentials(secret=secret)
    )
    service.start()
    return service


def rank_of(service: PeerService) -> Rank:
    """Return the rank as a plan names it."""
    own = service.identity
    return Rank(
        rank=0, member=0, worker=own.worker, worker_uid=own.worker_uid, address="127.0.0.1",
        peer_port=own.peer_port or 0, on_demand=True,
    )  # fmt: skip


@pytest.fixture
def victim() -> Iterator[PeerService]:
    """A rank with a secret."""
    service = service_of("a", b"s" * 32)
    yield service
    service.close()


@pytest.fixture
def mate(victim: PeerService) -> Iterator[PeerService]:
    """Another rank of the same job."""
    service = service_of("b", victim.identity.secret)
    yield service
    service.close()


FORGED = encode_plan(Plan(job_uid="j", generation=0, revision=9, members=(), ranks=(), global_batch_samples=1))
REQUESTS = [
    {"op": "plan"}, {"op": "doing"}, {"op": "offer", "text": FORGED},
    {"op": "decided", "formation": [1, 1], "ranks": ["x"]},
    {"op": "prepare", "formation": [1, 1], "ballot": ["z", 0]}, {"op": "broken", "formation": [1, 0]},
    {"op": "keys", "number": 1},
]  # fmt: skip


@pytest.mark.parametrize("body", REQUESTS, ids=lambda body: body["op"])
def test_whoever_knows_all_names_gets_nothing(victim: PeerService, body: dict[str, object]) -> None:
    """Uids are in the metrics, so a stranger knows them; requests with them are not even read."""
    before = REFUSALS.count
    message = {"job": "j", "to": ["a-uid", 0], "from": ["evil", 0], **body}
    text = json.dumps(message).encode()
    with socket.create_connection(("127.0.0.1", victim.identity.peer_port or 0), UNLIMITED_S) as stranger:
        stranger.settimeout(UNLIMITED_S)
        assert stranger.recv(1000) != b""
        stranger.sendall(struct.pack("!I", len(text)) + text + b" " * 100)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1000) == b""
    wait_until(lambda: REFUSALS.count > before, "the refusal is counted", timeout_s=30)
    assert victim.source.newest is None


def test_a_rank_of_another_job_or_without_a_secret_is_refused(victim: PeerService, mate: PeerService) -> None:
    """And a rank that has the right secret is served."""
    for secret in (b"t" * 32, b""):
        other = service_of("c", secret)
        assert other.call(other.request(rank_of(victim), "plan", {}, timeout_s=UNLIMITED_S)).result() is None
        other.close()
    assert mate.call(mate.request(rank_of(victim), "plan", {}, timeout_s=UNLIMITED_S)).result() is not None


def test_a_flood_of_silent_connections_is_bounded_and_shuts_nobody_out(victim: PeerService, mate: PeerService) -> None:
    """Each new connection beyond the limit costs the oldest silent one its place."""
    port, count = victim.identity.peer_port or 0, MOST_HALF_OPEN + 200

    async def flood() -> int:
        opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(count)]
        greeted = await asyncio.gather(
            *(reader.readexactly(len(GREETING) + NONCE_BYTES) for reader, _ in opened), return_exceptions=True
        )
        assert victim.callers.half_open <= MOST_HALF_OPEN
        reply = await asyncio.wrap_future(mate.call(mate.request(rank_of(victim), "plan", {}, timeout_s=UNLIMITED_S)))
        assert reply is not None
        for _, writer in opened:
            writer.transport.abort()
        return len(greeted)

    before = REFUSALS.count
    assert asyncio.run(flood()) == count
    wait_until(lambda: victim.callers.half_open == 0, "all are forgotten", timeout_s=60)
    wait_until(lambda: REFUSALS.count >= before + count, "all are counted", timeout_s=60)


def test_a_caller_without_a_proof_is_dropped_after_the_limit(
    monkeypatch: pytest.MonkeyPatch, victim: PeerService
) -> None:
    """A slow client holds its place for a limited time, however slowly it goes on."""
    monkeypatch.setattr(victim.callers, "_handshake_s", 0.2)
    with socket.create_connection(("127.0.0.1", victim.identity.peer_port or 0), UNLIMITED_S) as stranger:
        stranger.settimeout(UNLIMITED_S)
        stranger.recv(1000)
        stranger.sendall(b"x")
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1000) == b""


def test_another_process_at_the_address_of_a_peer_is_a_lost_peer(mate: PeerService) -> None:
    """A pod that has no secret got the address: the heartbeats find the peer lost instead of asking for ever."""
    usurper = service_of("a", b"t" * 32)
    lost: list[str] = []
    mate.heartbeats.subscribe(lambda _key, reason: lost.append(reason))

    async def watch() -> None:
        mate.watch([rank_of(usurper)])

    mate.call(watch()).result()
    wait_until(lambda: bool(lost), "the peer counts as lost", timeout_s=60)
    assert lost == ["is no longer the process at its address"]
    usurper.close()
