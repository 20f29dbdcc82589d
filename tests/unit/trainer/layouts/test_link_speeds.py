"""Speeds of links by the messages of steps: what is counted, and that waiting for a sender is told from a slow link."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from heterotrain.layouts import link_speeds
from heterotrain.layouts.link_speeds import LARGE_BYTES, LinkSpeeds
from heterotrain.layouts.neighbours import Neighbours
from heterotrain.layouts.part_messages import Exchange
from heterotrain.network.gloo.member_group import MemberGroup
from torch import distributed as dist

pytestmark = pytest.mark.usefixtures("long_setup")
MIB = 2**20
LATE_S = 2.0
"""What a rank comes late by. Half of it tells waiting for that rank from a slow link, and is the busy machine's."""


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
    groups = [MemberGroup(rank=rank, world_size=2) for rank in range(2)]
    barrier, errors = threading.Barrier(2), []
    seen: list[list[tuple[int, float, float]]] = [[], []]

    def work(rank: int) -> None:
        try:
            groups[rank].on_received = lambda *message: seen[rank].append(message)
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
        thread.join(60)
    for group in groups:
        group.cut("the test is over")
    assert errors == []
    return seen


def test_a_tensor_between_stages_shows_the_link_whoever_waits_for_whom() -> None:
    """The first tensor is late, so its header waits; the second one waits for its receiver. Values never wait."""
    values = torch.ones(MIB)

    def run(group: MemberGroup, rank: int, barrier: threading.Barrier) -> None:
        neighbours = Neighbours(group, torch.device("cpu"))
        for late in (0, 1):
            barrier.wait()
            if rank == late:
                time.sleep(LATE_S)
            if rank == 0:
                neighbours.send(values, 1)
                neighbours.flush()
            else:
                assert torch.equal(neighbours.receive(0).detach(), values)

    _, seen = on_two_ranks(run)
    assert [size > LARGE_BYTES for _, size, _ in seen] == [False, True, False, True]
    assert all(sender == 0 for sender, *_ in seen)
    assert seen[0][2] > LATE_S / 2, "a header waits for its sender"
    assert seen[1][2] < LATE_S / 2
    assert seen[2][2] < LATE_S / 2, "the sender was there"
    assert seen[3][2] < LATE_S / 2


def test_the_rank_that_comes_last_to_an_exchange_measures_the_link() -> None:
    def run(group: MemberGroup, rank: int, barrier: threading.Barrier) -> None:
        barrier.wait()
        if rank == 1:
            time.sleep(LATE_S)
        mine, theirs = torch.ones(MIB), torch.zeros(MIB)
        received: list[Any] = [theirs, theirs]
        Exchange(group, [mine, mine], received).finish()

    first, last = on_two_ranks(run)
    assert first[0][2] > LATE_S / 2
    assert last[0][2] < LATE_S / 2
    assert first[0][1] == last[0][1] == 4 * MIB


def test_messages_that_arrive_together_count_as_one() -> None:
    """The link carries them in the time of the last one, however early the first one has arrived."""
    group = MemberGroup(rank=0, world_size=3)
    seen: list[tuple[int, float, float]] = []
    group.on_received = lambda *message: seen.append(message)

    class Ended:
        def __init__(self, began_s: float, ended_s: float) -> None:
            self.began_s, self.ended_s = began_s, ended_s

    messages: Any = [(Ended(1.0, 1.2), 1, 300), (Ended(1.0, 2.0), 2, 100)]
    group.note_received(messages)
    group.note_received([])
    assert seen == [(1, 400, 1.0), (2, 400, 1.0)]
