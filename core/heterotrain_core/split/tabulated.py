"""Times of members that have a table or a curve: seconds of all allowed shares, and their lookup.

Legend: ``G`` allowed shares, ``W`` members.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from heterotrain_core.split.member import CurveTime, TableTime

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ShareTable:
    """One distinct table, on the grid of shares that its members may have.

    Attributes:
        columns: the members that use it.
        lo, granularity: grid point ``x`` is the share ``lo + x * granularity``.
        own_G: compute seconds on the grid.
        reach_G: least compute seconds of this share or any larger one up to the cap, so that it never falls: a share
            counts as reached as soon as an equal or larger one is. Of a curve, less what its backward hides.
        back_G: backward seconds of the last micro-batch; 0 for a table.
        falls: whether a larger share may take less time.
    """

    columns: Ints
    lo: int
    granularity: int
    own_G: Floats
    reach_G: Floats
    back_G: Floats
    falls: bool


class Lookup:
    """All tables one after the other, so that the times of many members are found at once.

    Attributes:
        columns: the members with tables.
        place_W: where each member is among them; -1 for others.
        own_G, reach_G, back_G: as of the tables.
    """

    def __init__(self, tables: Sequence[ShareTable], members: int) -> None:
        whose = np.concatenate([table.columns for table in tables])
        which = np.repeat(np.arange(len(tables)), [len(table.columns) for table in tables])
        sizes = np.array([len(table.own_G) for table in tables])
        self.columns: Ints = whose
        self.place_W: Ints = np.full(members, -1, dtype=np.int64)
        self.place_W[whose] = np.arange(len(whose))
        self.own_G: Floats = np.concatenate([table.own_G for table in tables])
        self.reach_G: Floats = np.concatenate([table.reach_G for table in tables])
        self.back_G: Floats = np.concatenate([table.back_G for table in tables])
        self._first: Ints = (np.cumsum(sizes) - sizes)[which]
        self._last: Ints = (sizes - 1)[which]
        self._lo: Ints = np.array([table.lo for table in tables])[which]
        self._granularity: Ints = np.array([table.granularity for table in tables])[which]

    def index(self, samples: Ints, places: Ints | slice = slice(None)) -> Ints:
        """Return where the times of shares of these members are; the last axis is theirs."""
        steps = (samples - self._lo[places]) // self._granularity[places]
        found: Ints = self._first[places] + np.clip(steps, 0, self._last[places])
        return found


def table_seconds(table: TableTime, samples: Ints, micro_cap: int) -> Floats:
    """Return own compute seconds for shares by the table: micro-batches add up, and an empty share takes no time."""
    return _seconds(table.points, samples, micro_cap)


def curve_seconds(curve: CurveTime, samples: Ints, micro_cap: int) -> tuple[Floats, Floats]:
    """Return own compute seconds by the curve for growing shares, and the last micro-batch's backward seconds."""
    own = np.maximum.accumulate(_seconds(curve.points, samples, micro_cap))
    xs, ys = (np.array(axis, dtype=float) for axis in zip(*curve.points, strict=True))
    last = np.interp(samples // np.maximum(-(-samples // micro_cap), 1), xs, ys)
    return own + curve.update_s, np.where(samples > 0, curve.backward_part * last, 0.0)


def _seconds(points: Sequence[tuple[float, float]], samples: Ints, micro_cap: int) -> Floats:
    xs, ys = (np.array(axis, dtype=float) for axis in zip(*points, strict=True))
    micro = np.maximum(-(-samples // micro_cap), 1)
    small, larger = np.divmod(samples, micro)
    spent = (micro - larger) * np.interp(small, xs, ys) + larger * np.interp(small + 1, xs, ys)
    return np.where(samples > 0, spent, 0.0)
