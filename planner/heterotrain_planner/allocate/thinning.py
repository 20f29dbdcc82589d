"""Numbers of workers to compare where a job has too many pools to compare all of them.

Legend: ``O`` options, ``P`` the job's pools.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Row = tuple[int, ...]

_MOST_BEFORE_LIMITS = 32
"""Rows before the limits drop the impossible ones, in multiples of the bound of the rows: bounds memory."""
_TOTALS_RATIO = 1.4
"""Ratio of one total of workers to the next."""


class PoolLimit(NamedTuple):
    """The least and the most workers that some of the job's pools have together.

    Attributes:
        own: positions of the pools.
        least: fewest workers.
        most: most workers.
    """

    own: Sequence[int]
    least: int
    most: int

    def allows(self, row: Sequence[int]) -> bool:
        """Return whether the numbers of workers keep the limit."""
        return self.least <= sum(row[i] for i in self.own) <= self.most


def combine(axes: Sequence[Sequence[int]], limits: Sequence[PoolLimit], most_rows: int) -> Ints | None:
    """Return all combinations that keep the limits, in the order of their numbers; ``None`` above ``most_rows``.

    Impossible combinations are dropped pool by pool, so the memory is bounded by ``most_rows`` times the pools. Where
    an axis has gaps or is very long, the result may be ``None`` although fewer combinations keep the limits in the end.

    Args:
        axes: ascending numbers of workers for each pool.
        limits: of pools together.
        most_rows: bound of the rows.
    """
    if not axes or not all(axes):
        return np.empty((0, len(axes)), dtype=np.int64)
    rows_OP: Ints = np.array([[axis[0] for axis in axes]], dtype=np.int64)
    more_P = np.array([axis[-1] - axis[0] for axis in axes], dtype=np.int64)
    for i, axis in enumerate(axes):
        more_P[i] = 0
        if len(axis) == 1 and i < len(axes) - 1:
            continue
        count = len(rows_OP)
        if count * len(axis) > _MOST_BEFORE_LIMITS * most_rows:
            return None
        rows_OP = np.repeat(rows_OP, len(axis), axis=0)
        rows_OP[:, i] = np.tile(np.array(axis, dtype=np.int64), count)
        for own, least, most in limits:
            # All later pools are at their lowest here, and can add ``more_P``.
            sum_O = rows_OP[:, own].sum(axis=1)
            rows_OP = rows_OP[(sum_O <= most) & (sum_O + more_P[own].sum() >= least)]
        if len(rows_OP) > most_rows:
            return None
    return rows_OP


def thin(
    axes: Sequence[Sequence[int]],
    limits: Sequence[PoolLimit],
    *,
    current: Row,
    preferred: Sequence[int],
    most_rows: int,
) -> Ints:
    """Return some combinations that keep the limits, at most ``most_rows``, always the same for the same input.

    They are, in this order: the current workers; changes of them in one pool; the fewest and the most workers and
    totals between them, from each pool onwards in the preferred order; changes in two pools.

    Args:
        axes: ascending numbers of workers for each pool.
        limits: of pools together; the first one is that of all pools.
        current: the job's workers in each pool.
        preferred: the pools, the most useful one first.
        most_rows: bound of the rows.
    """
    found: dict[Row, None] = {}
    for row in _in_order_of_importance(axes, limits, current, preferred, most_rows):
        if len(found) >= most_rows:
            break
        if all(limit.allows(row) for limit in limits):
            found[row] = None
    return np.array(sorted(found), dtype=np.int64).reshape(len(found), len(axes))


def _in_order_of_importance(
    axes: Sequence[Sequence[int]], limits: Sequence[PoolLimit], current: Row, preferred: Sequence[int], most_rows: int
) -> Iterator[Row]:
    """Yield combinations, the most important ones first; some repeat and some break a limit."""
    yield current
    yield from _changed(current, axes, pools=1)
    fullest = _filled(axes, limits, preferred, limits[0].most)
    totals = _totals(sum(_filled(axes, limits, preferred, limits[0].least)), sum(fullest))
    # Many pools: not from each of them, so that half of the rows are left for changes.
    starts = range(0, len(axes), -(-2 * len(axes) * len(totals) // most_rows))
    for total in (totals[0], totals[-1], *totals[1:-1]):
        for start in starts:
            yield _filled(axes, limits, [*preferred[start:], *preferred[:start]], total)
    yield from _changed(fullest, axes, pools=1)
    for near_current, near_fullest in zip(
        _changed(current, axes, pools=2), _changed(fullest, axes, pools=2), strict=False
    ):
        yield near_current
        yield near_fullest


def _changed(row: Row, axes: Sequence[Sequence[int]], *, pools: int) -> Iterator[Row]:
    """Yield the combinations that differ in so many pools: one worker more or less, or another number of the axis."""
    near = [
        [n for n in dict.fromkeys((count - 1, count + 1, *axis)) if axis[0] <= n <= axis[-1] and n != count]
        for count, axis in zip(row, axes, strict=True)
    ]
    for positions in combinations(range(len(row)), pools):
        for values in product(*(near[i] for i in positions)):
            changed = list(row)
            for i, n in zip(positions, values, strict=True):
                changed[i] = n
            yield tuple(changed)


def _filled(axes: Sequence[Sequence[int]], limits: Sequence[PoolLimit], order: Sequence[int], total: int) -> Row:
    """Return this total of workers from one pool after another, minimums first; fewer where limits bind."""
    row = [axis[0] for axis in axes]
    spare = [most - sum(row[i] for i in own) for own, _, most in limits]
    limits_of: list[list[int]] = [[] for _ in axes]
    for k, limit in enumerate(limits):
        for i in limit.own:
            limits_of[i].append(k)
    for k, (own, least, _) in [*enumerate(limits)][::-1]:
        # All pools together come last: the totals of pools with a common name keep their minimums first.
        missing = max(total if k == 0 else 0, least) - sum(row[i] for i in own)
        inside = set(own)
        for i in order if missing > 0 else ():
            if i in inside:
                more = max(0, min(missing, axes[i][-1] - row[i], *(spare[m] for m in limits_of[i])))
                row[i] += more
                missing -= more
                for m in limits_of[i]:
                    spare[m] -= more
    return tuple(row)


def _totals(least: int, most: int) -> list[int]:
    """Return totals of workers between the least and the most one, in about equal ratios."""
    totals = [least]
    while totals[-1] < most:
        totals.append(min(most, max(totals[-1] + 1, round(totals[-1] * _TOTALS_RATIO))))
    return totals
