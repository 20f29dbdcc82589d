"""Whether workers fit on nodes: each worker's accelerators have to be on one node."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from heterotrain_core.allocate.views import Pool


class Room:
    """What each pool holds, and whether more would fit.

    Exact where larger worker sizes are multiples of smaller ones (1, 2, 4, 8 …): larger workers are placed first and a
    smaller one fits wherever its size is left, so counting per size is enough. Other mixes are placed largest first into
    the fullest node that takes them, which may miss a packing but never claims one that does not exist.
    """

    def __init__(self, pools: Iterable[Pool]) -> None:
        """Start empty."""
        self._nodes = {pool.name: pool.usable for pool in pools}
        self._held: dict[str, dict[int, int]] = {name: {} for name in self._nodes}
        self._places: dict[tuple[str, int], int] = {}

    def places(self, pool: str, size: int) -> int:
        """Return how many workers of this size the pool holds when it is empty; 0 for an unknown pool."""
        key = (pool, size)
        if key not in self._places:
            self._places[key] = sum(node // size for node in self._nodes.get(pool, ()))
        return self._places[key]

    def fits(self, more: Mapping[tuple[str, int], int]) -> bool:
        """Return whether these workers fit beside what is held; keys are (pool, size), counts may be negative."""
        for pool in {pool for pool, _ in more}:
            if pool not in self._nodes:
                if any(count > 0 for (name, _), count in more.items() if name == pool):
                    return False
                continue
            held = dict(self._held[pool])
            for (name, size), count in more.items():
                if name == pool:
                    held[size] = held.get(size, 0) + count
            if not self._packed(pool, {size: count for size, count in held.items() if count > 0}):
                return False
        return True

    def hold(self, more: Mapping[tuple[str, int], int]) -> None:
        """Take these workers in (negative counts: let them go), whether they fit or not."""
        for (pool, size), count in more.items():
            held = self._held.setdefault(pool, {})
            held[size] = held.get(size, 0) + count

    def _packed(self, pool: str, held: Mapping[int, int]) -> bool:
        sizes = sorted(held, reverse=True)
        if all(larger % smaller == 0 for larger, smaller in pairwise(sizes)):
            used = 0
            for size in sizes:
                used += held[size] * size
                if used > self.places(pool, size) * size:
                    return False
            return True
        return _placed(self._nodes[pool], [size for size in sizes for _ in range(held[size])])


def _placed(nodes: Sequence[int], sizes: Sequence[int]) -> bool:
    """Return whether the workers, largest first, each find a node; the fullest that takes it."""
    free = sorted(nodes)
    for size in sizes:
        place = next((i for i, left in enumerate(free) if left >= size), None)
        if place is None:
            return False
        free[place] -= size
        free.sort()
    return True
