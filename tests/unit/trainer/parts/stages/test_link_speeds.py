"""Speeds of links by the messages of steps: what is counted, and that waiting for a sender is told from a slow link."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from heterotrain.network import link_speeds
from heterotrain.network.gloo import bounded_wait
from heterotrain.network.gloo.member_group import MemberGroup
from heterotrain.network.link_speeds import LARGE_BYTES, LinkSpeeds
from heterotrain.parts.stages.neighbours import Neighbours
from heterotrain.parts.unequal.part_messages import PartExchange
from support.waiting import wait_until
from torch import distributed as dist

MIB = 2**20
LATE_S = 2.0
"""What a rank comes late by, on the test's clock, which stands still otherwise: messages themselves take no time."""


class Clock:
    """The time of messages; it is read when the wait for one begins, and when the message has arrived or left."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self.reads: list[float] = []

    def __call__(self) -> float:
        self.reads.append(self._now_s)  # by any thread
        return self._now_s

    def come_late(self, *, reads: int) -> None:
        """Advance the clock once it has been read so many times."""
        wait_until(lambda: len(self.reads) >= reads, "the other rank waits", timeout_s=60.0)
        self._now_s += LATE_S


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Let messages be measured by a clock of the test."""
    found = Clock()
    monkeypatch.setattr(bounded_wait, "time", SimpleNamespace(perf_counter=found))
    return found


def test_the_fastest_messages_show_latency_and_bandwidth() -> None:
    speeds = LinkSpeeds()
    speeds.form({0: "t4", 2: "a100"})
    for seconds in (0.4, 0.1, 0.9):
        speeds.received(0, MIB, seconds)
        speeds.received(2, 100, seconds / 100)
    speeds.received(0, 100, 0.002)
    speeds.received(1, MIB, 1e-6)  # of the same worker
    speeds.received(0, LARGE_BYTES - 1, 1e-6)  # neither small nor large
    speeds.received(0, MIB, 0.0)
    assert speeds.links() == [("a100", None, 0.001), ("t4", pytest.approx(10 * MIB), 0.002)]


def test_old_messages_and_other_members_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_speeds, "KEPT", 4)
    speeds = LinkSpeeds()
    speeds.form({0: "a", 1: "b"})
    speeds.received(0, MIB, 0.001)
    speeds.received(1, MIB, 0.001)
    for _ in range(8):
        speeds.received(0, MIB, 0.1)
    assert speeds.links() == [("a", pytest.approx(10 * MIB), None), ("b", pytest.approx(1000 * MIB), None)]
    speeds.form({0: "a"})
    assert [pool for pool, *_ in speeds.links()] == ["a"]


def on_two_ranks(run: Callable[[MemberGroup, int, threading.Barrier], None]) -> list[list[tuple[int, float, float]]]:
    """Run a function on two ranks that gloo connects; return the messages that each one has received."""
    store = dist.HashStore()
    barrier, errors = threading.Barrier(2), []
    seen: list[list[tuple[int, float, float]]] = [[], []]
    groups = [
        MemberGroup(rank=rank, world_size=2, on_received=lambda *message, rank=rank: seen[rank].append(message))
        for rank in range(2)
    ]

    def work(rank: int) -> None:
        try:
            groups[rank].connect(store, "links", check=lambda: None)
            run(groups[rank], rank, barrier)
            barrier.wait()
        except Exception as error:  # noqa: BLE001  # the test shows it
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for group in groups:
        group.cut("the test is over")
    assert errors == []
    return seen


def test_a_tensor_between_stages_shows_the_link_whoever_waits_for_whom(clock: Clock) -> None:
    """The first tensor is late, so its header waits; the second one waits for its receiver. Values never wait."""
    values = torch.ones(MIB)

    def run(group: MemberGroup, rank: int, barrier: threading.Barrier) -> None:
        neighbours = Neighbours(group, torch.device("cpu"))
        for late in (0, 1):
            if barrier.wait() == 0:
                clock.reads.clear()
            barrier.wait()
            if rank == late:
                clock.come_late(reads=1 if late == 0 else 2)  # waits for a header, or for both to leave
            if rank == 0:
                neighbours.send(values, 1)
                neighbours.flush()
            else:
                assert torch.equal(neighbours.receive(0).detach(), values)

    _, seen = on_two_ranks(run)
    assert [size > LARGE_BYTES for _, size, _ in seen] == [False, True, False, True]
    assert all(sender == 0 for sender, *_ in seen)
    assert seen[0][2] == LATE_S, "a header waits for its sender"
    assert [seconds for *_, seconds in seen[1:]] == [0.0] * 3, "the sender was there"


def test_the_rank_that_comes_last_to_an_exchange_measures_the_link(clock: Clock) -> None:
    def run(group: MemberGroup, rank: int, barrier: threading.Barrier) -> None:
        barrier.wait()
        if rank == 1:
            clock.come_late(reads=2)  # of a message in each direction
        mine, theirs = torch.ones(MIB), torch.zeros(MIB)
        received: list[Any] = [theirs, theirs]
        PartExchange(group, [mine, mine], received).finish()

    first, last = on_two_ranks(run)
    assert first[0][2] == LATE_S
    assert last[0][2] == 0.0
    assert first[0][1] == last[0][1] == 4 * MIB


def test_messages_that_arrive_together_count_as_one() -> None:
    """The link carries them in the time of the last one, however early the first one has arrived."""
    seen: list[tuple[int, float, float]] = []
    group = MemberGroup(rank=0, world_size=3, on_received=lambda *message: seen.append(message))

    class Ended:
        def __init__(self, began_s: float, ended_s: float) -> None:
            self.began_s, self.ended_s = began_s, ended_s

    messages: Any = [(Ended(1.0, 1.2), 1, 300), (Ended(1.0, 2.0), 2, 100)]
    group.note_received(messages)
    group.note_received([])
    assert seen == [(1, 400, 1.0), (2, 400, 1.0)]
