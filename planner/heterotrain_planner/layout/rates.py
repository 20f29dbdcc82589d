"""What devices are worth to a job: the rate of its best members on every number of devices of each kind, in one table.

Within a time T, members that use n devices of each kind take at most

    V_T(n) = max over templates w ≤ n:   V_T(n − w) + samples_w(T)

samples, an unbounded knapsack with one dimension for each kind. All times of a geometric series are computed together,
and the least one in which n devices take the batch gives their step. So an allocation can ask for thousands of numbers
of devices, where ``cover`` answers for one.

Legend: ``T`` times, ``N`` numbers of devices, flattened, ``J`` templates, ``K`` kinds, ``M`` members up to the minimum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from heterotrain_planner.layout.book import Book
from heterotrain_planner.layout.costs import Floats, Ints
from heterotrain_planner.layout.exchange import slowest_link
from heterotrain_planner.layout.level import LevelMenu, menu_of
from heterotrain_planner.layout.problem import Link
from heterotrain_planner.layout.result import LayoutKind, Template

MOST_WORK = 200_000_000
"""Numbers of devices, times and templates of one table, multiplied: about half a second. Beyond it, devices are counted
by twos, fours and so on, which underrates numbers in between."""
MOST_CELLS = 8192
"""Numbers of devices of one table."""
TIME_RATIO = 1.04
"""Between two neighbouring times. A step is interpolated between them by the samples that do not fit."""
MOST_TIMES = 160
MOST_LEAST_MEMBERS = 8
"""Least members that the table tells apart; larger minimums count as so many."""


class LayoutRates:
    """Samples per second of a job's best members by the number of devices, exchange included.

    Args:
        book: templates of the job, for the most devices that are asked for.
        kinds: layouts that members may have.
        further: as in ``cover``.
    """

    def __init__(self, book: Book, kinds: frozenset[LayoutKind], further: Sequence[Template] = ()) -> None:
        self._problem = book.problem
        menu = menu_of(book, further, kinds, 1)
        possible = np.isfinite(menu.first_BJ).any(axis=0)
        self._rate_N: Floats
        self._counts = np.array([kind.count for kind in book.problem.kinds], dtype=np.int64)
        self._steps = np.ones(len(self._counts), dtype=np.int64)
        if not possible.any():
            self._rate_N = np.zeros(int(np.prod(self._counts + 1)))
            return
        times_T = _times(menu)
        least = min(book.problem.least_members, MOST_LEAST_MEMBERS)
        each = len(times_T) * int(possible.sum()) * (least + 1)
        while (np.prod(self._sizes(), dtype=float) > min(MOST_CELLS, MOST_WORK / each)) and (
            self._steps <= self._counts
        ).any():
            self._steps[np.argmax(self._counts // self._steps)] *= 2
        self._rate_N = self._table(menu, np.flatnonzero(possible), times_T, least)

    def of(self, names: Sequence[str], counts_ON: Ints) -> Floats:
        """Return samples per second for each row of numbers of devices; 0 where no members hold the model.

        Args:
            names: kind of each column; several columns may have one kind, and unknown kinds are not used.
            counts_ON: one row for each question.
        """
        order = {kind.name: index for index, kind in enumerate(self._problem.kinds)}
        counts_OK = np.zeros((len(counts_ON), len(order)), dtype=np.int64)
        for column, name in enumerate(names):
            if name in order:
                counts_OK[:, order[name]] += counts_ON[:, column]
        cells = np.minimum(counts_OK, self._counts) // self._steps
        rate_O: Floats = self._rate_N[np.ravel_multi_index(tuple(cells.T), self._sizes())]
        return rate_O

    @property
    def most_per_s(self) -> float:
        """The highest rate of all numbers of devices."""
        return float(self._rate_N.max())

    def _sizes(self) -> tuple[int, ...]:
        return tuple((self._counts // self._steps + 1).tolist())

    def _table(self, menu: LevelMenu, columns: Ints, times_T: Floats, least: int) -> Floats:
        """Return the rate of each cell."""
        sizes = self._sizes()
        cells_NK = np.stack(np.unravel_index(np.arange(int(np.prod(sizes))), sizes), axis=1)
        need_JK = -(-menu.need_JK[columns] // self._steps)
        offset_J = np.ravel_multi_index(
            tuple(np.minimum(need_JK, np.array(sizes) - 1).T), sizes
        )  # of templates that fit into a cell at all
        samples_TJ = np.array([menu.samples(float(at_s))[0][columns] for at_s in times_T])
        # A template that is too slow for a time gives nothing then, and forms no member.
        samples_TJ[samples_TJ <= 0] = -np.inf
        size = len(cells_NK)
        best_MTN = np.full((least + 1, len(times_T), size), -np.inf)
        best_MTN[0] = 0.0
        number_TN, held_TN = np.zeros((2, len(times_T), size))
        held_J = 1.0 / menu.need_JK[columns].sum(axis=1)
        row = np.arange(len(times_T))
        for cell in range(1, size):
            fits = np.flatnonzero((need_JK <= cells_NK[cell]).all(axis=1))
            if not len(fits):
                continue
            before = cell - offset_J[fits]
            for members in range(least + 1):
                # The last layer has at least so many members, the others exactly.
                sources = {max(0, members - 1), members} if members == least else {members - 1} - {-1}
                for source in sorted(sources):
                    value_TF = best_MTN[source][:, before] + samples_TJ[:, fits]
                    pick_T = value_TF.argmax(axis=1)
                    value_T = value_TF[row, pick_T]
                    better = value_T > best_MTN[members, :, cell]
                    best_MTN[members, better, cell] = value_T[better]
                    if members == least:
                        last = before[pick_T[better]]
                        number_TN[better, cell] = (number_TN[better, last] if source == least else members - 1) + 1
                        held_TN[better, cell] = np.maximum(held_TN[better, last], held_J[fits[pick_T[better]]])
        return self._rates(times_T, best_MTN[least], number_TN, held_TN)

    def _rates(self, times_T: Floats, best_TN: Floats, number_TN: Floats, held_TN: Floats) -> Floats:
        batch = self._problem.batch_samples
        enough_TN = best_TN >= batch
        first_N = enough_TN.argmax(axis=0)
        columns = np.arange(best_TN.shape[1])
        taken_N = best_TN[first_N, columns]
        earlier_N = np.where(first_N > 0, times_T[np.maximum(first_N - 1, 0)], 0.0)
        with np.errstate(divide="ignore", invalid="ignore"):
            step_N = np.maximum(earlier_N, times_T[first_N] * batch / taken_N)
        members_N, held_N = number_TN[first_N, columns], held_TN[first_N, columns]
        latency_N, pace_N = self._links()
        whole = float(sum(unit.parameter_bytes for unit in self._problem.units))
        moved_N = whole * held_N / np.maximum(members_N, 1)
        exchange_N = np.where(members_N > 1, 2 * (members_N - 1) * (latency_N + moved_N * pace_N), 0)
        possible_N = enough_TN.any(axis=0)
        rate_N: Floats = np.where(possible_N, batch / np.where(possible_N, step_N + exchange_N, 1.0), 0.0)
        return rate_N

    def _links(self) -> tuple[Floats, Floats]:
        """Return latency and seconds for each byte of the slowest link among the devices of each cell."""
        sizes = self._sizes()
        counts_NK = np.stack(np.unravel_index(np.arange(int(np.prod(sizes))), sizes), axis=1) * self._steps
        # Whether there is none, one or more of a kind says which links there are.
        rows, cell_N = np.unique(np.minimum(counts_NK, 2), axis=0, return_inverse=True)
        links = [slowest_link(self._problem, row) if sum(row) > 1 else Link() for row in rows.tolist()]
        latency = np.array([link.latency_s for link in links])
        pace = np.array([1.0 / link.bytes_per_s for link in links])
        return latency[cell_N.ravel()], pace[cell_N.ravel()]


def _times(menu: LevelMenu) -> Floats:
    """Return times from the shortest share of a template to the longest time of any one."""
    possible = np.isfinite(menu.first_BJ)
    first = menu.first_BJ[possible]
    low = float(first.min())
    further = -(-menu.batch_samples // menu.samples_BJ[possible]) - 1
    high = float((first + further * menu.next_BJ[possible]).max())
    number = math.ceil(math.log(max(high / low, 1.0)) / math.log(TIME_RATIO)) + 1
    return np.geomspace(low, high * (1 + 1e-9), min(max(2, number), MOST_TIMES))
