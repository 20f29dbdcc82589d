"""Packs workers onto nodes: one node has to hold everything that one worker needs.

``PoolCapacity`` is what the pools hold when they are empty; ``Occupancy`` is what a trial allocation places in them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from itertools import islice, pairwise

from heterotrain_planner.allocate.packing import Amounts, PackingTable, packing_table, patterns, times, work_of
from heterotrain_planner.allocate.problem import Pool, Size

MOST_WORK = 10_000_000
"""Work on packings over all pools of one allocation, in entries of tables: about a tenth of a second."""
MOST_WORK_OF_TABLE = 4_000_000
"""The same for one table."""


class Fit(Enum):
    """Whether workers fit on the nodes of an empty pool."""

    YES = "yes"
    NO = "no"
    """No packing exists."""
    UNKNOWN = "unknown"
    """No packing was found, and to exclude all of them would take too long."""


class PoolCapacity:
    """What each pool holds when it is empty. Made once per allocation, and shared by all its steps.

    Larger workers are placed first, each on the fullest nodes that take it. That is exact where larger sizes are
    multiples of smaller ones (1, 2, 4, 8 …): wherever a large worker goes, it takes the slots of as many small ones.
    With other sizes it may miss a packing. Then a table of all packings decides (see ``packing``), where pool and
    numbers of workers are small enough. No packing is claimed that does not exist.
    """

    def __init__(self, pools: Iterable[Pool]) -> None:
        """Take the pools, each name once."""
        self.pools: Mapping[str, Pool] = {pool.name: pool for pool in pools}
        self._nodes = {pool.name: Counter(map(_amounts, pool.usable)) for pool in self.pools.values()}
        self._slots: dict[tuple[str, Size], int] = {}
        self._fits: dict[tuple[str, frozenset[tuple[Size, int]]], Fit] = {}
        self._tables: dict[tuple[str, frozenset[Size]], tuple[tuple[Size, ...], PackingTable] | None] = {}
        self._work_left = float(MOST_WORK)

    def slots(self, pool: str, size: Size) -> int:
        """Return how many workers of this size the empty pool holds; 0 for an unknown pool."""
        key = (pool, size)
        if key not in self._slots:
            nodes = self._nodes.get(pool, Counter[Amounts]())
            self._slots[key] = sum(times(node, _amounts(size)) * count for node, count in nodes.items())
        return self._slots[key]

    def rows(self, pool: str, sizes: Sequence[Size]) -> list[tuple[dict[Size, int], int]]:
        """Return limits that workers of these sizes keep if they fit together: a part of each worker, and the limit.

        For each size, a worker counts as the workers of this size that could stand in its place on a node. Where sizes
        are multiples of each other, these limits are enough. Otherwise the amounts of each resource are limits as well.
        """
        needs = {size: _amounts(size) for size in sizes}
        found = [
            ({size: part for size, need in needs.items() if (part := times(need, one))}, self.slots(pool, own))
            for own, one in needs.items()
        ]
        if len(sizes) > 1:
            totals = _sum(self._nodes.get(pool, Counter[Amounts]()))
            found += [({size: need[r] for size, need in needs.items() if need[r]}, n) for r, n in enumerate(totals)]
        return [(parts, limit) for parts, limit in found if parts]

    def patterns(self, pool: str, sizes: Sequence[Size], most: int) -> list[tuple[int, list[tuple[int, ...]]]] | None:
        """Return for each kind of node how many there are, and all sets of workers of these sizes that one holds.

        Sets to which one more of the last size can be added are left out. ``None`` where more than ``most`` are left.
        """
        needs, limits = [_amounts(size) for size in sizes], [self.slots(pool, size) for size in sizes]
        found = []
        for node, count in self._nodes[pool].items():
            own = list(islice(patterns(node, needs, limits), most + 1))
            most -= len(own)
            if most < 0:
                return None
            found.append((count, own))
        return found

    def holds(self, pool: str, workers: Mapping[Size, int]) -> bool:
        """Return whether the empty pool holds these workers, as far as is known; see ``fit``."""
        return self.fit(pool, workers) is Fit.YES

    def fit(self, pool: str, workers: Mapping[Size, int]) -> Fit:
        """Return whether the empty pool holds these workers; keys are sizes. An unknown pool holds none."""
        if pool not in self._nodes:
            return Fit.NO if any(count > 0 for count in workers.values()) else Fit.YES
        wanted = frozenset((size, count) for size, count in workers.items() if count > 0)
        key = (pool, wanted)
        if key not in self._fits:
            self._fits[key] = self._fit(pool, dict(wanted))
        return self._fits[key]

    def _fit(self, pool: str, wanted: Mapping[Size, int]) -> Fit:
        nodes = self._nodes[pool]
        if any(count > self.slots(pool, size) for size, count in wanted.items()):
            return Fit.NO
        if len(wanted) <= 1:
            return Fit.YES
        # 1. One table answers for all numbers of workers of these sizes, once it exists.
        known = self._tables.get((pool, frozenset(wanted)))
        if known is not None:
            return _answer(*known, wanted)
        # 2. Place larger workers first. Fewest slots first: a larger worker has fewer, whichever resource limits it.
        ordered = sorted(wanted, key=lambda size: (self.slots(pool, size), _amounts(size)))
        if _packed(nodes, [(size, wanted[size]) for size in ordered]):
            return Fit.YES
        # 3. Exclude a packing, or find one.
        needs = [_amounts(size) for size in ordered]
        if _nested(needs) or _exceed(nodes, {_amounts(size): count for size, count in wanted.items()}):
            return Fit.NO
        key = (pool, frozenset(wanted))
        if key not in self._tables:
            found = self._table(pool, needs, [self.slots(pool, size) for size in ordered])
            self._tables[key] = None if found is None else (tuple(ordered), found)
            if found is not None:
                return _answer(ordered, found, wanted)
        # 4. Too many numbers of workers for one table: limit it to those that are asked for.
        found = self._table(pool, needs, [wanted[size] for size in ordered])
        return Fit.UNKNOWN if found is None else _answer(ordered, found, wanted)

    def _table(self, pool: str, needs: Sequence[Amounts], limits: Sequence[int]) -> PackingTable | None:
        """Return a table of packings; ``None`` where it takes more work than is left."""
        if self._work_left <= 0:
            return None
        work, listing = work_of(self._nodes[pool], needs, limits)
        self._work_left -= listing
        if work > min(MOST_WORK_OF_TABLE, self._work_left):
            return None
        self._work_left -= work
        return packing_table(self._nodes[pool], needs, limits)


class Occupancy:
    """The workers that a trial allocation places in the pools; none at first.

    Attributes:
        capacity: of the pools.
        uncertain: whether workers were refused somewhere for which a packing may exist.
    """

    def __init__(self, capacity: PoolCapacity) -> None:
        """Start without workers."""
        self.capacity = capacity
        self.uncertain = False
        self._placed: dict[str, dict[Size, int]] = {name: {} for name in capacity.pools}

    def fits(self, more: Mapping[tuple[str, Size], int]) -> bool:
        """Return whether these workers fit next to the placed ones; keys are (pool, size), counts may be negative."""
        # Where each pool has workers of one size, slots decide: nearly always, and this is called very often.
        slots = self.capacity.slots
        for (pool, size), count in more.items():
            placed = self._placed.get(pool)
            if placed is None or (placed and (len(placed) > 1 or size not in placed)):
                break
            if placed.get(size, 0) + count > max(0, slots(pool, size)):
                return False
        else:
            if len(more) == 1 or len({pool for pool, _ in more}) == len(more):
                return True
        for pool in {pool for pool, _ in more}:
            workers = dict(self._placed[pool]) if pool in self.capacity.pools else {}
            for (name, size), count in more.items():
                if name == pool:
                    workers[size] = workers.get(size, 0) + count
            found = self.capacity.fit(pool, workers)
            if found is not Fit.YES:
                self.uncertain = self.uncertain or found is Fit.UNKNOWN
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


def _packed(nodes: Mapping[Amounts, int], workers: Iterable[tuple[Size, int]]) -> bool:
    """Return whether the workers find nodes, in the order given. Nodes are counted by their free amounts."""
    free = Counter(nodes)
    for size, count in workers:
        need, left = _amounts(size), count
        takes = sorted((most, node) for node in free if (most := times(node, need)))
        for most, node in takes:
            filled = min(free[node], left // most)
            rest = left - filled * most if filled < free[node] else 0
            last = min(rest, most)
            for nodes_now, workers_each in ((filled, most), (1 if last else 0, last)):
                if nodes_now:
                    free[node] -= nodes_now
                    free[tuple(have - workers_each * one for have, one in zip(node, need, strict=True))] += nodes_now
            if not free[node]:
                del free[node]
            left -= filled * most + last
            if not left:
                break
        if left:
            return False
    return True


def _answer(sizes: Sequence[Size], table: PackingTable, wanted: Mapping[Size, int]) -> Fit:
    return Fit.YES if table.holds([wanted[size] for size in sizes]) else Fit.NO


def _nested(needs: Sequence[Amounts]) -> bool:
    """Return whether each need, the largest first, is a multiple of the next one."""
    return all(larger == tuple(times(larger, need) * one for one in need) for larger, need in pairwise(needs))


def _exceed(nodes: Mapping[Amounts, int], wanted: Mapping[Amounts, int]) -> bool:
    """Return whether workers need more of some resource than all nodes have together."""
    return any(need > have for need, have in zip(_sum(wanted), _sum(nodes), strict=True))


def _sum(amounts: Mapping[Amounts, int]) -> list[int]:
    return [sum(column) for column in zip(*([each * n for each in one] for one, n in amounts.items()), strict=True)]


def _amounts(size: Size) -> Amounts:
    return (size,) if isinstance(size, int) else size
