"""The order of members in which their rings of owners end soonest.

Owners send to the next one in the order of the members' ranks, so a ring is as slow as the slowest link between two
neighbours. Members that hold the same parts on the same kinds of devices are of one type, and only the types that are
neighbours count. So branch and bound forbids neighbours: for a shorter exchange than that of an order, one of the rings
of its busiest device has to do without its slowest links. Whether an order without forbidden neighbours exists is a
search over (members left of each type, last type), which gives up after some dead ends.

Legend: ``P`` pieces of the model, ``T`` types of members, ``D`` devices of the types, ``K`` kinds.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from heterotrain_planner.layout.costs import Floats
from heterotrain_planner.layout.problem import Problem

Flags = NDArray[np.bool_]

MOST_TRIED = 64
"""Sets of forbidden neighbours for which an order is looked for."""
MOST_DEAD_ENDS = 2000
"""Of the search for one order."""
_SHORTER = 1e-9
"""Part of the exchange by which another order has to shorten it."""


class Rings:
    """The rings of some members.

    Args:
        problem: sound.
        kinds: of the devices of each type's members.
        held: bytes of each piece, by the place of its owner in the members of each type.
        counts: members of each type, at least one.
    """

    def __init__(
        self,
        problem: Problem,
        kinds: Sequence[Sequence[str]],
        held: Mapping[tuple[int, ...], float],
        counts: Sequence[int],
    ) -> None:
        self._counts = tuple(counts)
        members = sum(counts)
        number = {name: index for index, name in enumerate(sorted({name for own in kinds for name in own}))}
        links = [[problem.link(one, other) for other in number] for one in number]
        latency_KK = np.array([[link.latency_s for link in row] for row in links])
        per_byte_KK = np.array([[1 / link.bytes_per_s for link in row] for row in links])
        kind_PT = np.array([[number[own[at]] for own, at in zip(kinds, owners, strict=True)] for owners in held])
        size_P = np.array(list(held.values())).reshape(-1, 1, 1) / members
        pairs = (kind_PT[:, :, None], kind_PT[:, None])
        seconds_PTT = np.where(size_P > 0, latency_KK[pairs] + size_P * per_byte_KK[pairs], 0.0)
        self._seconds_PTT: Floats = 2 * (members - 1) * seconds_PTT
        device = {pair: index for index, pair in enumerate({pair: 0 for owners in held for pair in enumerate(owners)})}
        self._has_PD = np.zeros((len(held), len(device)), dtype=bool)
        for piece, owners in enumerate(held):
            self._has_PD[piece, [device[pair] for pair in enumerate(owners)]] = True

    def seconds(self, order: Sequence[int]) -> float:
        """Return the seconds of the busiest device with the members in this order, each by its type."""
        return float(self._busy_seconds(self._ring_seconds(order)).max())

    def shortest(self, order: Sequence[int]) -> tuple[float, tuple[int, ...]]:
        """Return the least seconds that are found, and their order of types; the given one where it is as good."""
        best = (self.seconds(order), tuple(order))
        if len(order) <= 3 or len(self._counts) == 1:  # noqa: PLR2004  # all orders of three are one ring
            return best
        ties = itertools.count()
        queue: list[tuple[float, int, Flags]] = []
        found: tuple[int, ...] | None = best[1]
        allowed_TT = ~np.diag(np.array(self._counts) == 1)
        for _ in range(MOST_TRIED):
            if found is not None:
                ring_P = self._ring_seconds(found)
                busy_D = self._busy_seconds(ring_P)
                if busy_D.max() < best[0] * (1 - _SHORTER):
                    best = (float(busy_D.max()), found)
                for piece in np.flatnonzero(self._has_PD[:, busy_D.argmax()]):
                    fast_TT = allowed_TT & (self._seconds_PTT[piece] < ring_P[piece])
                    least_P = np.where(fast_TT, self._seconds_PTT, np.inf).min(axis=2).max(axis=1)
                    heapq.heappush(queue, (float(self._busy_seconds(least_P).max()), next(ties), fast_TT))
            if not queue or queue[0][0] >= best[0] * (1 - _SHORTER):
                break
            _, _, allowed_TT = heapq.heappop(queue)
            found = _order(allowed_TT, self._counts)
        return best

    def _ring_seconds(self, order: Sequence[int]) -> Floats:
        slowest_P: Floats = self._seconds_PTT[:, order, np.roll(order, -1)].max(axis=1)
        return slowest_P

    def _busy_seconds(self, ring_P: Floats) -> Floats:
        busy_D: Floats = np.where(self._has_PD, ring_P[:, None], 0.0).sum(axis=0)
        return busy_D


def _order(allowed_TT: Flags, counts: Sequence[int]) -> tuple[int, ...] | None:
    """Return an order of all members, on a circle, whose neighbours are allowed; ``None`` where none is found."""
    beside = [np.flatnonzero(row).tolist() for row in allowed_TT]
    if any(kind not in own and counts[kind] > sum(counts[k] for k in own) for kind, own in enumerate(beside)):
        return None
    first = min(range(len(counts)), key=lambda kind: len(beside[kind]))
    left, path, members = list(counts), [first], sum(counts)
    left[first] -= 1

    def options() -> list[int]:
        """Return the next types, the best one last: those that need neighbours of other types, then the same one."""
        at = path[-1]
        return sorted((k for k in beside[at] if left[k]), key=lambda k: (k not in beside[k], k == at, left[k]))

    open_, dead = [options()], set[tuple[int, ...]]()
    while open_ and len(dead) < MOST_DEAD_ENDS:
        if len(path) == members and first in beside[path[-1]]:
            return tuple(path)
        if open_[-1]:
            step = open_[-1].pop()
            left[step] -= 1
            if (step, *left) in dead:
                left[step] += 1
            else:
                path.append(step)
                open_.append(options())
        else:
            dead.add((path[-1], *left))
            open_.pop()
            left[path.pop()] += 1
    return None
