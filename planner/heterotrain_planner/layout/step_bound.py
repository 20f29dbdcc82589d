"""A time that no members' step falls below, the exchange of gradients included.

A share may be short with many members, and the exchange with few. So the numbers of members are divided into ranges.
In each range, the shares take at least what the relaxation needs with at most so many members, and the exchange what
the fewest of them need. The bound is the least sum. The range with the least one is halved until it does not matter.

Of n members on D devices, one has no more than ``d = D / n`` devices, and one of those holds at least a d-th of the
model. It is in rings of n owners, one of each member. A ring whose owners are all of one kind needs n devices of that
kind; every other ring has a link between two kinds. With W bytes of gradients, the exchange takes at least

    2 (n − 1) (latency + W / (d n bandwidth))

over the fastest link that rings of n owners can have.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence

import numpy as np

from heterotrain_planner.layout.exchange import ring_seconds
from heterotrain_planner.layout.level import MOST_MEMBERS, Search, TemplateOptions
from heterotrain_planner.layout.problem import Link, Problem

MOST_RANGES = 12
"""Ranges of numbers of members for which the relaxation is solved."""
CLOSE = 0.0005
"""Distance of the bound from a known step, as a ratio, at which halving ends."""


def least_exchange_seconds(problem: Problem, devices: Sequence[int], members: int, *, most_devices: int) -> float:
    """Return seconds that the exchange among at least so many members does not fall below.

    Args:
        problem: sound.
        devices: by kind, of all members together.
        members: their least number.
        most_devices: of one member.
    """
    link = _fastest(problem, devices, members)
    if members <= 1 or link is None:
        return 0.0
    own = min(most_devices, sum(devices) / members)
    held = sum(unit.parameter_bytes for unit in problem.units) / max(1.0, own)
    return ring_seconds([link], members, held)


def least_step(
    options: TemplateOptions, problem: Problem, devices: Sequence[int], *, known_s: float, share_s: float
) -> float:
    """Return seconds that no members out of these options fall below, shares by the formula and the exchange.

    Args:
        options: templates of the members.
        problem: sound.
        devices: by kind.
        known_s: step of known members.
        share_s: seconds that no shares fall below, whatever the number of members.
    """
    fits = (options.need_JK <= np.array(devices)).all(axis=1) & np.isfinite(options.first_BJ).any(axis=0)
    if not fits.any():
        return share_s
    sizes_J = options.need_JK[fits].sum(axis=1)
    most_devices = int(sizes_J.max())
    most = min(MOST_MEMBERS, sum(devices) // max(1, int(sizes_J.min())))
    queue: list[tuple[float, int, int]] = []

    def exchange_s(members: int) -> float:
        return least_exchange_seconds(problem, devices, members, most_devices=most_devices)

    def consider(first: int, last: int, least_s: float) -> None:
        """Add a range; ``least_s`` bounds the shares of a range around it."""
        least_s = max(least_s, share_s)
        if least_s + exchange_s(first) < known_s:  # else solving it would not lower the result below what is known
            found = Search(options, np.array(devices, dtype=np.int64), first, last).relaxed_s(least_s)
            if found is None:
                return
            least_s = max(least_s, found)
        heapq.heappush(queue, (least_s + exchange_s(first), first, last))

    first, last = max(1, problem.least_members), max(1, problem.least_members, most)
    heapq.heappush(queue, (share_s + exchange_s(first), first, last))
    for _ in range(MOST_RANGES // 2):
        bound_s, first, last = queue[0]
        if first == last or bound_s >= known_s * (1 - CLOSE):
            break
        heapq.heappop(queue)
        middle = int((first * last) ** 0.5)
        inside_s = bound_s - exchange_s(first)
        for part in ((first, middle), (middle + 1, last)):
            consider(*part, inside_s)
        if not queue:
            return bound_s
    return min(queue[0][0], known_s)


def _fastest(problem: Problem, devices: Sequence[int], members: int) -> Link | None:
    """Return the fastest link that a ring of so many owners can have; ``None`` where none is possible."""
    there = [(kind.name, count) for kind, count in zip(problem.kinds, devices, strict=True) if count]
    links = [problem.link(name, name) for name, count in there if count >= members]
    links += [problem.link(one, other) for (one, _), (other, _) in itertools.combinations(there, 2)]
    if not links:
        return None
    return Link(bytes_per_s=max(link.bytes_per_s for link in links), latency_s=min(link.latency_s for link in links))
