"""Routes the bytes of a state between ranks, such that no rank's network link carries more than necessary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from heterotrain.state.balance import shared
from heterotrain.state.loads import Load
from heterotrain.state.memory import bounds
from heterotrain.state.ranges import TensorRange, between


@dataclass(frozen=True, slots=True)
class Route:
    """Bytes ``[start, stop)`` of the ranges of a load, sent from one rank to another; at least one byte."""

    source: int
    to: int
    load: Load
    start: int
    stop: int

    @property
    def ranges(self) -> tuple[TensorRange, ...]:
        """The bytes, by entry of the state; only the two ranks look at them."""
        return between(self.load.ranges, self.start, self.stop)


Round = tuple[Route, ...]
"""Routes used at the same time."""


def rounds(loads: Sequence[Load]) -> tuple[Round, ...]:
    """Return how all loads get from their donors to their receivers, in consecutive rounds.

    A load with at most as many receivers as donors goes straight: each donor sends its part to every receiver. With
    more receivers (R), donors would send more than one load. So each receiver then gets an R-th of it, and passes it
    on to the other receivers. Donors' parts are such that the busiest donor sends as little as possible: of a single
    load, each of D donors sends a D-th.
    """
    sizes = [load.size_bytes for load in loads]
    copies = [1 if load.is_relayed else len(load.receivers) for load in loads]
    supplies = [(size * number, load.donors) for size, number, load in zip(sizes, copies, loads, strict=True)]
    first: list[Route] = []
    second: list[Route] = []
    for load, size, amounts in zip(loads, sizes, shared(supplies), strict=True):
        receivers = load.receivers
        if not load.is_relayed:
            for donor, edges in _parts(0, size, amounts).items():
                first += [Route(donor, receiver, load, *edges) for receiver in receivers]
            continue
        for receiver, (start, stop) in zip(receivers, bounds(size, len(receivers)), strict=True):
            parts = _parts(start, stop, amounts)
            first += [Route(donor, receiver, load, *edges) for donor, edges in parts.items()]
            second += [Route(receiver, other, load, start, stop) for other in receivers if other != receiver and parts]
    return tuple(found for found in (tuple(first), tuple(second)) if found)


def _parts(start: int, stop: int, amounts: Mapping[int, int]) -> dict[int, tuple[int, int]]:
    """Cut ``[start, stop)`` in proportion to what each donor gives; donors without a byte are left out."""
    given, reached, found = sum(amounts.values()), 0, {}
    for donor in sorted(amounts):
        first = start + (stop - start) * reached // given
        reached += amounts[donor]
        end = start + (stop - start) * reached // given
        if end > first:
            found[donor] = (first, end)
    return found
