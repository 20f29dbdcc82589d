"""Routes the bytes of a state between ranks, such that no rank's network link carries more than necessary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from heterotrain.state.balance import shared
from heterotrain.state.parts import bounds


@dataclass(frozen=True, slots=True)
class Load:
    """Bytes that all ``receivers`` lack and all ``donors`` have; at least one of each, and none is both."""

    size_bytes: int
    donors: tuple[int, ...]
    receivers: tuple[int, ...]

    @property
    def is_relayed(self) -> bool:
        """Whether receivers pass parts on to each other, because donors would have to send more than the load."""
        return len(self.receivers) > len(self.donors)


@dataclass(frozen=True, slots=True)
class Route:
    """Bytes ``[start, stop)`` of a load, sent from one rank to another; at least one byte."""

    load: int
    source: int
    to: int
    start: int
    stop: int


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
    for number, (load, amounts) in enumerate(zip(loads, shared(supplies), strict=True)):
        if not load.is_relayed:
            first += [
                Route(number, donor, receiver, start, stop)
                for donor, (start, stop) in _parts(load.size_bytes, amounts).items()
                for receiver in load.receivers
            ]
            continue
        parts = dict(zip(load.receivers, bounds(load.size_bytes, len(load.receivers)), strict=True))
        for receiver, (begin, end) in parts.items():
            first += [
                Route(number, donor, receiver, begin + start, begin + stop)
                for donor, (start, stop) in _parts(end - begin, amounts).items()
            ]
        second += [
            Route(number, source, receiver, start, stop)
            for source, (start, stop) in parts.items()
            for receiver in load.receivers
            if receiver != source and stop > start
        ]
    return tuple(found for found in (tuple(first), tuple(second)) if found)


def _parts(size_bytes: int, amounts: Mapping[int, int]) -> dict[int, tuple[int, int]]:
    """Cut ``[0, size_bytes)`` in proportion to what each donor gives; donors without a byte are left out."""
    whole, reached, found = sum(amounts.values()), 0, {}
    for donor in sorted(amounts):
        start = size_bytes * reached // whole
        reached += amounts[donor]
        stop = size_bytes * reached // whole
        if stop > start:
            found[donor] = (start, stop)
    return found
