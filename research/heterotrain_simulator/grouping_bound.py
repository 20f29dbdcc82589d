"""A sum of exchange and pipeline traffic that no grouping over zones beats.

Of a stage, only the set of its zones is kept:

- its exchange is at least that of one device in each of its zones and all others as near as possible;
- two neighbouring stages cost at least the Hausdorff distance of their sets: every zone of one is paired with some
  zone of the other.

All zones have to occur. For a limit of the exchange, the least traffic is a shortest path over (zones that occurred,
last set) among the sets within the limit. The limit is searched by intervals: its lower end is paid for the exchange,
its upper end says which sets are allowed.

Legend: ``S`` sets of zones, as bit masks from 1.
"""

from __future__ import annotations

import heapq
import itertools

import numpy as np
from numpy.typing import NDArray

from heterotrain_simulator.zones import ZoneCosts

Floats = NDArray[np.float64]

MOST_ZONES_OF_PATHS = 8
"""Zones up to which sets are searched. Beyond, only single zones and pairs of zones count."""
_MOST_INTERVALS = 24


def least_total(costs: ZoneCosts, stages: int, found_s: float) -> float:
    """Return a bound of at most ``found_s``, the sum of a known grouping.

    Args:
        costs: by zone.
        stages: of every member.
        found_s: seconds of the known grouping; the search ends when the bound reaches it.
    """
    zones = len(costs.boundary_s)
    inside_s = float(costs.boundary_s.min())
    if zones > MOST_ZONES_OF_PATHS:
        return min(found_s, _simple(costs, stages))
    masks = [mask for mask in range(1, 1 << zones) if mask.bit_count() <= costs.stage_devices]
    exchange_S = np.array([_exchange(costs, _members(mask)) for mask in masks])
    distance_SS = _distances(costs, masks) - inside_s
    levels = np.unique(exchange_S)
    fixed_s = (stages - 1) * inside_s

    def bound(first: int, last: int) -> float:
        allowed = np.flatnonzero(exchange_S <= levels[last])
        path_s = _least_path(
            [masks[index] for index in allowed], distance_SS[np.ix_(allowed, allowed)], (1 << zones) - 1
        )
        return float(levels[first]) + fixed_s + path_s

    queue = [(bound(0, len(levels) - 1), 0, len(levels) - 1)]
    for _ in range(_MOST_INTERVALS):
        value, first, last = queue[0]
        if first == last or value >= found_s:
            break
        heapq.heappop(queue)
        middle = (first + last) // 2
        heapq.heappush(queue, (bound(first, middle), first, middle))
        heapq.heappush(queue, (max(value, bound(middle + 1, last)), middle + 1, last))
    return min(found_s, queue[0][0])


def _simple(costs: ZoneCosts, stages: int) -> float:
    """Return the bound over the number of neighbouring stages that differ, for many zones.

    With j changes there are j + 1 different stages at most, so one of them spans several zones where j + 1 is less than
    the number of zones.
    """
    zones = range(len(costs.boundary_s))
    inside_s = float(costs.boundary_s.min())
    between_s = min(float(costs.boundary_s[pair]) for pair in itertools.combinations(zones, 2))
    # Further zones may be nearer than the chosen ones.
    nearest_s = float(costs.exchange_s.min())
    one_s = (costs.stage_devices - 1) * nearest_s
    farther_s = min(float(costs.exchange_s[pair]) for pair in itertools.combinations(zones, 2))
    two_s = max(0, costs.stage_devices - 2) * nearest_s + max(farther_s, nearest_s)
    sums = []
    for changes in range(stages):
        exchange_s = one_s if changes + 1 >= len(zones) else two_s
        sums.append(exchange_s + changes * max(between_s, inside_s) + (stages - 1 - changes) * inside_s)
    return min(sums)


def _members(mask: int) -> tuple[int, ...]:
    return tuple(zone for zone in range(mask.bit_length()) if mask >> zone & 1)


def _exchange(costs: ZoneCosts, chosen: tuple[int, ...]) -> float:
    """Return the least exchange of any stage with devices in all of these zones and no others."""
    rest = costs.stage_devices - len(chosen)
    times = []
    for zone in chosen:
        others = sum(float(costs.exchange_s[zone, other]) for other in chosen if other != zone)
        nearest = min(float(costs.exchange_s[zone, other]) for other in chosen)
        times.append(others + rest * nearest)
    return max(times)


def _distances(costs: ZoneCosts, masks: list[int]) -> Floats:
    """Return the Hausdorff distance of each pair of sets (``SS``)."""
    zones = range(len(costs.boundary_s))
    inside_SZ = np.array([[mask >> zone & 1 for zone in zones] for mask in masks], dtype=bool)
    # Nearest zone of each set, by zone.
    nearest_ZS = np.array(
        [np.where(inside_SZ, costs.boundary_s[zone], np.inf).min(axis=1) for zone in zones], dtype=float
    )
    one_way: Floats = np.array([nearest_ZS[row].max(axis=0) for row in inside_SZ])
    both: Floats = np.maximum(one_way, one_way.T)
    return both


def _least_path(masks: list[int], distance_SS: Floats, everything: int) -> float:
    """Return the shortest path from any set through sets that together have all zones; infinite where none has."""
    shortest = distance_SS.copy()
    np.fill_diagonal(shortest, 0.0)
    for middle in range(len(masks)):
        np.minimum(shortest, shortest[:, middle : middle + 1] + shortest[middle : middle + 1, :], out=shortest)
    bits = np.array(masks)
    best = np.full((everything + 1, len(masks)), np.inf)
    best[bits, np.arange(len(masks))] = 0.0
    for covered in range(1, everything):
        row = best[covered]
        known = np.flatnonzero(np.isfinite(row))
        if not len(known):
            continue
        reached = (row[known, None] + shortest[known]).min(axis=0)
        np.minimum.at(best, (covered | bits, np.arange(len(masks))), reached)
    return float(best[everything].min())
