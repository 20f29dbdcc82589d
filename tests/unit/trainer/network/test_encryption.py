"""Connections between ranks under TLS: the same exchanges, nothing readable on the way, and nobody else gets in."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import random
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from heterotrain.identity import Identity, Mode
from heterotrain.membership.peer_service import PeerService
from heterotrain.membership.plan_source import PlanSource
from heterotrain.network import connection_setup
from heterotrain.network.authentication import (
    GREETING,
    NONCE_BYTES,
    REFUSALS,
    TLS_GREETING,
    Credentials,
    NotAuthenticatedError,
    authenticate,
    authenticate_streams,
    receive,
)
from heterotrain.network.connection_setup import c10d, gloo_group
from heterotrain.network.encryption import Tls
from heterotrain.network.gloo.abort import OpenSocket, open_sockets
from heterotrain.network.gloo.bounded_wait import BoundedWait
from heterotrain.network.gloo.tunnels import Route, Tunnels
from heterotrain.network.mesh.exchange import Payload
from support.certificates import put_certificate
from support.ports import free_port
from support.tap import Tap
from support.waiting import UNLIMITED_S, wait_until
from unit.trainer.membership.test_strangers import rank_of
from unit.trainer.network.mesh.test_mesh import Store, collected, meshes, together

SECRET = b"s" * 32
NEVER_S = time.monotonic() + UNLIMITED_S


@pytest.fixture
def tls(tmp_path: Path) -> Tls:
    """The certificate of a job."""
    return put_certificate(tmp_path)


@pytest.fixture
def other_tls(tmp_path: Path) -> Tls:
    """That of another job."""
    (folder := tmp_path / "other").mkdir()
    return put_certificate(folder)


def both(listener: Credentials, caller: Credentials) -> list[socket.socket | OSError]:
    """Return what ``authenticate`` returns or raises on the listening and on the calling side."""
    ends = socket.socketpair()

    def side(number: int) -> socket.socket | OSError:
        credentials, end_s = (listener, caller)[number], NEVER_S
        try:
            return authenticate(ends[number], credentials, role="r", listens=not number, end_s=end_s)
        except OSError as error:
            return error

    return together(2, side)


def test_both_sides_with_the_jobs_certificate_agree_on_tls_1_3(tls: Tls) -> None:
    """And the proofs of the job's secret still come, inside."""
    ours = Credentials(secret=SECRET, tls=tls)
    left, right = both(ours, ours)
    assert isinstance(left, ssl.SSLSocket)
    assert isinstance(right, ssl.SSLSocket)
    assert left.version() == right.version() == "TLSv1.3"
    right.sendall(b"hello")
    assert receive(left, 5, end_s=NEVER_S) == b"hello"
    left.close()
    right.close()
    refusals = both(ours, Credentials(secret=b"t" * 32, tls=tls))
    assert isinstance(refusals[0], NotAuthenticatedError)
    assert isinstance(refusals[1], OSError)


def test_another_certificate_is_refused_by_both_sides(tls: Tls, other_tls: Tls) -> None:
    """Even with the right secret."""
    found = both(Credentials(secret=SECRET, tls=tls), Credentials(secret=SECRET, tls=other_tls))
    assert isinstance(found[1], NotAuthenticatedError)
    assert "does not have the job's certificate" in str(found[1])
    assert isinstance(found[0], OSError)


@pytest.mark.parametrize("who", ["listener", "caller"])
def test_a_rank_that_encrypts_never_falls_back(who: str, tls: Tls) -> None:
    """A mixture of both kinds says at once what is the matter, and nothing else is sent."""
    plain, ours = Credentials(secret=SECRET), Credentials(secret=SECRET, tls=tls)
    listener, caller = both(ours, plain) if who == "listener" else both(plain, ours)
    assert isinstance(caller, NotAuthenticatedError)
    assert "encrypt" in str(caller)
    assert isinstance(listener, OSError)


def test_a_caller_without_a_certificate_gets_no_further(tls: Tls) -> None:
    """It may trust anything: the listener asks for a certificate before it reads."""
    here, stranger = socket.socketpair()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE

    def listen() -> OSError | None:
        try:
            authenticate(here, Credentials(secret=SECRET, tls=tls), role="r", listens=True, end_s=NEVER_S)
        except OSError as error:
            return error
        return None

    def call() -> bytes:
        assert stranger.recv(100) == TLS_GREETING
        with contextlib.suppress(OSError), context.wrap_socket(stranger) as inside:
            return inside.recv(100)
        return b""

    error, read = together(2, lambda number: (listen, call)[number]())
    assert isinstance(error, NotAuthenticatedError)
    assert read == b""


@pytest.mark.parametrize(("ranks", "size_bytes"), [(2, 160), (3, 0), (3, 3_000_000)])
def test_every_rank_gets_what_every_rank_sent(ranks: int, size_bytes: int, tls: Tls) -> None:
    """Also more bytes than the connections' buffers hold while no rank reads."""
    with meshes(ranks, tls=tls) as found:
        for turn in range(3):
            sent = [bytes([17 * rank + turn]) * size_bytes for rank in range(ranks)]
            assert together(ranks, lambda rank: collected(found[rank], sent[rank])) == [sent] * ranks  # noqa: B023  # called at once


@pytest.mark.parametrize("seed", range(5))
def test_payloads_in_pieces_of_any_size_arrive(seed: int, tls: Tls) -> None:
    """A record of TLS may hold more than the piece that is filled: no bytes wait unnoticed."""
    draw = random.Random(seed)  # noqa: S311  # no secret
    data = draw.randbytes(draw.randrange(1, 400_000))

    def pieces(memory: memoryview) -> list[memoryview]:
        cuts = sorted(draw.randrange(len(data) + 1) for _ in range(draw.randrange(40)))
        return [memory[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]

    got = bytearray(len(data))
    out, into = pieces(memoryview(data)), pieces(memoryview(got))
    with meshes(2, tls=tls) as (first, second):

        def run(rank: int) -> None:
            if rank:
                second.send_receive(outgoing={}, incoming={0: Payload(len(data), into)}).wait()
            else:
                first.send_receive(outgoing={1: Payload(len(data), out)}, incoming={}).wait()

        together(2, run)
        assert bytes(got) == data


@pytest.mark.parametrize("how", ["cut here", "cut there", "closed there"])
def test_a_broken_connection_ends_the_wait(how: str, tls: Tls) -> None:
    """``cut`` from another thread wakes a wait, and no byte follows in plain text."""
    with meshes(2, tls=tls) as (first, second), ThreadPoolExecutor(1) as pool:
        gathering = first.gather(b"x")
        waiting = pool.submit(gathering.wait)
        {"cut here": first.cut, "cut there": second.cut, "closed there": second.close}[how]()
        with pytest.raises(OSError, match=r"rank \d ended|reset|EOF|PROTOCOL_IS_SHUTDOWN|pipe"):
            waiting.result()
        first.cut()
        with pytest.raises(OSError, match=r"EOF|SSL|pipe|reset|closed"):
            first._peers[1].send(b"plain text")  # rather than succeed below TLS


class TappedStore(Store):
    """A store in which all ports of connections between ranks lead to a tap."""

    def __init__(self, tap: Tap) -> None:
        super().__init__()
        self._tap = tap

    def set(self, key: str, value: bytes) -> None:
        """Set a value, with the tap's port instead of the rank's."""
        if key.endswith("-0") and b" " in value:
            port, rest = value.split(b" ", 1)
            self._tap.target = int(port)
            value = f"{self._tap.port} ".encode() + rest
        super().set(key, value)


@pytest.fixture
def tap() -> Iterator[Tap]:
    """A reader on the network."""
    found = Tap()
    yield found
    found.close()


@pytest.mark.parametrize("encrypted", [True, False])
def test_a_reader_of_the_network_sees_no_state(encrypted: bool, tap: Tap, tls: Tls) -> None:
    """Without TLS it sees everything, so the tap works."""
    mark = os.urandom(24)
    with meshes(2, store=TappedStore(tap), tls=tls if encrypted else None) as found:
        rows = together(2, lambda rank: collected(found[rank], mark * 100))
        assert rows == [[mark * 100] * 2] * 2
    assert (mark in tap.seen) is not encrypted
    assert len(tap.seen) > 2 * 100 * len(mark)


class TorchStore(c10d.Store):  # type: ignore[misc]  # torch leaves it untyped
    """The same store for gloo."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store

    def set(self, key: str, value: str | bytes) -> None:
        """Set a value."""
        self._store.set(key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        """Wait for a value."""
        return self._store.get(key)

    def wait(self, keys: list[str], _timeout: object = None) -> None:
        """Wait for values."""
        for key in keys:
            self._store.get(key)


@pytest.mark.parametrize("ranks", [2, 4])
def test_gradients_of_gloo_travel_inside_tls(monkeypatch: pytest.MonkeyPatch, ranks: int, tap: Tap, tls: Tls) -> None:
    """The sums are right, and the tap between rank 0 and the others sees none of the numbers.

    On a loaded machine, one of the ranks has been seen to end its tunnels while the others connect, in one of some
    forty runs. Why is not known. With a limit, the others give up instead of waiting for ever.
    """
    monkeypatch.setattr(connection_setup, "SETUP_S", 60.0)
    store, route = (
        TorchStore(TappedStore(tap)),
        Route(address="127.0.0.1", credentials=Credentials(secret=SECRET, tls=tls)),
    )
    groups = together(ranks, lambda rank: gloo_group(store, "g", rank=rank, world_size=ranks, route=route))
    mark = torch.frombuffer(bytearray(os.urandom(8)), dtype=torch.uint8)
    for size in (1, 500_000):
        values = [mark.repeat(size) if rank == 0 else torch.zeros(8 * size, dtype=torch.uint8) for rank in range(ranks)]

        def add(rank: int) -> None:
            groups[rank].allreduce([values[rank]], c10d.AllreduceOptions()).wait()  # noqa: B023  # used here

        together(ranks, add)
        assert all(torch.equal(value, mark.repeat(size)) for value in values)
    assert len(tap.seen) > 500_000
    assert bytes(mark.tolist()) not in tap.seen
    groups.clear()


@pytest.fixture
def nothing_left() -> Iterator[list[str]]:
    """Wait until the test's tunnels have ended, with their sockets, unless the test says why they cannot."""
    before, reasons = tcp_sockets(), list[str]()
    yield reasons
    if reasons:
        return
    gc.collect()
    wait_until(lambda: not running("heterotrain-tunnels"), "the threads end", timeout_s=30)
    wait_until(lambda: not tcp_sockets() - before, "the sockets are closed", timeout_s=30)


def tcp_sockets() -> set[OpenSocket]:
    """Return the open sockets without those by which event loops wake themselves."""
    found = set()
    for each in open_sockets():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(each.descriptor)) as duplicate:
            if duplicate.family == socket.AF_INET:
                found.add(each)
    return found


def running(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == name]


def test_a_lost_rank_ends_the_operations_of_the_others_at_once(
    tls: Tls, monkeypatch: pytest.MonkeyPatch, nothing_left: list[str]
) -> None:
    """Gloo waits for half an hour otherwise. Rank 1 takes no part, and its connections end."""
    made: dict[int, Tunnels] = {}

    def noted(peers: dict[int, socket.socket], *, rank: int) -> Tunnels:
        return made.setdefault(rank, Tunnels(peers, rank=rank))

    monkeypatch.setattr("heterotrain.network.connection_setup.Tunnels", noted)
    route = Route(address="127.0.0.1", credentials=Credentials(secret=SECRET, tls=tls))
    store = TorchStore(Store())
    groups = together(3, lambda rank: gloo_group(store, "g", rank=rank, world_size=3, route=route))
    value = torch.ones(1_000_000)
    works = {rank: groups[rank].allreduce([value.clone()], c10d.AllreduceOptions()) for rank in (0, 2)}
    groups[1] = None
    for rank, work in works.items():
        wait_until(lambda rank=rank: made[rank]._pairs[1].is_over, f"rank {rank} sees the end", timeout_s=60)
        with pytest.raises(RuntimeError, match=r"closed|reset|Broken pipe|gloo did not report") as caught:
            BoundedWait(work, is_over=lambda: True, belongs_to=groups[rank]).wait()
        if "did not report" in str(caught.value):
            nothing_left.append("gloo lost an operation, and its group has to stay: docs/adr/0013")


@pytest.mark.usefixtures("nothing_left")
def test_a_failed_tunnel_leaves_no_connection_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever fails in the thread: the others see the end, rather than silence."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        theirs = socket.create_connection(server.getsockname())
        ours, _ = server.accept()
    monkeypatch.setattr("heterotrain.network.gloo.tunnels._Pair.move", Mock(side_effect=MemoryError))
    Tunnels({0: ours}, rank=1)
    theirs.sendall(b"x")
    theirs.settimeout(UNLIMITED_S)
    with contextlib.suppress(ConnectionResetError):
        assert theirs.recv(1) == b""
    theirs.close()


def test_bytes_before_the_handshake_end_the_connection(tls: Tls) -> None:
    """Whoever is on the way cannot begin the conversation inside: its bytes are no proof."""
    ours = Credentials(secret=SECRET, tls=tls)

    async def run() -> list[BaseException | None]:
        listened: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()

        async def outcome(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, listens: bool) -> Any:
            try:
                async with asyncio.timeout(UNLIMITED_S):
                    await authenticate_streams(reader, writer, ours, role="r", listens=listens)
            except (OSError, asyncio.IncompleteReadError) as error:
                return error
            finally:
                writer.transport.abort()

        async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            listened.set_result(await outcome(reader, writer, listens=True))

        async def between(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            there = await asyncio.open_connection("127.0.0.1", server.sockets[0].getsockname()[1])
            writer.write(await there[0].readexactly(len(TLS_GREETING)) + GREETING + bytes(NONCE_BYTES))
            await asyncio.gather(copied(reader, there[1]), copied(there[0], writer))

        async def copied(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError):
                while data := await reader.read(65536):
                    writer.write(data)
            writer.close()

        async with (
            await asyncio.start_server(listen, "127.0.0.1", 0) as server,
            await asyncio.start_server(between, "127.0.0.1", 0) as middle,
        ):
            caller = await outcome(
                *await asyncio.open_connection("127.0.0.1", middle.sockets[0].getsockname()[1]), listens=False
            )
            return [caller, await listened]

    assert all(isinstance(error, OSError | EOFError) for error in asyncio.run(run()))


def service_of(name: str, tls: Tls | None) -> PeerService:
    """Start a rank's peer service."""
    identity = Identity(
        mode=Mode.OPERATED, job_uid="j", worker=name, worker_uid=f"{name}-uid", peer_port=free_port(), secret=SECRET
    )
    credentials = Credentials(secret=SECRET, tls=tls)
    service = PeerService(identity, PlanSource(None, job_uid="j"), timeout_s=1.0, credentials=credentials)
    service.start()
    return service


def test_the_peer_port_serves_ranks_with_the_certificate_only(tls: Tls, other_tls: Tls) -> None:
    """Requests, the store and heartbeats work; everybody else is counted, and nothing is read from them."""
    victim, mate = service_of("a", tls), service_of("b", tls)
    rank = rank_of(victim)
    assert mate.call(mate.request(rank, "plan", {}, timeout_s=UNLIMITED_S)).result() is not None
    hosted = victim.host_store()
    hosted.store.set("key", b"value")
    store = mate.connect_store(rank, hosted.number)
    assert store.get("key") == b"value"
    store.cut()
    with pytest.raises(OSError, match=r".*"):
        store.get("never")

    async def watch() -> None:
        mate.watch([rank])

    mate.call(watch()).result()
    wait_until(lambda: mate.heartbeats.is_up(("a-uid", 0)), "the heartbeats are up", timeout_s=30)
    for wrong in (other_tls, None):
        before, other = REFUSALS.count, service_of("c", wrong)
        assert other.call(other.request(rank, "plan", {}, timeout_s=UNLIMITED_S)).result() is None
        wait_until(lambda: REFUSALS.count > before, "the refusal is counted", timeout_s=30)  # noqa: B023  # used here
        other.close()
    for each in (mate, victim):
        each.close()
