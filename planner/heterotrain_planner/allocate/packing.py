"""All workers of several sizes that a pool's nodes hold together, exactly: a table of what fits next to what.

Placing larger workers first may miss a packing where sizes are not multiples of each other. Here, each node contributes
its *patterns*, the sets of workers that it holds, and one node after another is added to a table: the most workers of
one size that fit next to each number of workers of the other sizes. This is the dynamic programme of the knapsack
problem with several resources (Kellerer, Pferschy and Pisinger 2004, chapter 9). Its work grows with the product of
numbers of workers, so it is bounded: small pools and few sizes are decided, others are not.

Legend: ``T`` a table with one axis for each size but the last.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

import numpy as np
from numpy.typing import NDArray

Amounts = tuple[int, ...]
"""Amounts of several resources, in one order for the whole pool."""

_OVERHEAD = 1000
"""Entries that take as long as the fixed part of one pattern's step."""
_LISTING = 100
"""Entries that take as long as listing one pattern."""
_MOST_PATTERNS = 4000
"""Patterns of all kinds of nodes, beyond which there is no table."""
_NOTHING = -(2**31)
"""Entry where the other workers alone do not fit; any sum with it stays negative."""


class PackingTable:
    """Which numbers of workers of these sizes fit together, each number up to a limit."""

    def __init__(self, last_T: NDArray[np.int64], limits: Sequence[int]) -> None:
        """Note the most workers of the last size next to each number of the others, and the limits of all sizes."""
        self._last_T, self._limits = last_T, tuple(limits)

    def holds(self, counts: Sequence[int]) -> bool:
        """Return whether these workers fit; counts in the order of the sizes.

        Raises:
            IndexError: if a count, other than the last one, exceeds its limit.
        """
        *others, last = counts
        return bool(self._last_T[tuple(others)] >= last)


def work_of(nodes: Mapping[Amounts, int], needs: Sequence[Amounts], limits: Sequence[int]) -> tuple[float, float]:
    """Return the work that a table takes, and the work to find that out, both in entries.

    The first one is infinite where nodes have too many patterns. Arguments as in ``packing_table``.
    """
    entries = math.prod(limit + 1 for limit in limits[:-1])
    listed, work = 0, 0.0
    for node, count in nodes.items():
        own = sum(1 for _ in islice(patterns(node, needs, limits), _MOST_PATTERNS + 1 - listed))
        listed += own
        work += count * own * (entries + _OVERHEAD)
        if listed > _MOST_PATTERNS:
            return math.inf, listed * _LISTING
    return work, listed * _LISTING


def packing_table(nodes: Mapping[Amounts, int], needs: Sequence[Amounts], limits: Sequence[int]) -> PackingTable:
    """Return the table for these nodes.

    Args:
        nodes: how many nodes have these free amounts.
        needs: amounts that one worker of each size needs, not all zero.
        limits: most workers of each size that are asked for; those of all sizes but the last bound the table.
    """
    last_T = np.full([limit + 1 for limit in limits[:-1]], _NOTHING, dtype=np.int64)
    last_T[(0,) * last_T.ndim] = 0
    for node, count in nodes.items():
        own = list(patterns(node, needs, limits))
        for _ in range(count):
            after_T = last_T.copy()
            for *others, last in own:
                to = after_T[tuple(slice(n, None) for n in others)]
                np.maximum(to, last_T[tuple(slice(size) for size in to.shape)] + last, out=to)
            last_T = after_T
    return PackingTable(last_T, limits)


def patterns(node: Amounts, needs: Sequence[Amounts], limits: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield the sets of workers that a node holds, as many as possible of the last size."""
    need, most = needs[0], limits[0]
    fit = min(most, times(node, need))
    if len(needs) == 1:
        yield (fit,)
        return
    for count in range(fit + 1):
        left = tuple(have - count * one for have, one in zip(node, need, strict=True))
        for rest in patterns(left, needs[1:], limits[1:]):
            yield (count, *rest)


def times(node: Amounts, need: Amounts) -> int:
    """Return how many workers with this need the node takes."""
    return min((have // one for have, one in zip(node, need, strict=True) if one > 0), default=0)
