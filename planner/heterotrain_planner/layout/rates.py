"""Tabulates the rate of a job's best members on every number of devices of each kind.

Within a time T, members that use n devices of each kind take at most

    V_T(n) = max over templates w ≤ n:   V_T(n − w) + samples_w(T)

samples, an unbounded knapsack with one dimension for each kind. All times of a geometric series are computed together,
and the least one in which n devices take the batch gives their step. So an allocation can ask for thousands of numbers
of devices, where ``cover`` answers for one.

Legend: ``T`` times, ``N`` numbers of devices, flattened, ``J`` templates, ``K`` kinds, ``M`` members up to the minimum.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
from heterotrain_core.contract.plan import LayoutKind

from heterotrain_planner.layout.costs import Floats, Ints
from heterotrain_planner.layout.exchange import rough_exchange
from heterotrain_planner.layout.level import TemplateOptions, template_options
from heterotrain_planner.layout.result import Template
from heterotrain_planner.layout.template_table import TemplateTable

MOST_WORK = 200_000_000
"""Numbers of devices, times and templates of one table, multiplied: about half a second. Beyond it, devices are counted
by twos, fours and so on, which underrates numbers in between."""
MOST_CELLS = 8192
"""Numbers of devices of one table."""
TIME_RATIO = 1.04
"""Between two neighbouring times. A step is interpolated between them by the samples that do not fit."""
MOST_TIMES = 160
_FEW_MEMBERS = 4
"""Numbers of members that are told apart where the exchange is noticed."""
_NOTICED_EXCHANGE = 0.005
"""Part of the shortest step."""
_CLOSER = 5
"""Work of a closer look, in multiples of the first one."""
MOST_LEAST_MEMBERS = 8
"""Least members that the table tells apart; larger minimums count as so many."""


class LayoutRates:
    """Samples per second of a job's best members by the number of devices, exchange included.

    Args:
        templates: those of the job, for the most devices that are asked for.
        kinds: layouts that members may have.
        further: as in ``cover``.
    """

    def __init__(
        self, templates: TemplateTable, kinds: frozenset[LayoutKind], further: Sequence[Template] = ()
    ) -> None:
        self._problem = templates.problem
        self._exchanges: dict[frozenset[tuple[tuple[int, ...], int]], float] = {}
        """Seconds of the exchange by the numbers of members with the same devices."""
        options = template_options(templates, further, kinds, 1)
        possible = np.isfinite(options.first_BJ).any(axis=0)
        self._rate_N: Floats
        self._counts = np.array([kind.count for kind in templates.problem.kinds], dtype=np.int64)
        self._steps = np.ones(len(self._counts), dtype=np.int64)
        if not possible.any():
            self._rate_N = np.zeros(int(np.prod(self._counts + 1)))
            return
        times_T = _times(options)
        least = min(templates.problem.least_members, MOST_LEAST_MEMBERS)
        each = len(times_T) * int(possible.sum()) * (least + 1)
        while (np.prod(self._sizes(), dtype=float) > min(MOST_CELLS, MOST_WORK / each)) and (
            self._steps <= self._counts
        ).any():
            self._steps[np.argmax(self._counts // self._steps)] *= 2
        columns = np.flatnonzero(possible)
        self._rate_N = self._table(options, columns, times_T, least, least)
        noticed = max(self._exchanges.values(), default=0.0) > _NOTICED_EXCHANGE * times_T[0]
        if not noticed or np.prod(self._sizes(), dtype=float) * each * _CLOSER > MOST_WORK:
            return
        # The most samples may come with a long exchange: fewer members, or members of the same kinds, may be faster.
        kinds_J = options.need_JK[columns] > 0
        alike = [columns[(kinds_J == kinds).all(axis=1)] for kinds in np.unique(kinds_J, axis=0)]
        for own in [columns, *alike] if len(alike) > 1 else [columns]:
            found_N = self._table(options, own, times_T, least, max(least, _FEW_MEMBERS))
            self._rate_N = np.maximum(self._rate_N, found_N)

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

    def _sizes(self) -> tuple[int, ...]:
        return tuple((self._counts // self._steps + 1).tolist())

    def _table(self, options: TemplateOptions, columns: Ints, times_T: Floats, least: int, exact: int) -> Floats:
        """Return the rate of each cell with these templates.

        Up to ``exact``, numbers of members are told apart, and the best of them counts.
        """
        sizes = self._sizes()
        cells_NK = np.stack(np.unravel_index(np.arange(int(np.prod(sizes))), sizes), axis=1)
        need_JK = -(-options.need_JK[columns] // self._steps)
        offset_J = np.ravel_multi_index(
            tuple(np.minimum(need_JK, np.array(sizes) - 1).T), sizes
        )  # of templates that fit into a cell at all
        samples_TJ = np.array([options.samples(float(at_s))[0][columns] for at_s in times_T])
        # A template that is too slow for a time gives nothing then, and forms no member.
        samples_TJ[samples_TJ <= 0] = -np.inf
        size = len(cells_NK)
        best_MTN = np.full((exact + 1, len(times_T), size), -np.inf)
        best_MTN[0] = 0.0
        # The last template of each cell, and the layer of the members before it.
        last_MTN = np.full(best_MTN.shape, -1, dtype=np.int32)
        layer_MTN = np.zeros(best_MTN.shape, dtype=np.int8)
        row = np.arange(len(times_T))
        for cell in range(1, size):
            fits = np.flatnonzero((need_JK <= cells_NK[cell]).all(axis=1))
            if not len(fits):
                continue
            before = cell - offset_J[fits]
            for members in range(exact + 1):
                # The last layer has at least so many members, the others exactly.
                sources = {max(0, members - 1), members} if members == exact else {members - 1} - {-1}
                for source in sorted(sources):
                    value_TF = best_MTN[source][:, before] + samples_TJ[:, fits]
                    pick_T = value_TF.argmax(axis=1)
                    value_T = value_TF[row, pick_T]
                    better = value_T > best_MTN[members, :, cell]
                    best_MTN[members, better, cell] = value_T[better]
                    last_MTN[members, better, cell] = fits[pick_T[better]]
                    layer_MTN[members, better, cell] = source

        def exchange_s(layer: int, step: int, cell: int) -> float:
            """Return about the exchange of the members of a cell within a time."""
            found = Counter[tuple[int, ...]]()
            while (template := int(last_MTN[layer, step, cell])) >= 0:
                found[needs[template]] += 1
                layer, cell = int(layer_MTN[layer, step, cell]), cell - int(offset_J[template])
            key = frozenset(found.items())
            if key not in self._exchanges:
                self._exchanges[key] = rough_exchange(self._problem, found)
            return self._exchanges[key]

        needs = [tuple(need) for need in options.need_JK[columns].tolist()]
        rate_N: Floats = np.zeros(size)
        for layer in range(least, exact + 1):
            step_N = self._steps_of(times_T, best_MTN[layer])
            for cell in np.flatnonzero(np.isfinite(step_N)).tolist():
                first = int((best_MTN[layer, :, cell] >= self._problem.batch_samples).argmax())
                seconds = float(step_N[cell]) + exchange_s(layer, first, cell)
                rate_N[cell] = max(rate_N[cell], self._problem.batch_samples / seconds)
        return rate_N

    def _steps_of(self, times_T: Floats, best_TN: Floats) -> Floats:
        """Return the time in which each cell takes the batch, before the exchange; infinite where it does not."""
        batch = self._problem.batch_samples
        enough_TN = best_TN >= batch
        first_N = enough_TN.argmax(axis=0)
        taken_N = best_TN[first_N, np.arange(best_TN.shape[1])]
        earlier_N = np.where(first_N > 0, times_T[np.maximum(first_N - 1, 0)], 0.0)
        with np.errstate(divide="ignore", invalid="ignore"):
            step_N: Floats = np.maximum(earlier_N, times_T[first_N] * batch / taken_N)
        return np.where(enough_TN.any(axis=0), step_N, np.inf)


def _times(options: TemplateOptions) -> Floats:
    """Return times from the shortest share of a template to the longest time of any one."""
    possible = np.isfinite(options.first_BJ)
    first = options.first_BJ[possible]
    low = float(first.min())
    further = -(-options.batch_samples // options.samples_BJ[possible]) - 1
    high = float((first + further * options.next_BJ[possible]).max())
    number = math.ceil(math.log(max(high / low, 1.0)) / math.log(TIME_RATIO)) + 1
    return np.geomspace(low, high * (1 + 1e-9), min(max(2, number), MOST_TIMES))
