"""Ranks as threads of one process, over real sockets."""

from __future__ import annotations

import contextlib
import itertools
import queue
import random
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from heterotrain.errors import UsageError
from heterotrain.network.authentication import Credentials
from heterotrain.network.gloo.abort import address_of, interface_of
from heterotrain.network.mesh.connect import connect, gloo_address
from heterotrain.network.mesh.exchange import HEAD, Payload, Purpose
from heterotrain.network.mesh.mesh import Mesh, pack_floats, unpack_floats
from support.waiting import UNLIMITED_S


class Store:
    """A store in which reading a missing key waits for it."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._told = threading.Condition()

    def set(self, key: str, value: bytes) -> None:
        """Set a value."""
        with self._told:
            self._values[key] = value
            self._told.notify_all()

    def get(self, key: str) -> bytes:
        """Return a value as soon as it is set."""
        with self._told:
            assert self._told.wait_for(lambda: key in self._values)
            return self._values[key]


def together(ranks: int, work: Callable[[int], Any]) -> list[Any]:
    """Run ``work(rank)`` for all ranks at the same time; return what they returned.

    The first error of a rank is raised at once: the others may wait for this rank for ever.
    """
    ended: queue.Queue[tuple[int, Any, BaseException | None]] = queue.Queue()

    def run(rank: int) -> None:
        try:
            ended.put((rank, work(rank), None))
        except BaseException as error:  # noqa: BLE001  # the caller raises it
            ended.put((rank, None, error))

    for rank in range(ranks):
        threading.Thread(target=run, args=(rank,), daemon=True).start()
    found = {}
    for _ in range(ranks):
        rank, value, error = ended.get()
        if error is not None:
            raise error
        found[rank] = value
    return [found[rank] for rank in range(ranks)]


@contextlib.contextmanager
def meshes(
    ranks: int, *, store: Any = None, address: str = "127.0.0.1", limit_s: float = UNLIMITED_S
) -> Iterator[list[Mesh]]:
    """Connect ``ranks`` ranks."""
    store = store or Store()

    def one(rank: int) -> Mesh:
        return connect(
            store, rank=rank, world_size=ranks, address=address, within_s=UNLIMITED_S, limit_s=limit_s,
            credentials=Credentials(secret=b"s" * 32),
        )  # fmt: skip

    found = together(ranks, one)
    try:
        yield found
    finally:
        for mesh in found:
            mesh.close()


def collected(mesh: Mesh, data: bytes) -> list[bytes]:
    """Run one exchange."""
    gathering = mesh.gather(data)
    gathering.wait()
    return gathering.rows


@pytest.mark.parametrize(("ranks", "size_bytes"), [(1, 8), (2, 160), (5, 0), (3, 3_000_000)])
def test_every_rank_gets_what_every_rank_sent(ranks: int, size_bytes: int) -> None:
    """Several exchanges, also of more bytes than the connections' buffers hold while no rank reads."""
    with meshes(ranks) as found:
        for turn in range(3):
            sent = [bytes([17 * rank + turn]) * size_bytes for rank in range(ranks)]
            got = together(ranks, lambda rank: collected(found[rank], sent[rank]))  # noqa: B023  # used here
            assert got == [sent] * ranks


def test_a_rank_may_be_an_exchange_ahead_and_gone() -> None:
    """Data sent before a rank closed still arrive: a rank that has committed a step may leave at once."""
    with meshes(2) as (first, second):
        ahead = first.gather(b"a")
        assert collected(second, b"b") == [b"a", b"b"]
        second.close()
        ahead.wait()
        assert ahead.rows == [b"a", b"b"]


@pytest.mark.parametrize("how", ["cut here", "cut there", "closed there"])
def test_a_broken_connection_ends_the_wait(how: str) -> None:
    """A wait for a lost peer ends with its connection, or with ``cut`` from another thread."""
    with meshes(3) as (first, second, _silent):
        gathering = first.gather(b"x")
        assert collected_from(gathering, peers=()) == 0
        ended = {"cut here": first.cut, "cut there": second.cut, "closed there": second.close}[how]
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(gathering.wait)
            ended()
            with pytest.raises(OSError, match=r"rank \d ended|reset"):
                waiting.result()


def collected_from(gathering: Any, *, peers: tuple[int, ...]) -> int:
    """Return the number of these peers that have sent everything."""
    return sum(peer not in gathering._missing for peer in peers)


def test_silence_beyond_the_limit_ends_the_wait() -> None:
    """The error names the silent ranks."""
    with (
        meshes(2, limit_s=0.01) as (first, _silent),
        pytest.raises(TimeoutError, match=r"no data came from ranks \[1\] for 0.01 s"),
    ):
        collected(first, b"x")


def test_ranks_that_exchange_different_values_get_an_error() -> None:
    """Two values on one rank, one on the other: an error with what to check, not numbers of another exchange."""
    with meshes(2) as (first, second):
        second.gather(pack_floats([1.0]))
        with pytest.raises(UsageError, match=r"rank 1 exchanges 8 bytes where this rank exchanges 16: .* same model"):
            collected(first, pack_floats([1.0, 2.0]))


def test_exchanges_that_overlap_are_refused() -> None:
    """As from two threads of a script, whose data would be mixed up."""
    with meshes(2) as (first, _second):
        first.gather(b"x")
        with pytest.raises(UsageError, match=r"two exchanges between ranks overlap: .* from the thread that runs"):
            first.gather(b"y")


def test_ranks_in_different_calls_are_both_named() -> None:
    """Although the data have the same length."""
    with meshes(2) as (first, second):
        second.gather(b"x", Purpose.VOTE)
        gathering = first.gather(b"x", Purpose.SUM)
        with pytest.raises(
            UsageError, match=r"rank 1 is in step.apply while this rank is in job.sum: .* lockstep=True"
        ):
            gathering.wait()


def test_payloads_are_in_place_for_any_senders_and_receivers() -> None:
    """Random payloads between four ranks, in views of random lengths, larger than any connection's buffer."""
    rng, ranks = random.Random(3), 4  # noqa: S311  # seeded

    def cuts(data: bytearray) -> Payload:
        places = sorted(rng.randrange(len(data) + 1) for _ in range(rng.randrange(20)))
        edges = [0, *places, len(data)]
        return Payload(len(data), [memoryview(data)[a:b] for a, b in itertools.pairwise(edges)])  # some of them empty

    with meshes(ranks) as found:
        for _round in range(5):
            pairs = [(a, b) for a in range(ranks) for b in range(ranks) if a != b and rng.random() < 0.6]
            data = {pair: bytearray(rng.randbytes(rng.choice([1, 1000, 5_000_000]))) for pair in pairs}
            boxes = {pair: bytearray(len(sent_bytes)) for pair, sent_bytes in data.items()}
            sent = {pair: cuts(sent_bytes) for pair, sent_bytes in data.items()}
            taken = {pair: cuts(box) for pair, box in boxes.items()}

            def one(rank: int) -> None:
                found[rank].send_receive(
                    outgoing={b: payload for (a, b), payload in sent.items() if a == rank},  # noqa: B023  # used here
                    incoming={a: payload for (a, b), payload in taken.items() if b == rank},  # noqa: B023  # used here
                ).wait()

            together(ranks, one)
            assert boxes == data


@pytest.mark.parametrize("number", [15, 16, 17, 32])
def test_a_payload_that_ends_with_a_turn_is_complete(number: int) -> None:
    """As many views as reads per turn, one fewer and one more: received data are not waited for."""
    with meshes(2) as (first, second):
        views = [memoryview(bytes([i]) * 3) for i in range(number)]
        boxes = [bytearray(3) for _ in range(number)]
        sending = first.send_receive(outgoing={1: Payload(3 * number, views)}, incoming={})
        sending.wait()
        second.send_receive(outgoing={}, incoming={0: Payload(3 * number, map(memoryview, boxes))}).wait()
        assert [bytes(box) for box in boxes] == views


def test_views_are_requested_only_when_needed() -> None:
    """A state on a device is copied range by range, not all at once."""
    asked = 0

    def views() -> Iterator[memoryview]:
        nonlocal asked
        for _ in range(100):
            asked += 1
            yield memoryview(bytes(1_000_000))

    with meshes(2) as (first, second):
        sending = first.send_receive(outgoing={1: Payload(100_000_000, views())}, incoming={})
        assert asked < 50  # what fits into two buffers; the rest waits for a reader
        box = bytearray(100_000_000)
        with ThreadPoolExecutor(1) as pool:
            done = pool.submit(sending.wait)
            second.send_receive(outgoing={}, incoming={0: Payload(len(box), [memoryview(box)])}).wait()
            done.result()
        assert asked == 100


def test_payloads_of_different_sizes_are_an_error() -> None:
    """A receiver with another model reports it instead of taking a part or waiting for more."""
    with meshes(2) as (first, second):
        first.send_receive(outgoing={1: Payload(3, [memoryview(b"abc")])}, incoming={})
        with pytest.raises(UsageError, match="rank 0 exchanges 3 bytes where this rank exchanges 4"):
            second.send_receive(outgoing={}, incoming={0: Payload(4, [memoryview(bytearray(4))])}).wait()
    assert HEAD.unpack(HEAD.pack(1, 0, 2**40))[2] == 2**40  # a state of more than 4 GB


def test_connections_without_the_secret_are_rejected() -> None:
    """A client that does not know the secret, or sends nothing, is not accepted as a rank."""
    store = Store()
    strangers = []

    class Told(Store):
        """Connects to every rank before its peers can."""

        def set(self, key: str, value: bytes) -> None:
            port = int(value.split()[0])
            for greeting in (b"\0" * 16 + b"\1\0\0\0", b""):
                stranger = socket.create_connection(("127.0.0.1", port))
                stranger.sendall(greeting)
                stranger.shutdown(socket.SHUT_WR)
                strangers.append(stranger)
            store.set(key, value)

        def get(self, key: str) -> bytes:
            return store.get(key)

    with meshes(2, store=Told()) as (first, second):
        ahead = first.gather(b"a")
        assert collected(second, b"b") == [b"a", b"b"]
        ahead.wait()
    for stranger in strangers:
        stranger.close()


def test_numbers_keep_every_bit() -> None:
    """Packing and unpacking restores numbers, including NaN and the largest counters."""
    values = [0.1, -0.0, 2.0**53 - 1, float("inf")]
    assert unpack_floats(pack_floats(values)) == values
    assert unpack_floats(pack_floats([float("nan")]))[0] != 0.0


def test_the_address_is_that_of_the_interface_that_gloo_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The configured interface's address; without one, an address at which this host can be reached."""
    loopback = interface_of("127.0.0.1")
    assert loopback is not None
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", loopback)
    assert gloo_address() == address_of(loopback) == "127.0.0.1"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    socket.create_server((gloo_address(), 0)).close()
