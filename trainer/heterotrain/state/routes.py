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
    """Bytes of entries of the state, sent from one rank to another; at least one byte."""

    source: int
    to: int
    ranges: tuple[TensorRange, ...]


Round = tuple[Route, ...]
"""Routes used at the same time."""


def rounds(loads: Sequence[Load]) -> tuple[Round, ...]:
    """Return how all loads get from their donors to their receivers, in consecutive rounds.

    A load with at most as many receivers as donors goes straight: each donor sends its part to every receiver. With
    more receivers (R), donors would send more than one load. So each receiver then gets an R-th of it, and passes it
    on to the other receivers. Donors' parts are such that the busiest donor sends as little as possible: of a single
    load, each of D donors sends a D-th.
    """
    copies = [1 if load.is_relayed else len(load.receivers) for load in loads]
    supplies = [(load.size_bytes * number, load.donors) for load, number in zip(loads, copies, strict=True)]
    first: list[Route] = []
    second: list[Route] = []
    for load, amounts in zip(loads, shared(supplies), strict=True):
        receivers = load.receivers
        if not load.is_relayed:
            for donor, part in _parts(load.ranges, amounts).items():
                first += [Route(donor, receiver, part) for receiver in receivers]
            continue
        for receiver, (start, stop) in zip(receivers, bounds(load.size_bytes, len(receivers)), strict=True):
            if start == stop:
                continue
            own = between(load.ranges, start, stop)
            first += [Route(donor, receiver, part) for donor, part in _parts(own, amounts).items()]
            second += [Route(receiver, other, own) for other in receivers if other != receiver]
    return tuple(found for found in (tuple(first), tuple(second)) if found)


def _parts(ranges: Sequence[TensorRange], amounts: Mapping[int, int]) -> dict[int, tuple[TensorRange, ...]]:
    """Cut ranges in proportion to what each donor gives; donors without a byte are left out."""
    size_bytes, given, reached, found = sum(each.elements for each in ranges), sum(amounts.values()), 0, {}
    for donor in sorted(amounts):
        start = size_bytes * reached // given
        reached += amounts[donor]
        part = between(ranges, start, size_bytes * reached // given)
        if part:
            found[donor] = part
    return found
