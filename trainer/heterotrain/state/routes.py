"""Which bytes of a state go from whom to whom, so that no rank's link carries more than it must."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from heterotrain.state.parts import bounds


@dataclass(frozen=True, slots=True)
class Route:
    """Bytes ``[start, stop)`` of the whole state go from one rank to another; never none."""

    source: int
    to: int
    start: int
    stop: int


Round = tuple[Route, ...]
"""What travels at the same time."""


def rounds(total_bytes: int, *, donors: Sequence[int], receivers: Sequence[int]) -> tuple[Round, ...]:
    """Return how a state gets from those who hold it to those who lack it, one round after the other.

    While there are no more receivers than donors, each of D donors sends its D-th to every receiver. To more receivers (R)
    that would take each donor R/D states' worth of its link. So then each receiver gets an R-th, a D-th of it from each donor,
    and passes it on to the other receivers: a donor sends a D-th of the state, a receiver less than one whole.

    Args:
        total_bytes: of the state.
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
