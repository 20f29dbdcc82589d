"""Whether workers fit on nodes: one node has to hold everything that one worker needs.

``PoolCapacity`` is what the pools hold when they are empty; ``Occupancy`` is what a trial allocation places in them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from heterotrain_core.allocate.problem import Pool, Size

_Amounts = tuple[int, ...]


class PoolCapacity:
    """What each pool holds when it is empty. Made once per allocation, and shared by all its steps.

    Larger workers are placed first, each on the fullest nodes that take it. That is exact for one resource where larger
    sizes are multiples of smaller ones (1, 2, 4, 8 …): wherever a large worker goes, it takes the slots of as many
    small ones. With other sizes or several resources it may miss a packing, but never claims one that does not exist.
    """

    def __init__(self, pools: Iterable[Pool]) -> None:
        """Take the pools, each name once."""
        self.pools: Mapping[str, Pool] = {pool.name: pool for pool in pools}
        self._nodes = {pool.name: Counter(map(_amounts, pool.usable)) for pool in self.pools.values()}
        self._slots: dict[tuple[str, Size], int] = {}
        self._packable: dict[tuple[str, frozenset[tuple[Size, int]]], bool] = {}

    def slots(self, pool: str, size: Size) -> int:
        """Return how many workers of this size the empty pool holds; 0 for an unknown pool."""
        key = (pool, size)
        if key not in self._slots:
            nodes = self._nodes.get(pool, Counter[_Amounts]())
            self._slots[key] = sum(_times(node, _amounts(size)) * count for node, count in nodes.items())
        return self._slots[key]

    def slots_per_node(self, pool: str, size: Size) -> float:
        """Return how many workers of this size an average node of the pool holds; 0 for an unknown pool."""
        return self.slots(pool, size) / max(1, sum(self._nodes.get(pool, Counter[_Amounts]()).values()))

    def parts(self, pool: str, sizes: Collection[Size]) -> dict[Size, float]:
        """Return a part of the pool for one worker of each size: workers that fit together have parts of 1 at most.

        With one size, parts are one slot's. Where sizes mix, slots of different sizes do not add up, so amounts are
        compared instead, of the resource that these sizes need most.
        """
        if len(sizes) == 1:
            return {size: 1.0 / max(1, self.slots(pool, size)) for size in sizes}
        nodes = self._nodes.get(pool, Counter[_Amounts]())
        totals = [
            sum(column) for column in zip(*(tuple(n * k for n in node) for node, k in nodes.items()), strict=True)
        ]
        needs = {size: _amounts(size) for size in sizes}
        found = [{size: need[r] / total for size, need in needs.items()} for r, total in enumerate(totals) if total > 0]
        return max(found, key=lambda parts: sum(parts.values()), default=dict.fromkeys(sizes, 0.0))

    def holds(self, pool: str, workers: Mapping[Size, int]) -> bool:
        """Return whether the empty pool holds these workers; keys are sizes. ``False`` for an unknown pool."""
        if pool not in self._nodes:
            return not any(count > 0 for count in workers.values())
        wanted = frozenset((size, count) for size, count in workers.items() if count > 0)
        key = (pool, wanted)
        if key not in self._packable:
            # Fewest slots first: a larger worker has fewer, whichever resource limits it.
            ordered = sorted(wanted, key=lambda item: (self.slots(pool, item[0]), _amounts(item[0])))
            self._packable[key] = all(count <= self.slots(pool, size) for size, count in wanted) and (
                len(wanted) <= 1 or _packed(self._nodes[pool], ordered)
            )
        return self._packable[key]


class Occupancy:
    """The workers that a trial allocation places in the pools; none at first."""

    def __init__(self, capacity: PoolCapacity) -> None:
        """Start without workers."""
        self.capacity = capacity
        self._placed: dict[str, dict[Size, int]] = {name: {} for name in capacity.pools}

    def fits(self, more: Mapping[tuple[str, Size], int]) -> bool:
        """Return whether these workers fit next to the placed ones; keys are (pool, size), counts may be negative."""
        if len(more) == 1:
            ((pool, size), count), *_ = more.items()
            placed = self._placed.get(pool)
            if placed is not None and (not placed or placed.keys() == {size}):
                return placed.get(size, 0) + count <= max(0, self.capacity.slots(pool, size))
        for pool in {pool for pool, _ in more}:
            workers = dict(self._placed[pool]) if pool in self.capacity.pools else {}
            for (name, size), count in more.items():
                if name == pool:
                    workers[size] = workers.get(size, 0) + count
            if not self.capacity.holds(pool, workers):
                return False
        return True

    def free_slots(self, pool: str, size: Size, limit: int) -> int:
        """Return how many workers of one size fit next to the placed ones, at most ``limit``."""
        placed = self._placed.get(pool)
        if placed is not None and (not placed or placed.keys() == {size}):
            return max(0, min(limit, self.capacity.slots(pool, size) - placed.get(size, 0)))
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.fits({(pool, size): middle}) else (low, middle - 1)
        return low

    def add(self, more: Mapping[tuple[str, Size], int]) -> None:
        """Place these workers (negative counts remove workers), whether they fit or not."""
        for (pool, size), count in more.items():
            placed = self._placed.setdefault(pool, {})
            placed[size] = placed.get(size, 0) + count


def _packed(nodes: Mapping[_Amounts, int], workers: Iterable[tuple[Size, int]]) -> bool:
    """Return whether the workers find nodes, in the order given. Nodes are counted by their free amounts."""
    free = Counter(nodes)
    for size, count in workers:
        need, left = _amounts(size), count
        takes = sorted((times, node) for node in free if (times := _times(node, need)))
        for times, node in takes:
            filled = min(free[node], left // times)
            rest = left - filled * times if filled < free[node] else 0
            last = min(rest, times)
            for nodes_now, workers_each in ((filled, times), (1 if last else 0, last)):
                if nodes_now:
                    free[node] -= nodes_now
                    free[tuple(have - workers_each * one for have, one in zip(node, need, strict=True))] += nodes_now
            if not free[node]:
                del free[node]
            left -= filled * times + last
            if not left:
                break
        if left:
            return False
    return True


def _amounts(size: Size) -> _Amounts:
    return (size,) if isinstance(size, int) else size


def _times(node: _Amounts, need: _Amounts) -> int:
    """Return how many workers with this need the node takes."""
    return min((have // one for have, one in zip(node, need, strict=True) if one > 0), default=0)
