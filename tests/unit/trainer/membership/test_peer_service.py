"""Heartbeats and listener on loopback: which requests are answered, how plans spread, how losses are detected."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import queue
import socket
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from heterotrain.errors import UsageError
from heterotrain.identity import Identity, Mode
from heterotrain.membership.peer_service import PeerService
from heterotrain.membership.plan_source import PlanSource
from heterotrain.network import heartbeat
from heterotrain.network.authentication import Credentials
from heterotrain.network.gloo.abort import connected, cut, interface_of, open_sockets
from heterotrain.network.group import Group
from heterotrain.network.heartbeat import key_of, loss_reason
from heterotrain.network.peer_sockets import SocketFilter
from heterotrain_core.contract import keys
from heterotrain_core.contract.codec import encode_plan
from heterotrain_core.contract.plan import Plan, Rank
from support.ports import free_port
from support.waiting import UNLIMITED_S, wait_until

Make = Callable[..., tuple[PeerService, Rank]]


@pytest.fixture
def make() -> Iterator[Make]:
    """Make peer services of one job, each with its own plan source."""
    made: list[PeerService] = []

    def one(
        name: str, *, timeout_s: float = 1.0, mount: Path | None = None, clock: Callable[[], float] = time.monotonic
    ) -> tuple[PeerService, Rank]:
        port = free_port()
        identity = Identity(mode=Mode.OPERATED, job_uid="j", worker=name, worker_uid=f"{name}-uid", peer_port=port)
        service = PeerService(
            identity, PlanSource(mount, job_uid="j"), timeout_s=timeout_s, credentials=Credentials(secret=b""),
            clock=clock,
        )  # fmt: skip
        service.start()
        made.append(service)
        rank = Rank(
            rank=0, member=0, worker=name, worker_uid=f"{name}-uid", address="127.0.0.1", peer_port=port,
            on_demand=True,
        )  # fmt: skip
        return service, rank

    yield one
    for service in made:
        service.close()


def text_of(revision: int) -> str:
    """Return a plan without members."""
    return encode_plan(Plan(job_uid="j", generation=0, revision=revision, members=(), ranks=(), global_batch_samples=1))


def watch(service: PeerService, *peers: Rank) -> None:
    """Exchange heartbeats with these peers."""

    async def do() -> None:
        service.watch(peers)

    service.call(do()).result()


def test_only_the_addressed_process_answers(make: Make) -> None:
    """Requests for the address's previous pod, from a foreign job or of unknown type get no answer."""
    (one, _), (_, other) = make("a"), make("b")
    assert one.call(one.request(other, "plan", {}, timeout_s=UNLIMITED_S)).result() is not None
    assert (
        one.call(one.request(replace(other, worker_uid="b-earlier"), "plan", {}, timeout_s=UNLIMITED_S)).result()
        is None
    )
    assert one.call(one.request(replace(other, local_rank=1), "plan", {}, timeout_s=UNLIMITED_S)).result() is None
    assert one.call(one.request(other, "plan", {"job": "k"}, timeout_s=UNLIMITED_S)).result() is None
    assert one.call(one.request(other, "dance", {}, timeout_s=UNLIMITED_S)).result() is None


def test_the_host_of_a_store_uses_it_like_the_others_and_ends_it_for_all(make: Make) -> None:
    """A formation that the host gives up holds nobody, whoever waits for a key."""
    (host, place), (other, _) = make("a"), make("b")
    hosted = host.host_store()
    views = [service.connect_store(place, hosted.number) for service in (host, other)]
    views[0].set("mesh-0", b"here")
    assert [view.get("mesh-0") for view in views] == [b"here"] * 2
    group = Group(
        rank=0, world_size=2, sockets=SocketFilter(members=frozenset(), excluded_ports=frozenset({place.peer_port})),
        hosted=hosted,
    )  # fmt: skip
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(view.get, "mesh-1") for view in views]
        group.cut("a member is lost")
        for each in waiting:
            with pytest.raises(OSError, match="ended"):
                each.result()
    for view in views:
        view.close()


def test_garbage_does_not_disturb_the_listener(make: Make) -> None:
    """After any input on the port, the next peer is served."""
    (one, _), (_, other) = make("a"), make("b")
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\x00\x00\x00\x02[]", b"\xff\xff\xff\xff", b""):
        with socket.create_connection(("127.0.0.1", other.peer_port)) as stranger:
            stranger.sendall(garbage)
    assert one.call(one.request(other, "plan", {}, timeout_s=UNLIMITED_S)).result() is not None


@pytest.mark.parametrize("newer", ["a", "b"])
def test_plans_spread_with_heartbeats(make: Make, newer: str) -> None:
    """After a heartbeat both peers hold the newer plan, byte for byte."""
    (one, _), (two, other) = make("a"), make("b")
    one.source.offer(text_of(5 if newer == "a" else 4))
    two.source.offer(text_of(5 if newer == "b" else 4))
    watch(one, other)
    wait_until(
        lambda: all(s.source.newest is not None and s.source.newest.text == text_of(5) for s in (one, two)),
        "both hold the newest plan",
        timeout_s=60,
    )


def test_a_plan_that_a_kubelet_delivers_spreads_before_the_next_heartbeat_is_due(make: Make, tmp_path: Path) -> None:
    """With this time limit, the next one is due after a quarter of an hour."""
    (one, _), (two, other) = make("a", timeout_s=3600.0, mount=tmp_path), make("b", timeout_s=3600.0)
    watch(one, other)
    wait_until(lambda: one.heartbeats.is_up(key_of(other)), "heartbeats are up", timeout_s=60)
    (tmp_path / keys.PLAN_KEY).write_text(text_of(1))
    one.source.poll()
    wait_until(lambda: two.source.newest is not None, "the peer has the plan", timeout_s=60)


def test_a_peer_that_ends_is_lost_at_once(make: Make) -> None:
    """Its connection ends and cannot be established again."""
    (one, _), (two, other) = make("a"), make("b")
    lost: queue.Queue[tuple[str, int]] = queue.Queue()
    one.heartbeats.subscribe(lambda key, _reason: lost.put(key))
    watch(one, other)
    wait_until(lambda: one.heartbeats.is_up(key_of(other)), "heartbeats are up", timeout_s=60)
    two.close()
    assert lost.get() == ("b-uid", 0)
    assert not one.heartbeats.is_up(key_of(other))
    one.call(_forget(one)).result()  # as when the operator names it once more
    assert lost.get() == ("b-uid", 0), "it is given up again"


@pytest.mark.parametrize("expected", [False, True])
def test_the_end_of_a_peer_is_a_warning_only_before_everything_is_done(
    make: Make, caplog: pytest.LogCaptureFixture, *, expected: bool
) -> None:
    (one, _), (two, other) = make("a"), make("b")
    lost: queue.Queue[tuple[str, int]] = queue.Queue()
    one.heartbeats.subscribe(lambda key, _reason: lost.put(key))
    watch(one, other)
    wait_until(lambda: one.heartbeats.is_up(key_of(other)), "heartbeats are up", timeout_s=60)
    one.heartbeats.ends_expected = expected
    two.close()
    assert lost.get() == ("b-uid", 0)
    warned = [record.getMessage() for record in caplog.records if record.name.endswith("heartbeat")]
    assert [text for text in warned if text.startswith("peer b/0 ")] == warned
    assert bool(warned) != expected


def test_requests_that_end_before_they_are_sent_leave_nothing_behind(make: Make) -> None:
    """The service ends like this after a training; Python would print a warning about each of them."""
    (one, _), (_, other) = make("a"), make("b")

    async def ask_and_end() -> None:
        asked = asyncio.ensure_future(one.ask_all([other] * 8, "plan", {}))
        await asyncio.sleep(0)
        asked.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asked

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        one.call(ask_and_end()).result()
        gc.collect()  # which also finds what the tests before have left open
    assert [text for each in seen if "never awaited" in (text := str(each.message))] == []


def test_a_peer_that_is_no_longer_watched_is_not_lost(make: Make) -> None:
    """A peer that left as announced ends without an alarm."""
    (one, _), (two, other), (_, third) = make("a"), make("b"), make("c")
    lost: list[tuple[str, int]] = []
    one.heartbeats.subscribe(lambda key, _reason: lost.append(key))
    watch(one, other, third)
    wait_until(
        lambda: one.heartbeats.is_up(key_of(other)) and one.heartbeats.is_up(key_of(third)),
        "heartbeats are up",
        timeout_s=60,
    )
    watch(one, third)
    two.close()
    one.call(one.heartbeats.ping_all(60.0)).result()
    assert lost == []


def test_a_peer_that_is_given_up_is_not_waited_for(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request to a host that has fallen silent ends with its heartbeats, not at the request's own limit."""
    monkeypatch.setattr(heartbeat, "FROZEN_FACTOR", 4.0)
    (one, _), (_, other) = make("a", timeout_s=0.1), make("b")
    with socket.create_server(("127.0.0.1", 0)) as listener:  # takes connections, and nothing reads from them
        silent = replace(other, worker="c", worker_uid="c-uid", peer_port=listener.getsockname()[1])

        async def ask() -> dict[tuple[str, int], dict[str, object]]:
            one.watch([silent])
            return await one.ask_all([silent, other], "plan", {}, timeout_s=3600.0)

        assert one.call(ask()).result().keys() == {key_of(other)}


def test_silence_is_measured_with_the_clock_of_the_service(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a peer is silent in real time, it is lost when the clock has passed the limit, and not before."""
    monkeypatch.setattr(heartbeat, "FROZEN_FACTOR", 4.0)
    now_s = 1000.0
    (one, other) = make("a", timeout_s=0.01, clock=lambda: now_s)
    with socket.create_server(("127.0.0.1", 0)) as listener:  # takes connections, and nothing reads from them
        silent = replace(other, worker="c", worker_uid="c-uid", peer_port=listener.getsockname()[1])
        watch(one, silent)
        connection, _ = listener.accept()
        with connection:
            time.sleep(0.1)  # more than the limit
            assert one.call(_is_lost(one, silent)).result() is False
            now_s += 3600.0
            wait_until(lambda: one.call(_is_lost(one, silent)).result(), "it is lost", timeout_s=60)


async def _forget(service: PeerService) -> None:
    service.heartbeats.forget_losses()


async def _is_lost(service: PeerService, peer: Rank) -> bool:
    return service.heartbeats.is_lost(key_of(peer))


def test_the_loss_reason_states_the_time_that_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that acknowledges nothing, a frozen process and a broken route have different reasons."""
    monkeypatch.setattr(heartbeat, "FROZEN_FACTOR", 4.0)
    assert loss_reason(OSError(errno.ETIMEDOUT, "timed out"), timeout_s=3.0) == "acknowledged nothing for 3 s"
    assert loss_reason(TimeoutError(), timeout_s=3.0) == "answered no heartbeat for 12 s"
    assert "No route to host" in loss_reason(OSError(errno.EHOSTUNREACH, "No route to host"), timeout_s=3.0)


def test_a_port_in_use_is_reported(make: Make) -> None:
    """The port is named."""
    _, member = make("a")
    identity = Identity(mode=Mode.OPERATED, job_uid="j", worker="b", worker_uid="b", peer_port=member.peer_port)
    service = PeerService(identity, PlanSource(None, job_uid="j"), timeout_s=1.0, credentials=Credentials(secret=b""))
    with pytest.raises(UsageError, match=f"peer port {member.peer_port}"):
        service.start()
    service.close()


def test_cutting_wakes_waits_and_spares_other_sockets() -> None:
    """Both ends of a member's connection end; listeners, excluded ports and foreign addresses stay."""
    before = open_sockets()
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    near = socket.create_connection(("127.0.0.1", port))
    far, _ = listener.accept()
    candidates = open_sockets() - before
    assert len(candidates) == 3
    assert len(connected(candidates, addresses={"127.0.0.1"}, excluded_ports=())) == 2
    assert len(connected(candidates, addresses=None, excluded_ports=())) == 2
    assert not connected(candidates, addresses=None, excluded_ports={port})
    assert not connected(candidates, addresses={"10.9.9.9"}, excluded_ports=())
    assert cut(candidates, addresses={"10.9.9.9"}, excluded_ports=()) == 0
    assert cut(candidates, addresses={"127.0.0.1"}, excluded_ports={port}) == 0
    near.sendall(b"x")
    assert far.recv(1) == b"x"
    assert cut(candidates, addresses={"127.0.0.1"}, excluded_ports=()) == 2
    assert far.recv(1) == b""
    with socket.create_connection(("127.0.0.1", port)) as again:
        assert again.getpeername()[1] == port
    for each in (listener, near, far):
        each.close()


def test_the_interface_of_an_address() -> None:
    """Loopback is found; an address without an interface is not."""
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.7") is None
