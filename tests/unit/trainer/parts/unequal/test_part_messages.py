"""Sums and exchanges of parts between ranks, over a network in which a message waits for its receiver."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from typing import Any

import pytest
import torch
from heterotrain.parts.unequal.part_messages import PartExchange, sum_of_parts

LONGEST_S = 30.0
"""A test that waits for longer has ranks that wait for each other."""


class Message:
    """One side of a message; ``over`` is set when both sides have come together."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.over = tensor, threading.Event()


class Network:
    """Messages between two ranks meet in their order."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sides: dict[tuple[int, int, bool], deque[Message]] = defaultdict(deque)
        self.open_elements: dict[int, int] = defaultdict(int)
        self.most_elements: dict[int, int] = defaultdict(int)

    def begin(self, source: int, target: int, tensor: torch.Tensor, *, sends: bool) -> Message:
        mine = Message(tensor)
        with self._lock:
            if not sends:
                self.open_elements[target] += tensor.numel()
                self.most_elements[target] = max(self.most_elements[target], self.open_elements[target])
            others = self._sides[source, target, not sends]
            if not others:
                self._sides[source, target, sends].append(mine)
                return mine
            other = others.popleft()
            to, origin = (other, mine) if sends else (mine, other)
            to.tensor.copy_(origin.tensor)
        mine.over.set()
        other.over.set()
        return mine


class Rank:
    """A rank's view of the network, with the methods of ``MemberGroup`` that parts need."""

    def __init__(self, network: Network, rank: int) -> None:
        self._network, self._rank = network, rank

    def rank(self) -> int:
        return self._rank

    def start(self, direction: str, tensor: torch.Tensor, rank: int, _tag: int) -> Message:
        if direction == "send":
            return self._network.begin(self._rank, rank, tensor, sends=True)
        return self._network.begin(rank, self._rank, tensor, sends=False)

    def finish(self, direction: str, message: Message) -> None:
        if not message.over.wait(LONGEST_S):
            raise TimeoutError(f"rank {self._rank} waits for the other side of its {direction}")
        if direction == "receive":
            self._network.open_elements[self._rank] -= message.tensor.numel()

    def note_received(self, messages: list[tuple[Message, int, int]]) -> None:
        for message, sender, size_bytes in messages:
            assert message.over.is_set()
            assert sender != self._rank
            assert size_bytes == message.tensor.nbytes


def on_all(number: int, run: Any) -> tuple[list[Any], Network]:
    """Return what ``run(group, rank)`` returns on each rank, with a thread for each, and their network."""
    network, found, errors = Network(), [None] * number, []

    def work(rank: int) -> None:
        try:
            found[rank] = run(Rank(network, rank), rank)
        except Exception as error:  # noqa: BLE001  # the test shows it
            errors.append(error)

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    return found, network


@pytest.mark.parametrize(
    "sizes", [(3, 3, 3), (8, 1, 1, 2), (0, 5, 1), (1, 0, 0, 0, 9), (4, 4), (7,), (2, 2, 2, 6, 6, 6)], ids=str
)
def test_each_rank_gets_the_sum_of_its_parts_in_little_memory(sizes: tuple[int, ...]) -> None:
    number, elements = len(sizes), sum(sizes)
    values = [torch.randn(elements, generator=torch.Generator().manual_seed(rank)).double() for rank in range(number)]
    expected = torch.stack(values).sum(0).split(list(sizes))

    def run(group: Any, rank: int) -> torch.Tensor:
        return sum_of_parts(group, list(values[rank].clone().split(list(sizes))))

    found, network = on_all(number, run)
    for rank in range(number):
        torch.testing.assert_close(found[rank], expected[rank], rtol=1e-14, atol=1e-14)
        assert network.most_elements[rank] <= max(elements, sizes[rank])


def test_exchanges_that_are_ended_late_keep_their_order() -> None:
    def run(group: Any, rank: int) -> list[list[float]]:
        targets = [[torch.zeros(1) for _ in range(3)] for _ in range(4)]
        begun = [
            PartExchange(group, [torch.tensor([10.0 * turn + rank])] * 3, targets[turn]) for turn in range(len(targets))
        ]
        for exchange in reversed(begun):
            exchange.finish()
        return [[float(target) for target in each] for each in targets]

    found, _ = on_all(3, run)
    for rank in range(3):
        assert found[rank] == [
            [0.0 if other == rank else 10.0 * turn + other for other in range(3)] for turn in range(4)
        ]
