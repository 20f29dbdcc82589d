"""What workers have measured of the links between pools."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class MeasuredLink(NamedTuple):
    """A link by the messages of steps: a small message takes ``latency_s``."""

    bytes_per_s: float
    latency_s: float


def better(one: MeasuredLink | None, other: MeasuredLink) -> MeasuredLink:
    """Return the link of two measurements: a rank that waits for others measures too long, never too short."""
    if one is None:
        return other
    return MeasuredLink(max(one.bytes_per_s, other.bytes_per_s), min(one.latency_s, other.latency_s))


def by_pair(found: Iterable[tuple[str, str, MeasuredLink]]) -> dict[tuple[str, str], MeasuredLink]:
    """Return links by pair of pools, in alphabetical order, out of what ranks of one pool have measured to another."""
    links: dict[tuple[str, str], MeasuredLink] = {}
    for own, peer, link in found:
        pair = (min(own, peer), max(own, peer))
        links[pair] = better(links.get(pair), link)
    return links
