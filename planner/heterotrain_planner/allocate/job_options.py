"""One option for each job, so that all workers find nodes: the programme behind every question of an allocation.

Each pool has a row for each size of its workers. A worker of another size counts as the workers of this size that could
stand in its place on a node: what fits on the nodes keeps every such row. Where larger sizes are multiples of smaller
ones, the rows say all. Otherwise an answer may not fit. Then the programme is solved again with what each node of that
pool can hold as further columns (Gilmore and Gomory 1961), or, where there is too much of that, without this answer and
larger ones.

Legend: ``O`` options of a job, ``P`` its pools, ``K`` kinds of workers (pool and size), ``R`` rows of pools, ``C``
columns of a programme, ``M`` offers, ``Q`` sets of workers that nodes hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from heterotrain_planner.allocate.capacity import Fit, PoolCapacity
from heterotrain_planner.allocate.problem import JobDemand, Size
from heterotrain_planner.programme import Floats, Ints, Programme, Solution, maximise

_MOST_ROUNDS = 60
"""Solutions of one programme before it is given up."""
_MOST_PATTERNS = 400
"""Sets of workers that nodes of one pool can hold, if these are columns."""


class JobOptions(NamedTuple):
    """A job's options in a programme.

    Attributes:
        job: the demand.
        counts_OP: workers of each of its pools.
        gain_O: what each option adds to the sum that is maximised.
        required: whether the job has to get one.
    """

    job: JobDemand
    counts_OP: Ints
    gain_O: Floats
    required: bool


class Picked(NamedTuple):
    """One option for each job.

    Attributes:
        options: positions in the jobs' offers; ``None`` for a job without one.
        value: the sum of their gains.
        bound: no options that fit together have a larger sum.
        certain: whether no workers were taken to need more nodes than there are without a proof.
    """

    options: tuple[int | None, ...]
    value: float
    bound: float
    certain: bool


class Excess(NamedTuple):
    """Numbers of workers of one pool, by kind, that do not fit together; with one less of any kind, they do."""

    most: Mapping[int, int]


class Packed(NamedTuple):
    """What the nodes of one pool can hold.

    Attributes:
        kinds: of its workers.
        patterns: for each kind of node how many there are, and the workers that one holds, in the order of ``kinds``.
    """

    kinds: Sequence[int]
    patterns: Sequence[tuple[int, Sequence[tuple[int, ...]]]]


class PoolRows:
    """The rows of all pools.

    Args:
        jobs: all jobs of the allocation.
        capacity: of the pools.
    """

    def __init__(self, jobs: Iterable[JobDemand], capacity: PoolCapacity) -> None:
        self.capacity = capacity
        sizes: dict[str, dict[Size, None]] = {}
        for job in jobs:
            for each in job.pools:
                if capacity.slots(each.pool, each.size):
                    sizes.setdefault(each.pool, {})[each.size] = None
        self.kinds: list[tuple[str, Size]] = [(pool, size) for pool, own in sizes.items() for size in own]
        self._kind_of = {kind: k for k, kind in enumerate(self.kinds)}
        limits = [row for pool, own in sizes.items() for row in self._rows_of(pool, list(own))]
        self.limit_R: Floats = np.array([float(limit) for _, limit in limits])
        self.need_KR: Floats = np.zeros((len(self.kinds), len(limits)))
        """What one worker of each kind takes of each row."""
        for r, (parts, _) in enumerate(limits):
            for kind, part in parts.items():
                self.need_KR[kind, r] = part
        self._cuts: list[Excess] = []
        self._packed: dict[str, Packed | None] = {}
        self._certain = True

    def _rows_of(self, pool: str, sizes: Sequence[Size]) -> list[tuple[dict[int, int], int]]:
        rows = self.capacity.rows(pool, sizes)
        return [({self._kind_of[pool, size]: part for size, part in parts.items()}, limit) for parts, limit in rows]

    def kinds_of(self, job: JobDemand) -> Floats:
        """Return which kind a worker of each of the job's pools is, ``_PK``; a pool without slots has none."""
        found_PK: Floats = np.zeros((len(job.pools), len(self.kinds)))
        for p, each in enumerate(job.pools):
            if (kind := self._kind_of.get((each.pool, each.size))) is not None:
                found_PK[p, kind] = 1.0
        return found_PK

    def pick(
        self,
        offers: Sequence[JobOptions],
        *,
        start: Sequence[int | None] | None = None,
        gap: float = 0.0,
        most_nodes: int = 1000,
    ) -> Picked | None:
        """Return options with the largest sum of gains; ``None`` where none fit together, or none were found.

        Args:
            offers: of the jobs; other jobs have no workers.
            start: options that fit together; the answer is at least as good.
            gap: difference of value and bound that is good enough.
            most_nodes: bounds the time of each solution.
        """
        builder = _Columns(self, offers)
        for _ in range(_MOST_ROUNDS):
            found = builder.solve(self._cuts, [each for each in self._packed.values() if each], start, gap, most_nodes)
            if found is None:
                return None
            options, solution = found
            if not self._cut_off(builder.workers(options)):
                return Picked(options, solution.value, solution.bound, self._certain)
        if start is None:
            return None
        return Picked(tuple(start), builder.value(start), solution.bound, certain=False)

    def prices(self, offers: Sequence[JobOptions]) -> Floats:
        """Return a price of each row, at which parts of options sum up to the best that such parts can reach."""
        programme = _Columns(self, offers).programme((), ())
        solution = maximise(programme)
        if solution is None:
            return np.zeros(len(self.limit_R))
        found_R: Floats = np.maximum(0.0, solution.price_R[: len(self.limit_R)])
        return found_R

    def _cut_off(self, count_K: Sequence[int]) -> bool:
        """Note what excludes these workers, for each pool that does not hold them; return whether there is one."""
        by_pool: dict[str, dict[int, int]] = {}
        for kind, count in enumerate(count_K):
            if count:
                by_pool.setdefault(self.kinds[kind][0], {})[kind] = count
        found = False
        for own in by_pool.values():
            if len(own) > 1 and not self._fits(own):
                found = True
                pool = self.kinds[next(iter(own))][0]
                if pool not in self._packed:
                    kinds = [kind for kind, (name, _) in enumerate(self.kinds) if name == pool]
                    patterns = self.capacity.patterns(pool, [self.kinds[kind][1] for kind in kinds], _MOST_PATTERNS)
                    self._packed[pool] = None if patterns is None else Packed(kinds, patterns)
                    if patterns is not None:
                        continue
                self._cuts.append(self._least_unfit(own))
        return found

    def _fits(self, own: Mapping[int, int]) -> bool:
        fit = self.capacity.fit(self.kinds[next(iter(own))][0], {self.kinds[kind][1]: n for kind, n in own.items()})
        self._certain = self._certain and fit is not Fit.UNKNOWN
        return fit is Fit.YES

    def _least_unfit(self, own: dict[int, int]) -> Excess:
        """Return numbers of workers, none larger than these, that only just do not fit: they cut off the most."""
        for kind, count in list(own.items()):
            low, high = 0, count
            while low < high:
                middle = (low + high) // 2
                low, high = (middle + 1, high) if self._fits({**own, kind: middle}) else (low, middle)
            own = {**own, kind: high}
        return Excess({kind: count for kind, count in own.items() if count})


class _Columns:
    """The programme of some jobs: its columns are their options, job after job, then those of cuts and packed pools."""

    def __init__(self, rows: PoolRows, offers: Sequence[JobOptions]) -> None:
        self._rows, self._offers = rows, offers
        self._first_M = np.cumsum([0, *(len(offer.gain_O) for offer in offers)])
        self._gain_C = np.concatenate([np.zeros(0), *(offer.gain_O for offer in offers)])
        self._count_CK = np.vstack(
            [np.zeros((0, len(rows.kinds))), *(offer.counts_OP @ rows.kinds_of(offer.job) for offer in offers)]
        )

    def solve(
        self,
        cuts: Sequence[Excess],
        packed: Sequence[Packed],
        start: Sequence[int | None] | None,
        gap: float,
        most_nodes: int,
    ) -> tuple[tuple[int | None, ...], Solution] | None:
        """Return the best options, as far as these cuts and packed pools tell."""
        programme = self.programme(cuts, packed)
        start_C = None if start is None else self._amounts(start, cuts, len(programme.gain_C))
        solution = maximise(programme, whole=True, start_C=start_C, gap=gap, most_nodes=most_nodes)
        if solution is None:
            return None
        picked: list[int | None] = []
        for first, end in pairwise(self._first_M.tolist()):
            own_O = np.flatnonzero(solution.amounts_C[first:end])
            picked.append(int(own_O[0]) if len(own_O) else None)
        return tuple(picked), solution

    def programme(self, cuts: Sequence[Excess], packed: Sequence[Packed]) -> Programme:
        """Return the programme with these cuts and packed pools."""
        builder = _Builder(self._gain_C)
        # 1. The pools hold the workers, and each job has one option at most.
        need_CR = self._count_CK @ self._rows.need_KR
        for need_C, limit in zip(need_CR.T, self._rows.limit_R.tolist(), strict=True):
            builder.row(np.flatnonzero(need_C), need_C[need_C != 0], most=limit)
        for offer, (first, end) in zip(self._offers, pairwise(self._first_M.tolist()), strict=True):
            builder.row(np.arange(first, end), np.ones(end - first), least=float(offer.required), most=1.0)
        # 2. One kind has fewer workers than in the cut: its column is 1, and the rows of the others do not bind.
        for cut in cuts:
            own = builder.columns(len(cut.most), 1.0)
            for column, (kind, count) in zip(own.tolist(), cut.most.items(), strict=True):
                slack = float(self._rows.capacity.slots(*self._rows.kinds[kind]) - count + 1)
                builder.row(*self._of_kind(kind, [column], [slack]), most=count - 1 + slack)
            builder.row(own, np.ones(len(own)), least=1.0)
        # 3. The nodes of a packed pool hold one set of workers each, and together all workers of each kind.
        for pool in packed:
            sets = [(builder.columns(len(patterns), float(nodes)), nodes) for nodes, patterns in pool.patterns]
            for own, nodes in sets:
                builder.row(own, np.ones(len(own)), most=float(nodes))
            every = np.concatenate([own for own, _ in sets])
            held_QK = np.array([pattern for _, patterns in pool.patterns for pattern in patterns], dtype=float)
            for held_Q, kind in zip(held_QK.T, pool.kinds, strict=True):
                here = np.flatnonzero(held_Q)
                builder.row(*self._of_kind(kind, every[here].tolist(), (-held_Q[here]).tolist()), most=0.0)
        return builder.programme()

    def _of_kind(self, kind: int, columns: Sequence[int], values: Sequence[float]) -> tuple[Ints, Floats]:
        """Return the options with workers of a kind and further columns, with their numbers of workers and values."""
        here = np.flatnonzero(self._count_CK[:, kind])
        return np.append(here, columns).astype(np.int64), np.append(self._count_CK[here, kind], values)

    def workers(self, options: Sequence[int | None]) -> list[int]:
        """Return the workers of each kind."""
        columns = [f + o for f, o in zip(self._first_M.tolist(), options, strict=False) if o is not None]
        found: list[int] = self._count_CK[columns].sum(axis=0).astype(np.int64).tolist()
        return found

    def value(self, options: Sequence[int | None]) -> float:
        """Return the sum of the options' gains."""
        pairs = zip(self._offers, options, strict=True)
        return sum(float(offer.gain_O[option]) for offer, option in pairs if option is not None)

    def _amounts(self, options: Sequence[int | None], cuts: Sequence[Excess], columns: int) -> Floats:
        amounts_C: Floats = np.full(columns, np.nan)  # what nodes hold is found for them
        amounts_C[: len(self._gain_C)] = 0.0
        for first, option in zip(self._first_M.tolist(), options, strict=False):
            if option is not None:
                amounts_C[first + option] = 1.0
        count_K = self.workers(options)
        less = [float(count_K[kind] < count) for cut in cuts for kind, count in cut.most.items()]
        amounts_C[len(self._gain_C) : len(self._gain_C) + len(less)] = less
        return amounts_C


class _Builder:
    """A programme, row by row; its first columns have gains, further ones have none."""

    def __init__(self, gain_C: Floats) -> None:
        self._gain_C, self._upper = gain_C, [1.0] * len(gain_C)
        self._columns: list[Ints] = []
        self._values: list[Floats] = []
        self._limits: list[tuple[float, float]] = []

    def columns(self, number: int, upper: float) -> Ints:
        """Add columns and return their positions."""
        first = len(self._upper)
        self._upper += [upper] * number
        return np.arange(first, first + number)

    def row(self, columns: Ints, values: Floats, *, least: float = -np.inf, most: float = np.inf) -> None:
        """Add a row with these entries."""
        self._columns.append(columns)
        self._values.append(values)
        self._limits.append((least, most))

    def programme(self) -> Programme:
        """Return the programme."""
        lengths = [len(columns) for columns in self._columns]
        return Programme(
            gain_C=np.append(self._gain_C, np.zeros(len(self._upper) - len(self._gain_C))),
            upper_C=np.array(self._upper),
            least_R=np.array([least for least, _ in self._limits]),
            most_R=np.array([most for _, most in self._limits]),
            row_E=np.repeat(np.arange(len(lengths)), lengths),
            column_E=np.concatenate([np.zeros(0, dtype=np.int64), *self._columns]),
            value_E=np.concatenate([np.zeros(0), *self._values]),
        )
