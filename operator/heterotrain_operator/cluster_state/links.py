"""Links between pools, as workers have measured them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

SETTLED_RATIO = 2**0.25
"""A value changes where a newer one differs by more than this. The planner's rounding has the same step."""
LEAST_LATENCY_S = 1e-5
"""Latencies below this count as none."""


class MeasuredLink(NamedTuple):
    """A link by the messages of steps: a small message takes ``latency_s``."""

    bytes_per_s: float
    latency_s: float


def better(one: MeasuredLink | None, other: MeasuredLink) -> MeasuredLink:
    """Return the link of two measurements: a rank that waits for others measures too long, never too short."""
    if one is None:
        return other
    return MeasuredLink(max(one.bytes_per_s, other.bytes_per_s), min(one.latency_s, other.latency_s))


def settled(known: MeasuredLink | None, newest: MeasuredLink) -> MeasuredLink:
    """Return the known link while the newest measurement is near it, so that noise makes no search for layouts."""
    if known is None:
        return newest
    near = abs(math.log(newest.bytes_per_s / known.bytes_per_s)) <= math.log(SETTLED_RATIO)
    latencies = [max(each.latency_s, LEAST_LATENCY_S) for each in (known, newest)]
    near &= max(latencies) <= SETTLED_RATIO * min(latencies)
    return known if near else newest


def by_pair(found: Iterable[tuple[str, str, MeasuredLink]]) -> dict[tuple[str, str], MeasuredLink]:
    """Return links by pair of pools, in alphabetical order, out of what ranks of one pool have measured to another."""
    links: dict[tuple[str, str], MeasuredLink] = {}
    for own, peer, link in found:
        pair = (min(own, peer), max(own, peer))
        links[pair] = better(links.get(pair), link)
    return links
