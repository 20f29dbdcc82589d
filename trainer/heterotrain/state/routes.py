"""Which bytes of a state are sent between which ranks, such that no rank's network link carries more than necessary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from heterotrain.state.parts import bounds


@dataclass(frozen=True, slots=True)
class Route:
    """Bytes ``[start, stop)`` of the whole state, sent from one rank to another; at least one byte."""

    source: int
    to: int
    start: int
    stop: int


Round = tuple[Route, ...]
"""Routes used at the same time."""


def rounds(total_bytes: int, *, donors: Sequence[int], receivers: Sequence[int]) -> tuple[Round, ...]:
    """Return how a state gets from the ranks that hold it to the ranks that lack it, in consecutive rounds.

    With at most as many receivers as donors, each of D donors sends a D-th of the state to every receiver. With more
    receivers (R), each donor would send R/D states. So each receiver then gets an R-th of the state, a D-th of that
    from each donor, and passes it on to the other receivers. A donor sends a D-th of the state, a receiver less than
    one state.

    Args:
        total_bytes: size of the state.
        donors: ranks that hold it; at least one.
        receivers: ranks that lack it.
    """
    direct = tuple(
        Route(donor, receiver, start, stop)
        for receiver in receivers
        for donor, (start, stop) in zip(donors, bounds(total_bytes, len(donors)), strict=True)
        if stop > start
    )
    if len(receivers) <= len(donors):
        return (direct,) if direct else ()
    parts = dict(zip(receivers, bounds(total_bytes, len(receivers)), strict=True))
    scattered = tuple(
        Route(donor, receiver, first + start, first + stop)
        for receiver, (first, last) in parts.items()
        for donor, (start, stop) in zip(donors, bounds(last - first, len(donors)), strict=True)
        if stop > start
    )
    passed_on = tuple(
        Route(source, receiver, start, stop)
        for source, (start, stop) in parts.items()
        for receiver in receivers
        if receiver != source and stop > start
    )
    return tuple(found for found in (scattered, passed_on) if found)
