"""Sums in two levels, with gloo inside the islands as well."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from heterotrain.exchange.islands.sums import CUT, IslandSums
from heterotrain.exchange.islands.topology import IslandTopology
from heterotrain.network.connection_setup import c10d

RANKS = 5
ISLANDS = IslandTopology(islands=((0, 3), (1, 4)), inner="gloo")


def test_heads_and_ranks_outside_islands_add_up_between_islands() -> None:
    """Each island counts once."""
    assert ISLANDS.heads(RANKS) == (0, 1, 2)
    assert [ISLANDS.island(rank) for rank in range(RANKS)] == [(0, 3), (1, 4), (), (0, 3), (1, 4)]


def everywhere(run: Callable[[int], Any]) -> list[Any]:
    """Run the same code on all ranks, each a thread of this process; return the results by rank."""
    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(run, range(RANKS)))


def test_all_ranks_get_the_same_bits_within_the_bound_of_a_plain_sum() -> None:
    """Several sums at a time: each element has the error of at most W additions, and no rank differs in a bit."""
    store = c10d.HashStore()
    torch.manual_seed(1)
    terms = [[torch.randn(size) * 10**rank for size in (7, 1, 301)] for rank in range(RANKS)]

    def run(rank: int) -> list[torch.Tensor]:
        group = ISLANDS.connect(store, rank=rank, world_size=RANKS, address="", is_over=lambda: False)
        found = [term.clone() for term in terms[rank]]
        ended: list[object] = []
        works = [group.start(flat) for flat in found]
        works[0].get_future().add_done_callback(ended.append)
        for work in works:
            work.wait()
        assert len(ended) == 1
        group.close()
        return found

    results = everywhere(run)
    for place in range(3):
        exact = sum(term[place].double() for term in terms)
        bound = RANKS * torch.finfo(torch.float32).eps / 2 * sum(term[place].double().abs() for term in terms)
        assert ((results[0][place].double() - exact).abs() <= bound).all()
        assert all(torch.equal(found[place], results[0][place]) for found in results)


class Held:
    """An operation that ends, with or without an error, when the test says so."""

    def __init__(self) -> None:
        self.end = threading.Event()
        self.error: RuntimeError | None = None

    def wait(self, *limit: Any) -> None:
        """Wait; after a limit, torch's operations raise."""
        if not self.end.wait(limit[0].total_seconds() if limit else 60):
            raise RuntimeError("time-out")
        if self.error is not None:
            raise self.error

    def is_completed(self) -> bool:
        """Return whether the operation has ended."""
        return self.end.is_set()


class Operations:
    """A group that starts such operations."""

    def __init__(self) -> None:
        self.started: list[tuple[str, Held]] = []

    def _start(self, name: str) -> Held:
        self.started.append((name, Held()))
        return self.started[-1][1]

    def reduce(self, _tensors: Any, _options: Any) -> Held:
        """Start."""
        return self._start("reduce")

    def allreduce(self, _tensors: Any, _options: Any) -> Held:
        """Start."""
        return self._start("allreduce")

    def broadcast(self, _tensors: Any, _options: Any) -> Held:
        """Start."""
        return self._start("broadcast")


def test_a_sum_whose_island_ends_after_a_cut_is_not_passed_on() -> None:
    """Its buffer is free after ``settle``: nothing that starts later may write into it."""
    inner, outer, is_cut = Operations(), Operations(), threading.Event()
    group = IslandSums(inner, outer, is_nccl=False, is_over=is_cut.is_set)
    work = group.start(torch.ones(1))
    group.stop()
    inner.started[0][1].end.set()
    with pytest.raises(RuntimeError, match=CUT):
        work.wait()
    is_cut.set()
    work.settle()
    group.close()
    assert outer.started == []
    assert [name for name, _ in inner.started] == ["reduce"]


@pytest.mark.parametrize("level", ["inside", "between"])
def test_a_loss_in_either_level_ends_the_wait(level: str) -> None:
    """The error reaches the head's training thread, and the island gets no sum."""
    inner, outer, is_cut = Operations(), Operations(), threading.Event()
    group = IslandSums(inner, outer, is_nccl=False, is_over=is_cut.is_set)
    work = group.start(torch.ones(1))
    (_, up) = inner.started[0]
    lost = RuntimeError("a connection broke")
    if level == "inside":
        up.error = lost
        up.end.set()
    else:
        up.end.set()
        work._is_relayed.wait()
        (_, across) = outer.started[0]
        across.error = lost
        across.end.set()
    with pytest.raises(RuntimeError, match="a connection broke"):
        work.wait()
    is_cut.set()
    work.settle()
    group.close()
    assert [name for name, _ in inner.started] == ["reduce"]


def test_sums_leave_an_island_in_the_order_in_which_they_were_started() -> None:
    """The second one is ready first, and waits: heads would otherwise add up different buckets."""
    inner, outer = Operations(), Operations()
    group = IslandSums(inner, outer, is_nccl=False, is_over=lambda: False)
    works = [group.start(torch.full((1,), float(number))) for number in range(2)]
    inner.started[1][1].end.set()
    assert outer.started == []
    inner.started[0][1].end.set()
    for work in works:
        work._is_relayed.wait()
    assert [work._across and work._across._work for work in works] == [held for _, held in outer.started]
    group.close()
