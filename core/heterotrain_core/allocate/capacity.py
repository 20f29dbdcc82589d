"""Whether workers fit on nodes: everything that one worker needs has to be on one node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from heterotrain_core.allocate.problem import Pool, Size

_Amounts = tuple[int, ...]


class Room:
    """What each pool holds, and whether more would fit.

    Larger workers are placed first, each on the fullest nodes that take it. That is exact for one resource where larger
    sizes are multiples of smaller ones (1, 2, 4, 8 …): wherever a large worker goes, it takes the places of as many
    small ones. With other sizes or several resources it may miss a packing, but never claims one that does not exist.
    """

    def __init__(self, pools: Iterable[Pool]) -> None:
        """Start empty."""
        self._nodes = {pool.name: Counter(map(_amounts, pool.usable)) for pool in pools}
        self._held: dict[str, dict[Size, int]] = {name: {} for name in self._nodes}
        self._places: dict[tuple[str, Size], int] = {}
        self._known: dict[tuple[str, frozenset[tuple[Size, int]]], bool] = {}

    def places(self, pool: str, size: Size) -> int:
        """Return how many workers of this size the pool holds when it is empty; 0 for an unknown pool."""
        key = (pool, size)
        if key not in self._places:
            nodes = self._nodes.get(pool, Counter[_Amounts]())
            self._places[key] = sum(_times(node, _amounts(size)) * count for node, count in nodes.items())
        return self._places[key]

    def per_node(self, pool: str, size: Size) -> float:
        """Return how many workers of this size an average node of the pool holds; 0 for an unknown pool."""
        return self.places(pool, size) / max(1, sum(self._nodes.get(pool, Counter[_Amounts]()).values()))

    def fits(self, more: Mapping[tuple[str, Size], int]) -> bool:
        """Return whether these workers fit beside what is held; keys are (pool, size), counts may be negative."""
        if len(more) == 1:
            ((pool, size), count), *_ = more.items()
            held = self._held.get(pool)
            if held is not None and (not held or held.keys() == {size}):
                return held.get(size, 0) + count <= max(0, self.places(pool, size))
        for pool in {pool for pool, _ in more}:
            if pool not in self._nodes:
                if any(count > 0 for (name, _), count in more.items() if name == pool):
                    return False
                continue
            holds = dict(self._held[pool])
            for (name, size), count in more.items():
                if name == pool:
                    holds[size] = holds.get(size, 0) + count
            if not self._holds(pool, frozenset((size, count) for size, count in holds.items() if count > 0)):
                return False
        return True

    def more(self, pool: str, size: Size, limit: int) -> int:
        """Return how many workers of one size fit beside what is held, at most ``limit``."""
        held = self._held.get(pool)
        if held is not None and (not held or held.keys() == {size}):
            return max(0, min(limit, self.places(pool, size) - held.get(size, 0)))
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.fits({(pool, size): middle}) else (low, middle - 1)
        return low

    def hold(self, more: Mapping[tuple[str, Size], int]) -> None:
        """Take these workers in (negative counts: let them go), whether they fit or not."""
        for (pool, size), count in more.items():
            held = self._held.setdefault(pool, {})
            held[size] = held.get(size, 0) + count

    def _holds(self, pool: str, held: frozenset[tuple[Size, int]]) -> bool:
        key = (pool, held)
        if key not in self._known:
            # Fewest places first: a larger worker has fewer, whatever the resource that limits it.
            ordered = sorted(held, key=lambda item: (self.places(pool, item[0]), _amounts(item[0])))
            self._known[key] = all(count <= self.places(pool, size) for size, count in held) and (
                len(held) <= 1 or _packed(self._nodes[pool], ordered)
            )
        return self._known[key]


def _packed(nodes: Mapping[_Amounts, int], workers: Iterable[tuple[Size, int]]) -> bool:
    """Return whether the workers find nodes, in the order given. Nodes are counted by what is free on them."""
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
