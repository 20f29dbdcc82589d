"""Balances senders: the busiest one has as little to send as possible.

Each load can be divided at will among the ranks that have it. The least possible maximum is found by bisection over
it: loads and ranks form a flow network, in which every rank may carry at most that much. All integers, so every rank
computes the same.
"""

from __future__ import annotations

from collections.abc import Sequence

PRECISION = 64
"""The maximum is at most this fraction (1 in 64) above the least possible one."""


Supply = tuple[int, tuple[int, ...]]
"""So many units, and the sources (at least one) that can each give all or any part of them."""


def shared(supplies: Sequence[Supply]) -> list[dict[int, int]]:
    """Return for each supply how much each of its sources gives; sources that give nothing are left out."""
    ranks = {rank for _, sources in supplies for rank in sources}
    total = sum(size for size, _ in supplies)
    if not total:
        return [{} for _ in supplies]
    low = max(-(-total // len(ranks)), *(-(-size // len(sources)) for size, sources in supplies), 1)
    found = _within(supplies, low)
    if found is not None:
        return found
    high, best = low, None
    while best is None:
        low, high = high, 2 * high
        best = _within(supplies, high)
    while high - low > max(1, high // PRECISION):
        level = (low + high) // 2
        found = _within(supplies, level)
        low, high, best = (level, high, best) if found is None else (low, level, found)
    return best


def _within(supplies: Sequence[Supply], level: int) -> list[dict[int, int]] | None:
    """Return a division in which no source gives more than ``level``; ``None`` if there is none."""
    free: dict[int, int] = {rank: level for _, sources in supplies for rank in sources}
    given: list[dict[int, int]] = [{} for _ in supplies]
    for number in sorted(range(len(supplies)), key=lambda index: (len(supplies[index][1]), index)):
        left, sources = supplies[number]
        for position, rank in enumerate(sources):  # evenly, as far as there is room
            amount = min(-(-left // (len(sources) - position)), free[rank])
            _give(given[number], rank, amount)
            free[rank] -= amount
            left -= amount
        while left:
            moved = _make_room(supplies, given, free, number, left)
            if not moved:
                return None
            left -= moved
    return given


def _make_room(
    supplies: Sequence[Supply], given: list[dict[int, int]], free: dict[int, int], number: int, left: int
) -> int:
    """Give more of one supply along the shortest way to a source with room; return how much."""
    came: dict[int, tuple[int, int | None]] = {}  # rank -> (the supply that it would give more of, who gives less)
    queue: list[tuple[int, int | None]] = [(number, None)]
    for supply, before in queue:  # grows meanwhile
        for rank in supplies[supply][1]:
            if rank in came:
                continue
            came[rank] = (supply, before)
            if free[rank]:
                return _shift(given, free, came, rank, left)
            queue += [(other, rank) for other, amounts in enumerate(given) if other != supply and amounts.get(rank)]
    return 0


def _shift(
    given: list[dict[int, int]],
    free: dict[int, int],
    came: dict[int, tuple[int, int | None]],
    end: int,
    left: int,
) -> int:
    way = []
    rank: int | None = end
    while rank is not None:
        supply, before = came[rank]
        way.append((rank, supply, before))
        rank = before
    limits = [given[supply][before] for _, supply, before in way if before is not None]
    amount = min(left, free[end], *limits)
    for rank, supply, before in way:
        _give(given[supply], rank, amount)
        if before is not None:
            _give(given[supply], before, -amount)
    free[end] -= amount
    return amount


def _give(amounts: dict[int, int], rank: int, amount: int) -> None:
    amounts[rank] = amounts.get(rank, 0) + amount
    if not amounts[rank]:
        del amounts[rank]
