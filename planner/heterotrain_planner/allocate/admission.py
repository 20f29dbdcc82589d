"""Which jobs can run together: the first ones in an order, each with one of its options.

A job is admitted if it fits next to all jobs admitted before it, whichever options these take. Three questions are
asked, the cheap ones first: do its workers fit next to options that are known to fit together? Is there too little
capacity even if every job takes as little as it can? If neither is the case, a programme decides about this job and
those that follow.

Legend: ``O`` options of a job, ``P`` its pools, ``R`` rows of pools, ``S`` sums that show what is too much.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from heterotrain_planner.allocate.candidate import Candidate, need_of
from heterotrain_planner.allocate.capacity import Occupancy, PoolCapacity
from heterotrain_planner.allocate.job_options import JobOptions, PoolRows
from heterotrain_planner.programme import Floats, Ints

AT_ONCE = 16
"""Jobs that one programme decides about."""
_MOST_NODES = 500
_ROUNDING = 1e-9

Counts = tuple[int, ...]
"""Workers of each pool of a job."""


class Admission:
    """What can run together of the jobs of one allocation, by the rows of their pools.

    Args:
        candidates: the jobs, in the order of admission.
        capacity: of the pools.
    """

    def __init__(self, candidates: Sequence[Candidate], capacity: PoolCapacity) -> None:
        self._candidates, self._capacity = candidates, capacity
        self.rows = PoolRows([candidate.job for candidate in candidates], capacity)
        self._least = [_smallest(candidate.arrays[0], candidate.arrays[1]) for candidate in candidates]
        need_KR, limit_R = self.rows.need_KR, np.maximum(self.rows.limit_R, 1.0)
        # Any sum of rows is a limit, too: each row alone, and all rows, each relative to its limit.
        self._limit_S = np.append(self.rows.limit_R / limit_R, float((self.rows.limit_R > 0).sum()))
        least = []
        for candidate, counts_OP in zip(candidates, self._least, strict=True):
            part_OR = counts_OP @ self.rows.kinds_of(candidate.job) @ need_KR / limit_R
            part_OS = np.hstack([part_OR, part_OR.sum(axis=1, keepdims=True)])
            least.append(part_OS.min(axis=0, initial=np.inf))
        self._least_S: Sequence[Floats] = least

    def first(
        self, base: Sequence[int], further: Sequence[int], preferred: Mapping[int, Counts] | None = None
    ) -> dict[int, Counts] | None:
        """Return options that fit together of all jobs of ``base`` and of those of ``further`` that are admitted.

        Jobs are given by their position. ``None`` where those of ``base`` do not fit together.

        Args:
            base: jobs that come first, whatever the order.
            further: jobs in the order in which they are admitted, none of ``base``.
            preferred: options that are tried first, such as the current workers.
        """
        chosen: dict[int, Counts] = {}
        occupancy = Occupancy(self._capacity)
        used_S = np.zeros(len(self._limit_S))
        refused: set[tuple[object, ...]] = set()
        waiting = [*base, *further]
        must = set(base)
        while waiting:
            i = waiting.pop(0)
            own = self._place(i, occupancy, (preferred or {}).get(i))
            if own is not None:
                chosen[i] = own
                used_S = used_S + self._least_S[i]
                continue
            if self._key(i) in refused or (used_S + self._least_S[i] > self._limit_S + _ROUNDING).any():
                if i in must:
                    return None
                refused.add(self._key(i))
                continue
            # The programme decides about all jobs of the base that are left, or about some further ones.
            group = [i]
            while waiting and (waiting[0] in must if i in must else len(group) < AT_ONCE):
                group.append(waiting.pop(0))
            found = self._decide(chosen, group, required=i in must)
            if found is None:
                if i in must:
                    return None
                found = chosen
            refused |= {self._key(j) for j in group if j not in found}
            chosen, occupancy, used_S = found, Occupancy(self._capacity), np.zeros(len(self._limit_S))
            for j, counts in chosen.items():
                occupancy.add(need_of(self._candidates[j].job, counts))
                used_S = used_S + self._least_S[j]
        return chosen

    def _key(self, i: int) -> tuple[object, ...]:
        """Return what decides whether a job fits: jobs with the same pools and options are alike."""
        job = self._candidates[i].job
        return (tuple((each.pool, each.size) for each in job.pools), self._least[i].tobytes())

    def _place(self, i: int, occupancy: Occupancy, preferred: Counts | None) -> Counts | None:
        """Place a job's preferred option or one of its smallest, if one fits next to those placed."""
        job, counts_OP = self._candidates[i].job, self._least[i]
        options = [tuple(row) for row in counts_OP.tolist()]
        if preferred is not None and preferred in self._candidates[i].by_counts:
            options.insert(0, preferred)
        for counts in options:
            need = need_of(job, counts)
            if occupancy.fits(need):
                occupancy.add(need)
                return counts
        return None

    def _decide(
        self, chosen: Mapping[int, Counts], group: Sequence[int], *, required: bool
    ) -> dict[int, Counts] | None:
        """Return options of the chosen jobs and of those of the group that are admitted, earlier ones first."""
        offers, start, together = [], [], [*chosen, *group]
        for position, i in enumerate(together):
            counts_OP = self._least[i]
            if i in chosen and not (counts_OP == chosen[i]).all(axis=1).any():
                counts_OP = np.vstack([counts_OP, chosen[i]])
            weight = 0.0 if i in chosen else 2.0 ** (len(together) - 1 - position)
            offers.append(
                JobOptions(self._candidates[i].job, counts_OP, np.full(len(counts_OP), weight), i in chosen or required)
            )
            start.append(int((counts_OP == chosen[i]).all(axis=1).argmax()) if i in chosen else None)
        found = self.rows.pick(offers, start=None if required else start, gap=0.5, most_nodes=_MOST_NODES)
        if found is None:
            return None
        return {
            i: tuple(offer.counts_OP[option].tolist())
            for i, offer, option in zip(together, offers, found.options, strict=True)
            if option is not None
        }


def _smallest(counts_OP: Ints, score_O: Floats) -> Ints:
    """Return the options that have no smaller one, the fewest workers first, then the best: others never fit sooner."""
    rest = counts_OP[np.lexsort((-score_O, counts_OP.sum(axis=1)))]
    found = []
    while len(rest):
        found.append(rest[0])
        rest = rest[(rest < rest[0]).any(axis=1)]
    return np.array(found, dtype=np.int64).reshape(len(found), counts_OP.shape[1])
